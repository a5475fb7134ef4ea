"""The catalogue's entries of damages: what is wrong with a checkpoint at rest."""

from __future__ import annotations

from harness.faults.entry import EDIT, EVERY, OLD, REWRITE, SMALL, Entry

DAMAGES: dict[str, Entry] = {
    "added_config": Entry(
        what="The config claims what the weights know nothing of: a quantisation, code of its own, a rope scaling.",
        by_hand=EDIT.format("c['quantization_config'] = {'quant_method': 'fp8'}"),
        reports=("ModelCloud/GPTQModel#1654", "vllm-project/vllm#12682"),
        cost=SMALL,
    ),
    "add_bias": Entry(
        what="The checkpoint has a bias that the config does not ask for; engines drop it without a word.",
        by_hand=REWRITE.format("t['model.layers.0.self_attn.q_proj.bias'] = torch.randn(hidden)"),
    ),
    "beyond_fp16_range": Entry(
        what="The weights hold values that bf16 can and fp16 cannot: with `--dtype float16` they become infinite.",
        by_hand=REWRITE.format("t['...up_proj.weight'] *= 2.0**18"),
        reports=("vllm-project/vllm#14126", "vllm-project/vllm#16579", "vllm-project/vllm#33972"),
    ),
    "broken_hub_cache": Entry(
        what="The hub cache resolves the model to a snapshot whose weights never came, or came in part.",
        by_hand="in a copy of the hub cache, write another revision into `refs/main`, or rename a blob to `*.incomplete`",
        reports=(
            "vllm-project/vllm#47551",
            "huggingface/huggingface_hub#4487",
            "google-research/timesfm#510",
        ),
        needs=("an engine started by model name, offline, with this directory as hub cache",),
        cost=SMALL,
    ),
    "cast_all": Entry(
        what="Every tensor is stored in another dtype than the config says.",
        by_hand=REWRITE.format("t = {k: v.half() for k, v in t.items()}"),
        cost=EVERY,
    ),
    "cast_tensor": Entry(
        what="One tensor is stored in another dtype than the config says; int8 without its scale is garbage.",
        by_hand=REWRITE.format("t[name] = t[name].half()"),
    ),
    "changed_chat_template": Entry(
        what="The chat template is not the one the model was trained with: answers drift, nothing fails.",
        by_hand="on a copy, write another `chat_template.jinja`",
        cost=SMALL,
    ),
    "cut_json": Entry(
        what="Config, weight index or tokenizer is half-written.",
        by_hand="on a copy: `truncate -s 200 config.json`",
        cost=SMALL,
    ),
    "damage_header": Entry(
        what="The header of a weight file is no JSON; its size is right.",
        by_hand="on a copy: `printf '\\xff' | dd of=model.safetensors bs=1 seek=8 conv=notrunc`",
        reports=("huggingface/transformers#27923",),
    ),
    "drop_tensor": Entry(
        what="A tensor is in no file, and the weight index does not name it: memory that nobody filled is served.",
        by_hand=REWRITE.format("del t['model.layers.1.mlp.down_proj.weight']"),
        reports=(
            "vllm-project/vllm#57108",
            "vllm-project/vllm#54444",
            "vllm-project/vllm#15536",
            "vllm-project/vllm#14828",
        ),
    ),
    "extend_shard": Entry(
        what="A weight file has bytes behind its end.",
        by_hand="on a copy: `printf x >> model.safetensors`",
        reports=("Comfy-Org/ComfyUI#15602",),
    ),
    "flip_bit": Entry(
        what="One bit of one value is flipped, as memory and disks do; the header is right.",
        by_hand="on a copy, read one byte behind the header with `xxd`, write it back changed with `dd conv=notrunc`",
    ),
    "flip_dtype_in_header": Entry(
        what="The header gives another dtype of the same size: the same bytes are other numbers.",
        by_hand='on a copy, replace `"BF16"` by `"F16" ` in the header (one space keeps its length)',
        cost=EVERY,
    ),
    "foreign_file": Entry(
        what="A web page, nothing, zeros or an archive lies under a weight file's name.",
        by_hand="on a copy: `curl -o model.safetensors URL-THAT-NEEDS-A-LOGIN`, or `: > model.safetensors`",
        reports=("vllm-project/vllm#57975", "huggingface/transformers#27923"),
    ),
    "generation_defaults": Entry(
        what="The checkpoint brings sampling defaults: requests that name none are answered otherwise.",
        by_hand='on a copy, add `"temperature": 1.9, "top_k": 3` to `generation_config.json`',
        reports=("vllm-project/vllm#15241", "OpenPipe/ART#140"),
        cost=SMALL,
    ),
    "leftover_consolidated": Entry(
        what="Old weights lie in `consolidated*.safetensors` beside the new ones, and engines take those.",
        by_hand="copy the old weights to `consolidated.safetensors` in a copy of the new checkpoint",
        reports=(
            "vllm-project/vllm#40765",
            "vllm-project/vllm#33253",
            "vllm-project/vllm#19953",
            "gpustack/gpustack#2257",
        ),
        needs=("old",),
        cost=OLD,
    ),
    "leftover_shards": Entry(
        what="Old weight files lie beside the new ones without a weight index: all are read, the last one wins.",
        by_hand="copy the old `model.safetensors` to `previous-model.safetensors` in a copy of the new checkpoint",
        needs=("old",),
        cost=OLD,
    ),
    "mismatched_config": Entry(
        what="The config belongs to another model: layers, sizes, vocabulary, tied embeddings, rope, architecture.",
        by_hand=EDIT.format("c['intermediate_size'] = 224"),
        reports=(
            "vllm-project/vllm#53105",
            "verl-project/verl#834",
            "bytedance-iaas/vllm#48",
            "meta-pytorch/gpt-fast#215",
            "vllm-project/vllm#53019",
            "vllm-project/vllm#5621",
            "vllm-project/vllm#6758",
            "vllm-project/vllm#28542",
            "deepspeedai/DeepSpeed#8345",
            "vllm-project/vllm#9490",
        ),
        cost=SMALL,
    ),
    "missing_chat_template": Entry(
        what="There is no chat template: the server starts, every chat is refused.",
        by_hand="on a copy, remove `chat_template.jinja` and the key `chat_template` of `tokenizer_config.json`",
        reports=("vllm-project/vllm#39279", "vllm-project/vllm#18140", "vllm-project/vllm#35679"),
        needs=("a checkpoint with a chat template",),
        cost=SMALL,
    ),
    "missing_file": Entry(
        what="Config, weight index or tokenizer is absent.",
        by_hand="on a copy: `rm tokenizer.json`",
        reports=("vllm-project/vllm#50633",),
        cost=SMALL,
    ),
    "missing_shard": Entry(
        what="A weight file is absent, and the weight index names it.",
        by_hand="on a copy: `rm model-00002-of-00002.safetensors`",
        reports=("vllm-project/vllm#34859", "huggingface/text-generation-inference#730"),
        cost=SMALL,
    ),
    "narrow_tensor": Entry(
        what="A tensor is smaller than the config says.",
        by_hand=REWRITE.format("t[name] = t[name][:, :-32].contiguous()"),
    ),
    "nested_checkpoint": Entry(
        what="The new checkpoint lies in a directory inside the old one, which is served.",
        by_hand="`mv new live` where `live` exists",
        needs=("old",),
        cost=OLD,
    ),
    "new_config_old_weights": Entry(
        what="The small files of a sync have come, the weights have not.",
        by_hand="copy everything but `*.safetensors` and the weight index over the old checkpoint",
        reports=("caikit/caikit#361", "vllm-project/vllm#50633"),
        needs=("old",),
        cost=OLD,
    ),
    "new_weights_as_bin": Entry(
        what="The new weights were saved as `.bin`, the old safetensors stayed, and those win.",
        by_hand="`torch.save(state, 'pytorch_model.bin')` beside the old `model.safetensors`",
        needs=("old",),
        cost=EVERY,
    ),
    "nonfinite_values": Entry(
        what="A tensor holds values that are not numbers, or infinite.",
        by_hand=REWRITE.format("t[name][0, 0] = float('nan')"),
    ),
    "old_config_new_weights": Entry(
        what="The weights of a sync have come, the config has not.",
        by_hand="copy only `*.safetensors` and the weight index over the old checkpoint",
        reports=("caikit/caikit#361",),
        needs=("old",),
        cost=SMALL,
    ),
    "permuted_tokenizer": Entry(
        what="The tokenizer is another release's: every id is in range and stands for another token.",
        by_hand="copy the `tokenizer.json` of another model with the same vocabulary size",
        reports=("vllm-project/vllm#11375", "OpenRLHF/OpenRLHF#1117"),
        cost=SMALL,
    ),
    "pointer_file": Entry(
        what="A git-lfs pointer lies under the name of the weights it points to.",
        by_hand="`GIT_LFS_SKIP_SMUDGE=1 git clone REPOSITORY`",
        reports=("vllm-project/vllm#57975", "microsoft/OmniParser#34", "deepseek-ai/DeepSeek-V3#557"),
    ),
    "presharded_state": Entry(
        what="The weights are a state saved rank by rank for another tensor parallel size.",
        by_hand="`LLM(...).save_sharded_state(...)` with two ranks, then serve it with one and `--load-format sharded_state`",
        reports=("vllm-project/vllm#19971",),
        needs=("a Llama", "a launch with `--load-format sharded_state`"),
        cost=EVERY,
    ),
    "previous_shard": Entry(
        what="One weight file is the previous step's: the same header, other bytes.",
        by_hand="copy one shard of the old checkpoint into a copy of the new one",
        needs=("old",),
    ),
    "relayout_tensor": Entry(
        what="A tensor has another shape with the same number of elements.",
        by_hand=REWRITE.format("t[name] = t[name].reshape(t[name].shape[::-1])"),
        reports=("vllm-project/vllm#53105", "vllm-project/vllm#53233"),
    ),
    "removed_config": Entry(
        what="The config lacks what the weights need, such as their quantisation.",
        by_hand=EDIT.format("del c['quantization_config']"),
        reports=("vllm-project/llm-compressor#959", "vllm-project/vllm#19361"),
        cost=SMALL,
    ),
    "rename_prefix": Entry(
        what="Every tensor has another prefix, as a wrapper class saves them.",
        by_hand=REWRITE.format("t = {k.replace('model.', 'model.model.', 1): v for k, v in t.items()}"),
        reports=("OpenBMB/AgentCPM-GUI#80", "unslothai/unsloth#1770"),
        cost=EVERY,
    ),
    "rename_tensor": Entry(
        what="A tensor has a name that the model does not know.",
        by_hand=REWRITE.format("t['model.layers.1.mlp.w2.weight'] = t.pop(name)"),
        reports=("vllm-project/vllm#53950", "vllm-project/vllm#27138", "vllm-project/vllm#40358"),
    ),
    "stale_index": Entry(
        what="The old shards and their weight index lie beside the new weights, and the index names only the old.",
        by_hand="save the new weights as one file into a directory that holds shards and their index",
        needs=("old",),
        cost=OLD,
    ),
    "stale_numpy_cache": Entry(
        what="`np/` was made from the old `.bin`; `--load-format npcache` never makes it anew.",
        by_hand="serve a `.bin` checkpoint with `--load-format npcache`, replace the `.bin`, restart",
        needs=("old", "a launch with `--load-format npcache`", "a directory that the engine may write to"),
        cost=EVERY,
    ),
    "swap_tensors": Entry(
        what="Two tensors of one shape hold each other's values.",
        by_hand=REWRITE.format("t[a], t[b] = t[b], t[a]"),
    ),
    "token_beyond_rows": Entry(
        what="The tokenizer has grown and the embedding has not: the first text with that token ends the engine.",
        by_hand="on a copy, give a token of `tokenizer.json` the id `vocab_size`",
        reports=(
            "vllm-project/vllm#13175",
            "vllm-project/vllm#11375",
            "vllm-project/vllm#340",
            "huggingface/transformers#1848",
        ),
        cost=SMALL,
    ),
    "transpose_tensor": Entry(
        what="A square matrix is transposed: no header shows it.",
        by_hand=REWRITE.format("t[name] = t[name].T.contiguous()"),
    ),
    "truncate_shard": Entry(
        what="A weight file ends early.",
        by_hand="on a copy: `truncate -s -1 model.safetensors`",
        reports=("vllm-project/vllm#15445", "gpustack/gpustack#815"),
    ),
    "unreadable_file": Entry(
        what="A weight file is listed and cannot be read.",
        by_hand="on a copy: `ln -sf /nowhere model.safetensors`, or `chmod 000 model.safetensors`",
        needs=('for how="mode": not root',),
    ),
    "widen_tensor": Entry(
        what="A tensor is larger than the config says; what is too long is cut off without a word.",
        by_hand=REWRITE.format("t[name] = torch.cat([t[name][:, :32], t[name]], dim=1)"),
        reports=("HYGON-AI/vllm-plugin-das#110", "verl-project/verl#834"),
    ),
    "wider_weights": Entry(
        what="The weights are those of a model with a larger hidden size.",
        by_hand="copy the `config.json` of a smaller model of the family over a larger one's",
        reports=("bytedance-iaas/vllm#48",),
        cost=EVERY,
    ),
    "zero_tail": Entry(
        what="A weight file was preallocated and its end not written yet: size and header are right.",
        by_hand="on a copy: `truncate -s 50% model.safetensors && truncate -s OLD-SIZE model.safetensors`",
        reports=("huggingface/safetensors#762",),
    ),
}
