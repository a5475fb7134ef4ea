"""What one start of an engine on a fault came to: who noticed, after how long, and what was answered until then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from harness.clock import seconds_between
from harness.guards.canary import Answer
from harness.judge.detection import Detection, detection
from harness.judge.expectations import Start
from harness.judge.exposure import exposure
from harness.judge.moments import fault_at_ns, remedy_at_ns
from harness.judge.reloads import expected_answers, tells_nothing_of_weights
from harness.observe.history import EventKind, History, RequestResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What it took to see who notices faults."""

    engine_starts: int  # on faults
    ready_after_s: tuple[float, ...]  # of each engine that was started and became ready
    took_s: tuple[float, ...]  # of each fault, from its preparation to its end
    golden_starts: int = 0  # for the answers of undamaged checkpoints

    @classmethod
    def of(cls, history: History, *, took_s: float) -> Cost:
        """Return what one fault took; an engine that another fault left running was not started for it."""
        started = {
            event.data["incarnation"]
            for event in history.of(EventKind.ENGINE_STARTING)
            if "handed_on" not in event.data.get("launch", {})
        }
        ready = [event for event in history.of(EventKind.ENGINE_READY) if event.data["incarnation"] in started]
        return cls(
            engine_starts=len(started),
            ready_after_s=tuple(float(event.data["took_s"]) for event in ready),
            took_s=(took_s,),
        )

    @classmethod
    def sum_of(cls, costs: Sequence[Cost]) -> Cost:
        """Return what several faults took together."""
        return cls(
            engine_starts=sum(each.engine_starts for each in costs),
            ready_after_s=tuple(after_s for each in costs for after_s in each.ready_after_s),
            took_s=tuple(took_s for each in costs for took_s in each.took_s),
        )

    def sentence(self) -> str:
        """Say how many engines were started, and how long a fault took beside a bare cold start."""
        count = len(self.took_s)
        said = f"{count} {'fault' if count == 1 else 'faults'}, {self.engine_starts} engine starts"
        if self.golden_starts:
            said += f" and {self.golden_starts} for the answers of undamaged checkpoints"
        if not count:
            return said
        said += f", {median(self.took_s):.1f} s per fault (median)"
        if not self.ready_after_s:
            return f"{said}; no engine became ready, so how long a bare cold start takes is not known"
        cold_s = median(self.ready_after_s)
        ratio = f", {median(self.took_s) / cold_s:.1f} times a bare cold start ({cold_s:.1f} s)" if cold_s > 0 else ""
        return said + ratio


NOTHING_SPENT = Cost(engine_starts=0, ready_after_s=(), took_s=())


def start_of(scenario: str, run: str, history: History, *, seen: Detection | None = None) -> Start:
    """Return what a history of one start says."""
    seen = seen or detection(history)
    return Start(
        scenario=scenario,
        layer=seen.layer,
        run=run,
        seen=seen.because,
        noticed_after_s=_noticed_after_s(history, seen),
        wrong_ratio=wrong_ratio(history),
    )


def _noticed_after_s(history: History, seen: Detection) -> float | None:
    since_ns = fault_at_ns(history)
    if since_ns is None or seen.at_ns is None:
        return None
    return round(seconds_between(since_ns, seen.at_ns), 2)


def wrong_ratio(history: History) -> float | None:
    """Return which share of the answers between the fault and the remedy came from wrong weights; None without answers.

    Of users' answers it is the upper bound of their exposure; where nobody used the engine, of the canaries before traffic.
    """
    since_ns, remedy_ns = fault_at_ns(history), remedy_at_ns(history)
    if since_ns is None:
        return None
    until_ns = 2**63 if remedy_ns is None else remedy_ns
    users = [
        request
        for request in history.requests
        if not request.is_canary
        and not request.is_ours
        and request.result is RequestResult.OK
        and since_ns <= request.ended_ns < until_ns
    ]
    if users:
        return round(min(1.0, exposure(history).upper / len(users)), 3)
    expected = expected_answers(history)
    answers = [
        (event, expected.get(event.data["incarnation"]))
        for event in history.of(EventKind.CANARY_CHECKED)
        if since_ns <= event.at_ns < until_ns and not tells_nothing_of_weights(event)
    ]
    usable = [(event, expects) for event, expects in answers if event.data["answer"] in list(Answer)]
    if not usable:
        return None
    wrong = [
        event
        for event, expects in usable
        if event.data["answer"] != Answer.AMBIGUOUS
        and (expects is None or not expects.allows(event.data["answer"], event.at_ns, event.at_ns))
    ]
    return round(len(wrong) / len(usable), 3)
