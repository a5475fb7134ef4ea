"""Check the arguments an engine is about to be started with against the checkpoint it is to serve.

Source: vLLM 0.28.0 to 0.33.0, whose checks of parallel sizes, lengths, dtypes and quantisation are repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.checkpoint.survey import Checkpoint
from harness.guards.finding import PreflightFinding, Severity, shortened
from harness.guards.launch_length import length_findings
from harness.guards.launch_options import WHERE, Launch
from harness.guards.launch_values import MEANT_DTYPES
from harness.guards.releases import names_known

ACCEPTED_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
HALF = ("float16", "half")
NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")  # refused by name, every release read
PADDED_ROWS = 64  # the engine pads the vocabulary to a multiple of it before it divides
SAME_METHOD = (
    frozenset({"gptq", "auto_gptq", "gptq_marlin", "moe_wna16"}),
    frozenset({"awq", "auto_awq", "awq_marlin", "moe_wna16"}),
    frozenset({"fp8", "deepseek_v4_fp8"}),
    frozenset({"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"}),
    frozenset({"mxfp4", "gpt_oss_mxfp4"}),
    frozenset({"mxfp8", "modelopt_mxfp8"}),
)
ANY_METHOD = "humming"  # kernels for every method
AWQ_OR_GPTQ = ("awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "moe_wna16")
NEEDS_SCALES = (*AWQ_OR_GPTQ, *SAME_METHOD[3], "compressed-tensors", "inc", "quark", "torchao")
HALVES_ONLY = (*AWQ_OR_GPTQ, "fp8")  # float32 is refused


def argument_findings(checkpoint: Checkpoint, launch: Launch, *, dtype: str = "auto") -> Iterator[PreflightFinding]:
    """Yield what is wrong with the launch; a `--dtype` among its options wins over `dtype`."""
    yield from launch.problems
    config = checkpoint.config
    asked = launch.text("--dtype") or dtype
    if "--dtype" not in launch.values and dtype not in ACCEPTED_DTYPES:
        meant = MEANT_DTYPES.get(dtype.lower())
        yield _finding(
            "L01",
            f'--dtype "{shortened(dtype)}"',
            f"one of {', '.join(ACCEPTED_DTYPES)}",
            f"use --dtype {meant}" if meant else "use an accepted spelling",
        )
    yield from _dtype(checkpoint, asked)
    yield from _parallel(text_config(config), launch)
    yield from length_findings(text_config(config), launch)
    yield from _quantisation(config, launch, asked)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return where a config keeps the sizes of its language model: at the top, or under `text_config`."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def with_overrides(config: Mapping[str, Any], launch: Launch) -> Mapping[str, Any]:
    """Return the config as the engine will read it, with what `--hf-overrides` puts over it."""
    overrides = launch.json("--hf-overrides")
    if not isinstance(overrides, dict):
        return config
    merged = dict(config)
    for key, value in overrides.items():
        held = merged.get(key)
        merged[key] = {**held, **value} if isinstance(held, dict) and isinstance(value, dict) else value
    return merged


def _finding(
    fault_id: str, seen: str, expected: str, remedy: str, severity: Severity = Severity.REFUSES
) -> PreflightFinding:
    return PreflightFinding(id=fault_id, severity=severity, seen=seen, expected=expected, where=WHERE, remedy=remedy)


def _dtype(checkpoint: Checkpoint, dtype: str) -> Iterator[PreflightFinding]:
    model_type = text_config(checkpoint.config).get("model_type")
    if dtype in HALF and model_type in NOT_IN_FLOAT16:
        yield _finding(
            "C07",
            f'--dtype {dtype} for a model of type "{model_type}"',
            "bfloat16 or float32, which this model type needs",
            "use --dtype bfloat16",
        )
    elif dtype in HALF and any(tensor.dtype == "BF16" for tensor in checkpoint.tensors):
        yield _finding(
            "C07",
            f"bf16 weights, --dtype {dtype}",
            "bfloat16, or values and activations within +-65504",
            "use --dtype bfloat16, or scan the values (--verify) and watch the canary",
            Severity.RISK,
        )


def _parallel(config: Mapping[str, Any], launch: Launch) -> Iterator[PreflightFinding]:
    size = launch.number("--tensor-parallel-size", 1)
    if size is None:
        return
    if size < 1:
        yield _finding("L03", f"tensor parallel size {size}", "1 or more", "choose a positive size")
        return
    heads, kv_heads = _count(config, "num_attention_heads"), _count(config, "num_key_value_heads")
    divisors = [("num_attention_heads", heads)]
    if kv_heads and size < kv_heads:
        divisors.append(("num_key_value_heads", kv_heads))
    rows = _count(config, "vocab_size")
    if rows:
        padded = (rows + PADDED_ROWS - 1) // PADDED_ROWS * PADDED_ROWS
        divisors.append((f"vocab_size {rows}, padded", padded))
    for key in ("intermediate_size", "moe_intermediate_size"):
        if key == "intermediate_size" or not launch.flags.get("--enable-expert-parallel"):
            divisors.append((key, _count(config, key)))
    for key, number in divisors:
        if number and number % size:
            yield _indivisible(f"tensor parallel size {size}, {key} {number}", "a size that divides it")
    if kv_heads and size > kv_heads and size % kv_heads:
        yield _indivisible(f"tensor parallel size {size}, num_key_value_heads {kv_heads}", "a multiple of it")
    yield from _stages(config, launch, size)


def _stages(config: Mapping[str, Any], launch: Launch, tensor_size: int) -> Iterator[PreflightFinding]:
    stages, layers = launch.number("--pipeline-parallel-size", 1), _count(config, "num_hidden_layers")
    if stages is not None and layers and stages > layers:
        yield _finding(
            "L03",
            f"pipeline parallel size {stages}",
            f"at most num_hidden_layers {layers}, so that each stage has a layer",
            "choose a smaller pipeline parallel size",
            Severity.RISK,
        )
    contexts = launch.number("--decode-context-parallel-size", 1)
    if contexts and contexts > 1 and tensor_size % contexts and "--prefill-context-parallel-size" not in launch.values:
        yield _indivisible(
            f"decode context parallel size {contexts}", f"a divisor of the tensor parallel size {tensor_size}"
        )
    experts = next((count for key in ("num_experts", "num_local_experts") if (count := _count(config, key))), None)
    if experts and tensor_size > experts and not launch.flags.get("--enable-expert-parallel"):
        yield _finding(
            "L03",
            f"tensor parallel size {tensor_size}",
            f"at most the number of experts {experts}, which most model classes demand",
            "choose a smaller tensor parallel size",
            Severity.RISK,
        )


def _indivisible(seen: str, expected: str) -> PreflightFinding:
    return _finding("L03", seen, expected, "choose a size that divides the model")


def _quantisation(config: Mapping[str, Any], launch: Launch, dtype: str) -> Iterator[PreflightFinding]:
    declared = config.get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, dict) else None
    asked = launch.text("--quantization")
    asked = None if asked in ("", "None") else asked
    if asked is not None and asked not in names_known("quantizations", launch.release.read_as):
        yield _finding(
            "C08",
            f"--quantization {shortened(asked)}",
            f"a method that {launch.release.label} has",
            "correct the name; only a plug-in could bring another method",
        )
    elif asked is not None and isinstance(method, str) and asked not in (method, ANY_METHOD):
        if not any(asked in family and method in family for family in SAME_METHOD):
            yield _finding(
                "C08",
                f"--quantization {asked}, config.json says {shortened(method)}",
                "one method",
                "leave --quantization out: the config decides",
            )
    elif asked in NEEDS_SCALES and not isinstance(declared, dict):
        yield _finding(
            "C08",
            f"--quantization {asked}, no quantization_config",
            f"a checkpoint that was quantised with {asked}",
            "leave --quantization out, or publish the quantised checkpoint with its config",
        )
    if (asked or method) in HALVES_ONLY and dtype in ("float", "float32"):
        yield _finding(
            "C07", f"--dtype {dtype} with {asked or method}", "float16 or bfloat16", "use --dtype auto or bfloat16"
        )


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and 0 < value < 2**40 else None
