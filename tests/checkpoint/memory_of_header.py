"""Write a weight file whose header is made to cost memory, read it, and print what was found and the peak of memory.

Run: python memory_of_header.py KIND DIRECTORY SIZE_BYTES read|check
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ENTRY = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]'
KINDS = {
    # what comes first, what is repeated, what comes last; the data section is one byte
    "nested lists": ('{"x":' + ENTRY + ',"q":[', "[0],", "0]}}"),
    "empty objects": ('{"x":' + ENTRY + ',"q":[', "{},", "0]}}"),
    "small objects": ('{"x":' + ENTRY + ',"q":[', '{"a":0},', "0]}}"),
    "short strings": ('{"x":' + ENTRY + ',"q":[', '"ab",', "0]}}"),
    "floats": ('{"x":' + ENTRY + ',"q":[', "1.5,", "0]}}"),
    "long shape": ('{"x":{"dtype":"U8","data_offsets":[0,1],"shape":[', "1,", "1]}}"),
    "metadata": ('{"__metadata__":{', '"k":"v",', '"k":"v"},"x":' + ENTRY + "}}"),
    "escapes": ('{"', "\\n", '":' + ENTRY + "}}"),
    "one number": ('{"x":' + ENTRY + ',"q":0.0', "1", "}}"),
    "wide text": ('{"\N{GRINNING FACE}":' + ENTRY + ',"q":"', "a", '"}}'),
    "tensors": ("", "", ""),
}
ACCEPTED = KINDS.keys() - {"long shape"}


def write(kind: str, path: Path, size_bytes: int) -> None:
    """Write in pieces, since this process is the one that is measured."""
    with path.open("wb") as file:
        file.write(bytes(8))
        data_bytes = 1
        if kind == "tensors":
            data_bytes = size_bytes // 80
            file.write(b"{")
            for number in range(data_bytes):
                comma, offsets = "," if number else "", f"[{number},{number + 1}]"
                name = f"model.layers.{number}.mlp.up_proj.weight"
                file.write(f'{comma}"{name}":{{"dtype":"U8","shape":[1],"data_offsets":{offsets}}}'.encode())
            file.write(b"}")
        else:
            first, again, last = KINDS[kind]
            file.write(first.encode())
            block = again.encode() * (100_000 // len(again))
            for _ in range(-(-size_bytes // len(block))):
                file.write(block)
            file.write(last.encode())
        length = file.tell() - 8
        file.seek(0)
        file.write(length.to_bytes(8, "little"))
        file.truncate(8 + length + data_bytes)


def main() -> None:
    """Write, read and print."""
    kind, directory, size_bytes, what = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    path = directory / "model.safetensors"
    write(kind, path, size_bytes)
    found = []
    if what == "check":
        from harness.guards.preflight import check

        found = [finding.as_text() for finding in check(directory)]
    else:
        from harness.checkpoint.shard import read_shard
        from harness.errors import CheckpointDefect

        try:
            read_shard(path)
        except CheckpointDefect as defect:
            found = [defect.reason]
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    print(json.dumps({"found": found, "peak_bytes": int(peak.split()[1]) * 1024, "header_bytes": header_bytes}))


if __name__ == "__main__":
    main()
