"""The engine is started before all files of the new checkpoint are there, or finds those of two checkpoints.

Must hold: with guards nobody is answered from a half or mixed checkpoint; without, the engine notices no later than it was
seen to before. Source: incident write-up, "weight file not found" on machines where the service started before the files
were synced, and its `mv new live`, which nests the new directory inside the old one.
"""

from __future__ import annotations

import pytest

from harness import Scenario, faults, models
from harness.checkpoint.models import ModelSource
from harness.faults import Fault
from scenarios.defences import BITES, LOAD, contained, qualifying

OLD = models.tiny_llama(seed=1, shards=2)
NEW = models.tiny_llama(seed=2, shards=2)
OTHER_SIZE = models.tiny_llama(seed=2, shards=2, intermediate=320)  # its config differs from the old one


def half_synced(name: str, fault: Fault, *, new: ModelSource = NEW, noticed_by: str = "preflight") -> Scenario:
    """Return the scenario of one kind of half-synced files."""
    return Scenario(
        name=name,
        old=OLD,
        new=new,
        faults=(fault,),
        load=LOAD,
        unguarded=BITES,
        guarded=contained(noticed_by),
    )


# Slow enough to be still running when an engine that needs half a minute to start looks at the files.
SLOW_SYNC = half_synced("slow_sync_on_restart", faults.slow_sync(duration_s=150.0))
OTHERS = (
    half_synced("missing_shard_on_restart", faults.missing_shard()),
    half_synced("truncated_shard_on_restart", faults.truncate_shard()),
    half_synced("preallocated_shard_on_restart", faults.zero_tail()),
    half_synced("pointer_file_on_restart", faults.pointer_file()),
    half_synced("new_config_old_weights_on_restart", faults.new_config_old_weights(), new=OTHER_SIZE),
    half_synced("old_config_new_weights_on_restart", faults.old_config_new_weights(), new=OTHER_SIZE),
    half_synced("stale_index_on_restart", faults.stale_index()),
    half_synced("nested_move_on_restart", faults.nested_move()),
    half_synced("slow_preallocated_sync_on_restart", faults.slow_sync(duration_s=150.0, preallocate=True)),
)


@pytest.mark.core
@pytest.mark.qualification
def test_nobody_is_served_while_files_are_copied(run_scenario) -> None:
    run_scenario(SLOW_SYNC).require_held()


@pytest.mark.parametrize("scenario", qualifying(OTHERS, "stale_index_on_restart", "nested_move_on_restart"))
def test_nobody_is_served_from_half_synced_files(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()
