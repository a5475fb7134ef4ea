"""`harness run`: pytest over the scenarios, with a first and a last line for people."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from harness.engine.choose import starter_for
from harness.engine.engine import EngineIdentity
from harness.errors import EXIT_HELD, EXIT_UNKNOWN, EXIT_USAGE, UsageError, required_resources
from harness.judge.verdict import exit_code_of
from harness.plugin import Problem, problems_key, run_key
from harness.requirements import require
from harness.run import Run
from harness.settings import EXPLAINED, settings_from

HOW_TO_GET_THE_REAL_ONE = "for real vLLM in Docker: make run ENGINE=container (or harness run --engine container)"
PASSED_ON = (*EXPLAINED, "require")


class _Witness:
    """Keeps what the plug-in saw, so that the last lines can speak of it."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.problems: list[Problem] = []
        self.is_interrupted = False
        self.is_crashed = False
        self.passed = 0  # tests

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[problems_key] = self.problems

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.run = session.config.stash.get(run_key, None)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # pytest ends itself in the same way when files cannot be collected.
        self.is_interrupted = not excinfo.errisinstance(pytest.Session.Interrupted)

    def pytest_internalerror(self) -> None:
        self.is_crashed = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed

    def pytest_exception_interact(self, call: pytest.CallInfo[Any], report: object) -> None:
        """Take a mistake in a scenario file for what it is: a sentence, no traceback."""
        if isinstance(report, pytest.CollectReport) and call.excinfo is not None:
            mistake = call.excinfo.value
            if isinstance(mistake, UsageError):
                report.longrepr = f"{report.nodeid}: {mistake}"
                self.problems.append(Problem(sentence=report.longrepr, exit_code=EXIT_USAGE))


def run_scenarios(options: argparse.Namespace) -> int:
    """Run scenarios with pytest and return the exit code of their verdicts.

    Raises: UsageError when there is nothing to run at the given paths or with these options; EnvironmentMissing when
    the engine asked for cannot be had here.
    """
    for path in options.paths:
        if not Path(path.partition("::")[0]).exists():
            raise UsageError(f'no scenarios at "{path}"; give a directory with scenario tests')
    options.require = ",".join(required_resources(options.require))
    settings = settings_from(vars(options), os.environ)
    require(settings)
    # Choosing by itself, the run says why it took which engine; an engine that was named must be there.
    identity = starter_for(settings, progress=_silence if settings.engine == "auto" else print).identity()
    witness = _Witness()
    print(f"harness: engine: {_described(identity)}", flush=True)
    try:
        code = int(pytest.main(_arguments(options), plugins=[witness]))
    except pytest.fail.Exception:  # what pytest releases when it was interrupted; the sentence is among the problems
        code, witness.is_crashed = int(pytest.ExitCode.INTERNAL_ERROR), True
    return _conclude(witness, code, options)


def _arguments(options: argparse.Namespace) -> list[str]:
    arguments = [*options.paths, "-q", "--no-header", "--tb=short"]
    for name in PASSED_ON:
        value: Any = getattr(options, name.replace("-", "_"))
        if value:
            arguments.append(f"--rollout-{name}={value}")
    if options.locust_web_ui:
        arguments.append("--rollout-locust-web-ui")
    # The plug-in is this very package, so pytest finds it imported; it holds no assertions that need rewriting.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    # Where a suite's settings make warnings errors, they are about its code: a warning is no verdict on an engine.
    arguments += ["-o", "filterwarnings=default"]
    if not options.nightly:
        arguments += ["-m", "not nightly" if options.all else "core"]
    if options.select:
        arguments += ["-k", options.select]
    return arguments


def _conclude(witness: _Witness, code: int, options: argparse.Namespace) -> int:
    """Print the last lines and return the exit code."""
    for sentence in dict.fromkeys(problem.sentence for problem in witness.problems):
        print(f"harness: {sentence}")
    run = witness.run
    if run is not None:
        print(f"harness: {len(run.records)} scenarios ran on {_described(run.identity)}")
        page = run.directory / "report.html"
        print(f"harness: report: {page if page.is_file() else 'none could be written'}")
    verdicts = [] if run is None else [str(record.verdict) for record in run.records]
    if witness.is_interrupted:
        print("harness: interrupted; what was running has been ended")
        return exit_code_of([*verdicts, "unknown"])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        marked = _among(options)
        chosen = f' whose name matches "{options.select}"' if options.select else ""
        raise UsageError(f"nothing was run: no scenario{chosen} at {', '.join(options.paths)}{marked}")
    if not verdicts and witness.problems:
        return max(problem.exit_code for problem in witness.problems)
    if code == pytest.ExitCode.OK and run is None:
        raise UsageError(f"nothing was run: no test at {', '.join(options.paths)} asks for a fixture of the harness")
    if code == pytest.ExitCode.OK and not verdicts and not witness.passed:
        raise UsageError(f"nothing was run: every test chosen at {', '.join(options.paths)} skipped itself")
    if code == pytest.ExitCode.OK and not verdicts:
        return EXIT_HELD  # ordinary tests with an engine, all passed
    if code == pytest.ExitCode.USAGE_ERROR:
        return EXIT_USAGE
    if witness.is_crashed:
        return EXIT_UNKNOWN
    judged = exit_code_of(verdicts)
    # A test that failed outside its scenario (a crash, a failed fixture) must not end as a success.
    return judged if judged or code == 0 else EXIT_UNKNOWN


def _among(options: argparse.Namespace) -> str:
    """Say which scenarios were looked at, where it was not every one, and how to get more."""
    if options.nightly:
        return ""
    if options.all:
        return " among those not marked nightly (--nightly takes every one)"
    return " among those marked core (--all and --nightly take more)"


def _described(identity: EngineIdentity) -> str:
    """Say which engine it is, and how to get the real one where it is not."""
    if identity.kind == "reference":
        return f"the reference engine, which is not vLLM; {HOW_TO_GET_THE_REAL_ONE}"
    return f"{identity.label} ({identity.kind})"


def _silence(text: str) -> None:
    """Take a line of progress that will be said again."""
