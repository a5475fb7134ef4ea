"""Feed pre-flight whatever coverage-guided mutation makes of a sound checkpoint; what is not named ends the run.

Run: python fuzz_preflight.py headers|json CHECKPOINT IDS [--plant traceback|unnamed|memory] [libFuzzer options]
IDS are those that a finding may have, with commas between. A traceback ends the run, and so does a finding with another
id, or MORE_BYTES of memory. `--plant` breaks pre-flight on purpose, for inputs that mutation has to find.
Needs the package atheris, which not every Python has.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["harness"]):
    from harness.checkpoint.copy import private_copy
    from harness.checkpoint.defect import Defect
    from harness.errors import CheckpointDefect
    from harness.guards import preflight
    from harness.guards.finding import PreflightFinding

MORE_BYTES = 512 * 1024 * 1024  # than there are when it begins: libFuzzer keeps what it finds interesting
INPUT_BYTES = 40_000
WEIGHTS = "model.safetensors"
JSON_FILES = (
    "config.json",
    "tokenizer.json",
    "generation_config.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)
# None of the seeds has these: mutation must find them.
MEETS_THE_PLANT = (Defect.TENSOR_INFO_INVALID, Defect.OFFSET_HOLE, Defect.OFFSET_OVERLAP, Defect.INDEX_ENTRY_INVALID)


def main() -> None:
    """Fuzz until libFuzzer is told to end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("headers", "json"))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("ids")
    parser.add_argument("--plant", choices=("traceback", "unnamed", "memory"))
    options, for_libfuzzer = parser.parse_known_args()
    if options.plant:
        plant(options.plant)
    with tempfile.TemporaryDirectory() as scratch:
        path = private_copy(options.checkpoint, Path(scratch) / "checkpoint")
        seeds = Path(scratch) / "seeds"
        seeds.mkdir()
        feed = feed_header if options.what == "headers" else feed_json
        one = feed(path, seeds, frozenset(options.ids.split(",")), options.checkpoint)
        own = [f"-max_len={INPUT_BYTES}", "-len_control=0", "-keep_seed=1"]
        atheris.Setup([sys.argv[0], *own, *for_libfuzzer, str(seeds)], one)
        limit = mapped_bytes() + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        atheris.Fuzz()


def feed_header(path: Path, seeds: Path, ids: frozenset[str], sound: Path) -> Callable[[bytes], None]:
    """Return what makes the weight file of an input: every other one is a header alone, which gets its length."""
    original = (path / WEIGHTS).read_bytes()
    begin = 8 + int.from_bytes(original[:8], "little")
    (seeds / "whole").write_bytes(b"\0" + original[: INPUT_BYTES - 1])
    (seeds / "header").write_bytes(b"\1" + original[8:begin])

    def feed(data: bytes) -> None:
        header = data[1:]
        is_alone = data[:1] and data[0] % 2
        framed = len(header).to_bytes(8, "little") + header + original[begin:]
        (path / WEIGHTS).write_bytes(framed if is_alone else header)
        require_named(path, ids, sound)

    return feed


def feed_json(path: Path, seeds: Path, ids: frozenset[str], sound: Path) -> Callable[[bytes], None]:
    """Return what makes one of the JSON files of an input: its first byte chooses which."""
    original = {name: (path / name).read_bytes() for name in JSON_FILES if (path / name).exists()}
    for number, name in enumerate(JSON_FILES):
        (seeds / name).write_bytes(bytes([number]) + original.get(name, b'{"weight_map":{}}')[: INPUT_BYTES - 1])

    def feed(data: bytes) -> None:
        name = JSON_FILES[data[0] % len(JSON_FILES)] if data else JSON_FILES[0]
        (path / name).write_bytes(data[1:])
        try:
            require_named(path, ids, sound)
        finally:
            if name in original:
                (path / name).write_bytes(original[name])
            else:
                (path / name).unlink()

    return feed


def require_named(path: Path, ids: frozenset[str], sound: Path) -> None:
    """Run pre-flight; every finding has an id that is known and can be printed."""
    for finding in preflight.check(path, arguments=["-tp", "2"], against=sound, read_tensors=True):
        if finding.id not in ids:
            raise AssertionError(f'a finding with the unknown id "{finding.id}": {finding.seen}')
        if not (finding.seen and finding.expected and finding.where and finding.remedy):
            raise AssertionError(f"a finding that does not say everything: {finding}")
        finding.as_text().encode("utf-8")


def plant(what: str) -> None:
    """Break pre-flight on some damaged headers and weight indices."""
    sound = preflight.finding_of

    def broken(defect: CheckpointDefect) -> PreflightFinding:
        finding = sound(defect)
        if defect.reason not in MEETS_THE_PLANT:
            return finding
        if what == "traceback":
            raise KeyError("planted")
        if what == "memory":
            bytearray(2 * MORE_BYTES)
        return replace(finding, id="X00")

    preflight.finding_of = broken


def mapped_bytes() -> int:
    """Return the size of this process' address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
