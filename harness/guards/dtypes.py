"""Compare the dtypes of tensors with each other, with the config and with what a quantisation method needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from harness.checkpoint.header import Tensor
from harness.guards.finding import PreflightFinding, Severity, shortened

PAIR = "publish config.json and weights of one release together"
NEEDED_KEYS: Mapping[str, tuple[tuple[str, ...], ...]] = {  # one of each; without it the engine does not start
    "fp8": (("activation_scheme",),),
    "gptq": (("bits",), ("group_size",), ("desc_act",)),
    "awq": (("bits", "w_bit"), ("group_size", "q_group_size"), ("zero_point",)),
}
QUANTISED_SUFFIXES = ("_scale", "_scale_inv", "qweight", "qzeros", "weight_packed", ".SCB")
CONFIG_DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "half": "F16",
    "float32": "F32",
    "float": "F32",
    "float64": "F64",
}
FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
WIDER_BY_DESIGN = ("norm", "router", ".gate.weight")  # commonly kept in float32 next to bf16 matrices


def quantisation_findings(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[PreflightFinding]:
    """Yield where config and tensors disagree about whether the checkpoint is quantised."""
    named = [name for name in tensors if name.endswith(QUANTISED_SUFFIXES)]
    declared = isinstance(config.get("quantization_config"), dict)
    if named and not declared:
        yield PreflightFinding(
            id="C08",
            severity=Severity.REFUSES,
            seen=f"{len(named)} tensors of a quantised checkpoint ({_listed(named)}), no quantization_config",
            expected="a quantization_config",
            where='"config.json"',
            remedy=PAIR,
        )
    if declared:
        yield from _incomplete(config["quantization_config"])
    is_stored = (
        declared and str(config["quantization_config"].get("quant_method")).lower() == "fp8"
    )  # and never made so
    if declared and not named and all(tensor.dtype in FLOAT_DTYPES for tensor in tensors.values()):
        yield PreflightFinding(
            id="C08",
            severity=Severity.SILENT if is_stored else Severity.RISK,
            seen="a quantization_config, but plain weights only",
            expected="quantised tensors or scales",
            where='"config.json"',
            remedy=PAIR if is_stored else f"{PAIR}; some methods quantise on loading, for those it is right",
        )


def _incomplete(declared: Mapping[str, Any]) -> Iterator[PreflightFinding]:
    """Yield the first key that a method cannot do without."""
    method = str(declared.get("quant_method")).lower()
    for keys in NEEDED_KEYS.get(method, ()):
        if not any(key in declared for key in keys):
            yield PreflightFinding(
                id="C08",
                severity=Severity.REFUSES,
                seen=f'a quantization_config of method "{method}" without "{keys[0]}"',
                expected=f"one of {', '.join(keys)}" if len(keys) > 1 else f'"{keys[0]}"',
                where='"config.json"',
                remedy=PAIR,
            )
            return


def dtype_findings(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[PreflightFinding]:
    """Yield dtypes that differ from the others', and from the one that the config declares."""
    counts = Counter(tensor.dtype for tensor in tensors.values())
    main = max((dtype for dtype in counts if dtype in FLOAT_DTYPES), key=lambda dtype: counts[dtype], default=None)
    for dtype, count in sorted(counts.items()):
        if dtype == main:
            continue
        names = [tensor.name for tensor in tensors.values() if tensor.dtype == dtype]
        is_float = dtype in FLOAT_DTYPES
        harmless = dtype == "F32" and all(
            len(tensors[name].shape) < 2 or any(part in name for part in WIDER_BY_DESIGN) for name in names
        )
        yield PreflightFinding(
            id="D16",
            severity=Severity.RISK if harmless else Severity.SILENT,
            seen=f"{count} of {len(tensors)} tensors are {dtype} ({_listed(names)})",
            expected=f"{main}, as the others" if main else "a float dtype",
            where="weight files",
            remedy="write the tensors again in one dtype" if is_float else "integer values need a quantization_config",
        )
    declared = config.get("torch_dtype", config.get("dtype"))
    if isinstance(declared, str) and main is not None:
        wanted = CONFIG_DTYPES.get(declared.removeprefix("torch."))
        if wanted is not None and wanted != main:
            yield PreflightFinding(
                id="D16",
                severity=Severity.SILENT,
                seen=f"weights are {main}",
                expected=f'{wanted}, as config.json says ("{declared}")',
                where='"config.json"',
                remedy=PAIR,
            )


def comparable_dtype(dtype: str) -> bool:
    """Say whether a tensor of this dtype has one value an element, so that its shape is the layer's."""
    return dtype in FLOAT_DTYPES or dtype == "I8" or dtype.startswith("F8_")


def _listed(names: list[str]) -> str:
    shown = ", ".join(f'"{shortened(name)}"' for name in names[:2])
    return shown if len(names) <= 2 else f"{shown}, ..."
