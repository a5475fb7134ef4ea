"""Comparisons on the reference engine: blocks on disk, a planted slowdown found, gates that void, commands that explain."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import pytest

from harness import cli
from harness.compare import Options, compare
from harness.errors import UsageError
from harness.judge.blocks import load_blocks, load_declaration
from harness.judge.comparison import judge_run
from harness.judge.gates import GateLimits
from harness.judge.paired import Slower
from harness.observe.history import EventKind, Recorder, Request
from harness.settings import Settings
from tests.judge.histories import event
from tests.judge.measured import S, request
from tests.judge.stored import store_comparison
from tests.planted import DEFECT, STEP_MS, PlantingStarter

# A machine that others use cannot keep a schedule to the millisecond.
LENIENT = GateLimits().with_changes(
    {
        "lag_ms_p99": 1e4,
        "lag_of_margin": 1e4,
        "lag_ms_max": 1e5,
        "loop_lag_ms_p99": 1e4,
        "loader_cpu_ratio": 2,
        "loader_cpu_ratio_max": 9,
        "steal_ratio": 1,
        "pressure_cpu": 100,
        "pressure_io": 100,
        "pressure_memory": 100,
        "drifting_ratio": 1,
    }
)
TINY_BLOCKS = {
    "block_s": 0.5,
    "warm_s": 0.1,
    "spare_pairs": 0,
    "null_every": 0,
    "failure_budget": 0.1,
    "same": True,
    "canaries": False,
}

Told = tuple[int, str, str]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the checkpoints of these tests to themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Told]:
    """Give `harness` as a function, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Told:
        code = cli.main(arguments)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def pressure_of(run: Path) -> float:
    """Return the share of the time in which something waited for a processor, in percent, as the blocks recorded it."""
    events = [event for block in load_blocks(run, load_declaration(run)) for event in block.events]
    return fmean(e.data.get("pressure_cpu_avg10") or 0.0 for e in events if e.kind is EventKind.HOST)


def test_planted_slowdown_is_found_and_found_again_from_disk(tmp_path: Path) -> None:
    options = Options(
        profile="incident",
        environment=((STEP_MS, "20"),),
        # 130 ms a token instead of 20: so far that waiting for a processor on a busy machine does not hide it.
        new_environment=((DEFECT, "slower_30_percent"), (STEP_MS, "100")),
        output_tokens=4,
        limits=LENIENT,
        **{**TINY_BLOCKS, "block_s": 0.8},  # type: ignore[arg-type]
    )
    settings = Settings(engine="reference", results=tmp_path / "results", rate_rps=3.0)
    said: list[str] = []
    run, comparison = compare(settings, options, progress=said.append)
    again = judge_run(run)
    assert again.as_json() == comparison.as_json()
    assert json.loads((run / "verdict.json").read_text())["answer"] == comparison.answer
    folders = sorted(path.name for path in (run / "blocks").iterdir())
    assert folders[:4] == ["000-old", "001-new", "002-new", "003-old"]  # ABBA
    blocks = [json.loads((run / "blocks" / name / "block.json").read_text()) for name in folders]
    assert len({block["schedule_sha256"] for block in blocks}) == 1  # the same work
    assert len({block["plan_sha256"] for block in blocks}) == len(blocks)  # and no prompt twice
    assert {block["incarnation"] for block in blocks} == {"old-1", "new-2"}
    old, new = (load_declaration(run).arm(name).key for name in ("old", "new"))
    assert {name for name in old if old[name] != new[name]} == {"flags"}
    assert "slower_30_percent" not in new["flags"]  # values of the environment may be secrets
    assert any("is ready after" in line for line in said)

    if comparison.answer is not Slower.YES and (pressure := pressure_of(run)) > GateLimits().pressure_cpu:
        pytest.skip(
            f"the machine is too busy to measure anything: {pressure:.0f} % of the time somebody waited for a core"
        )
    assert comparison.answer is Slower.YES, comparison.because
    assert comparison.decision is not None
    assert "tpot_ms_p50" in comparison.decision.slower
    assert comparison.reported["tpot_ms_p50"].low > 0.15
    assert comparison.finding().verdict == "broken"


def test_failed_gate_makes_it_invalid_and_fresh_engines_serve_each_pair(tmp_path: Path) -> None:
    options = Options(
        fresh=True,
        blocks_per_arm=1,
        limits=LENIENT.with_changes({"loader_cpu_ratio": 0.0}),
        **TINY_BLOCKS,  # type: ignore[arg-type]
    )
    settings = Settings(engine="reference", results=tmp_path / "results", rate_rps=8.0)
    run, comparison = compare(settings, options, progress=lambda _: None)
    assert comparison.answer is Slower.INVALID
    assert re.search(
        r"1 pairs are void, .* \(loader_cpu_ratio; first: .* in block 000-old, limit 0\)", comparison.because
    )
    assert comparison.finding().verdict == "unknown"
    blocks = [json.loads(path.read_text()) for path in sorted(run.glob("blocks/*/block.json"))]
    assert [block["incarnation"] for block in blocks] == ["old-1", "new-2"]
    assert len(list((run / "logs").iterdir())) == 2


