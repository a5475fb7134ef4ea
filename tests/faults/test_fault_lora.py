"""Damaged adapters prove themselves, and say so when nothing, or something else, was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from harness.checkpoint.copy import RawTensor, load_shard, save_shard
from harness.checkpoint.lora import Adapter, merged, write_adapter
from harness.checkpoint.models import tiny_llama
from harness.engine.reference.check import forward_logprobs
from harness.errors import FaultNotApplicable, ScenarioInvalid, UsageError
from harness.faults import AdapterFault
from harness.faults.lora import adapter_prefix, adapter_rank, adapter_width
from harness.faults.target import Target
from harness.guards.canary import largest_difference

FAULTS: tuple[AdapterFault, ...] = (adapter_rank(), adapter_width(), adapter_prefix())
every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(1, hidden=32, heads=2, kv_heads=1, intermediate=64, vocabulary=300).build(
        tmp_path_factory.mktemp("models")
    )


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base, Adapter(seed=1))


def damaged(fault: AdapterFault, adapter: Path, base: Path) -> bool:
    injected = fault.distort(adapter, base=base)
    assert injected.fault == fault.name
    assert injected.fault_id == fault.fault_id
    return injected.proved


@every_fault
def test_proves_itself(fault: AdapterFault, adapter: Path, base: Path) -> None:
    before = (adapter / ADAPTER_WEIGHTS).read_bytes()
    assert damaged(fault, adapter, base)
    assert (adapter / ADAPTER_WEIGHTS).read_bytes() != before


@every_fault
def test_is_not_proved_when_its_writes_are_lost(
    fault: AdapterFault, adapter: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in ("replace_tensors", "rename_tensors", "write"):
        monkeypatch.setattr(Target, change, lambda *arguments, **named: None)
    assert not damaged(fault, adapter, base)


@every_fault
def test_is_not_proved_when_something_else_was_written(
    fault: AdapterFault, adapter: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_tensors = Target.replace_tensors

    def replace_others(own: Target, shard: str, changes: dict[str, RawTensor | None]) -> None:
        other = {
            name: raw and RawTensor(raw.dtype, raw.shape, bytes(raw.data[:-1]) + bytes([raw.data[-1] ^ 1]))
            for name, raw in changes.items()
        }
        replace_tensors(own, shard, other)

    monkeypatch.setattr(Target, "replace_tensors", replace_others)
    assert not damaged(fault, adapter, base)


def test_a_higher_rank_computes_the_same(adapter: Path, base: Path, tmp_path: Path) -> None:
    prompts = ((5, 6, 7, 8),)
    before = forward_logprobs(merged(tmp_path / "before", base, adapter), prompts)
    assert damaged(adapter_rank(64), adapter, base)
    assert {min(tensor.shape) for tensor in load_shard(adapter / ADAPTER_WEIGHTS).values()} <= {16, 32, 64}
    after = forward_logprobs(merged(tmp_path / "after", base, adapter), prompts)
    assert largest_difference(before, after) < 1e-4


@pytest.mark.parametrize("fault", [adapter_width(), adapter_prefix()], ids=lambda fault: fault.name)
def test_other_widths_and_names_belong_to_another_base(
    fault: AdapterFault, adapter: Path, base: Path, tmp_path: Path
) -> None:
    assert damaged(fault, adapter, base)
    with pytest.raises(UsageError):
        merged(tmp_path / "merged", base, adapter)


def test_what_changes_nothing_is_refused(adapter: Path, base: Path) -> None:
    for fault in (adapter_rank(8), adapter_prefix("encoder.")):
        with pytest.raises(FaultNotApplicable):
            fault.distort(adapter, base=base)
    for make in (lambda: adapter_width(by=0), lambda: adapter_prefix("x", to="x")):
        with pytest.raises(ScenarioInvalid):
            make()


def changed_config(adapter: Path, **changes: object) -> None:
    path = adapter / ADAPTER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.chmod(0o644)
    path.write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(
    "changes", [{"r": None}, {"r": "8"}, {"lora_alpha": None}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 4}}]
)
def test_a_config_by_which_a_higher_rank_would_not_compute_the_same_is_refused(
    adapter: Path, base: Path, changes: dict[str, object]
) -> None:
    changed_config(adapter, **changes)
    with pytest.raises(FaultNotApplicable, match=next(iter(changes))):
        adapter_rank().distort(adapter, base=base)


@pytest.mark.parametrize("fault", [adapter_rank(), adapter_width()], ids=lambda fault: fault.name)
@pytest.mark.parametrize("name", ["base_model.model.x.lora_A.weight", "base_model.model.x.lora_magnitude_vector"])
def test_an_adapter_that_is_not_of_two_factors_is_refused(
    fault: AdapterFault, adapter: Path, base: Path, name: str
) -> None:
    tensors = load_shard(adapter / ADAPTER_WEIGHTS)
    (adapter / ADAPTER_WEIGHTS).chmod(0o644)
    save_shard(adapter / ADAPTER_WEIGHTS, {**tensors, name: RawTensor("BF16", (4,), bytes(8))})
    with pytest.raises(FaultNotApplicable, match=name):
        fault.distort(adapter, base=base)


def test_names_that_the_base_has_are_not_unknown_ones(adapter: Path, base: Path) -> None:
    with pytest.raises(FaultNotApplicable, match=r"k_proj"):
        adapter_prefix("q_proj", to="k_proj").distort(adapter, base=base)


def test_a_rank_below_one_is_no_rank() -> None:
    with pytest.raises(ScenarioInvalid, match="rank=0"):
        adapter_rank(0)
