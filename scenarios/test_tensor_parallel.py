"""The model is split over two ranks, and something is wrong with what only one of them needs.

Must hold: with guards nobody is answered from it, and service comes back with both ranks; without, the engine notices no
later than it was seen to before. Source: taxonomy rows D03, D07, D08, D15, L03. Each rank reads every file and keeps its half of each tensor: the halves are
checked, or not, by each rank for itself.
"""

from __future__ import annotations

import pytest

from harness import Scenario, faults, models
from harness.faults import Fault
from scenarios.defences import BITES, LOAD, contained, qualifying

TWO_RANKS = ("--tensor-parallel-size", "2")
DOWN = "model.layers.1.mlp.down_proj.weight"  # split by columns
GATE = "model.layers.1.mlp.gate_proj.weight"  # split by rows
ELEMENTS = 256 * 128  # of that one: its last row is in the second rank's half


def split(name: str, fault: Fault, *, noticed_by: str) -> Scenario:
    """Return the scenario of one fault under two ranks; each engine start splits the model."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1, shards=2),
        new=models.tiny_llama(seed=2, shards=2),
        faults=(fault,),
        load=LOAD,
        engine_arguments=TWO_RANKS,
        unguarded=BITES,
        guarded=contained(noticed_by),
    )


SCENARIOS = (
    split("one_bit_of_the_second_rank", faults.flip_bit(GATE, element=ELEMENTS - 1), noticed_by="canary"),
    split("rows_that_the_second_rank_lacks", faults.narrow_tensor(GATE, dim=0, by=32), noticed_by="preflight"),
    split("columns_beyond_the_second_rank", faults.widen_tensor(DOWN, dim=1, by=32, at="end"), noticed_by="preflight"),
    split("missing_shard_under_two_ranks", faults.missing_shard(), noticed_by="preflight"),
    split("three_ranks_for_four_heads", faults.parallel_size(3), noticed_by="preflight"),
)


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", qualifying(SCENARIOS, "rows_that_the_second_rank_lacks"))
def test_nobody_is_served_from_what_one_rank_lacks(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()
