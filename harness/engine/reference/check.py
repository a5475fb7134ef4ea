"""Our own forward pass as a second opinion on what a checkpoint answers."""

from __future__ import annotations

from pathlib import Path

from harness.checkpoint.manifest import read_checkpoint
from harness.engine.reference.loading import load
from harness.engine.reference.model import Llama, log_softmax
from harness.engine.reference.tensor_source import CheckpointFiles
from harness.errors import CheckpointDefect
from harness.guards.canary import LogprobRows, TokenRows

ARCHITECTURES = frozenset({"LlamaForCausalLM"})
WEIGHTS_MAX_BYTES = 1 << 30  # beyond it a float32 copy and a NumPy forward pass cost more than they tell


def is_supported(checkpoint: Path) -> bool:
    """Say whether this checkpoint is of a family and size that our forward pass handles."""
    try:
        found = read_checkpoint(checkpoint)
    except CheckpointDefect:
        return False
    size_bytes = sum(tensor.end_byte - tensor.begin_byte for tensor in found.tensors)
    architectures = found.config.get("architectures") or []
    return bool(ARCHITECTURES.intersection(architectures)) and size_bytes <= WEIGHTS_MAX_BYTES


def forward_logprobs(checkpoint: Path, prompts: TokenRows, *, rounded: bool = False) -> LogprobRows:
    """Return the logprob of every prompt token after the first, in float32, from the weights as stored.

    With `rounded` every result is rounded to bfloat16, as an engine does that serves in it.

    Raises: CheckpointDefect when the checkpoint does not match its config.
    """
    longest = max(len(prompt) for prompt in prompts)
    loaded = load(checkpoint, dtype="float32", max_model_len=longest, source=CheckpointFiles())
    model = Llama(loaded.shape, loaded.tensors, rounded=rounded)
    rows = []
    for prompt in prompts:
        logprobs = log_softmax(model.forward(prompt, model.new_cache(len(prompt))))
        rows.append(tuple(float(logprobs[position, token]) for position, token in enumerate(prompt[1:])))
    return tuple(rows)
