"""Serve a checkpoint: `python -m harness.engine.reference MODEL --port PORT`."""

from __future__ import annotations

import os
import sys

# NumPy's linear algebra reads these once, when it is imported. One core is what the engine is given.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from harness.engine.reference.serve import main  # noqa: E402 - only now

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
