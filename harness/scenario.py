"""What a scenario is: data, checked when it is made."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from harness.checkpoint.models import ModelSource
from harness.engine.rollout import How, Rollout, blue_green, restart
from harness.errors import ScenarioInvalid
from harness.faults.fault import (
    AdapterFault,
    CacheFault,
    CompileCacheFault,
    Damage,
    Fault,
    LaunchFault,
    LiveFault,
    PublishFault,
    StartRace,
)
from harness.faults.old_server import PortOfOldServer
from harness.judge.claim import PAIRED_ONLY, WHY_PAIRED_ONLY, Claim
from harness.load.shape import LoadShape


class Mode(StrEnum):
    """With the operator's defences, or the engine alone."""

    UNGUARDED = "unguarded"
    GUARDED = "guarded"


class Action(StrEnum):
    """What a step does."""

    PUBLISH = "publish"
    START_ROLLOUT = "start_rollout"
    INJECT = "inject"
    REMEDY = "remedy"


class Guard(StrEnum):
    """One defence of the operator."""

    PREFLIGHT = "preflight"  # look at the files before anything starts
    CANARY_GATE = "canary_gate"  # no traffic before the canaries are right
    PURGE_CACHE = "purge_cache"  # empty the weight cache before each start


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One action and when it is due: at a time, right after the step before, or once the fault was noticed."""

    action: Action
    at_s: float | None = None
    after_detection_limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class When:
    """A moment that waits for its action."""

    at_s: float | None = None
    after_detection_limit_s: float | None = None

    def publish(self, which: str) -> Step:
        """Put the new checkpoint where the engine reads it."""
        if which != "new":
            raise ScenarioInvalid(f'publish("{which}"): only "new" can be published')
        return self._step(Action.PUBLISH)

    def start_rollout(self) -> Step:
        """Move the engine to what was published."""
        return self._step(Action.START_ROLLOUT)

    def inject(self) -> Step:
        """Let the scenario's live faults strike the engine that serves."""
        return self._step(Action.INJECT)

    def remedy(self) -> Step:
        """Undo the fault and roll out the undamaged new checkpoint, or after an incident start the same one anew.

        Nothing is done when the rollout went well and nobody noticed anything.
        """
        return self._step(Action.REMEDY)

    def _step(self, action: Action) -> Step:
        return Step(action=action, at_s=self.at_s, after_detection_limit_s=self.after_detection_limit_s)


def at(at_s: float) -> When:
    """Name a time in seconds from the start of load."""
    return When(at_s=at_s)


def then() -> When:
    """Name the moment right after the step before."""
    return When()


def after_detection(*, limit_s: float) -> When:
    """Name the moment at which somebody noticed the fault, or `limit_s` seconds later when nobody did."""
    return When(after_detection_limit_s=limit_s)


