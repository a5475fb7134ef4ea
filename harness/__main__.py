"""`python -m harness`: the command line, also where its script is not on the path."""

from __future__ import annotations

import sys

from harness.cli import main

sys.exit(main())
