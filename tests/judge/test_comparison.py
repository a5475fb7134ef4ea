"""The verdict on whole comparisons: yes, no, inconclusive and invalid, alone and judged together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import claims
from harness.errors import HarnessError, ScenarioInvalid, UsageError
from harness.judge.blocks import Block, load_blocks, load_declaration
from harness.judge.comparison import Comparison, judge_blocks, judge_run
from harness.judge.gates import GateLimits
from harness.judge.paired import Slower
from harness.judge.together import judge_together
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind, RequestResult
from tests.judge.histories import event
from tests.judge.measured import blocks, declaration, failing_gate, noisy, with_failures
from tests.judge.stored import store_comparison
from tests.test_scenario import GOOD

FAST, SLOW = noisy(0.0, 16), noisy(0.3, 16)


def judge(made: Sequence[Block], **declared: Any) -> Comparison:
    return judge_blocks(declaration(**declared), made)


@pytest.mark.parametrize(
    ("made", "answer", "verdict", "said"),
    [
        (blocks(SLOW[:4]), Slower.YES, Verdict.BROKEN, "more than 5% slower: ttft_ms_p50, tpot_ms_p50 (4 pairs)"),
        (blocks(FAST[:4]), Slower.NO, Verdict.HELD, "not more than 5% slower in any of ttft_ms_p50, tpot_ms_p50"),
        (blocks(noisy(0.05, 16)), Slower.INCONCLUSIVE, Verdict.UNKNOWN, "pairs would be needed"),
        (blocks(SLOW[:3]), Slower.INVALID, Verdict.UNKNOWN, "3 valid pairs, the first look is at 4"),
        ([], Slower.INVALID, Verdict.UNKNOWN, "0 valid pairs"),
    ],
)
def test_answers(made: list[Block], answer: Slower, verdict: Verdict, said: str) -> None:
    seen = judge(made)
    assert seen.answer is answer
    assert said in seen.because
    found = seen.finding()
    assert found.verdict is verdict
    assert found.claim == str(claims.latency_not_regressed(profile="nightly"))
    assert found.because.startswith(f"slower: {answer}: ")
    told = json.loads(json.dumps(seen.as_json(), allow_nan=False))
    assert (told["answer"], told["verdict"]) == (answer, verdict)


def test_effect_interval_spread_and_what_could_be_found_are_always_there() -> None:
    for factors in (SLOW[:4], FAST[:16], noisy(0.05, 16)):
        seen = judge(blocks(factors))
        for name in ("ttft_ms_p50", "e2e_ms_p99"):
            found = seen.reported[name]
            assert found.low < found.effect < found.high
            assert found.pair_sd > 0
            assert found.detectable > 0.05


def test_it_goes_on_until_it_is_final() -> None:
    assert judge(blocks(SLOW[:4])).is_final
    assert not judge(blocks(noisy(0.05, 8))).is_final
    assert judge(blocks(noisy(0.05, 16))).is_final
    assert not judge(blocks(SLOW[:3])).is_final


def void(made: list[Block], *pairs: int) -> list[Block]:
    return [replace(b, gates=(failing_gate(),)) if b.pair in pairs and b.arm == "new" else b for b in made]


def test_failed_gate_voids_its_pair_and_too_many_void_everything() -> None:
    one = judge(void(blocks([*SLOW[:4], 0.2]), 4))
    assert (one.answer, one.pairs, one.void_pairs) == (Slower.YES, 4, 1)
    assert "1 pairs are void and were left out: 4" in one.notes
    many = judge(void(blocks(SLOW), 0, 1, 2), spare_pairs=2)
    assert many.answer is Slower.INVALID
    assert many.is_final
    assert (
        "3 pairs are void, at most 2 may be (lag_ms_p99; first: lag_ms_p99 is 9 in block 000-old, limit 5)"
        in many.because
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"is_drifting": True}, "drifting_ratio is 1 in 8 blocks"),
        ({"schedule_sha256": "another"}, "had another schedule of arrivals than was declared"),
    ],
)
def test_condition_of_the_whole_voids_the_whole(change: dict[str, Any], said: str) -> None:
    seen = judge(blocks(SLOW[:4], **change))
    assert seen.answer is Slower.INVALID
    assert said in seen.because


def test_gpu_that_was_slower_in_one_arm_voids_the_whole() -> None:
    def on_gpu(b: Block) -> Block:
        clock_mhz = 1500 if b.arm == "new" else 1980
        return replace(b, events=(event(1.0, EventKind.GPU, index=0, clock_mhz=clock_mhz, throttle=[]),))

    seen = judge([on_gpu(b) for b in blocks(SLOW[:4])])
    assert seen.answer is Slower.INVALID
    assert seen.because == "clock_difference is 0.2424 in GPU 0, B against A, limit 0.02"


@pytest.mark.parametrize("effect", [0.2, -0.2])
def test_negative_control_that_differs_voids_the_whole(effect: float) -> None:
    seen = judge([*blocks(SLOW[:4]), *blocks(noisy(effect, 4), is_null=True, first=8)])
    assert seen.answer is Slower.INVALID
    assert "the negative control differs: ttft_ms_p50 of the old engine's second start is" in seen.because
    calm = judge([*blocks(SLOW[:4]), *blocks(noisy(0.0, 4), is_null=True, first=8)])
    assert calm.answer is Slower.YES
    assert abs(calm.null["ttft_ms_p50"].effect) < 0.05


def test_failures_decide_as_well() -> None:
    calm = blocks(FAST[:4])
    assert judge(with_failures(calm, "new", inband_error=1)).answer is Slower.YES
    assert judge(with_failures(calm, "new", reset=20)).answer is Slower.YES
    open_ = judge(with_failures(with_failures(calm, "new", reset=4), "old", reset=4))
    assert open_.answer is Slower.INCONCLUSIVE
    assert not open_.is_final
    assert (
        judge(with_failures(with_failures(calm, "new", reset=4), "old", reset=4), failure_budget=0.05).answer
        is Slower.NO
    )


def test_improvement_and_changed_gates_are_noted() -> None:
    seen = judge(blocks(noisy(-0.2, 4)), limits=GateLimits().with_changes({"lag_ms_p99": 20.0}))
    assert seen.answer is Slower.NO
    assert "faster than before: ttft_ms_p50, tpot_ms_p50" in seen.notes
    assert "gates were changed: lag_ms_p99=20" in seen.notes


def test_swapping_the_arms_is_never_slower_both_ways() -> None:
    made = blocks(SLOW[:8])
    swapped = [replace(b, arm={"old": "new", "new": "old"}[b.arm]) for b in made]
    there, back = judge(made), judge(swapped)
    assert (there.answer, back.answer) == (Slower.YES, Slower.NO)
    assert back.reported["ttft_ms_p50"].effect == pytest.approx(1 / (1 + there.reported["ttft_ms_p50"].effect) - 1)


# --- several comparisons ---


def test_release_needs_more_evidence_among_many() -> None:
    weak = [1.0458, 1.0468, 1.0316, 1.0560, 1.0370, 1.0428]
    slower = judge(blocks(weak), profile="release")
    assert slower.answer is Slower.YES
    others = [judge(blocks(noisy(0.0, 24, seed=n)), profile="release", name=f"r{n}") for n in range(80)]
    assert judge_together([slower])[0].answer is Slower.YES
    together = judge_together([slower, *others])[0]
    assert together.answer is Slower.INCONCLUSIVE
    assert "when all comparisons are judged together" in together.because
    strong = judge(blocks(noisy(0.3, 6)), profile="release")
    assert judge_together([strong, *others])[0].answer is Slower.YES


def test_screening_is_red_only_when_confirmed() -> None:
    screened = judge(blocks(SLOW[:8]), profile="screen", name="screening")
    assert screened.answer is Slower.YES
    alone = judge_together([screened])[0]
    assert alone.answer is Slower.INCONCLUSIVE
    assert 'harness compare --profile confirm --confirms "screening"' in alone.because

    def again(factors: list[float], confirms: str = "screening") -> Comparison:
        return judge(blocks(factors), profile="confirm", name="again", confirms=confirms)

    assert judge_together([screened, again(SLOW)])[0].answer is Slower.YES
    cleared = judge_together([screened, again(FAST)])[0]
    assert cleared.answer is Slower.NO
    assert 'not confirmed by "again"' in cleared.because
    assert judge_together([screened, again(SLOW, confirms="other")])[0].answer is Slower.INCONCLUSIVE
    clean = judge(blocks(FAST[:8]), profile="screen", name="clean")
    assert judge_together([clean])[0].answer is Slower.NO
    failing = judge(with_failures(blocks(FAST[:8]), "new", inband_error=1), profile="screen")
    assert judge_together([failing])[0].answer is Slower.YES


# --- on disk ---


@pytest.mark.parametrize(("factor", "answer"), [(1.3, Slower.YES), (1.0, Slower.NO)])
def test_stored_comparison_is_judged_from_disk(tmp_path: Path, factor: float, answer: Slower) -> None:
    store_comparison(tmp_path, factor=factor, pairs=4)
    seen = judge_run(tmp_path)
    assert seen.answer is answer, seen.because
    assert seen.pairs == 4
    assert seen.medians_ms["ttft_ms_p50"][0] == pytest.approx(100, rel=0.05)
    again = load_declaration(tmp_path)
    assert [b.name for b in load_blocks(tmp_path, again)][:4] == ["000-old", "001-new", "002-new", "003-old"]


def test_block_that_did_not_end_is_left_out(tmp_path: Path) -> None:
    store_comparison(tmp_path, factor=1.3, pairs=4)
    (tmp_path / "blocks/007-old/block.json").unlink()
    assert judge_run(tmp_path).pairs == 3


@pytest.mark.parametrize(
    ("file", "content", "error", "said"),
    [
        ("comparison.json", "{", UsageError, "does not declare a comparison"),
        ("comparison.json", "[]", UsageError, "does not declare a comparison"),
        ("comparison.json", {"profile": "weekly"}, UsageError, 'profile "weekly" is unknown'),
        ("comparison.json", {"gating": ["speed"]}, UsageError, "it decides by speed; metrics: ttft_ms_p50"),
        ("comparison.json", {"slo": {"ttft": 1}}, UsageError, "does not declare a comparison"),
        ("comparison.json", {"limits": {"lag_ms_p99": "x"}}, UsageError, "limit of gate lag_ms_p99 is 'x'"),
        ("comparison.json", {"arms": []}, UsageError, 'it has no arm "old"'),
        ("blocks/000-old/block.json", "{}", HarnessError, r'block ".*000-old" cannot be read: KeyError'),
        ("blocks/000-old/block.json", {"report": {}}, HarnessError, "cannot be read: KeyError"),
        ("blocks/000-old/records.npz", "x", HarnessError, "does not hold records"),
        ("blocks/000-old/history.jsonl", "x\ny\n", HarnessError, "is not a request or an event"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, file: str, content: str | dict[str, Any], error: type[Exception], said: str
) -> None:
    store_comparison(tmp_path, factor=1.0, pairs=4)
    path = tmp_path / file
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text()), **content})
    path.write_text(content)
    with pytest.raises(error, match=said):
        judge_run(tmp_path)


def test_the_lag_that_a_comparison_bears_is_a_share_of_its_margin(tmp_path: Path) -> None:
    """A first token after 100 ms, of which 3 are the loader's own: too much for a margin of 5 %, little for one of 15 %."""
    store_comparison(tmp_path / "nightly", factor=1.0, pairs=8, late_ms=3.0, profile="nightly")
    store_comparison(tmp_path / "incident", factor=1.0, pairs=8, late_ms=3.0, profile="incident")
    nightly = judge_run(tmp_path / "nightly")
    assert nightly.answer is Slower.INVALID
    assert "lag_of_margin is 0.6" in nightly.because
    assert any("serve a larger model" in note for note in nightly.notes)
    incident = judge_run(tmp_path / "incident")
    assert incident.answer is Slower.NO
    assert not any("serve a larger model" in note for note in incident.notes)


