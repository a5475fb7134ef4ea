"""Compare the tensors of a checkpoint with what its config promises: names, layers, shapes, tie."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from harness.checkpoint.header import Tensor
from harness.checkpoint.survey import Checkpoint
from harness.guards.dtypes import PAIR, dtype_findings, quantisation_findings
from harness.guards.expected import (
    FAMILIES,
    FUSED,
    IGNORED,
    LAYER,
    ConfigUnusable,
    Expected,
    architecture,
    expected_tensors,
    is_cut,
)
from harness.guards.finding import PreflightFinding, Severity, shortened

SHOWN_NAMES = 5
RESTORE = "restore the tensor from the release it belongs to"


def layout_findings(checkpoint: Checkpoint, *, is_whole: bool = True) -> Iterator[PreflightFinding]:
    """Yield what is wrong between config and headers.

    With `is_whole` false, some shards are absent or cannot be read: then absent tensors are not listed one by one.
    """
    config = checkpoint.config
    if not config or not checkpoint.tensors:
        return
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    yield from quantisation_findings(config, tensors)
    if isinstance(config.get("quantization_config"), dict):
        yield _not_checked("a quantised checkpoint")
        return
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
        yield _not_checked(f'architecture "{shortened(architecture(config))}"')
        return
    yield from _layers(expected, tensors, is_whole=is_whole)
    if is_whole:
        yield from _shortened(list(_absent(expected, tensors)))
    yield from _unexpected(expected, tensors)
    yield from _shapes(expected, tensors)


def _not_checked(what: str) -> PreflightFinding:
    return PreflightFinding(
        id="C06",
        severity=Severity.RISK,
        seen=f"{what}: names and shapes were not checked",
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


def _layers(expected: Expected, tensors: Mapping[str, Tensor], *, is_whole: bool) -> Iterator[PreflightFinding]:
    numbers = _layer_numbers(tensors)
    absent = expected.layers - sum(1 for number in numbers if number < expected.layers)
    surplus = [number for number in numbers if number >= expected.layers]
    if absent and is_whole:
        yield PreflightFinding(
            id="C01",
            severity=Severity.REFUSES,
            seen=f"no tensors of {absent} layers",
            expected=f"{expected.layers} layers, as num_hidden_layers says",
            where='"config.json"',
            remedy=PAIR,
        )
    if surplus:
        yield PreflightFinding(
            id="C01",
            severity=Severity.REFUSES,
            seen=f"tensors of layer {max(surplus)}",
            expected=f"layers 0 to {expected.layers - 1}, as num_hidden_layers says",
            where='"config.json"',
            remedy=PAIR,
        )


def _absent(expected: Expected, tensors: Mapping[str, Tensor]) -> Iterator[PreflightFinding]:
    for name in expected.of_model:
        if name not in tensors:
            is_head = name == "lm_head.weight"
            yield PreflightFinding(
                id="C04" if is_head else "D06" if "norm" in name else "D04",
                severity=Severity.REFUSES if "norm" in name else Severity.SILENT,
                seen="absent",
                expected="present" + (", because tie_word_embeddings is false" if is_head else ""),
                where=f'tensor "{name}"',
                remedy=f"{RESTORE}, or set tie_word_embeddings if the model ties them" if is_head else RESTORE,
            )
    for number in sorted(_layer_numbers(tensors)):
        if number >= expected.layers:
            continue
        for inner in expected.of_layer:
            name = f"model.layers.{number}.{inner}"
            if name not in tensors:
                yield _absent_of_layer(name, inner, number, tensors)


def _absent_of_layer(name: str, inner: str, number: int, tensors: Mapping[str, Tensor]) -> PreflightFinding:
    block, _, rest = inner.partition(".")
    part, _, kind = rest.partition(".")
    siblings = [f"model.layers.{number}.{block}.{other}.{kind}" for other in FUSED.get(part, ()) if other != part]
    if any(sibling in tensors for sibling in siblings):
        fault_id, severity = "D05", Severity.SILENT
    elif "norm" in inner:
        fault_id, severity = "D06", Severity.REFUSES
    else:
        fault_id, severity = "D06" if kind == "bias" else "D04", Severity.SILENT
    return PreflightFinding(
        id=fault_id, severity=severity, seen="absent", expected="present", where=f'tensor "{name}"', remedy=RESTORE
    )


def _unexpected(expected: Expected, tensors: Mapping[str, Tensor]) -> Iterator[PreflightFinding]:
    unknown = []
    for name in tensors:
        match = LAYER.match(name)
        if expected.shape(name) is not None or IGNORED.search(name):
            continue
        if match is not None and int(match[1]) >= expected.layers and match[2] in expected.of_layer:
            continue  # one finding about the number of layers says it
        if name == "lm_head.weight" and expected.tied:
            yield PreflightFinding(
                id="C04",
                severity=Severity.RISK,
                seen="present, though tie_word_embeddings is true",
                expected="absent, or equal to the embeddings",
                where=f'tensor "{name}"',
                remedy="vLLM before 0.30.0 drops it, later ones use it: set tie_word_embeddings as trained",
            )
        elif name.endswith(".bias"):
            yield PreflightFinding(
                id="D10",
                severity=Severity.SILENT,
                seen="a bias, which the engine drops",
                expected="none, as config.json says",
                where=f'tensor "{shortened(name)}"',
                remedy=PAIR,
            )
        else:
            unknown.append(name)
    known = _known_names(expected, tensors) if unknown else []
    for name in unknown[:SHOWN_NAMES]:
        nearest = difflib.get_close_matches(name[:200], known, n=1)
        yield PreflightFinding(
            id="D09",
            severity=Severity.REFUSES,
            seen="a name that the architecture does not have",
            expected=f'for example "{nearest[0]}"' if nearest else "a name of the architecture",
            where=f'tensor "{shortened(name)}"',
            remedy="convert the checkpoint to the names of its architecture",
        )
    if len(unknown) > SHOWN_NAMES:
        yield PreflightFinding(
            id="D09",
            severity=Severity.REFUSES,
            seen=f"{len(unknown) - SHOWN_NAMES} more names that the architecture does not have",
            expected="names of the architecture",
            where="weight files",
            remedy="convert the checkpoint to the names of its architecture",
        )


def _known_names(expected: Expected, tensors: Mapping[str, Tensor]) -> list[str]:
    shown = [number for number in sorted(_layer_numbers(tensors) | {0, 1}) if number < expected.layers][:4]
    return [*expected.of_model, *(f"model.layers.{number}.{inner}" for number in shown for inner in expected.of_layer)]


def _shapes(expected: Expected, tensors: Mapping[str, Tensor]) -> Iterator[PreflightFinding]:
    """Compare every dimension; a tensor that is wrong in the same way in every layer is one finding about the config."""
    wrong: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        wanted = expected.shape(name)
        if wanted is not None and tensor.shape != wanted:
            match = LAYER.match(name)
            wrong[(match[2] if match else name, tensor.shape)].append(name)
    for (inner, shape), names in wrong.items():
        wanted = expected.shape(names[0]) or ()
        cut = is_cut(names[0], shape, wanted)
        everywhere = len(names) == expected.layers > 1
        rows = inner in ("model.embed_tokens.weight", "lm_head.weight") and shape[1:] == wanted[1:]
        single = "D08" if cut else "D07"
        shown = names[:1] if everywhere else names
        for name in shown:
            yield PreflightFinding(
                id="C03" if rows else "C02" if everywhere else single,
                severity=Severity.SILENT if cut else Severity.REFUSES,
                seen=f"shape {list(shape)}{', which the engine cuts without a word' if cut else ''}"
                + (f", in all {len(names)} layers" if everywhere else ""),
                expected=f"{list(wanted)}",
                where=f'tensor "{name}"',
                remedy=PAIR,
            )


def _layer_numbers(tensors: Mapping[str, Tensor]) -> set[int]:
    return {int(match[1]) for name in tensors if (match := LAYER.match(name)) is not None}
