"""What pre-flight says beforehand about the checkpoint and the launch line of a scenario: its faults, without any engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from harness.admission import preflight_findings
from harness.checkpoint.models import default_cache
from harness.clock import Deadline
from harness.engine.engine import Engine, EngineIdentity, EngineSite
from harness.engine.launch import Launch
from harness.errors import FaultNotProved, UsageError
from harness.faults.fault import CacheFault, Damage, LaunchFault, LiveFault, PublishFault, StartRace
from harness.faults.publish import RsyncInPlace, SlowSync
from harness.ground import LIVE, Ground, weight_cache_of
from harness.guards.canary import Golden, GoldenPair
from harness.guards.finding import BLOCKING, PreflightFinding
from harness.guards.manifest import write_manifest
from harness.judge.agreement import Prediction
from harness.observe.history import EventKind, Recorder
from harness.operations import Operations
from harness.scenario import Mode, Scenario
from harness.service import Service

NOBODY = Golden(
    weights_id="",
    engine="",
    build="",
    hardware="",
    flags=(),
    prompts=(),
    prompt_logprobs=(),
    noise_max=0.0,
    noise_checks=0,
    tolerance=0.0,
)


ROWS = ("C", "D", "K", "L")  # config, data, caches, launch; the others are about processes, reloads and speed
OF_THE_HOST = frozenset({"K04", "L05"})  # which `--check-host` looks at, there


class NoEngine:
    """A starter for what is only foreseen: it starts nothing."""

    def identity(self) -> EngineIdentity:
        """Name no engine."""
        return EngineIdentity(kind="none", name="none", version="", build="", hardware="")

    def open(self, site: EngineSite) -> None:
        """Acquire nothing."""

    def start(self, launch: Launch, *, incarnation: str) -> Engine:
        """Refuse."""
        raise UsageError(f'"{incarnation}" is only foreseen: no engine is started for a prediction')

    def close(self) -> None:
        """Release nothing."""


def is_foreseeable(scenario: Scenario) -> bool:
    """Say whether an engine is started on what is wrong, and files, a launch line or a weight cache are all that is."""
    starts = not scenario.is_incident and not scenario.reloads
    kinds = Damage | LaunchFault | PublishFault | CacheFault | StartRace
    return starts and all(
        isinstance(fault, kinds)
        and not isinstance(fault, LiveFault)
        and fault.fault_id[:1] in ROWS
        and fault.fault_id not in OF_THE_HOST
        for fault in scenario.faults
    )


def predict(
    scenario: Scenario, engines: Sequence[str], work: Path, *, seed: int = 1, max_model_len: int = 256
) -> Mapping[str, Prediction]:
    """Damage and publish in the new directory `work` as the scenario does, and ask pre-flight about it for each engine.

    `engines` are releases such as "vllm==0.32.0". What a publish fault still does in the background counts as it is then.
    Raises: FaultNotProved when a fault did not prove itself: of that nothing can be foreseen.
    """
    old, new = (source.build(default_cache()) for source in (scenario.old, scenario.new))
    work.mkdir(parents=True)
    cache = work / "weight_cache"
    launch = Launch(
        checkpoint_root=work / "checkpoints",
        checkpoint_name=LIVE,
        max_model_len=max_model_len,
        weight_cache=weight_cache_of(scenario, cache),
        extra_arguments=scenario.engine_arguments,
    )
    recorder = Recorder(work / "history.jsonl")
    ground = Ground(
        scenario=scenario,
        mode=Mode.UNGUARDED,
        starter=NoEngine(),
        recorder=recorder,
        goldens=GoldenPair(NOBODY, NOBODY),
        old=old,
        new=new,
        work=work,
        cache=cache,
        launch=launch,
        api_key="",
        random=Random(f"{seed}:{scenario.name}"),
        deadline=Deadline.after(scenario.limit_s),
    )
    manifest = work / "published.json"
    write_manifest(new, manifest)
    operations = Operations(ground, Service(ground))
    try:
        operations.prepare()
        operations.publish_new()
        faulty = operations.alter_launch()
        unproved = [e.data["because"] for e in recorder.snapshot().of(EventKind.FAULT_INJECTED) if not e.data["proved"]]
        if unproved:
            raise FaultNotProved(f'"{scenario.name}": {"; ".join(unproved)}')
        live = operations.publication.live.resolve()
        is_moving = any(isinstance(fault, SlowSync | RsyncInPlace) for fault in scenario.faults)
        return {
            engine: replace(_prediction(live, faulty, engine, against=old, manifest=manifest), is_moving=is_moving)
            for engine in engines
        }
    finally:
        operations.stop_all()
        recorder.close()


def _prediction(path: Path, launch: Launch, engine: str, *, against: Path, manifest: Path) -> Prediction:
    """Ask what an operator can ask, from the cheapest on, until something is found that stops the rollout."""
    alone = preflight_findings(path, launch, engine=engine)
    if _blocking(alone):
        return Prediction(findings=alone)
    beside = preflight_findings(path, launch, engine=engine, against=against)
    if _blocking(beside):
        return Prediction(findings=beside, asked_with="--against")
    compared = preflight_findings(path, launch, engine=engine, manifest=manifest)
    return Prediction(findings=compared, asked_with="--manifest") if _blocking(compared) else Prediction(findings=alone)


def _blocking(findings: Sequence[PreflightFinding]) -> bool:
    return any(finding.severity in BLOCKING for finding in findings)
