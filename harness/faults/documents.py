"""The pages about faults, made from the tables in the code: `python -m harness.faults.documents docs`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.faults import FAULTS
from harness.faults.catalogue import CATALOGUE
from harness.faults.entry import Entry
from harness.faults.rows import ROWS

ID = re.compile(r"\b[DCLMKUPN]\d\d\b")
IDS_PAGE = "fault-ids.md"
FAULTS_PAGE = "faults.md"
MADE = "<!-- Made by `python -m harness.faults.documents docs`: change the tables in harness/faults, not this page. -->"

IDS_HEAD = f"""# Fault list

{MADE}

The ids that pre-flight, fault proofs and log lines carry. "Engine" is vLLM 0.32.0 by itself: **loud** refuses to start,
**silent** starts and serves. *Measured* cells were seen on CPU; the others were read in its source. Every fault has its
parameters, reports and a way to make it by hand in [the catalogue]({FAULTS_PAGE}). Where nothing injects a row, *its cell says
why*.

| id | what is wrong | engine | injected by (`faults.`) | pre-flight |
|---|---|---|---|---|
"""
IDS_TAIL = """
Log lines carry these ids too: `harness/observe/signatures.py` has them with pattern and remedy.
"""
FAULTS_HEAD = f"""# Faults

{MADE}

Every fault proves itself: it reads back from disk, or from the launch line, what it did, and a fault that cannot makes a
verdict unknown. A damage works on a copy: `harness damage CHECKPOINT --fault NAME --set KEY=VALUE --out DIR` writes one,
`harness damage --list` prints this list; of a LoRA adapter with `harness damage ADAPTER --fault NAME --base CHECKPOINT --out DIR`. It never writes to a file of yours: a change is a new file that takes over a name
in the copy. To undo a damage, publish the undamaged checkpoint; scenarios prove by its digest that it is served again.

Reports are public threads. That somebody saw it does not mean that today's engines still do it.
"""


def rows_of(name: str) -> tuple[str, ...]:
    """Return the ids that a fault may carry, as its docstring gives them."""
    return tuple(dict.fromkeys(ID.findall(FAULTS[name].__doc__ or "")))


def is_damage(name: str) -> bool:
    """Say whether a fault changes a checkpoint at rest."""
    return _makes(name, "damage")


def is_of_adapter(name: str) -> bool:
    """Say whether a fault changes a LoRA adapter at rest."""
    return _makes(name, "distort")


def _makes(name: str, method: str) -> bool:
    made = inspect.signature(FAULTS[name]).return_annotation
    module = inspect.getmodule(FAULTS[name])
    kind = getattr(module, made, None) if isinstance(made, str) else made
    return isinstance(kind, type) and hasattr(kind, method)


def parameters_of(name: str) -> str:
    """Return the parameters of a fault as `harness damage` takes them: `dim=INT`, with defaults where there are some."""
    return ", ".join(_parameter(each) for each in inspect.signature(FAULTS[name]).parameters.values())


def summary_of(name: str) -> str:
    """Return the first line of a fault's docstring."""
    return (FAULTS[name].__doc__ or "").strip().split("\n")[0]


def gaps() -> dict[str, str]:
    """Return why nothing injects a row, for every row that no fault carries; empty where not even that is said."""
    carried = {row for name in FAULTS for row in rows_of(name)}
    return {row: text.gap for row, text in ROWS.items() if row not in carried}


def ids_page() -> str:
    """Return docs/fault-ids.md."""
    injected: dict[str, list[str]] = {row: [] for row in ROWS}
    for name in sorted(FAULTS):
        for row in rows_of(name):
            injected[row].append(f"`{name}`")
    why = gaps()
    lines = (
        f"| {row} | {text.what} | {text.engine} | {', '.join(injected[row]) or _reason(why[row])} | {text.preflight} |\n"
        for row, text in ROWS.items()
    )
    return IDS_HEAD + "".join(lines) + IDS_TAIL


def _reason(why: str) -> str:
    return f"*{why}*" if why else "**nothing**"


def faults_page() -> str:
    """Return docs/faults.md."""
    return FAULTS_HEAD + "".join(_section(title, names) for title, names in _families())


def _families() -> Iterator[tuple[str, list[str]]]:
    damages = [name for name in sorted(FAULTS) if is_damage(name)]
    of_adapters = [name for name in sorted(FAULTS) if is_of_adapter(name)]
    yield "Damages: the checkpoint at rest", damages
    yield "Damages of a LoRA adapter", of_adapters
    yield "Others: launch, publish, caches", [name for name in sorted(FAULTS) if name not in {*damages, *of_adapters}]


def _section(title: str, names: Sequence[str]) -> str:
    return f"\n## {title}\n" + "".join(_entry(name, CATALOGUE[name]) for name in names)


def _entry(name: str, entry: Entry) -> str:
    needs = "; ".join("the old checkpoint (`--old`)" if need == "old" else need for need in entry.needs)
    lines = [
        f"\n### `{name}`\n\n{entry.what} Rows: {', '.join(rows_of(name))}.\n",
        f"- parameters: `{parameters_of(name)}`" if parameters_of(name) else "- parameters: none",
        f"- writes: {entry.cost}",
        f"- needs: {needs}" if needs else "",
        f"- by hand: {entry.by_hand}",
        f"- reports: {', '.join(entry.reports)}" if entry.reports else "",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _parameter(each: inspect.Parameter) -> str:
    kind = str(each.annotation).replace("Mapping[str, Any]", "JSON").replace(" | None", "")
    stars = "*" if each.kind is inspect.Parameter.VAR_POSITIONAL else ""
    if each.default is inspect.Parameter.empty:
        return f"{stars}{each.name}={kind.upper().replace(' | ', '|')}"
    return each.name if each.default is None else f"{each.name}={_shown(each.default)}"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 30 and "\n" not in text else "TEXT"


def main(arguments: Sequence[str]) -> None:
    """Write both pages into a directory."""
    pages: dict[str, Callable[[], str]] = {IDS_PAGE: ids_page, FAULTS_PAGE: faults_page}
    for name, make in pages.items():
        (Path(arguments[0]) / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
