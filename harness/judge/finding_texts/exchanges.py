"""Weights and adapters that are exchanged while the engine runs."""

from __future__ import annotations

from harness.judge.finding_texts.text import ASK, HEALTH, OPERATOR, Text
from harness.judge.moments import Layer

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
# Adapters: the base is served as "base", and what is loaded as "tiny". One sequence at a time, as in the scenarios.
ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
ADAPTER_ARGUMENTS = "--enable-lora --max-loras 2 --max-num-seqs 1"
LOAD_FIRST = f"""{POST}/v1/load_lora_adapter {JSON} \\
  -d '{{"lora_name": "tiny", "lora_path": "'"$OLD/adapter"'"}}'"""
LOAD_DAMAGED = f"""{POST}/v1/load_lora_adapter {JSON} \\
  -d '{{"lora_name": "tiny", "lora_path": "'"$PWD/damaged"'", "load_inplace": true}}'"""
LOAD_SERVED = f"""{POST}/v1/load_lora_adapter {JSON} \\
  -d '{{"lora_name": "tiny", "lora_path": "'"$PWD/served"'", "load_inplace": true}}'"""
# More than a block of the KV cache, which is 128 tokens on a CPU; prompt logprobs would go past the prefix cache.
ASK_LONG = """curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
  -d '{"model": "tiny", "prompt": '"$(python -c 'print([5, 17, 42, 99] * 50)')"', "max_tokens": 1, "temperature": 0, "logprobs": 3}'"""

EXCHANGES: tuple[Text, ...] = (
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
        "loaded in place, and not after an unload. From 0.31.0 on, a path of its own for each version avoids it.",
        reports=("vllm-project/vllm#42125",),
        serve=f"{DEV_MODE} {ADAPTERS}",
        arguments=f"{ADAPTER_ARGUMENTS} --enable-prefix-caching",
        by_hand=(
            'rm -rf served; cp -rL "$OLD/adapter" served',
            LOAD_SERVED,
            ASK_LONG,
            'cp -f "$NEW"/adapter/* served/',
            "# in place; the same comes of unload_lora_adapter and then load_lora_adapter",
            LOAD_SERVED,
            f"{ASK_LONG}   # from keys and values of the old adapter",
            f"{POST}/reset_prefix_cache",
            f"{ASK_LONG}   # what the new adapter answers",
        ),
    ),
    Text(
        pattern=r"adapter_that_fits",
        when=r"the KV cache is stale",
        title="An adapter that is loaded in place from a path of its own answers from keys and values of the one before",
        expected="Blocks of the prefix cache are known by the adapter's files as well, not by its name alone.",
        why="Not even a path of its own for each version makes a rollout of adapters right: the prefix cache has to be reset.",
    ),
    Text(
        pattern=r"adapter_.*",
        when=r"refused the adapter.*; then: a canary.*neither",
        layers=(Layer.STARTUP,),
        title="An adapter that is refused in place has spoilt the one that was served",
        expected="The call fails and the adapter from before goes on answering.",
        why="After HTTP 500 the name is still listed and answers with 200, from neither adapter: whoever keeps the old one on an error, "
        "which is what the error suggests, serves wrong answers from then on. Loaded under another name it does no harm.",
        serve=ADAPTERS,
        arguments=ADAPTER_ARGUMENTS,
        by_hand=(
            LOAD_FIRST,
            ASK,
            f"{LOAD_DAMAGED}   # 500",
            "# the same request to the same adapter is answered otherwise now:",
        ),
    ),
    Text(
        pattern=r"adapter_of_unknown_names",
        title="An adapter whose names match nothing is listed and changes nothing",
        expected="Loading it fails, naming the tensors that match no module.",
        why="The call is answered with 200, the adapter is listed as loaded, and its users are answered by the base model.",
        reports=("vllm-project/vllm#34186", "vllm-project/vllm#55193", "vllm-project/vllm#34591"),
        serve=ADAPTERS,
        arguments=ADAPTER_ARGUMENTS,
        by_hand=(
            LOAD_FIRST,
            f"{LOAD_DAMAGED}   # 200",
            ASK.replace('"tiny"', '"base"'),
            "# the adapter answers as its base does:",
        ),
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
)
