"""What the driver says about the memory of this machine's GPUs, for proofs."""

from __future__ import annotations

from harness.observe.gpu import NoGpu, sample_gpus


def used_bytes(device: int | None = None) -> int | None:
    """Return how much device memory is used, of one GPU or of all; None where no GPU can be asked or one does not tell."""
    figures = _figures(device)
    return None if figures is None else sum(used for used, _ in figures)


def free_bytes(device: int) -> int | None:
    """Return how much memory of a GPU is free; None where it cannot be asked."""
    figures = _figures(device)
    return None if not figures else sum(total - used for used, total in figures)


def _figures(device: int | None) -> list[tuple[int, int]] | None:
    """Return used and total memory of a GPU, or of each."""
    samples = sample_gpus()
    if isinstance(samples, NoGpu):
        return None
    chosen = [each for each in samples if device is None or each.index == device]
    figures = [
        (each.memory_used_bytes, each.memory_total_bytes)
        for each in chosen
        if each.memory_used_bytes is not None and each.memory_total_bytes is not None
    ]
    return figures if figures and len(figures) == len(chosen) else None
