"""One qualification while it is gathered: which engine each side turned out to be, what was found, and why the rest was not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import HarnessError, UsageError
from harness.judge.qualification import PARTS, RECOVERY
from harness.qualify.evidence import Known, build_of
from harness.qualify.request import Request
from harness.qualify.reuse import why_of_another
from harness.qualify.side import Side
from harness.recording import Tell
from harness.report.store import RunRecord, load_run
from harness.scenario import Scenario
from harness.settings import Settings

CANDIDATE, BASELINE = "candidate", "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """What is asked for, and what came of it so far."""

    request: Request
    scenarios: tuple[Scenario, ...]  # which may be run
    names: tuple[str, ...]  # of all that are judged: these, and those that every qualification requires
    noticed: frozenset[str]  # of those that claim who notices them: detection is about no other
    tell: Tell
    labels: dict[str, str | None] = field(default_factory=dict)  # which engine each side is, once that is known
    builds: dict[str, str] = field(default_factory=dict)  # of the runs of each side
    asked: dict[str, str] = field(default_factory=dict)  # the build that a side said it is
    silent: dict[str, str] = field(default_factory=dict)  # why a side could not say which build it is
    sources: dict[str, list[str]] = field(default_factory=lambda: {part: [] for part in PARTS})
    # Of each part: why there is nothing of a scenario, of a side, or of the comparison.
    why: dict[str, dict[str, str]] = field(default_factory=lambda: {part: {} for part in PARTS})
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.labels.update({arm: side.label for arm, side in self.sides.items()})

    @property
    def sides(self) -> Mapping[str, Side]:
        """Return both sides."""
        return {CANDIDATE: self.request.candidate, BASELINE: self.request.baseline}

    def label(self, arm: str) -> str:
        """Return which engine a side is, or how it was named where that is not known."""
        return self.labels[arm] or self.sides[arm].given

    def known(self, arm: str) -> Known:
        """Return which engine and builds a side is known to be."""
        builds = frozenset(build for seen in (self.builds, self.asked) if (build := seen.get(arm)))
        return Known(name=arm, label=self.labels[arm], builds=builds)

    def note(self, text: str) -> None:
        """Note what a reader of the verdict must know; each text once."""
        if text not in self.notes:
            self.notes.append(text)

    def lack(self, part: str, names: Iterable[str], why: str) -> None:
        """Note why there is nothing of these in a part; the first reason counts."""
        for name in names:
            self.why[part].setdefault(name, why)

    def can_start(self, arm: str, part: str, names: Sequence[str]) -> bool:
        """Say whether engines of a side can be started for a part; if not, note why its names are missing."""
        why = self.sides[arm].why_not_started
        if not self.request.may_run:
            why = f"no run of the {arm} was given, and nothing may be run"
        elif not why:
            why = self.ask(arm)
        if why:
            self.cannot(arm, part, names, why)
        return not why

    def cannot(self, arm: str, part: str, names: Sequence[str], why: str) -> None:
        """Note that no engine of a side can be started for these names of a part, so that it recovers from nothing."""
        self.lack(part, names, why)
        self.lack(RECOVERY, [arm], why)

    def ask(self, arm: str) -> str:
        """Ask a side which engine it is; return why it cannot be asked, empty when it said."""
        try:
            identity = self.sides[arm].identity(self.tell)
        except HarnessError as error:  # nothing to start it with, or an image that cannot be built
            return str(error)
        self.name(arm, identity.label)
        self.asked[arm] = identity.build
        return ""

    def why_of_another(
        self,
        path: Path,
        arm: str,
        adapt: Callable[[Settings], Settings] = lambda given: given,
        *,
        ignored: Sequence[str] = (),
    ) -> str:
        """Say why what an earlier call made of a side is not about what is asked now, and note it; empty when it is.

        `adapt` turns the settings of the side into those with which such a thing is made now.
        A name that can come to mean another build, such as a tag or an interpreter, is asked which it is now.
        """
        side, why = self.sides[arm], ""
        if side.settings is None:
            return ""
        if side.label is None and arm not in self.asked:
            if arm not in self.silent:
                self.silent[arm] = self.ask(arm)
            if self.silent[arm]:
                why = f"which build {side.given} is now cannot be asked: {self.silent[arm]}"
        if not why:
            now = Known(name=arm, label=self.labels[arm], builds=frozenset(filter(None, [self.asked.get(arm)])))
            why = why_of_another(path, adapt(side.settings), now, ignored=ignored)
        if why:
            self.note(f'"{path}" is of an earlier call and does not count for the {arm}: {why}')
        return why

    def why_unknown(self) -> str:
        """Say why it is not known which engine a side is, after asking it; empty when both are known."""
        for arm, side in self.sides.items():
            why = "" if self.labels[arm] is not None else side.why_not_started or self.ask(arm)
            if why:
                return f"the {arm} cannot be asked who it is: {why}"
        return ""

    def name(self, arm: str, label: str) -> None:
        """Note which engine a side turned out to be.

        Raises: UsageError when it is another one than was asked for, or than other runs of this side say.
        """
        known = self.labels[arm]
        if known is not None and known != label:
            raise UsageError(f'the {arm} "{self.sides[arm].given}" is {known}, and a run of it is on {label}')
        self.labels[arm] = label

    def load(self, path: Path, arm: str) -> RunRecord:
        """Return a run of a side, judged anew.

        Raises: UsageError when it is no run, or of another engine or build than the rest of its side.
        """
        run = load_run(path)
        self.name(arm, run.engine_label)
        build = build_of(path)
        if self.builds.setdefault(arm, build) != build:
            raise UsageError(
                f'"{path}" is of build "{build}", other runs of the {arm} are of "{self.builds[arm]}": give another --out'
            )
        if not run.is_complete:
            self.note(f"run {run.name} of the {arm} did not come to its end")
        if run.engine_kind == "reference":
            self.note("the reference engine is not vLLM: this is no verdict on a vLLM release")
        return run
