"""Check the arguments an engine is about to be started with against the checkpoint it is to serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.checkpoint.survey import Checkpoint
from harness.guards.finding import PreflightFinding, Severity, shortened

ACCEPTED_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
MEANT_DTYPES = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32"}
UNKNOWN_FLAGS = {
    "--disable-weight-cache": "leave it out; vLLM has no such flag (--load-format auto uses no weight cache daemon)",
    "--weight-cache-path": "leave it out; vLLM has no such flag",
}


def argument_findings(checkpoint: Checkpoint, *, dtype: str, arguments: Sequence[str]) -> Iterator[PreflightFinding]:
    """Yield what is wrong with the launch; a `--dtype` among the arguments wins over `dtype`."""
    options = parse_options(arguments)
    dtype = options.get("--dtype", dtype)
    if dtype not in ACCEPTED_DTYPES:
        meant = MEANT_DTYPES.get(dtype.lower())
        yield PreflightFinding(
            id="L01",
            severity=Severity.REFUSES,
            seen=f'--dtype "{shortened(dtype)}"',
            expected=f"one of {', '.join(ACCEPTED_DTYPES)}",
            where="launch arguments",
            remedy=f"use --dtype {meant}" if meant else "use an accepted spelling",
        )
    for flag, remedy in UNKNOWN_FLAGS.items():
        if flag in options:
            yield PreflightFinding(
                id="L01",
                severity=Severity.REFUSES,
                seen=flag,
                expected="a flag that vLLM has",
                where="launch arguments",
                remedy=remedy,
            )
    if dtype in ("float16", "half") and any(tensor.dtype == "BF16" for tensor in checkpoint.tensors):
        yield PreflightFinding(
            id="C07",
            severity=Severity.RISK,
            seen=f"bf16 weights, --dtype {dtype}",
            expected="bfloat16, or values and activations within +-65504",
            where="launch arguments",
            remedy="use --dtype bfloat16, or scan the values (--deep) and watch the canary",
        )
    yield from _parallel(checkpoint.config, options)
    yield from _length(checkpoint.config, options)


def parse_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options of an engine's command line: `--name value` and `--name=value`; flags map to ""."""
    options: dict[str, str] = {}
    pending: str | None = None
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            options[name] = value
            pending = None if equals else name
        elif pending is not None:
            options[pending] = argument
            pending = None
    return options


def effective_dtype(dtype: str, arguments: Sequence[str]) -> str:
    """Return the dtype that the engine will be asked for."""
    return parse_options(arguments).get("--dtype", dtype)


def _parallel(config: Mapping[str, Any], options: Mapping[str, str]) -> Iterator[PreflightFinding]:
    size = _number(options.get("--tensor-parallel-size", options.get("-tp", "1")))
    heads = config.get("num_attention_heads")
    if size is not None and size > 1 and type(heads) is int and heads % size:
        yield PreflightFinding(
            id="L03",
            severity=Severity.REFUSES,
            seen=f"tensor parallel size {size}",
            expected=f"a divisor of num_attention_heads {heads}",
            where="launch arguments",
            remedy="choose a tensor parallel size that divides the heads",
        )


def _length(config: Mapping[str, Any], options: Mapping[str, str]) -> Iterator[PreflightFinding]:
    asked, longest = _number(options.get("--max-model-len", "")), config.get("max_position_embeddings")
    if asked is not None and type(longest) is int and asked > longest and not config.get("rope_scaling"):
        yield PreflightFinding(
            id="L04",
            severity=Severity.REFUSES,
            seen=f"--max-model-len {asked}",
            expected=f"at most max_position_embeddings {longest}",
            where="launch arguments",
            remedy="lower --max-model-len",
        )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _is_number(text: str) -> bool:
    return text[1:2].isdecimal()
