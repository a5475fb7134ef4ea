"""Measure pre-flight: time and memory on a checkpoint of 70 billion parameters, and against loading SmolLM2.

    python benchmarks/preflight.py [--rounds N] [--transformers-python PYTHON]

The large one is a Llama layout of 30 shards, 723 tensors and 140 GB in sparse files: headers are right, the rest is holes.
SmolLM2 needs the extra "models"; the interpreter needs transformers and torch. Ratios are within this run; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from harness.checkpoint.models import default_cache, smollm2
from harness.checkpoint.tiny import write_json
from harness.checkpoint.tokenizer import write_byte_tokenizer
from harness.errors import EnvironmentMissing

COMMAND = (sys.executable, "-c", "import sys; from harness.cli import main; sys.exit(main())", "preflight")
SHARDS, LAYERS, HIDDEN, INTERMEDIATE, KEYS, VOCABULARY = 30, 80, 8192, 28672, 1024, 128256
LOADS = """
import sys, time
begun = time.perf_counter()
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1])
print("LOADED", time.perf_counter() - begun)
"""
CHECKS = """
import statistics, sys, time
from pathlib import Path
from harness.guards.preflight import check
check(Path(sys.argv[1]))
times = []
for _ in range(21):
    begun = time.perf_counter()
    check(Path(sys.argv[1]))
    times.append(time.perf_counter() - begun)
print("SECOND", times[0])
print("CHECKED", statistics.median(times))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transformers-python", type=Path, metavar="PYTHON")
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}; medians of {options.rounds}")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        tensors = write_70b(path)
        apparent_gb = sum(file.stat().st_size for file in path.iterdir()) / 1e9
        measured = [whole_command(path) for _ in range(options.rounds)]
    seconds, peak_bytes = statistics.median(one[0] for one in measured), max(one[1] for one in measured)
    print(f"70B layout: {SHARDS} shards, {tensors} tensors, {apparent_gb:.0f} GB apparent")
    print(f"  whole command        {seconds:6.3f} s   (target 0.25)   peak {peak_bytes / 1e6:.0f} MB (target 80)")
    if options.transformers_python is None:
        print("SmolLM2: no --transformers-python, so nothing to compare with")
        return
    try:
        small = smollm2().build(default_cache())
    except EnvironmentMissing as error:
        print(f"SmolLM2: {error}")
        return
    against_loading(small, options.transformers_python, options.rounds)


def against_loading(path: Path, python: Path, rounds: int) -> None:
    """Take turns: load with transformers, run the whole command, run the check alone; print the ratios of medians."""
    whole: list[float] = []
    loads: list[float] = []
    commands: list[float] = []
    seconds: list[float] = []
    checks: list[float] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        loads.append(said([python, "-c", LOADS, path], "LOADED"))
        whole.append(time.perf_counter() - begun)
        commands.append(whole_command(path)[0])
        checked = [sys.executable, "-c", CHECKS, path]
        seconds.append(said(checked, "SECOND"))
        checks.append(said(checked, "CHECKED"))
    script, load, command, second, alone = (statistics.median(s) for s in (whole, loads, commands, seconds, checks))
    print(f'SmolLM2 from "{path.name}"')
    print(f"  script that loads it {script:6.3f} s   of which import and from_pretrained {load:.3f} s")
    print(f"  whole command        {command:6.3f} s   {script / command:6.1f} times faster (target 15)")
    print(f"  the check itself     {alone:6.4f} s   {script / alone:6.0f} times faster (target 500)")
    print(
        f"  the second one of a process, which asks the system for memory: {second:.4f} s, {script / second:.0f} times"
    )


def whole_command(path: Path) -> tuple[float, int]:
    """Return seconds and peak memory in bytes of `harness preflight`."""
    begun = time.perf_counter()
    child = subprocess.Popen([*COMMAND, path], stdout=subprocess.DEVNULL)  # one process, waited for right here
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - begun
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 1):
        raise SystemExit(f"harness preflight ended with {child.returncode}")
    return seconds, usage.ru_maxrss * 1024


def said(command: Sequence[str | Path], word: str) -> float:
    """Return the number that a program prints behind a word."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return next(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith(f"{word} "))


def write_70b(path: Path) -> int:
    """Write the checkpoint and return how many tensors it has."""
    shapes = shapes_70b()
    names = list(shapes)
    weight_map = {}
    for number in range(SHARDS):
        shard = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        own = names[len(names) * number // SHARDS : len(names) * (number + 1) // SHARDS]
        write_sparse(path / shard, {name: shapes[name] for name in own})
        weight_map |= dict.fromkeys(own, shard)
    total = sum(2 * rows * columns for rows, columns in shapes.values())
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    write_json(
        path / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": VOCABULARY,
        },
    )
    write_byte_tokenizer(path, vocabulary=2000)
    return len(shapes)


def shapes_70b() -> dict[str, tuple[int, int]]:
    """Return name and shape of every tensor; a vector has one column."""
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEYS, HIDDEN),
        "self_attn.v_proj": (KEYS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN, 1),
        "post_attention_layernorm": (HIDDEN, 1),
    }
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for number in range(LAYERS):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (HIDDEN, 1), "lm_head.weight": (VOCABULARY, HIDDEN)}


def write_sparse(path: Path, shapes: dict[str, tuple[int, int]]) -> None:
    """Write a right header and a hole of the right length."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + 2 * rows * columns
        shape = [rows, columns] if columns > 1 else [rows]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


if __name__ == "__main__":
    main()
