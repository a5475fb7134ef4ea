"""Write a copy of a checkpoint with more layers: a slowdown that is really there, to see what the verdict says of it.

    python benchmarks/deeper_checkpoint.py SOURCE TARGET --factor 1.3

The new layers repeat the source's, in order. Prints by how much the arithmetic per token grew: the embeddings and the
head stay, so that it grows by less than the layers do.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

from harness.checkpoint.copy import RawTensor, load_shard
from harness.checkpoint.manifest import read_checkpoint
from harness.checkpoint.tiny import write_json, write_weights

LAYER = re.compile(r"^(.*layers\.)(\d+)(\..*)$")


def main() -> None:
    """Read the source, repeat layers, write the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="a directory that does not exist yet")
    parser.add_argument("--factor", type=float, default=1.3, help="of the number of layers")
    options = parser.parse_args()
    config = json.loads((options.source / "config.json").read_text(encoding="utf-8"))
    layers = int(config["num_hidden_layers"])
    wanted = round(layers * options.factor)
    if not 1 <= wanted <= 10 * layers:
        raise SystemExit(f"--factor {options.factor:g}: {layers} layers become {wanted}, expected 1 to {10 * layers}")
    tensors: dict[str, RawTensor] = {}
    for shard in dict.fromkeys(tensor.shard for tensor in read_checkpoint(options.source).tensors):
        tensors |= load_shard(options.source / shard)
    options.target.mkdir(parents=True)
    deeper = repeated(tensors, layers, wanted)
    write_weights(options.target, deeper, shards=1)
    for path in options.source.iterdir():
        if path.suffix in (".json", ".jinja", ".model", ".txt") and "index" not in path.name:
            shutil.copyfile(path, options.target / path.name)
    write_json(options.target / "config.json", config | {"num_hidden_layers": wanted})
    before, after = multiplications(tensors, config), multiplications(deeper, config)
    print(
        f"{layers} layers, now {wanted}; multiplications per token {before:,}, now {after:,} ({after / before - 1:+.1%})"
    )


def repeated(tensors: dict[str, RawTensor], layers: int, wanted: int) -> dict[str, RawTensor]:
    """Return the tensors with `wanted` layers: layer n is the source's layer n modulo `layers`."""
    result = {}
    for name, tensor in tensors.items():
        match = LAYER.match(name)
        if match is None:
            result[name] = tensor
            continue
        for number in range(int(match[2]), wanted, layers):
            result[f"{match[1]}{number}{match[3]}"] = tensor
    return result


def multiplications(tensors: dict[str, RawTensor], config: dict[str, object]) -> int:
    """Return how many multiplications with weights one token takes."""
    matrices = {name: t.shape[0] * t.shape[1] for name, t in tensors.items() if len(t.shape) == 2}
    embedding = sum(size for name, size in matrices.items() if "embed_tokens" in name)
    return sum(matrices.values()) - (0 if config.get("tie_word_embeddings") else embedding)


if __name__ == "__main__":
    main()
