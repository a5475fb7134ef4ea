"""The pytest plug-in: options and fixtures. Loaded by entry point; imports nothing heavy until a fixture is used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.errors import UsageError, required_resources
from harness.settings import EXPLAINED

if TYPE_CHECKING:
    from harness.bench import Bench, Checkpoints, EngineHandle, LoadHandle
    from harness.report.store import ScenarioRecord
    from harness.run import Run
    from harness.scenario import Scenario

OPTIONS = {**EXPLAINED, "expectations": "directory with the recorded detection layers of engine releases"}
MODES = ("unguarded", "guarded")
MARKERS = (
    "core: one variant per fault family; what harness run takes by itself",
    "nightly: too long for every change; harness run takes these with --nightly",
    "qualification: its guarded run is required by harness qualify",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the harness could not do in a session, and how a command ends for it."""

    sentence: str
    exit_code: int


run_key = pytest.StashKey["Run"]()
problems_key = pytest.StashKey[list[Problem]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; each can also be set as `ROLLOUT_<NAME>` in the environment."""
    group = parser.getgroup("rollout", "checkpoint rollouts on vLLM")
    for name, text in OPTIONS.items():
        group.addoption(f"--rollout-{name}", default=None, help=text)
    group.addoption(
        "--rollout-locust-web-ui",
        action="store_true",
        default=None,
        help="serve locust's own page while load runs; for looking only",
    )
    group.addoption(
        "--rollout-require",
        default="",
        help="comma-separated resources (docker, gpu, image, python, ...) whose absence fails instead of skipping",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers that say when a scenario is run."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    try:
        config.option.rollout_require = ",".join(required_resources(config.option.rollout_require))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def rollout_run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Give the run of this session: one engine kind, one label, one directory under results/."""
    from harness.run import Run
    from harness.settings import settings_from

    config = request.config
    names = (*OPTIONS, "locust-web-ui")
    options = {name.replace("-", "_"): config.getoption(f"--rollout-{name}") for name in names}
    with _one_sentence(config, ends_session=True):
        settings = settings_from(options, os.environ)
        run = Run(settings, progress=_progress(config), expectations=_expectations(config, options["expectations"]))
        run.__enter__()
    config.stash[run_key] = run
    try:
        yield run
    finally:
        session = request.session
        # Torn down after the last test, or when the session is cut: only then it has another status yet.
        is_whole = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        is_cut = not is_whole or session.shouldstop or session.shouldfail
        run.is_whole = run.is_whole and not is_cut
        with _one_sentence(config):
            try:
                run.__exit__(None, None, None)
            finally:
                _write_reports(run)


@pytest.fixture(params=MODES)
def rollout_mode(request: pytest.FixtureRequest) -> str:
    """Give the mode: the engine alone, or with the operator's guards."""
    return str(request.param)


@pytest.fixture
def run_scenario(
    rollout_run: Run, rollout_mode: str, request: pytest.FixtureRequest
) -> Callable[[Scenario], ScenarioRecord]:
    """Give a function that runs a scenario in the mode of this test and returns it judged."""
    from harness.scenario import Mode

    def run(scenario: Scenario) -> ScenarioRecord:
        __tracebackhide__ = True
        with _one_sentence(request.config):
            return rollout_run.scenario(scenario, Mode(rollout_mode))

    return run


@pytest.fixture
def rollout_bench(rollout_run: Run, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Give what the imperative fixtures stand on; everything started with it ends with the test."""
    from harness.bench import Bench

    with Bench(rollout_run, request.node.name) as bench:
        yield bench


@pytest.fixture
def rollout_checkpoints(rollout_bench: Bench) -> Checkpoints:
    """Give the old and the new checkpoint, as private copies that a test may damage."""
    return rollout_bench.checkpoints()


@pytest.fixture
def rollout_engine(rollout_bench: Bench) -> Callable[..., EngineHandle]:
    """Give a function that starts an engine on a checkpoint directory and waits until it is ready."""
    return rollout_bench.start_engine


@pytest.fixture
def rollout_load(rollout_bench: Bench) -> Callable[..., LoadHandle]:
    """Give a function that puts steady load on an engine."""
    return rollout_bench.start_load


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many scenarios held, were broken or could not be decided, and where the report is."""
    run = config.stash.get(run_key, None)
    if run is None or not run.records:
        return
    verdicts = [record.verdict for record in run.records]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts))]
    problems = config.stash.get(problems_key, [])
    counts += [f"{len(problems)} could not be run"] if problems else []
    terminalreporter.section("rollout scenarios")
    terminalreporter.write_line(f"engine: {run.identity.label} ({run.identity.kind}); {', '.join(counts)}")
    terminalreporter.write_line(f"report: {run.directory / 'report.html'}")


def _progress(config: pytest.Config) -> Callable[[str], None]:
    capture = config.pluginmanager.getplugin("capturemanager")

    def tell(text: str) -> None:
        if capture is None:
            print(text, flush=True)
        else:
            with capture.global_and_fixture_disabled():
                print(f"\n{text}", end="", flush=True)

    return tell


def _expectations(config: pytest.Config, given: str | None) -> Path:
    return Path(given) if given else config.rootpath / "scenarios" / "expectations"


@contextmanager
def _one_sentence(config: pytest.Config, *, ends_session: bool = False) -> Iterator[None]:
    """Turn what the harness could not do into a skip or a failure of one sentence, without a traceback.

    A missing resource skips, or fails where it was required.
    """
    from harness.errors import EXIT_UNKNOWN, EXIT_USAGE, EnvironmentMissing, HarnessError

    __tracebackhide__ = True
    try:
        yield
    except EnvironmentMissing as missing:
        is_required = missing.resource in config.getoption("--rollout-require").split(",")
        _note(config, str(missing), EXIT_USAGE)
        if is_required:
            if (run := config.stash.get(run_key, None)) is not None:
                run.is_whole = False  # a skip leaves it whole; what was required and is not there does not
            raise pytest.fail.Exception(f"{missing} (required)", pytrace=False) from None
        raise pytest.skip.Exception(str(missing)) from None
    except (HarnessError, OSError) as error:
        if isinstance(error, HarnessError):
            sentence, code = str(error), max(error.exit_code, EXIT_UNKNOWN)  # broken is a verdict on an engine only
        else:
            sentence, code = f"the system refused what the run needs: {error}", EXIT_UNKNOWN
        _note(config, sentence, code)
        if ends_session:
            raise pytest.exit.Exception(sentence, returncode=code) from None
        raise pytest.fail.Exception(sentence, pytrace=False) from None


def _note(config: pytest.Config, sentence: str, exit_code: int) -> None:
    config.stash.setdefault(problems_key, []).append(Problem(sentence=sentence, exit_code=exit_code))


def _write_reports(run: Run) -> None:
    from harness.report.reports import write_reports

    write_reports(run.directory)