@pytest.mark.parametrize("planted", ["wrong_answer", "wrong_under_load"])
def test_wrong_answers_of_one_side_make_it_invalid_after_one_pair(tmp_path: Path, planted: str) -> None:
    options = Options(limits=LENIENT, **{**TINY_BLOCKS, "canaries": True})  # type: ignore[arg-type]
    settings = Settings(engine="reference", results=tmp_path / "results", rate_rps=8.0)
    busy = {STEP_MS: "6"}  # of a block, most of the time is spent computing: canaries come upon others
    starter = PlantingStarter({"old-1": busy, "new-2": {**busy, DEFECT: planted}})
    run, comparison = compare(settings, options, progress=lambda _: None, starter=starter)
    assert comparison.answer is Slower.INVALID
    said = re.search(
        r"wrong_answers is \d+ in \d+ canaries \(first in block \d+-new: off by .*; (\d+) of (\d+) under load, (\d+) of (\d+) "
        r"beside it\), so at least one side does not serve the weights that it was given",
        comparison.because,
    )
    assert said, comparison.because
    under_load, asked_under_load, beside, asked_beside = map(int, said.groups())
    blocks = [json.loads(path.read_text()) for path in run.glob("blocks/*/block.json")]
    new = [block["canaries"] for block in blocks if block["arm"] == "new"]
    assert all(c["right"] == c["asked"] for c in (b["canaries"] for b in blocks if b["arm"] == "old"))
    assert asked_beside == 2 * len(blocks)
    assert asked_under_load >= 3 * len(blocks)
    assert 0 < under_load <= sum(canaries["asked_under_load"] for canaries in new)
    if planted == "wrong_answer":
        assert len(blocks) == 2
        assert all(canaries["wrong"] == canaries["asked"] for canaries in new)
    else:
        assert beside == 0  # before and after a block it answers rightly
    assert len({block["schedule_sha256"] for block in blocks}) == 1  # the same canaries for both
    assert "invalid" in (run / "report.html").read_text(encoding="utf-8")


def test_side_that_is_wrong_from_its_golden_on_is_refused_before_any_block(tmp_path: Path) -> None:
    options = Options(
        limits=LENIENT,
        new_environment=((DEFECT, "wrong_answer"),),
        **{**TINY_BLOCKS, "canaries": True, "failure_budget": 0.01},  # type: ignore[arg-type]
    )
    settings = Settings(engine="reference", results=tmp_path / "results", rate_rps=8.0)
    said: list[str] = []
    run, comparison = compare(settings, options, progress=said.append)
    assert any(line.startswith("64 requests to each side at most, 299 without a failure are needed") for line in said)
    assert comparison.answer is Slower.INVALID
    assert comparison.because.startswith('side "new" does not answer rightly: ')
    assert "our own forward pass" in comparison.because
    assert not (run / "blocks").exists()
    assert judge_run(run).because == comparison.because


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"profile": "weekly"}, 'profile "weekly" is unknown'),
        ({"block_s": 0.0}, "block_s must be from 0.5 to 36000 s, got 0"),
        ({"warm_s": -1.0}, "warm_s must be from 0"),
        ({"block_s": float("nan")}, "block_s must be"),
        ({"null_every": -1}, "null_every must be at least 0, got -1"),
        ({"family": 0}, "family must be at least 1"),
        ({"blocks_per_arm": 0}, "blocks_per_arm must be at least 1, got 0"),
        ({"failure_budget": 1.0}, "failure_budget must be between 0 and 1"),
        ({"profile": "confirm"}, "needs the run it confirms"),
        ({"confirms": Path("x")}, "no other profile takes one"),
    ],
)
def test_option_that_cannot_be_used_is_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Options(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "--engine", "reference", "--slo", "ttft=200"], 'slo "ttft=200" has no unit: write ttft_ms=200'),
        (["compare", "--engine", "reference", "--limit", "lag=1"], 'gate "lag" is unknown; gates: lag_ms_p99'),
        (["compare", "--engine", "reference", "--limit", "lag_ms_p99=x"], 'must be a number, got "x"'),
        (["compare", "--engine", "reference", "--new-environment", "X"], 'new-environment "X" is not NAME=VALUE'),
        (["compare", "--engine", "reference", "--new-arguments", "'"], "cannot be read as a command line"),
        (["compare", "--engine", "reference", "--new-arguments", "--port 1"], 'argument "--port" cannot be given'),
        (["compare", "--engine", "reference", "--confirms", "no", "--profile", "confirm"], '"no" is not a comparison'),
        (["compare", "--engine", "reference", "--output-tokens", "300"], "are 324 together, max_model_len is 256"),
        (["verdict", "nowhere"], '"nowhere" is not a run of this harness'),
        (["baseline", "accept", "nowhere"], '"nowhere" is not a comparison'),
        (["baseline", "compare", "nowhere"], '"nowhere" is not a comparison'),
    ],
)
def test_mistake_is_one_sentence(tell: Callable[..., Told], arguments: list[str], said: str) -> None:
    code, _, errors = tell(*arguments)
    assert code == 3
    assert errors.startswith("harness: ")
    assert errors.count("\n") == 1
    assert said in errors


