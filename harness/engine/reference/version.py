"""The version of the reference engine's behaviour, part of every golden made with it, and its own variables."""

from __future__ import annotations

REFERENCE_VERSION = "1.0"
PARENT_VARIABLE = "ROLLOUT_REFERENCE_PARENT"  # the process to end with; unset: none
STEP_MS_VARIABLE = "ROLLOUT_REFERENCE_STEP_MS"  # least time of one computing step, in milliseconds
