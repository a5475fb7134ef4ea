"""What a maintainer of vLLM should know about a fault that it serves, by the names of scenarios.

Written by hand, shown only where a recorded start says so. Reports are public threads about the same behaviour; that somebody
saw it does not mean that today's releases still do it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.judge.moments import Layer

HOLDER = "vLLM"  # who could do something about it
OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What is said of the scenarios whose whole name matches a pattern."""

    pattern: str
    title: str
    expected: str
    why: str
    reports: tuple[str, ...] = ()
    by_hand: tuple[
        str, ...
    ] = ()  # shell lines after the server is up, where a restart on a damaged copy does not show it
    serve: str = ""  # environment of `vllm serve`, such as "VLLM_SERVER_DEV_MODE=1"
    arguments: str = ""  # of `vllm serve`, as a shell reads them
    layers: tuple[Layer, ...] = ()  # where noticing there is a finding too, though it is not late in general
    when: str = ""  # only where the engine's words match this
    whose: str = HOLDER

    def fits(self, scenario: str, seen: str) -> bool:
        """Say whether this is what to say about a scenario in which that was seen."""
        return re.fullmatch(self.pattern, scenario) is not None and re.search(self.when, seen) is not None


RELOAD = """curl -s -X POST http://127.0.0.1:8000/collective_rpc -H 'Content-Type: application/json' \\
  -d '{"method": "reload_weights", "kwargs": {"weights_path": "'"$PWD/damaged"'"}}'"""
DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
# An update of weights, with the transfer engine of the harness: it reads files, so that no GPU is needed.
TRANSFER = f"""{DEV_MODE} PYTHONPATH="$(python -c 'import harness; print(harness.__path__[0])')/engine/weight_transfer_plugin\""""
TRANSFER_ARGUMENTS = """--weight-transfer-config '{"backend": "rollout_files"}'"""
POST = "curl -s -X POST http://127.0.0.1:8000"
JSON = "-H 'Content-Type: application/json'"
START_UPDATE = f"""{POST}/init_weight_transfer_engine {JSON} -d '{{"init_info": {{}}}}'
{POST}/start_weight_update"""
FINISH_UPDATE = f"""{POST}/finish_weight_update {JSON} -d '{{"weight_version": "2"}}'"""
PAUSE = "curl -s -X POST 'http://127.0.0.1:8000/pause?mode=wait'"
RESUME = f"{POST}/reset_prefix_cache; {POST}/resume"
WEIGHT_INFO = "curl -s http://127.0.0.1:8000/weight_info"
SEND_BUT_A_LAYER = f"""# of a fused parameter: leave out "layers.1.mlp.gate_proj" alone
NAMES=$(python -c 'import json, sys; from safetensors import safe_open
names = safe_open(sys.argv[1], "pt").keys()
print(json.dumps([name for name in names if "layers.1." not in name]))' "$NEW/model.safetensors")
{POST}/update_weights {JSON} -d '{{"update_info": {{"files": {{"'"$NEW/model.safetensors"'": '"$NAMES"'}}}}}}'"""
SEND_ABSENT = f"""{POST}/update_weights {JSON} -d '{{"update_info": {{"files": {{"absent.safetensors": ["a"]}}}}}}'"""
HEALTH = "curl -s -o /dev/null -w '%{http_code}\\n' http://127.0.0.1:8000/health"
CORE = "$(pgrep -f 'VLLM::EngineCor[e]')"
WELL_FORMED = "Nothing in the files contradicts the config, so no engine can know. A digest can, or known answers."

