"""A stored run is complete only if everything that was asked for in it was run: what is missing is unknown, never held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import claims, cli, models
from harness.checkpoint.models import default_cache
from harness.errors import EnvironmentMissing, GoldenUnusable
from harness.scenario import Mode
from tests.planted import UNSEEN, PlantingStarter, run_on, short
from tests.suites import NO_DOCKER, RUN_LIMIT_S

pytest_plugins = "pytester"
CACHE = default_cache()  # before pytester gives every test a home of its own
SAME = short("nothing_to_tell_apart", UNSEEN, claims=(claims.recovered(within_s=20.0),), new=models.tiny_llama(seed=1))


def is_complete(results: Path) -> bool:
    found: bool = json.loads((results / "latest" / "run.json").read_text())["is_complete"]
    return found


def test_a_scenario_that_could_not_be_declared_leaves_the_run_incomplete(tmp_path: Path) -> None:
    with run_on(PlantingStarter({}), tmp_path) as run, pytest.raises(GoldenUnusable):
        run.scenario(SAME, Mode.UNGUARDED)
    assert not is_complete(tmp_path / "results")
    assert cli.main(["judge", str(tmp_path / "results" / "latest")]) == 2


def test_a_scenario_for_which_something_is_missing_here_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise EnvironmentMissing("root", "only root can mount")

    monkeypatch.setattr("harness.run.require_for_faults", missing)
    with run_on(PlantingStarter({}), tmp_path) as run, pytest.raises(EnvironmentMissing):
        run.scenario(SAME, Mode.UNGUARDED)
    assert is_complete(tmp_path / "results")


@pytest.mark.parametrize(
    ("last", "options"), [("raise KeyboardInterrupt", ()), ("assert False", ("-x",))], ids=["ctrl-c", "first failure"]
)
def test_a_session_that_was_cut_leaves_the_run_incomplete(
    last: str, options: tuple[str, ...], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", str(CACHE))
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)
    pytester.makepyfile(
        f"import pytest\n\ndef test_first(rollout_run): ...\n\ndef test_second():\n    {last}\n\ndef test_third(): ...\n"
    )
    pytester.runpytest_subprocess("-p", "no:locust", "--rollout-engine", "reference", *options, timeout=RUN_LIMIT_S)
    assert not is_complete(pytester.path / "results")


COMPILED = """from harness import Scenario, claims, faults, load, models

COLD = Scenario(
    name="cold",
    old=models.tiny_llama(seed=1),
    new=models.tiny_llama(seed=2),
    faults=(faults.moved_compile_cache(),),
    load=load.steady(rate_rps=8.0),
    unguarded=(claims.recovered(within_s=9.0),),
    guarded=(claims.recovered(within_s=9.0),),
)


def test_cold(run_scenario):
    run_scenario(COLD)
"""


@pytest.mark.parametrize(("required", "complete"), [("", True), ("vllm", False)])
def test_a_resource_that_is_missing_although_it_was_required_leaves_the_run_incomplete(
    required: str, complete: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", str(CACHE))
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)
    pytester.makepyfile(COMPILED)
    options = ("--rollout-engine", "reference", f"--rollout-require={required}", "-k", "unguarded")
    done = pytester.runpytest_subprocess("-p", "no:locust", *options, timeout=RUN_LIMIT_S)
    done.assert_outcomes(**({"skipped": 1} if complete else {"failed": 1}), deselected=1)
    assert is_complete(pytester.path / "results") is complete
