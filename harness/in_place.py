"""Which procedure gives other weights to the engine that serves: a reload, an update, or the exchange of its adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.adapter_update import AdapterUpdate
from harness.engine.engine import Engine
from harness.engine.rollout import How, Rollout
from harness.reload import InPlace
from harness.service import Service
from harness.weight_update import Sent, WeightUpdate


def roll_in_place(engine: Engine, rollout: Rollout, *, service: Service, live: Path, is_gated: bool) -> str:
    """Carry out a rollout in place and return why it did not come about; empty when it did.

    `live` is what the engine was started on, where the new checkpoint is published. With the gate, an adapter is tried under
    another name before.
    Raises: HarnessError, CheckpointDefect when the update cannot be made of that checkpoint: then nothing was done.
    """
    scenario = service.ground.scenario
    claimed = {claim.name for claim in (*scenario.unguarded, *scenario.guarded)}
    in_place = InPlace(
        service=service,
        rollout=rollout,
        wants_checksums="checksums_trusted" in claimed,
        wants_requests_under_way="answers_unmixed" in claimed,
    )
    if rollout.how is How.UPDATE:
        sent = Sent.of(live.resolve(), rollout.flaw)
        update = WeightUpdate(service=service, engine=engine, flaw=rollout.flaw, sent=sent)
        in_place = replace(in_place, change=update.carry_out)
    elif rollout.how is How.ADAPTER:
        adapter = AdapterUpdate(service=service, engine=engine, rollout=rollout, live=live)
        if is_gated and not adapter.passes_trial():
            return "the canary gate refused the adapter, loaded under a trial name"
        in_place = replace(in_place, change=adapter.carry_out, look=adapter.is_right)
    return in_place.roll(engine, is_gated=is_gated)