def test_a_stored_limit_of_a_gate_that_is_no_more_is_left_out(tmp_path: Path) -> None:
    store_comparison(tmp_path, factor=1.0, pairs=4, late_ms=3.0)
    path = tmp_path / "comparison.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "limits": {"lag_of_ttft_p99": 0.5, "lag_ms_p99": 6.0}}))
    seen = judge_run(tmp_path)
    assert "gates were changed: lag_ms_p99=6" in seen.notes
    assert {gate.name for gate in seen.failed_gates} == {"lag_of_margin"}


def test_run_that_is_no_comparison_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a comparison: No such file or directory"):
        judge_run(tmp_path)


def test_counts_of_blocks_are_by_class(tmp_path: Path) -> None:
    store_comparison(tmp_path, factor=1.0, pairs=4, failing={"new": "truncated_protocol"})
    seen = judge_run(tmp_path)
    assert seen.answer is Slower.YES
    assert "what must never happen did" in seen.because
    assert load_blocks(tmp_path, load_declaration(tmp_path))[1].counts[RequestResult.TRUNCATED_PROTOCOL] == 1


# --- the claim ---


def test_scenario_refuses_a_claim_for_pairs_and_says_why() -> None:
    for where in ("unguarded", "guarded"):
        with pytest.raises(ScenarioInvalid, match=r"a machine that drifts .* claim latency_back_in_band"):
            replace(GOOD, **{where: (claims.latency_not_regressed(),)})  # type: ignore[arg-type]


def test_claim_names_the_profiles() -> None:
    assert str(claims.latency_not_regressed(profile="release")) == "latency_not_regressed(profile='release')"
    with pytest.raises(ScenarioInvalid, match='latency_not_regressed: profile "x" is unknown'):
        claims.latency_not_regressed(profile="x")
