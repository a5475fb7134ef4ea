"""Feed pre-flight whatever coverage-guided mutation makes of a sound checkpoint; a traceback ends the run.

Run: python fuzz_preflight.py CHECKPOINT [libFuzzer options, such as -max_total_time=300]
One byte of the input chooses the file that the rest becomes. Needs the package atheris, which not every Python has.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["harness"]):
    from harness.checkpoint.copy import private_copy
    from harness.guards.preflight import check

FILES = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "generation_config.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)


def main() -> None:
    """Fuzz until libFuzzer is told to end."""
    sound, arguments = Path(sys.argv[1]), [sys.argv[0], *sys.argv[2:]]
    with tempfile.TemporaryDirectory() as scratch:
        path = private_copy(sound, Path(scratch) / "checkpoint")
        seeds = Path(scratch) / "seeds"
        seeds.mkdir()
        original = {}
        for number, name in enumerate(FILES):
            original[name] = (path / name).read_bytes() if (path / name).exists() else None
            # the header and a little more: libFuzzer's inputs are small
            (seeds / name).write_bytes(bytes([number]) + (original[name] or b'{"weight_map":{}}')[:39_000])

        def feed(data: bytes) -> None:
            name = FILES[data[0] % len(FILES)] if data else FILES[0]
            (path / name).write_bytes(data[1:])
            try:
                for finding in check(path, arguments=["-tp", "2"], against=sound, read_tensors=True):
                    finding.as_text()
            finally:
                if original[name] is None:
                    (path / name).unlink()
                else:
                    (path / name).write_bytes(original[name] or b"")

        atheris.Setup([*arguments, str(seeds)], feed)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
