"""Tensors that a config does not promise: surplus experts and biases, second copies, names of another architecture."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator

from harness.guards.compared import SHOWN_NAMES, Compared, block_of, numberless
from harness.guards.dtypes import PAIR
from harness.guards.finding import PreflightFinding, Severity, shortened

EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")
DOT = re.compile(r"\.")
CONVERT = "convert the checkpoint to the names of its architecture"


def unknown_name_findings(compared: Compared) -> Iterator[PreflightFinding]:
    """Yield what the engine would refuse, drop or take for something else."""
    surplus_experts: set[int] = set()
    unknown: list[str] = []
    for name, inner, number in _unexpected(compared):
        expert = EXPERT.search(name)
        if name == "lm_head.weight" and compared.expected.tied:
            yield PreflightFinding(
                id="C04",
                severity=Severity.RISK,
                seen="present, though tie_word_embeddings is true",
                expected="absent, or equal to the embeddings",
                where=f'tensor "{name}"',
                remedy="vLLM before 0.30.0 drops it, later ones use it: set tie_word_embeddings as trained",
            )
        elif number is not None and compared.expected.kind(number).is_stored_twice(inner, compared.of_layer[number]):
            yield PreflightFinding(
                id="D11",
                severity=Severity.SILENT,
                seen="a second copy of parameters that are there under other names too",
                expected="each parameter once; which of the two is served depends on the order of reading",
                where=f'tensor "{shortened(name)}"',
                remedy=CONVERT,
            )
        elif expert is not None and 0 < compared.expected.experts <= int(expert[1]):
            surplus_experts.add(int(expert[1]))
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
    yield from _dropped(compared)
    if surplus_experts:
        yield PreflightFinding(
            id="C02",
            severity=Severity.SILENT,
            seen=f"tensors of expert {max(surplus_experts)}, which the engine drops",
            expected=f"experts 0 to {compared.expected.experts - 1}, as config.json says",
            where='"config.json"',
            remedy=PAIR,
        )
    yield from _unknown(compared, unknown)


def _unexpected(compared: Compared) -> Iterator[tuple[str, str, int | None]]:
    """Yield (whole name, name within its layer, its layer) of tensors that are not promised."""
    for name in compared.of_model:
        is_new = name not in compared.expected.of_model and block_of(name) not in compared.surplus_blocks
        if is_new and not _is_ignored(name, compared):
            yield name, name, None
    for number, present in compared.of_layer.items():
        known = compared.promised.get(number)
        if known is None:  # of a layer too many, one finding says it: only what no layer of the model has is named here
            known = compared.expected.of_any_layer(present)
        for inner, tensor in present.items():
            if inner not in known and not _is_ignored(tensor.name, compared):
                yield tensor.name, inner, number


def _is_ignored(name: str, compared: Compared) -> bool:
    """Say whether engines skip a tensor; of a quantised checkpoint, only plain weights are known well enough."""
    passed_over = any(pattern.search(name) for pattern in compared.expected.passed_over)
    return passed_over or (compared.is_quantised and not name.endswith(".weight"))


def _dropped(compared: Compared) -> Iterator[PreflightFinding]:
    """Yield the first bias that transformers uses and the engine's model does not have."""
    if not compared.expected.dropped:
        return
    for inner, name, _, _ in compared.pairs():
        if inner in compared.expected.dropped:
            yield PreflightFinding(
                id="D10",
                severity=Severity.RISK,
                seen="a bias that the engine's model of this architecture does not have, in every layer",
                expected="answers without it, unlike those of transformers",
                where=f'tensor "{name}"',
                remedy="compare the engine's answers with those of transformers before serving it",
            )
            return


def _unknown(compared: Compared, unknown: list[str]) -> Iterator[PreflightFinding]:
    known = _known_names(compared) if unknown else []
    modules = {numberless(name).rpartition(".")[0] for name in known}
    for name in unknown[:SHOWN_NAMES]:
        nearest = difflib.get_close_matches(name[:200], known, n=1)
        is_dropped = compared.expected.has_experts and ".experts." in name and not _is_below(name, modules)
        yield PreflightFinding(
            id="D09",
            severity=Severity.SILENT if is_dropped else Severity.REFUSES,
            seen="a name that the architecture does not have"
            + (", which the engine drops without a word" if is_dropped else ""),
            expected=f'for example "{nearest[0]}"' if nearest else "a name of the architecture",
            where=f'tensor "{shortened(name)}"',
            remedy=CONVERT,
        )
    if len(unknown) > SHOWN_NAMES:
        yield PreflightFinding(
            id="D09",
            severity=Severity.REFUSES,
            seen=f"{len(unknown) - SHOWN_NAMES} more names that the architecture does not have",
            expected="names of the architecture",
            where="weight files",
            remedy=CONVERT,
        )


def _is_below(name: str, modules: Collection[str]) -> bool:
    """Say whether a name begins with that of a module that is there: the engine looks for a parameter of it then."""
    return any(numberless(name)[: match.start()] in modules for match in DOT.finditer(numberless(name)))


def _known_names(compared: Compared) -> list[str]:
    expected = compared.expected
    shown = [number for number in sorted(compared.of_layer.keys() | {0, 1}) if number < expected.layers][:4]
    inner = {number: [*expected.kind(number).tensors][:400] for number in shown}
    return [*expected.of_model, *(f"model.layers.{number}.{name}" for number in shown for name in inner[number])]
