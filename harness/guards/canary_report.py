"""What one call of `harness canary` found out: as lines for people, as JSON, and as Prometheus metrics."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from harness.errors import EXIT_BROKEN, EXIT_HELD, EXIT_UNKNOWN
from harness.guards.canary import Answer, Comparison, Golden, GoldenPair
from harness.guards.canary_pass import Asked, Checked

NAMES = {Answer.OLD: "golden", Answer.NEW: "golden_new", Answer.NEITHER: "neither", Answer.AMBIGUOUS: "ambiguous"}
SENTENCES = {
    Answer.OLD: "the golden's checkpoint answered",
    Answer.NEW: "the other checkpoint answered",
    Answer.NEITHER: "neither known checkpoint answered: corrupt or mixed weights, or another engine build",
    Answer.AMBIGUOUS: "the answer fits both checkpoints: these prompts cannot tell them apart",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything one call of the command found out."""

    pair: GoldenPair
    is_alone: bool  # no second golden
    rotation: int | None
    asked: Asked
    comparison: Comparison
    answer: Answer
    checks: tuple[tuple[str, Checked], ...]

    @property
    def known(self) -> list[tuple[str, Golden, float]]:
        """Return each golden with its option's name and how far the answer is from it."""
        known = [("golden", self.pair.old, self.comparison.difference_old)]
        if not self.is_alone:
            known.append(("golden_new", self.pair.new, self.comparison.difference_new))
        return known

    @property
    def exit_code(self) -> int:
        """Return 0 when the golden's checkpoint answered and nothing else is wrong, else 1."""
        is_right = self.answer is Answer.OLD and not any(checked.because for _, checked in self.checks)
        return EXIT_HELD if is_right else EXIT_BROKEN

    @property
    def took_s(self) -> float:
        """Return how long the engine took to answer everything."""
        return self.asked.took_s + sum(checked.took_s for _, checked in self.checks)

    @property
    def prompt_tokens(self) -> int:
        """Return how many prompt tokens were asked."""
        return self.asked.prompt_tokens + sum(checked.prompt_tokens for _, checked in self.checks)

    @property
    def output_tokens(self) -> int:
        """Return how many tokens were decoded."""
        return self.asked.output_tokens + sum(checked.output_tokens for _, checked in self.checks)

    def as_lines(self, *, period_s: float) -> list[str]:
        """Return it for people, with its price when it is asked every `period_s` seconds."""
        sentence = "another checkpoint answered, or another engine build"
        if self.answer is not Answer.NEITHER or not self.is_alone:
            sentence = SENTENCES[self.answer]
        if not self.asked.rows:
            sentence = "the engine says that its logprobs are not finite: weights with NaN, or values beyond its dtype"
        far = ", ".join(f"{difference:.3g} from {golden.weights_id}" for _, golden, difference in self.known)
        lines = [f"{sentence}; largest difference in prompt logprobs: {far} (tolerance {self.pair.tolerance:g})"]
        for name, checked in self.checks:
            found = checked.because or f"right: {checked.saw}"
            lines.append(f"{'stream' if name == 'stream' else 'long prompt'}: {found} ({checked.took_s:.2f} s)")
        passes = self.pair.old.passes
        which = f"all {passes} passes" if self.rotation is None else f"pass {self.rotation + 1} of {passes}"
        lines.append(
            f"asked {which} by {self.asked.how}: {self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens, "
            f"{self.took_s:.3f} s; every {period_s:g} s that is at most {self.took_s / period_s:.2%} of the engine's time"
        )
        return lines

    def as_json(self, *, period_s: float, is_authenticated: bool) -> dict[str, Any]:
        """Return it for a JSON document, in which a difference beyond measure is null."""
        document: dict[str, Any] = {"answer": NAMES[self.answer], "tolerance": self.pair.tolerance}
        for name, golden, difference in self.known:
            shown = difference if math.isfinite(difference) else None
            document[name] = {"weights_id": golden.weights_id, "engine": golden.engine, "difference": shown}
        document["asked"] = {
            "pass": self.rotation,
            "passes": self.pair.old.passes,
            "by": self.asked.how,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "took_s": round(self.took_s, 4),
            "period_s": period_s,
            "share_of_engine_time": round(self.took_s / period_s, 5),
            "authenticated": is_authenticated,
        }
        return {**document, **{name: checked.as_json() for name, checked in self.checks}}


def prometheus(seen: Seen | None, *, now_s: float | None = None) -> str:
    """Return the result for a textfile collector; None: no usable answer. The time is a value of its own."""
    code = EXIT_UNKNOWN if seen is None else seen.exit_code
    values = {
        "rollout_canary_success": ("1 when the golden's checkpoint answered.", float(code == EXIT_HELD)),
        "rollout_canary_exit_code": ("0 the golden's checkpoint answered, 1 another, 2 no usable answer.", float(code)),
        "rollout_canary_timestamp_seconds": (
            "When the canary was asked last.",
            round(time.time() if now_s is None else now_s, 3),
        ),
    }
    if seen is not None:
        largest = seen.comparison.difference_old
        values["rollout_canary_difference"] = ("Largest difference in prompt logprobs from the golden.", largest)
        values["rollout_canary_tolerance"] = ("How large it may be.", seen.pair.tolerance)
        values["rollout_canary_took_seconds"] = ("How long the engine took to answer.", seen.took_s)
    return "".join(
        f"# HELP {name} {told}\n# TYPE {name} gauge\n{name} {'+Inf' if value == math.inf else repr(value)}\n"
        for name, (told, value) in values.items()
    )