USUAL_TIMELINE = (at(2.5).publish("new"), then().start_rollout(), after_detection(limit_s=120.0).remedy())
INCIDENT_TIMELINE = (at(2.5).inject(), after_detection(limit_s=60.0).remedy())
_ROLLOUT = (Action.PUBLISH, Action.START_ROLLOUT)
_ORDERS = (_ROLLOUT, (Action.INJECT,), (Action.INJECT, *_ROLLOUT), (*_ROLLOUT, Action.INJECT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A rollout, the faults in it and what must hold, without and with the operator's guards."""

    name: str
    old: ModelSource
    new: ModelSource
    faults: tuple[Fault, ...]
    load: LoadShape
    unguarded: tuple[Claim, ...]
    guarded: tuple[Claim, ...]
    rollout: Rollout = restart()  # noqa: RUF009 - a frozen value
    guarded_rollout: Rollout = blue_green()  # noqa: RUF009 - a frozen value
    timeline: tuple[Step, ...] = USUAL_TIMELINE
    guards: tuple[Guard, ...] = (Guard.PREFLIGHT, Guard.CANARY_GATE)
    engine_arguments: tuple[str, ...] = ()  # of every engine of this scenario, such as those that split the model
    limit_s: float = 600.0
    about: str = ""  # what goes wrong, what must hold, where that comes from; default: the module's docstring

    def __post_init__(self) -> None:
        if not self.about:
            object.__setattr__(self, "about", _docstring_of_caller())
        wrong = [
            *([] if self.name.isidentifier() else ["its name must be an identifier"]),
            *([] if self.faults or self.reloads else ["it injects no fault"]),  # a reload is one by itself
            *([] if self.unguarded and self.guarded else ["it claims nothing in one of its modes"]),
            *([] if 0 < self.limit_s < math.inf else [f"limit_s must be positive, got {self.limit_s:g}"]),
            *self._timeline_problems(),
            *self._fault_problems(),
            *([WHY_PAIRED_ONLY] if any(c.name == PAIRED_ONLY for c in (*self.unguarded, *self.guarded)) else []),
        ]
        if wrong:
            raise ScenarioInvalid(f'scenario "{self.name}": {"; ".join(wrong)}')

    def _timeline_problems(self) -> list[str]:
        times = [step.at_s for step in self.timeline if step.at_s is not None]
        waits = [s.after_detection_limit_s for s in self.timeline if s.after_detection_limit_s is not None]
        actions = tuple(step.action for step in self.timeline)
        problems = [
            f"after_detection(limit_s={wait:g}): nobody could notice anything in it, it must be positive"
            for wait in waits
            if not 0 < wait < math.inf
        ]
        if times != sorted(times) or not all(map(math.isfinite, times)):
            problems.append(f"timeline must be in time order, got at_s={tuple(times)}")
        if actions not in (*_ORDERS, *((*order, Action.REMEDY) for order in _ORDERS)):
            problems.append(
                "timeline must be publish, start_rollout and perhaps remedy, with inject before or after the rollout or "
                f"in its place, got {[str(a) for a in actions]}"
            )
        elif times[:1] and not 0 < times[0] < self.limit_s:
            problems.append(f"{actions[0]} must lie between 0 and limit_s={self.limit_s:g}, got {times[0]:g}")
        return problems

    def _fault_problems(self) -> list[str]:
        problems = [
            f'"{fault.name}" is no kind of fault that can be injected'
            for fault in self.faults
            if not isinstance(
                fault,
                Damage
                | AdapterFault
                | LaunchFault
                | PublishFault
                | CacheFault
                | CompileCacheFault
                | StartRace
                | LiveFault,
            )
        ]
        live = [fault.name for fault in self.faults if isinstance(fault, LiveFault)]
        if self.is_incident and len(live) != len(self.faults):
            problems.append("a scenario without a rollout can only inject live faults")
        if any(step.action is Action.INJECT for step in self.timeline) and not live:
            problems.append("inject() needs a live fault")
        if self.reloads and any(isinstance(fault, LaunchFault | CacheFault | StartRace) for fault in self.faults):
            problems.append("an engine that reloads is not started: faults of launch, cache and start cannot act")
        if not self.adapts and any(isinstance(fault, AdapterFault) for fault in self.faults):
            problems.append("no adapter is rolled out that could be distorted: rollout must be update_adapter()")
        if any(isinstance(fault, PortOfOldServer) for fault in self.faults):
            hows = (self.rollout.how, self.guarded_rollout.how)
            if set(hows) != {How.BLUE_GREEN}:
                problems.append(
                    f'"{PortOfOldServer.name}" needs an old server that runs beside the new one: rollout and '
                    f"guarded_rollout must be blue_green, got {hows[0]} and {hows[1]}"
                )
        for kind, what in ((PublishFault, "publish"), (CacheFault, "cache"), (CompileCacheFault, "compile cache")):
            count = sum(isinstance(fault, kind) for fault in self.faults)
            if count > 1:
                problems.append(f"{count} {what} faults, at most one is possible")
        return problems

    @property
    def reloads(self) -> bool:
        """Say whether an engine is given other weights while it runs, in either mode."""
        return self.rollout.is_in_place or self.guarded_rollout.is_in_place

    @property
    def updates(self) -> bool:
        """Say whether an engine is sent other weights over a transfer engine, in either mode."""
        return How.UPDATE in (self.rollout.how, self.guarded_rollout.how)

    @property
    def adapts(self) -> bool:
        """Say whether an engine is given another adapter while it runs, in either mode."""
        return How.ADAPTER in (self.rollout.how, self.guarded_rollout.how)

    @property
    def sleeps(self) -> bool:
        """Say whether an engine is put to sleep by a fault."""
        return any(getattr(fault, "sleeps", False) for fault in self.faults)

    @property
    def is_incident(self) -> bool:
        """Say whether nothing is rolled out: the engine on the old checkpoint is struck, and started anew."""
        return all(step.action is not Action.START_ROLLOUT for step in self.timeline)

    def at_rate(self, rate_rps: float) -> Scenario:
        """Return the same scenario at another request rate, with its times changed so that as many requests fit."""
        stretch = self.load.rate_rps / rate_rps
        steps = (replace(s, at_s=None if s.at_s is None else s.at_s * stretch) for s in self.timeline)
        return replace(
            self, load=self.load.at_rate(rate_rps), timeline=tuple(steps), limit_s=self.limit_s * max(1.0, stretch)
        )

    def with_patience(self, factor: float) -> Scenario:
        """Return the same scenario with every time limit multiplied, for engines that start slowly."""
        steps = (
            replace(
                s,
                after_detection_limit_s=None
                if s.after_detection_limit_s is None
                else s.after_detection_limit_s * factor,
            )
            for s in self.timeline
        )
        return replace(
            self,
            timeline=tuple(steps),
            rollout=replace(self.rollout, ready_limit_s=self.rollout.ready_limit_s * factor),
            guarded_rollout=replace(self.guarded_rollout, ready_limit_s=self.guarded_rollout.ready_limit_s * factor),
            unguarded=tuple(claim.with_patience(factor) for claim in self.unguarded),
            guarded=tuple(claim.with_patience(factor) for claim in self.guarded),
            limit_s=self.limit_s * factor,
        )

    def claims(self, mode: Mode) -> tuple[Claim, ...]:
        """Return what is claimed in a mode."""
        return self.guarded if mode is Mode.GUARDED else self.unguarded

    def declaration(self) -> Mapping[str, Any]:
        """Return what is stored of the scenario before it runs."""
        return {
            "name": self.name,
            "about": self.about,
            "old": self.old.name,
            "new": self.new.name,
            "faults": [
                {"name": fault.name, "fault_id": fault.fault_id, "parameters": dict(fault.parameters())}
                for fault in self.faults
            ],
            "rollout": self.rollout.how,
            "guarded_rollout": self.guarded_rollout.how,
            "guards": list(self.guards),
            "engine_arguments": list(self.engine_arguments),
            "timeline": [
                {"action": s.action, "at_s": s.at_s, "after_detection_limit_s": s.after_detection_limit_s}
                for s in self.timeline
            ],
            "limit_s": self.limit_s,
        }


def _docstring_of_caller() -> str:
    """Return the docstring of the module that declares the scenario: the first frame outside this file."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename != __file__ and not frame.f_code.co_filename.startswith("<"):
            return inspect.cleandoc(frame.f_globals.get("__doc__") or "")
        frame = frame.f_back
    return ""
