"""Measure how far rounding to bfloat16 alone moves our own answers on checkpoints of the Llama family.

    python benchmarks/golden_rounding.py CHECKPOINT... [--seed 1]

Twice that is what an engine may differ from our forward pass before its golden is refused, where it is more than 0.15.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.checkpoint.manifest import read_checkpoint
from harness.engine.reference.check import forward_logprobs
from harness.guards.canary import largest_difference
from harness.observe.canary_prompts import canary_prompts
from harness.observe.noise import mean_difference


def main() -> None:
    """Print a line for each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="+")
    parser.add_argument("--seed", type=int, default=1, help="of the canary prompts")
    options = parser.parse_args()
    for checkpoint in options.checkpoint:
        config = read_checkpoint(checkpoint).config
        prompts = canary_prompts(int(config["vocab_size"]), seed=options.seed)
        plain, rounded = (forward_logprobs(checkpoint, prompts, rounded=rounds) for rounds in (False, True))
        print(
            f"{checkpoint.name}: {config['num_hidden_layers']} layers; rounding moves logprobs by "
            f"{mean_difference(plain, rounded):.3f} on average, {largest_difference(plain, rounded):.3f} at most",
            flush=True,
        )


if __name__ == "__main__":
    main()
