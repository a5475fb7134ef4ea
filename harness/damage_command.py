"""The command line of `harness damage`."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from harness.damage import SHARES, Damaged, damage_copy
from harness.errors import EXIT_HELD, EXIT_UNKNOWN, CheckpointDefect, HarnessError, UsageError
from harness.faults import FAULTS, Damage
from harness.faults.catalogue import CATALOGUE
from harness.faults.documents import is_damage, is_of_adapter, parameters_of, rows_of, summary_of
from harness.faults.fault import AdapterFault
from harness.guards.command import CommandParser, print_json
from harness.guards.finding import printable

EXAMPLE = """examples:
  harness damage MODEL --fault widen_tensor --set tensor=*layers.1.mlp.down_proj.weight --set dim=1 --set by=32 --out DIR
  harness damage MODEL --fault mismatched_config --set changes.rope_theta=500 --out DIR
  harness damage MODEL --fault stale_index --old OLD --out DIR
  harness damage ADAPTER --fault adapter_width --set by=32 --base MODEL --out DIR

Values are JSON where a parameter is not text. A tensor may be given by a pattern that one name matches.
Exit codes: 0 written and proved, 2 it could not be proved (then nothing is written), 3 a wrong call."""


def damage_main(arguments: Sequence[str]) -> int:
    """Run `harness damage`; return 0 when the damaged copy is written and proved."""
    import argparse

    parser = CommandParser(
        prog="harness damage",
        description="Write a damaged copy of a checkpoint, or of a LoRA adapter, and prove what is wrong with it. The original never changes.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--fault", metavar="NAME", help="what is wrong with it; --list tells the names")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter of the fault", dest="settings"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new or empty directory for the damaged copy")
    parser.add_argument(
        "--old", type=Path, metavar="DIR", help="the checkpoint before this one, where a fault needs it"
    )
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="the checkpoint that an adapter is for, where the fault is of adapters"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides what the fault leaves open (default: 0)")
    parser.add_argument(
        "--share",
        choices=SHARES,
        default="auto",
        help="how undamaged files come into the copy: auto (reflink, else hard link, else copied), reflink (else copied), "
        "none (all copied)",
    )
    parser.add_argument("--json", action="store_true", help="print the proof as JSON")
    parser.add_argument("--list", action="store_true", help="list the faults with their parameters")
    try:
        options = parser.parse_args(arguments)
        if options.list:
            return _list(as_json=options.json)
        missing = [f"--{name}" for name in ("fault", "out") if getattr(options, name) is None]
        if options.checkpoint is None or missing:
            parser.error(f"a CHECKPOINT, --fault and --out are needed; missing: {', '.join(missing) or 'CHECKPOINT'}")
        fault = fault_from(options.fault, options.settings)
        if "old" in CATALOGUE[fault.name].needs and options.old is None:
            raise UsageError(f'"{fault.name}" leaves parts of the old checkpoint behind: give that with --old')
        if (options.base is None) is isinstance(fault, AdapterFault):
            kind = (
                "is of an adapter: give its checkpoint with"
                if options.base is None
                else "is of no adapter: it takes no"
            )
            raise UsageError(f'"{fault.name}" {kind} --base')
        damaged = damage_copy(
            options.checkpoint,
            options.out,
            fault,
            old=options.old,
            base=options.base,
            seed=options.seed,
            share=options.share,
        )
    except CheckpointDefect as defect:  # of a file that was whole when its header was read
        print(printable(f"harness damage: nothing was written: {defect}"), file=sys.stderr)
        return EXIT_UNKNOWN
    except (HarnessError, OSError) as error:
        print(printable(f"harness damage: {error}"), file=sys.stderr)
        return error.exit_code if isinstance(error, HarnessError) else UsageError.exit_code
    if options.json:
        print_json({**damaged.as_json(), "parameters": dict(fault.parameters()), "seed": options.seed})
    else:
        print("\n".join(printable(line) for line in _as_text(damaged, options.checkpoint)))
    return EXIT_HELD


def fault_from(name: str, settings: Sequence[str]) -> Damage | AdapterFault:
    """Return the damage of this name, made with parameters given as KEY=VALUE.

    Raises: UsageError for an unknown name or parameter, one that is absent, or a value of another kind.
    """
    damages = _at_rest()
    if name not in damages:
        if name in FAULTS:
            raise UsageError(f'"{name}" changes neither checkpoint nor adapter at rest: it is injected in a scenario')
        near = ", ".join(get_close_matches(name, damages, n=3, cutoff=0.4)) or "see harness damage --list"
        raise UsageError(f'fault "{name}" is unknown; nearest: {near}')
    signature = inspect.signature(FAULTS[name])
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        top, dot, inner = key.partition(".")
        if not equals or top not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise UsageError(f'"{setting}" sets no parameter of "{name}"; expected KEY=VALUE, with KEY among: {known}')
        kind = str(signature.parameters[top].annotation)
        if dot:
            if "Mapping" not in kind:
                raise UsageError(f'"{top}" of "{name}" has no parts, so "{key}" sets nothing')
            given.setdefault(top, {})[inner] = _json_or_text(text)
        else:
            given[top] = _value(name, top, kind, text)
    absent = [
        each.name
        for each in signature.parameters.values()
        if each.default is inspect.Parameter.empty and each.name not in given
    ]
    if absent:
        raise UsageError(
            f'"{name}" needs {" and ".join(f"--set {each}=..." for each in absent)} ({parameters_of(name)})'
        )
    fault = FAULTS[name](**given)
    if not isinstance(fault, Damage | AdapterFault):
        raise UsageError(f'"{name}" changes neither checkpoint nor adapter at rest')
    return fault


def _at_rest() -> list[str]:
    return [name for name in sorted(FAULTS) if is_damage(name) or is_of_adapter(name)]


def _value(fault: str, key: str, kind: str, text: str) -> Any:
    """Return a value of the kind that a parameter's annotation names; text stays text, everything else is JSON."""
    allowed = [part.strip() for part in kind.split("|")]
    if "str" in allowed and "int" not in allowed:
        return text
    value = _json_or_text(text)
    wanted: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "str": str}
    for part in allowed:
        if part == "None" and value is None:
            return None
        if part.startswith("tuple") and isinstance(value, list) and all(isinstance(each, int) for each in value):
            return tuple(value)
        if part.startswith("Mapping") and isinstance(value, Mapping):
            return value
        is_kind = part in wanted and isinstance(value, wanted[part])
        if is_kind and (part == "bool") == isinstance(value, bool):
            return value
    raise UsageError(f'"{key}" of "{fault}" is {text!r}, expected {kind}')


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _list(*, as_json: bool) -> int:
    names = _at_rest()
    if as_json:
        print_json(
            [
                {
                    "fault": name,
                    "fault_ids": list(rows_of(name)),
                    "parameters": parameters_of(name),
                    "summary": summary_of(name),
                    "needs": list(CATALOGUE[name].needs),
                }
                for name in names
            ]
        )
        return EXIT_HELD
    for name in names:
        needs = " [--old]" if "old" in CATALOGUE[name].needs else " [--base]" if is_of_adapter(name) else ""
        print(f"{name:24}{CATALOGUE[name].what}{needs}")
        if parameters_of(name):
            print(f"{'':24}  --set {parameters_of(name)}")
    return EXIT_HELD


def _as_text(damaged: Damaged, checkpoint: Path) -> list[str]:
    injected = damaged.injected
    shared = len(damaged.linked) + len(damaged.reflinked)
    lines = [
        f'{injected.fault} ({injected.fault_id}) is in "{damaged.out}", proved: {injected.because}',
        f'{damaged.files} files, {shared} shared with "{checkpoint}", {damaged.written_bytes / 2**20:,.1f} MiB written',
    ]
    if damaged.linked:
        lines.append(
            f"{len(damaged.linked)} of them are hard links: whoever writes to them writes to the original, so the "
            "directory is read-only; mount it read-only too, or make it again with --share none"
        )
    return lines
