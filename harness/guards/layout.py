"""Compare the tensors of a checkpoint with what its config promises: layers, absent tensors, shapes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from harness.checkpoint.header import Tensor
from harness.checkpoint.survey import Checkpoint
from harness.guards.compared import SHOWN_NAMES, Compared, beside
from harness.guards.dtypes import PAIR, comparable_dtype, dtype_findings, quantisation_findings
from harness.guards.expected import ConfigUnusable, ExpectedTensor, Fate, Loading, architecture
from harness.guards.families import FAMILIES, expected_tensors
from harness.guards.finding import PreflightFinding, Severity, shortened
from harness.guards.unknown_names import unknown_name_findings

RESTORE = "restore the tensor from the release it belongs to"
EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")


def layout_findings(checkpoint: Checkpoint, *, is_whole: bool = True) -> Iterator[PreflightFinding]:
    """Yield what is wrong between config and headers.

    With `is_whole` false, some shards are absent or cannot be read: then absent tensors are not listed one by one.
    """
    config = checkpoint.config
    if not config or not checkpoint.tensors:
        return
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    is_quantised = isinstance(config.get("quantization_config"), dict)
    yield from quantisation_findings(config, tensors)
    if not is_quantised:
        yield from dtype_findings(config, tensors)
    try:
        expected = expected_tensors(config)
    except ConfigUnusable as error:
        yield PreflightFinding(
            id="C02",
            severity=Severity.REFUSES,
            seen=str(error),
            expected="a value that fits the weights",
            where='"config.json"',
            remedy=PAIR,
        )
        return
    if expected is None:
        yield _not_checked(f'architecture "{shortened(architecture(config))}": names and shapes were not checked')
        return
    compared = beside(expected, tensors, is_quantised=is_quantised)
    yield from _layers(compared, is_whole=is_whole)
    if is_whole:
        yield from _shortened(list(_absent(compared)))
    yield from unknown_name_findings(compared)
    yield from _shapes(compared)
    if is_quantised:
        count = sum(not comparable_dtype(tensor.dtype) for tensor in tensors.values())
        yield _not_checked(f"a quantised checkpoint: the shapes of {count} packed tensors were not checked")


def _not_checked(seen: str) -> PreflightFinding:
    return PreflightFinding(
        id="C06",
        severity=Severity.RISK,
        seen=seen,
        expected=f"one of {', '.join(FAMILIES)}, not quantised",
        where='"config.json"',
        remedy="check that the engine release supports it; rely on the canary for its tensors",
    )


def _shortened(findings: list[PreflightFinding]) -> Iterator[PreflightFinding]:
    """Yield a long list's first findings of each kind, and how many more there are."""
    counts: Counter[tuple[str, Severity]] = Counter()
    for finding in findings:
        counts[finding.id, finding.severity] += 1
        if counts[finding.id, finding.severity] <= SHOWN_NAMES:
            yield finding
    for (fault_id, severity), count in counts.items():
        if count > SHOWN_NAMES:
            yield PreflightFinding(
                id=fault_id,
                severity=severity,
                seen=f"{count - SHOWN_NAMES} more tensors are absent",
                expected="present",
                where="weight files",
                remedy=RESTORE,
            )


def _layers(compared: Compared, *, is_whole: bool) -> Iterator[PreflightFinding]:
    layers, numbers = compared.expected.layers, compared.of_layer.keys()
    absent = layers - sum(1 for number in numbers if number < layers)
    surplus = [number for number in numbers if number >= layers]
    if absent and is_whole:
        first = next(number for number in range(layers) if number not in numbers)
        yield PreflightFinding(
            id="C01",
            severity=Severity.REFUSES,
            seen=f"no tensors of {absent} {'layer' if absent == 1 else 'layers'} (the first is {first})",
            expected=f"{layers} layers, as num_hidden_layers says",
            where='"config.json"',
            remedy=PAIR,
        )
    if surplus:
        yield PreflightFinding(
            id="C01",
            severity=Severity.REFUSES,
            seen=f"tensors of layer {max(surplus)}",
            expected=f"layers 0 to {layers - 1}, as num_hidden_layers says",
            where='"config.json"',
            remedy=PAIR,
        )


