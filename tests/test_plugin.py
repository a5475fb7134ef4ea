"""The plug-in in the suites of others: silent until asked, and then whole with nothing but the installed package."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness.checkpoint.models import default_cache
from harness.plugin import OPTIONS
from tests.suites import BROKEN_UNGUARDED, NO_DOCKER, RUN_LIMIT_S, left_of, start, write_suite

pytest_plugins = "pytester"

CACHE = default_cache()  # before pytester gives every test a home of its own
EXAMPLE = Path(__file__).parent.parent / "scenarios" / "test_imperative_example.py"
HEAVY = (
    "docker",
    "gevent",
    "harness.run",
    "jinja2",
    "locust",
    "numpy",
    "safetensors",
    "testcontainers",
)
LATE = "test_late.py::test_nobody_is_served_from_a_widened_tensor"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Give an empty directory of a user who has the package installed and no Docker engine."""
    monkeypatch.setenv("ROLLOUT_CACHE", str(CACHE))
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)
    scratch = pytester.path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.delenv("ROLLOUT_HARNESS_RUN", raising=False)
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest in a process of its own, as the user does."""
    return suite.runpytest_subprocess(*arguments, timeout=RUN_LIMIT_S)


def test_suite_that_does_not_ask_gets_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        f"""
        import sys

        def test_nothing_heavy_is_there(pytestconfig):
            assert [name for name in {HEAVY!r} if name in sys.modules] == []
            assert pytestconfig.pluginmanager.has_plugin("rollout_harness")
        """
    )
    before = {path.name for path in suite.path.iterdir()}
    result = run(suite, "-W", "error", "--strict-markers", "--strict-config")
    result.assert_outcomes(passed=1)
    assert "rollout scenarios" not in result.stdout.str()
    pytests_own = {"__pycache__", ".pytest_cache", "stdout", "stderr"}
    new = {path.name for path in suite.path.iterdir()} - before - pytests_own
    assert {name for name in new if not name.startswith("runpytest")} == set()
    assert list((suite.path / "scratch").iterdir()) == []


def test_options_and_fixtures_explain_themselves(suite: pytest.Pytester) -> None:
    options = run(suite, "--help").stdout.str()
    for name in (*OPTIONS, "require"):
        assert f"--rollout-{name}" in options
    fixtures = run(suite, "--fixtures").stdout.str()
    for name in ("run", "mode", "engine", "load", "checkpoints", "bench"):
        assert re.search(rf"^rollout_{name}\b.*\n +Give ", fixtures, re.MULTILINE), name
    assert re.search(r"^run_scenario\b.*\n +Give ", fixtures, re.MULTILINE)


def test_suite_outside_the_repository_runs_scenarios_and_ordinary_tests(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_imperative=EXAMPLE.read_text())
    (suite.path / "test_late.py").write_text(
        (write_suite(suite.path, unguarded=BROKEN_UNGUARDED) / "test_widened.py").read_text()
    )
    write_suite(suite.path)
    suite.makeini("[pytest]\nmarkers = core: mine\nfilterwarnings = error\naddopts = -p no:locust\n")

    result = run(suite, "--rollout-engine", "reference", "--deselect", f"{LATE}[guarded]")

    # The imperative test and the guarded scenario pass; without expectations the layer is unknown; nobody looks early.
    result.assert_outcomes(passed=2, failed=2, deselected=1)
    result.stdout.fnmatch_lines(
        ["engine: reference-* (reference); 1 broken, 1 held, 1 unknown", "report: results/*/report.html"]
    )
    said = result.stdout.str()
    history = r"evidence: results/\S+/scenarios/widened-unguarded(-2)?/history\.jsonl"
    assert re.search(
        rf'ClaimsBroken: "widened" \[unguarded\] is broken: detected_by\(layer=\'preflight\'\) is broken: noticed at startup, '
        rf"claimed preflight or earlier: .*; {history}",
        said,
    ), said
    assert re.search(
        rf"ClaimsUnknown: .*layer_as_expected\(\) is unknown: .* has 0 recorded starts .*; {history}", said
    ), said
    assert "harness/report/store.py" not in said, "the failure points at the test, not into the harness"
    latest = suite.path / "results/latest"
    assert json.loads((latest / "run.json").read_text())["is_complete"] is True
    junit = (latest / "junit.xml").read_text()
    assert 'tests="3"' in junit
    assert 'failures="1"' in junit
    assert 'errors="1"' in junit
    assert list((suite.path / "scratch").iterdir()) == []


def test_missing_resource_skips_with_its_reason_unless_it_is_required(suite: pytest.Pytester) -> None:
    write_suite(suite.path)
    for asked, reason, resource in (
        (
            ["--rollout-engine", "container"],
            f"docker is not available: no Docker daemon answers at {NO_DOCKER}*",
            "docker",
        ),
        (["--rollout-python", "/nowhere"], 'python is not available: "/nowhere" is not an interpreter*', "python"),
    ):
        result = run(suite, "-rs", *asked)
        result.assert_outcomes(skipped=2)
        result.stdout.fnmatch_lines([f"SKIPPED * {reason}"])
        assert result.ret == 0

        result = run(suite, *asked, "--rollout-require", f"gpu,{resource}")
        result.assert_outcomes(errors=2)
        result.stdout.fnmatch_lines([reason + "(required)"])
        assert "Traceback" not in result.stdout.str()
        assert "plugin.py" not in result.stdout.str()
    assert not (suite.path / "results").exists()


def test_wrong_option_ends_the_session_with_a_sentence(suite: pytest.Pytester) -> None:
    write_suite(suite.path)
    result = run(suite, "--rollout-engine", "vllm")
    assert result.ret == 3
    result.stdout.fnmatch_lines(['*Exit: engine "vllm" is unknown; engines: auto, container, process, reference*'])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


def test_what_nothing_can_lack_cannot_be_required(suite: pytest.Pytester) -> None:
    write_suite(suite.path)
    result = run(suite, "--rollout-require", "docker, dokcer")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(['*nothing is called "dokcer" that could be required; known: *'])
    assert not (suite.path / "results").exists()


def test_unknown_fault_is_named_where_it_was_asked_for(suite: pytest.Pytester) -> None:
    test = write_suite(suite.path) / "test_widened.py"
    test.write_text(test.read_text().replace("faults.widen_tensor", "faults.widen_tensors"))
    result = run(suite)
    assert result.ret == 2
    result.stdout.fnmatch_lines(['E*fault "widen_tensors" is unknown; faults: *widen_tensor*'])


def test_scenario_that_contradicts_itself_is_named(suite: pytest.Pytester) -> None:
    test = write_suite(suite.path) / "test_widened.py"
    test.write_text(test.read_text().replace("at(1.0)", "at(-1.0)"))
    result = run(suite)
    assert result.ret == 2
    result.stdout.fnmatch_lines(['E*scenario "widened": publish must lie between 0 and *, got -1'])


def test_two_sessions_at_once_in_one_results_directory_do_not_disturb_each_other(tmp_path: Path) -> None:
    write_suite(tmp_path)
    only = "rollouts/test_widened.py::test_nobody_is_served_from_a_widened_tensor[guarded]"
    scratch = tmp_path / "scratch"
    both = [start(["run", only, "--engine", "reference"], scratch=scratch, cwd=tmp_path) for _ in range(2)]
    told = [process.communicate(timeout=RUN_LIMIT_S)[0] for process in both]

    assert [process.returncode for process in both] == [0, 0], told
    runs = sorted(tmp_path.glob("results/2*"))
    assert len(runs) == 2
    for directory, text in zip(runs, sorted(told, key=lambda text: text.rpartition("results/")[2]), strict=True):
        assert f"report: results/{directory.name}/report.html" in text
        assert [path.name for path in (directory / "scenarios").iterdir()] == ["widened-guarded"]
        assert json.loads((directory / "run.json").read_text())["is_complete"] is True
    assert (tmp_path / "results/latest").resolve() in runs
    assert [path.name for path in (tmp_path / "results").iterdir() if path.name.startswith(".")] == []
    assert [left_of(process.pid, scratch) for process in both] == [[], []]
    assert list(scratch.iterdir()) == []
