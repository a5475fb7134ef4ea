"""`harness run`: pytest over the scenarios, with a first and a last line for people."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from harness.cli import exit_code_of
from harness.errors import EXIT_BROKEN, EXIT_UNKNOWN, EXIT_USAGE, UsageError
from harness.plugin import run_key
from harness.run import Run

HOW_TO_GET_THE_REAL_ONE = "for real vLLM in Docker: make run ENGINE=container (or harness run --engine container)"
PASSED_ON = (
    "engine",
    "image",
    "vllm_version",
    "gpus",
    "python",
    "model",
    "old",
    "new",
    "rate_rps",
    "seed",
    "results",
    "require",
)


class _Witness:
    """Keeps the run that the plug-in made, so that the last line can speak of it."""

    run: Run | None = None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.run = session.config.stash.get(run_key, None)


def run_scenarios(options: argparse.Namespace) -> int:
    """Run scenarios with pytest and return the exit code of their verdicts.

    Raises: UsageError when there is nothing to run at the given paths.
    """
    for path in options.paths:
        if not Path(path.partition("::")[0]).exists():
            raise UsageError(f'no scenarios at "{path}"; give a directory with scenario tests')
    arguments = [*options.paths, "-q", "--no-header"]
    for name in PASSED_ON:
        value = getattr(options, name)
        if value:
            arguments.append(f"--rollout-{name.replace('_', '-')}={value}")
    # The plug-in is this very package, so pytest finds it imported; it holds no assertions that need rewriting.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    if not options.all:
        arguments += ["-m", "core"]
    if options.select:
        arguments += ["-k", options.select]
    witness = _Witness()
    asked = options.engine or "auto"
    print(f"harness: engine asked for: {asked}{'' if asked == 'container' else f'; {HOW_TO_GET_THE_REAL_ONE}'}")
    code = int(pytest.main(arguments, plugins=[witness]))
    run = witness.run
    if run is None:
        return code if code in (EXIT_BROKEN, EXIT_UNKNOWN, EXIT_USAGE) else EXIT_UNKNOWN
    hint = f"; {HOW_TO_GET_THE_REAL_ONE}" if run.identity.kind == "reference" else ""
    what = "the reference engine, which is not vLLM" if run.identity.kind == "reference" else run.identity.label
    print(f"harness: {len(run.records)} scenarios ran on {what}{hint}")
    print(f"harness: report: {run.directory / 'report.html'}")
    verdicts = exit_code_of([record.verdict for record in run.records])
    # A test that failed outside its scenario (a crash, a failed fixture) must not end as a success.
    return verdicts if verdicts or code == 0 else EXIT_UNKNOWN
