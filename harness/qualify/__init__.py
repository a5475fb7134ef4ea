"""May this engine release replace that one? What finished runs hold, runs of its own for the rest, and one verdict."""

from harness.qualify.judged import qualify
from harness.qualify.request import Request

__all__ = ["Request", "qualify"]
