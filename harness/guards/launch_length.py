"""Check the lengths that a launch asks for against those that the config allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.guards.finding import PreflightFinding, Severity, shortened
from harness.guards.launch_options import WHERE, Launch

LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
SCALED_ALREADY = ("su", "longrope", "llama3")
YARN = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
YARN_SCALED_SINCE = (0, 30, 0)  # until then the factor was applied to original_max_position_embeddings
ALLOW_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def length_findings(config: Mapping[str, Any], launch: Launch) -> Iterator[PreflightFinding]:
    """Yield lengths that the engine refuses for this config."""
    asked = launch.number("--max-model-len")
    if "--max-model-len" in launch.values and asked is None:
        return
    longest = longest_length(config, launch)
    if asked is not None and asked != -1 and longest is not None and asked > longest:
        is_allowed = launch.variables.get(ALLOW_LONGER, "").lower() in ("1", "true")
        yield PreflightFinding(
            id="L04",
            severity=Severity.RISK if is_allowed else Severity.REFUSES,
            seen=f"--max-model-len {asked}" + (f", allowed by {ALLOW_LONGER}" if is_allowed else ""),
            expected=f"at most {longest}, which config.json allows",
            where=WHERE,
            remedy="lower --max-model-len",
        )
    elif asked is not None and asked != -1 and asked < 1:
        yield _refused(f"--max-model-len {asked}", "1 or more, or auto", "correct it")
    tokens, requests = launch.number("--max-num-batched-tokens"), launch.number("--max-num-seqs")
    if tokens is not None and requests is not None and tokens < requests:
        yield _refused(
            f"--max-num-batched-tokens {tokens}, --max-num-seqs {requests}",
            "at least one token for each sequence",
            "raise --max-num-batched-tokens",
        )
    length = asked if asked not in (None, -1) else longest
    if (
        tokens is not None
        and length is not None
        and tokens < length
        and launch.flags.get("--enable-chunked-prefill") is False
    ):
        yield _refused(
            f"--max-num-batched-tokens {tokens} without chunked prefill",
            f"at least the model length {length}",
            "raise --max-num-batched-tokens, or leave chunked prefill on",
        )


def longest_length(config: Mapping[str, Any], launch: Launch) -> int | None:
    """Return the longest sequence that the engine accepts for a config; None when it names no length or a strange one."""
    lengths = [config[key] for key in LENGTH_KEYS if config.get(key) is not None]
    if not lengths or not all(type(length) is int and 0 < length < 2**40 for length in lengths):
        return None
    longest: float = min(lengths)
    if config.get("model_max_length"):
        longest = config["model_max_length"]
    window = config.get("sliding_window")
    if launch.flags.get("--disable-sliding-window") and type(window) is int and window < longest:
        longest = window
    if "gemma3" not in str(config.get("model_type", "")):
        scaled = _scaled(config, longest, launch)
        if scaled is None:
            return None
        longest = scaled
    return int(longest)


def _scaled(config: Mapping[str, Any], longest: float, launch: Launch) -> float | None:
    """Return the length that rope scaling makes of it; None where that cannot be told."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict):
        return longest
    nested = [value for value in rope.values() if isinstance(value, dict)]
    factor: Any = 1.0
    for one in nested or [rope]:
        kind = one.get("rope_type", one.get("type", "default"))
        if kind in SCALED_ALREADY or (kind in YARN and launch.release.number >= YARN_SCALED_SINCE):
            continue
        factor = one.get("factor", factor)
        if kind == "yarn":
            longest = one.get("original_max_position_embeddings", longest)
    if factor is None:
        factor = 1.0
    usable = isinstance(factor, int | float) and isinstance(longest, int | float)
    return longest * factor if usable and 0 < factor < 1e6 and 0 < longest < 2**40 else None


def _refused(seen: str, expected: str, remedy: str) -> PreflightFinding:
    return PreflightFinding(
        id="L04",
        severity=Severity.REFUSES,
        seen=shortened(seen),
        expected=expected,
        where=WHERE,
        remedy=remedy,
    )