TEXTS: tuple[Text, ...] = (
    Text(
        pattern=r"cut_compile_cache.*",
        title="An engine that cannot load its compile cache compiles anew, and answers other numbers than with an empty cache",
        expected="The same answers as with an empty cache, since the files that cannot be read are not used.",
        why="Prompt logprobs differ by 0.06 from those of a start with an empty cache, where starts otherwise agree bit for bit: rounding, "
        "not other weights, but evaluations and canaries move with the state of a cache directory. The log has a warning.",
    ),
    # --- while the engine runs ---
    Text(
        pattern=r"reload.*",
        when=r"refused the reload.*; then: |^(?!.*canary).*(failed|died)",  # it did not outlive its refusal
        layers=(Layer.STARTUP,),
        title="An engine that refused a reload dies, or answers wrongly, at the next request",
        expected="The call fails and the old weights are served on; or `/health` fails from then on.",
        why="Right after the error `/health` still answers 200. The first user request finds the engine dead, and no router knew.",
        reports=("vllm-project/vllm#48312", "sgl-project/sglang#30749", "sgl-project/sglang#31924"),
        serve=DEV_MODE,
        by_hand=(RELOAD, f"{HEALTH}   # 200"),
    ),
    Text(
        pattern=r"reload_of_good_checkpoint|.*(checksum|weight_checker).*",
        when=r"[1-9]\d* of \d+ parameters the digest of no bytes",
        layers=(Layer.HARMLESS,),
        title="The checksum endpoint reports the digest of no bytes",
        expected="A digest of the weights that are computed with, or an error that says that they cannot be read.",
        why="Where linear weights were repacked, as on the CPU build, each of them has the digest e3b0c442..., that of nothing: "
        "two different checkpoints compare as equal.",
        serve=DEV_MODE,
        by_hand=(
            "curl -s -X POST http://127.0.0.1:8000/weight_checker -H 'Content-Type: application/json' -d '{\"action\": \"checksum\"}'",
        ),
    ),
    Text(
        pattern=r"reload_(without_pause|under_frozen_requests)",
        title="Requests under way at a reload are answered from both checkpoints",
        expected="They are ended, or computed anew; or the documentation of the call says that only a drained engine may reload.",
        why="The answer goes on with the new weights upon keys and values of the old ones, with 200 and an orderly end. "
        "`/reset_prefix_cache` answers 200 with `success: false` meanwhile, so that the cache stays stale too.",
        serve=DEV_MODE,
        by_hand=("# while a long answer is streamed", RELOAD),
    ),
    Text(
        pattern=r"reload.*(prefix|kv).*",
        title="After a reload, cached prefixes of the old weights are used on",
        expected="The cache is keyed by the weights that filled it, or the documentation of the call says that a reset is due.",
        why="Every prompt with a beginning that was seen before is answered from both checkpoints, until its blocks are evicted.",
        reports=("vllm-project/vllm#9744", "vllm-project/vllm#46125", "NVIDIA-NeMo/RL#4018"),
        serve=DEV_MODE,
        by_hand=(
            "# send a prompt of 300 tokens, then",
            RELOAD,
            "# and the same prompt again: it differs from a cold start",
        ),
    ),
    Text(
        pattern=r"reload_(with|of)_.*",
        title="A reload from an incomplete or misshapen checkpoint answers 200 and leaves a mixture of weights",
        expected="The call fails, and the engine goes on with what it had or refuses requests until a reload succeeds.",
        why="The caller is told that the new weights are served. Layers of two checkpoints answer together, with plausible text.",
        reports=("vllm-project/vllm#48312", "NovaSky-AI/SkyRL#1680", "vllm-project/vllm#25171"),
        serve=DEV_MODE,
        by_hand=(RELOAD,),
    ),
    Text(
        pattern=r"core_(killed|crashed|aborted).*",
        layers=(Layer.HEALTH,),
        title="The server does not end with an error code after its engine core was killed",
        expected="An exit code other than 0: the server did not end because somebody asked it to.",
        why="It ends with 0, which a supervisor with restart-on-failure, and a Kubernetes Job, take for a success: nobody starts "
        "it anew.",
        reports=("vllm-project/vllm#39863", "kserve/kserve#6259"),
        by_hand=(f"kill -SEGV {CORE}; wait %1; echo $?   # 0",),
    ),
    Text(
        pattern=r".*(frozen|sigstop|stopped_core).*",
        title="`/health` answers 200 while the engine core is stopped and requests hang",
        expected="`/health` fails once the core has not answered for some seconds.",
        why="Requests queue without an answer, and no probe ever takes the server out of rotation.",
        reports=("vllm-project/vllm#39863", "PrimeIntellect-ai/prime-rl#2375", "gonka-ai/gonka#1421"),
        by_hand=(
            f"kill -STOP {CORE}",
            f"{HEALTH}   # 200",
            f"kill -CONT {CORE}",
        ),
    ),
    Text(
        pattern=r"missing_compiler.*",
        title="A missing C++ compiler is found at the first request",
        expected="The server refuses to start: it knows that it will compile.",
        why="It starts, `/health` says 200, and the first completion kills the engine.",
    ),
    Text(
        pattern=r"adapter_replaced_and_not_refreshed",
        title="An adapter whose files are replaced goes on answering as before, until somebody loads it again",
        expected="What serves is what was loaded: after the files, the adapter has to be loaded, and asked something that is known.",
        why="It is listed under the same name and path as before, and nothing says which content it was loaded from.",
        reports=("vllm-project/vllm#31326",),
        whose=OPERATOR,
    ),
    Text(
        pattern=r"adapter_replaced_.*",
        when=r"the KV cache is stale",
        title="An adapter that is loaded again from its path answers from keys and values of the one before",
        expected="Blocks of the prefix cache that an adapter computed are forgotten when other weights are loaded under its name.",
        why="Short prompts are answered rightly, so a check of the new adapter passes; every prompt that begins as an earlier one, such "
        "as a system prompt of a block or more, is answered by a mixture of both adapters. The log warns of it when the adapter is "
        "loaded in place, and not after an unload. A path of its own for each version avoids it.",
        reports=("vllm-project/vllm#42125",),
    ),
    Text(
        pattern=r"adapter_.*",
        when=r"refused the adapter.*; then: a canary.*neither",
        layers=(Layer.STARTUP,),
        title="An adapter that is refused in place has spoilt the one that was served",
        expected="The call fails and the adapter from before goes on answering.",
        why="After HTTP 500 the name is still listed and answers with 200, from neither adapter: whoever keeps the old one on an error, "
        "which is what the error suggests, serves wrong answers from then on. Loaded under another name it does no harm.",
    ),
    Text(
        pattern=r"adapter_of_unknown_names",
        title="An adapter whose names match nothing is listed and changes nothing",
        expected="Loading it fails, naming the tensors that match no module.",
        why="The call is answered with 200, the adapter is listed as loaded, and its users are answered by the base model.",
        reports=("vllm-project/vllm#34186", "vllm-project/vllm#55193", "vllm-project/vllm#34591"),
    ),
    Text(
        pattern=r"update_of_nothing|update_told_by_version",
        title="An update of weights in which nothing was sent takes the new version",
        expected="`/finish_weight_update` fails, or leaves the version as it was, when no weight came since the start.",
        why="The old answers are served under the new version. A trainer or a router that asks `/weight_info` takes the rollout for "
        "done, and counts samples of old weights as samples of new ones.",
        serve=TRANSFER,
        arguments=TRANSFER_ARGUMENTS,
        by_hand=(PAUSE, START_UPDATE, FINISH_UPDATE, RESUME, f"{WEIGHT_INFO}   # 2"),
    ),
    Text(
        pattern=r"update_without_.*",
        title="An update of weights in which tensors never came answers 200 and takes the new version",
        expected="`/finish_weight_update` fails and names the parameters that never came, or the version stays as it was.",
        why="Layers of two checkpoints answer together under the new version. Where one part of a fused parameter never came, "
        "memory that nobody wrote is computed with. The log has a warning with the class of a layer at most, and so has a good update.",
        serve=TRANSFER,
        arguments=TRANSFER_ARGUMENTS,
        by_hand=(PAUSE, START_UPDATE, SEND_BUT_A_LAYER, FINISH_UPDATE, RESUME, f"{WEIGHT_INFO}   # 2"),
    ),
    Text(
        pattern=r"update_with_refused_chunk",
        when=r"refused the update.*; then: ",
        layers=(Layer.STARTUP,),
        title="An engine that refused a chunk of an update dies at the next request",
        expected="The old weights are served on; or a call ends the update and `/health` fails until the weights came whole.",
        why="The chunk is answered with 500, and so is `/finish_weight_update`: no call is left that ends or undoes the update. "
        "`/health` stays 200, and the first request of a user ends the service for all.",
        serve=TRANSFER,
        arguments=TRANSFER_ARGUMENTS,
        by_hand=(PAUSE, START_UPDATE, SEND_ABSENT, FINISH_UPDATE, RESUME, f"{HEALTH}   # 200"),
    ),
    Text(
        pattern=r"update_met_by_a_request",
        title="A request between the start of an update and its first weights kills the engine",
        expected="It waits as in a pause, or is refused; or `/start_weight_update` fails on an engine that is not paused.",
        why="`/start_weight_update` is answered with 200 on an engine that goes on serving. From then on it has no weights to compute "
        "with, so that one request of one user ends the service for all.",
        serve=TRANSFER,
        arguments=TRANSFER_ARGUMENTS,
        by_hand=(START_UPDATE,),
    ),
    # --- at a start ---
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
    # --- what no engine can be expected to see ---
    Text(
        pattern=r"(transposed_tensor|swapped_tensors|flipped_bit|shard_of_previous_step|config_of_other_rope)_on_restart"
        r"|one_bit_of_the_second_rank",
        title="Well-formed files with other values",
        expected=WELL_FORMED,
        why="A canary with known answers, or a manifest, is the only guard.",
        whose=OPERATOR,
    ),
    Text(
        pattern=r"(slow_)?preallocated_(shard|sync)_on_restart",
        title="A file that was preallocated and never filled",
        expected=f"{WELL_FORMED} Pre-flight sees the zeros.",
        why="The header came first, so the file looks whole.",
        whose=OPERATOR,
    ),
    Text(
        pattern=r"(nested_(move|checkpoint)|stale_index|rsync_in_place|overwritten_in_place|anonymous_weights).*",
        title="The old checkpoint is still what the directory holds, in whole or in part",
        expected="The engine reads what the directory and its weight index name. Publish whole, by a rename, and pre-flight it.",
        why="Every sign says that the rollout went well.",
        whose=OPERATOR,
    ),
    Text(
        pattern=r"port_held.*",
        title="The old server still holds the port",
        expected="The new one refuses to start, as it does. What asks the port has to ask which server answers, too.",
        why="Probes meet the old server and pass, so the rollout counts as done.",
        whose=OPERATOR,
    ),
    Text(
        pattern=r".*overwritten_while_loading.*",
        title="A weight file is written over while it is loaded",
        expected="The engine maps the file it was given. Publish by a rename, never in place.",
        why="Parts of two checkpoints are served together, and the header was right when it was read.",
        whose=OPERATOR,
    ),
    Text(
        pattern=r"stale_cache.*",
        title="A weight cache in shared memory outlives the checkpoint",
        expected="vLLM has no such cache: here it is a load-format plug-in that works as the incident's write-up describes.",
        why="Key such a cache by content, and purge it before a start.",
        whose=OPERATOR,
    ),
)


def text_for(scenario: str, seen: str) -> Text | None:
    """Return what to say about a scenario in which that was seen; None where nothing was written."""
    return next((text for text in TEXTS if text.fits(scenario, seen)), None)