def test_stored_comparisons_are_judged_by_command(tell: Callable[..., Told], tmp_path: Path) -> None:
    store_comparison(tmp_path / "slow", factor=1.3, pairs=4)
    store_comparison(tmp_path / "fine", factor=1.0, pairs=4)
    store_comparison(tmp_path / "short", factor=1.0, pairs=2)
    for command in ("verdict", "judge"):
        assert [tell(command, name)[0] for name in ("slow", "fine", "short")] == [1, 0, 2]
    code, output, _ = tell("verdict", "slow", "fine")
    assert code == 1
    assert "slower: yes: more than 5% slower" in output
    assert "slower: no: not more than 5% slower" in output
    assert json.loads((tmp_path / "fine/verdict.json").read_text())["verdict"] == "held"


def test_baseline_is_accepted_and_compared_by_command(tell: Callable[..., Told], tmp_path: Path) -> None:
    store_comparison(tmp_path / "fine", factor=1.0, pairs=4)
    code, output, _ = tell("baseline", "accept", "fine")
    assert code == 0
    assert '4 blocks of "made-up" are the baseline "results/baselines/this_engine-' in output
    code, output, _ = tell("baseline", "compare", "fine")
    assert code == 0
    assert "other days, so no verdict" in output
    stored = json.loads((tmp_path / "fine/comparison.json").read_text())
    stored["arms"][0]["key"]["driver"] = "570"
    (tmp_path / "fine/comparison.json").write_text(json.dumps(stored))
    code, _, errors = tell("baseline", "compare", "fine")
    assert code == 3
    assert 'differs in driver: "this driver" there, "570" here' in errors


def store_rollouts(run: Path, during_ms: float) -> None:
    """Write a run of one scenario, with latencies of 100 ms before its rollout and others after it."""
    folder = run / "scenarios" / "rolled_out-unguarded"
    folder.mkdir(parents=True)
    recorder = Recorder(folder / "history.jsonl")
    for at_s, kind in ((0.0, EventKind.LOAD_STARTED), (5.0, EventKind.ROLLOUT_STARTED), (10.0, EventKind.LOAD_ENDED)):
        data = {"recorded": 100, "planned": 100, "lag_ms_p99": 0.1} if kind is EventKind.LOAD_ENDED else {}
        made = event(at_s, kind, **data)
        recorder.event("test", made.kind, at_ns=made.at_ns, **made.data)
    requests: list[Request] = [request(n / 10, ttft_ms=100.0 if n < 50 else during_ms, number=n) for n in range(100)]
    for each in requests:
        recorder.request(each)
    recorder.close()
    assert requests[-1].planned_ns < 10 * S
    context = {"scenario": "rolled_out", "engine_label": "made-up", "expected_layers": [], "faults": []}
    declared = {"declaration": {"name": "rolled_out"}, "mode": "unguarded", "claims": [], "context": context}
    (folder / "scenario.json").write_text(json.dumps(declared))
    fields = {
        "name": run.name,
        "engine_label": "made-up",
        "engine_kind": "reference",
        "seed": 1,
        "command": "",
        "commit": "",
    }
    more = {"started_at": "", "machine": {}, "settings": {}, "is_complete": True}
    (run / "run.json").write_text(json.dumps({**fields, **more}))


@pytest.mark.parametrize(
    ("during_ms", "runs", "code", "said"),
    [
        ((200.0, 210.0, 190.0, 205.0), 4, 1, "yes: the peak of a rollout is 2.0"),
        ((101.0, 103.0, 102.0, 104.0), 4, 0, "no: the peak of a rollout is 1.0"),
        ((110.0, 150.0, 120.0, 170.0), 4, 2, "inconclusive: the peak"),
        ((200.0, 210.0), 2, 2, "invalid: 2 rollouts are there, at least 4 are needed"),
    ],
)
def test_spikes_of_stored_rollouts_are_judged_by_command(
    tell: Callable[..., Told], tmp_path: Path, during_ms: tuple[float, ...], runs: int, code: int, said: str
) -> None:
    for number, value in enumerate(during_ms):
        store_rollouts(tmp_path / f"run-{number}", value)
    names = [f"run-{number}" for number in range(runs)]
    seen, output, errors = tell("verdict", *names)
    assert seen == code, errors
    assert f"rolled_out [unguarded]: spike beyond the budget: {said}" in output
