"""Comparisons: two engines, one plan, blocks of load in ABBA order, until the verdict is there or pairs run out."""

from harness.compare.options import Options
from harness.compare.runner import compare

__all__ = ["Options", "compare"]