def _absent(compared: Compared) -> Iterator[PreflightFinding]:
    for name in compared.expected.of_model:
        if name not in compared.of_model and not _is_packed(name, compared.of_model, compared):
            is_head = name == "lm_head.weight"
            yield PreflightFinding(
                id="C04" if is_head else "D06" if "norm" in name else "D04",
                severity=Severity.REFUSES if "norm" in name else Severity.SILENT,
                seen="absent",
                expected="present" + (", because tie_word_embeddings is false" if is_head else ""),
                where=f'tensor "{name}"',
                remedy=f"{RESTORE}, or set tie_word_embeddings if the model ties them" if is_head else RESTORE,
            )
    for number, promised in compared.promised.items():
        present = compared.of_layer[number]
        if all(inner in present for inner in promised):
            continue
        groups = {tensor.group for inner, tensor in promised.items() if tensor.group and inner in present}
        for inner, tensor in promised.items():
            if inner not in present and not _is_packed(inner, present, compared):
                yield _absent_of_layer(
                    f"model.layers.{number}.{inner}", inner, tensor, is_part=tensor.group in groups, compared=compared
                )


def _is_packed(name: str, present: Mapping[str, Tensor], compared: Compared) -> bool:
    """Say whether a quantised checkpoint holds a weight in some other form: qweight, weight_packed, ..."""
    module = f"{name.removesuffix('.weight')}."
    return compared.is_quantised and any(other.startswith(module) for other in present)


def _absent_of_layer(
    name: str, inner: str, tensor: ExpectedTensor, *, is_part: bool, compared: Compared
) -> PreflightFinding:
    severity = Severity.SILENT
    if is_part:
        fault_id = "D05"
    elif "norm" in inner:
        fault_id, severity = "D06", Severity.REFUSES
    else:
        fault_id = "D06" if inner.endswith(".bias") else "D04"
    if inner in compared.expected.dropped:
        severity = Severity.RISK
    return PreflightFinding(
        id=fault_id,
        severity=severity,
        seen="absent",
        expected=f"present, shape {list(tensor.shape)}",
        where=f'tensor "{name}"',
        remedy=RESTORE,
    )


def _shapes(compared: Compared) -> Iterator[PreflightFinding]:
    """Compare every dimension; a tensor that is wrong in the same way in every layer is one finding about the config."""
    wrong: dict[tuple[str, tuple[int, ...]], list[tuple[str, ExpectedTensor]]] = defaultdict(list)
    for inner, name, tensor, wanted in compared.pairs():
        if tensor.shape != wanted.shape and (not compared.is_quantised or comparable_dtype(tensor.dtype)):
            wrong[(_of_any_expert(inner), tensor.shape)].append((name, wanted))
    if not wrong:
        return
    counts = Counter(_of_any_expert(inner) for inner, _, _, _ in compared.pairs())
    for (inner, shape), found in wrong.items():
        everywhere = len(found) == counts[inner] > 1
        for name, wanted in found[:1] if everywhere else found:
            yield _shape_finding(name, shape, wanted, count=len(found) if everywhere else 1)


def _of_any_expert(inner: str) -> str:
    return EXPERT_NUMBER.sub(".experts.*.", inner) if ".experts." in inner else inner


def _shape_finding(name: str, shape: tuple[int, ...], wanted: ExpectedTensor, *, count: int) -> PreflightFinding:
    fate = wanted.fate(shape)
    is_vocabulary = wanted.loading is Loading.VOCABULARY and shape[1:] == wanted.shape[1:]
    single = "D08" if fate is Fate.CUT else "D07"
    what = {
        Fate.CUT: ", which the engine cuts without a word",
        Fate.FILLED_IN_PART: ", with which the engine fills a part of the expert without a word",
        Fate.REFUSED: ", transposed" if shape == wanted.shape[::-1] else "",
    }
    places = "layers and experts" if ".experts." in name else "layers"
    return PreflightFinding(
        id="C03" if is_vocabulary else "C02" if count > 1 else single,
        severity=Severity.REFUSES if fate is Fate.REFUSED else Severity.SILENT,
        seen=f"shape {list(shape)}{what[fate]}" + (f", in all {count} {places}" if count > 1 else ""),
        expected=f"{list(wanted.shape)}",
        where=f'tensor "{name}"',
        remedy=PAIR,
    )
