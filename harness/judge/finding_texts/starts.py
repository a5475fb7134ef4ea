"""What an engine takes at its start, and should not."""

from __future__ import annotations

from harness.judge.finding_texts.text import Text

STARTS: tuple[Text, ...] = (
    Text(
        pattern=r"cut_compile_cache.*",
        title="An engine that cannot load its compile cache compiles anew, and answers other numbers than with an empty cache",
        expected="The same answers as with an empty cache, since the files that cannot be read are not used.",
        why="Prompt logprobs differ by 0.06 from those of a start with an empty cache, where starts otherwise agree bit for bit: rounding, "
        "not other weights, but evaluations and canaries move with the state of a cache directory. The log has a warning.",
    ),
    Text(
        pattern=r"missing_(tensor|part_of_fused_tensor|head)_on_restart",
        title="A linear weight that the checkpoint lacks is served as uninitialised memory",
        expected="`Following weights were not initialized from checkpoint`, as for a norm that is missing.",
        why="What the memory held before decides the answers. They may look plausible, and differ from start to start.",
        reports=("vllm-project/vllm#34859", "vllm-project/vllm#57108", "vllm-project/vllm#54444"),
    ),
    Text(
        pattern=r"(widened_(tensor|embedding|in_whole_dimension)|config_of_(narrower_model|larger_vocabulary)|old_config_new_weights)_on_restart",
        title="A tensor that is larger than its parameter is cut to fit",
        expected="An error with both shapes, as for a tensor that is too small.",
        why="The loader narrows a tensor before shapes are compared. A checkpoint of another model, or a config of another "
        "checkpoint, is served with parts of every layer missing.",
        reports=("HYGON-AI/vllm-plugin-das#110", "vllm-project/vllm#53233"),
    ),
    Text(
        pattern=r".*(cast_to_int8|int8).*",
        title="An integer tensor without a scale is taken for a floating point weight",
        expected="An error: the config names no quantisation, and the parameter is of another kind.",
        why="Integers up to 127 stand where weights of about 0.1 belong. The answers are garbage, and well-formed.",
        reports=("vllm-project/llm-compressor#959",),
    ),
    Text(
        pattern=r"(dtype_relabelled_in_header|config_of_other_dtype).*",
        title="Tensors of another dtype than the config says are cast without a word",
        expected="A warning that names the first tensor whose stored dtype is not the config's `torch_dtype`.",
        why="The bytes of bf16 read as fp16 give confident garbage: logprobs near 0. The header is the only witness.",
    ),
    Text(
        pattern=r"state_for_two_ranks_on_restart",
        title="`--load-format sharded_state` takes a state that was saved for more ranks",
        expected="An error with the ranks in the file names, or with both shapes.",
        why="Each parameter is filled in part, and the rest is what was in memory. A line about shapes is logged, and no error.",
    ),
    Text(
        pattern=r"values_(beyond_fp16|not_finite)_on_restart",
        title="Weights that are not finite are served",
        expected="A start that fails, or warns, when a weight is infinite or not a number after the cast.",
        why="Completions answer 200 with one repeated token. With logprobs the same request answers 400 `Out of range float "
        "values are not JSON compliant`, which blames the client.",
        reports=("vllm-project/vllm#14126", "vllm-project/vllm#16579", "vllm-project/vllm#33972"),
    ),
    Text(
        pattern=r"added_quantisation_on_restart",
        title="A config that asks for fp8 loads unquantised weights and computes with values that are not numbers",
        expected="An error: the checkpoint holds no scales, and its weights are not fp8.",
        why="A config of the quantised sibling beside the original weights is a usual mix-up, and nothing says so.",
        reports=("ModelCloud/GPTQModel#1654", "vllm-project/vllm#57108"),
    ),
    Text(
        pattern=r"added_bias_on_restart",
        title="A bias that the config does not ask for is dropped",
        expected="`There is no module or parameter named`, as for any other name that the model does not have.",
        why="The checkpoint was trained with it. Every answer is off, and looks fine.",
    ),
    Text(
        pattern=r"config_ties_embeddings_on_restart",
        title="An output layer of the checkpoint is ignored when the config ties embeddings",
        expected="A warning that `lm_head.weight` is there, differs, and is not used.",
        why="One wrong key in the config replaces the output layer by the embedding.",
        reports=("vllm-project/vllm#53019", "vllm-project/vllm#5621", "vllm-project/vllm#6758"),
    ),
    Text(
        pattern=r"leftover_shards_on_restart",
        title="The same tensor in two files: the file that is read last wins",
        expected="An error that names the tensor and both files.",
        why="After an update with other shard names the old files are still there; which weights are served depends on names.",
    ),
    Text(
        pattern=r"leftover_consolidated_on_restart",
        title="`consolidated*.safetensors` are loaded, and `model*.safetensors` beside them are not read",
        expected="A warning that two sets of weights are there, and which is used.",
        why="An update that replaced the set which every other tool reads has no effect: the old weights are served.",
        reports=("vllm-project/vllm#40765", "vllm-project/vllm#33253"),
    ),
    Text(
        pattern=r"stale_numpy_cache_on_restart",
        title="The tensor cache of `--load-format npcache` is used when the weights beside it are newer",
        expected="The cache is made anew when the files that it was made from have another size, time or digest.",
        why="It lies in the checkpoint, under `np/`. Replacing the weights has no effect from the first start on.",
    ),
    Text(
        pattern=r"new_weights_as_bin_on_restart",
        title="New weights as `pytorch_model.bin` beside old safetensors files are not read",
        expected="A warning that weights of two formats are there, and which are used.",
        why="The publication was complete, and the old weights are served.",
    ),
    Text(
        pattern=r"token_beyond_rows_on_restart",
        title="A token id beyond the embedding kills the engine",
        expected="The request fails with 400, or the start does: tokenizer and embedding are both known then.",
        why="One request of one user ends the service for all.",
        reports=("vllm-project/vllm#11375", "vllm-project/vllm#340", "huggingface/transformers#1848"),
    ),
)
