"""What every command line of the harness shares: how a wrong call ends, and how JSON is printed."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

from harness.errors import EXIT_USAGE


class CommandParser(argparse.ArgumentParser):
    """An argument parser that ends a wrong call with the harness's exit code for it."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=1))
