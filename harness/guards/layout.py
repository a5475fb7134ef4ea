"""Compare the tensors of a checkpoint with what its config promises: layers, absent tensors, shapes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from harness.checkpoint.header import Tensor
from harness.checkpoint.survey import Checkpoint
from harness.guards.compared import SHOWN_NAMES, Compared, beside, block_of, numberless
from harness.guards.dtypes import PAIR, comparable_dtype, dtype_findings, quantisation_findings
from harness.guards.expected import ConfigUnusable, ExpectedTensor, Fate, Loading, architecture
from harness.guards.families import FAMILIES, expected_tensors
from harness.guards.finding import PreflightFinding, Severity, shortened
from harness.guards.unknown_names import unknown_name_findings

RESTORE = "restore the tensor from the release it belongs to"
BESIDE_WEIGHTS = (".bias", "_scale", "_scale_inv", ".scales", "qzeros", ".g_idx", ".SCB", ".weight_format")
DOT = re.compile(r"\.")


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
    yield from compare(beside(expected, tensors, is_quantised=is_quantised), is_whole=is_whole)
    if is_quantised:
        count = sum(not comparable_dtype(tensor.dtype) for tensor in tensors.values())
        yield _not_checked(f"a quantised checkpoint: the shapes of {count} packed tensors were not checked")


def compare(compared: Compared, *, is_whole: bool) -> Iterator[PreflightFinding]:
    """Yield every difference in names and shapes; of a checkpoint that is not whole, absent tensors are not listed."""
    yield from _layers(compared, is_whole=is_whole)
    yield from _blocks(compared, is_whole=is_whole)
    if is_whole:
        yield from _shortened(list(_absent(compared)))
    yield from unknown_name_findings(compared)
    yield from _shapes(compared)


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


def _blocks(compared: Compared, *, is_whole: bool) -> Iterator[PreflightFinding]:
    """Yield layers too many or too few where they are known by their names alone."""
    if compared.absent_blocks and is_whole:
        yield PreflightFinding(
            id="C01",
            severity=Severity.REFUSES,
            seen=f'no tensors of {len(compared.absent_blocks)} layers (such as "{min(compared.absent_blocks)}")',
            expected="every layer that config.json says",
            where='"config.json"',
            remedy=PAIR,
        )
    if compared.surplus_blocks:
        yield PreflightFinding(
            id="C01",
            severity=Severity.REFUSES,
            seen=f'tensors of layers that are not there (such as "{shortened(max(compared.surplus_blocks))}")',
            expected="as many layers as config.json says",
            where='"config.json"',
            remedy=PAIR,
        )


def _absent(compared: Compared) -> Iterator[PreflightFinding]:
    yield from _absent_of("", compared.expected.of_model, compared.of_model, compared)
    for number, promised in compared.promised.items():
        yield from _absent_of(f"model.layers.{number}.", promised, compared.of_layer[number], compared)


def _absent_of(
    prefix: str, promised: Mapping[str, ExpectedTensor], present: Mapping[str, Tensor], compared: Compared
) -> Iterator[PreflightFinding]:
    if all(name in present for name in promised):
        return
    groups = {tensor.group for name, tensor in promised.items() if tensor.group and name in present}
    packed = _modules(name for name in present if not name.endswith(BESIDE_WEIGHTS)) if compared.is_quantised else ()
    for name, tensor in promised.items():
        is_packed = name.removesuffix(".weight") in packed  # as qweight, weight_packed, ...
        if name not in present and not is_packed and block_of(name) not in compared.absent_blocks:
            yield _absence(f"{prefix}{name}", name, tensor, is_part=tensor.group in groups, compared=compared)


def _modules(names: Iterable[str]) -> frozenset[str]:
    """Return every module that some tensor belongs to, at whatever depth."""
    return frozenset(name[: match.start()] for name in names for match in DOT.finditer(name))


def _absence(name: str, inner: str, tensor: ExpectedTensor, *, is_part: bool, compared: Compared) -> PreflightFinding:
    is_head = name == "lm_head.weight"
    severity = Severity.SILENT
    if is_head or is_part:
        fault_id = "C04" if is_head else "D05"
    elif "norm" in inner or ".ln_" in inner:
        fault_id, severity = "D06", Severity.REFUSES
    else:
        fault_id = "D06" if inner.endswith("bias") else "D04"
    if inner in compared.expected.dropped:
        severity = Severity.RISK
    return PreflightFinding(
        id=fault_id,
        severity=severity,
        seen="absent",
        expected=f"present, shape {list(tensor.shape)}" + (", as tie_word_embeddings is false" if is_head else ""),
        where=f'tensor "{name}"',
        remedy=f"{RESTORE}, or set tie_word_embeddings if the model ties them" if is_head else RESTORE,
    )


def _shapes(compared: Compared) -> Iterator[PreflightFinding]:
    """Compare every dimension; a tensor that is wrong in the same way in every layer is one finding about the config."""
    wrong: dict[tuple[str, tuple[int, ...]], list[tuple[str, ExpectedTensor]]] = defaultdict(list)
    for inner, name, tensor, wanted in compared.pairs():
        if tensor.shape != wanted.shape and (not compared.is_quantised or comparable_dtype(tensor.dtype)):
            if inner in compared.expected.dropped:
                continue  # whatever its shape, the engine never reads it: one finding says so
            wrong[(numberless(inner), tensor.shape)].append((name, wanted))
    if not wrong:
        return
    counts = Counter(numberless(inner) for inner, _, _, _ in compared.pairs())
    for (inner, shape), found in wrong.items():
        everywhere = len(found) == counts[inner] > 1
        for name, wanted in found[:1] if everywhere else found:
            yield _shape_finding(name, shape, wanted, count=len(found) if everywhere else 1)


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
