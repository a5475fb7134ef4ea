"""An adapter names what its base has, and merging it gives the checkpoint that computes the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoint.adapter import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_of
from harness.checkpoint.copy import load_shard, private_copy
from harness.checkpoint.lora import Adapter, merged, write_adapter
from harness.checkpoint.manifest import find_defects, weights_id
from harness.checkpoint.models import adapted_llama, tiny_llama
from harness.engine.reference.check import forward_logprobs
from harness.errors import UsageError
from harness.faults.values import to_float32
from harness.guards.canary import largest_difference

PROMPTS = ((5, 6, 7, 8), (200, 100, 50))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(1, hidden=32, heads=2, kv_heads=1, intermediate=64, vocabulary=300).build(
        tmp_path_factory.mktemp("models")
    )


def test_the_same_seed_gives_the_same_adapter_and_another_seed_another(base: Path, tmp_path: Path) -> None:
    written = [write_adapter(tmp_path / str(number), base, Adapter(seed=seed)) for number, seed in enumerate((1, 1, 2))]
    contents = [(path / ADAPTER_WEIGHTS).read_bytes() for path in written]
    assert contents[0] == contents[1] != contents[2]


def test_every_matrix_of_its_modules_has_two_factors_of_its_rank(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base, Adapter(seed=1, rank=3, modules=("k_proj", "down_proj")))
    shapes = {name: tensor.shape for name, tensor in load_shard(adapter / ADAPTER_WEIGHTS).items()}
    start = "base_model.model.model.layers"
    assert len(shapes) == 2 * 2 * 2
    assert shapes[f"{start}.1.self_attn.k_proj.lora_A.weight"] == (3, 32)
    assert shapes[f"{start}.1.self_attn.k_proj.lora_B.weight"] == (16, 3)
    assert shapes[f"{start}.0.mlp.down_proj.lora_A.weight"] == (3, 64)
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    assert (config["r"], config["target_modules"]) == (3, ["k_proj", "down_proj"])


def test_merging_adds_the_product_and_nothing_else(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base, Adapter(seed=1, modules=("o_proj",)))
    made = merged(tmp_path / "m", base, adapter)
    before, after = load_shard(base / "model.safetensors"), load_shard(made / "model.safetensors")
    factors = load_shard(adapter / ADAPTER_WEIGHTS)
    for name, tensor in before.items():
        difference = to_float32(after[name]) - to_float32(tensor)
        if not name.endswith("o_proj.weight"):
            assert not difference.any()
            continue
        module = "base_model.model." + name.removesuffix(".weight")
        product = to_float32(factors[f"{module}.lora_B.weight"]) @ to_float32(factors[f"{module}.lora_A.weight"])
        np.testing.assert_allclose(difference, product, atol=1e-6)
    assert largest_difference(forward_logprobs(made, PROMPTS), forward_logprobs(base, PROMPTS)) > 0.1


def test_an_adapter_of_another_base_is_not_merged(base: Path, tmp_path: Path) -> None:
    wider = tiny_llama(1, hidden=64, heads=2, kv_heads=1, intermediate=64, vocabulary=300).build(tmp_path / "models")
    deeper = tiny_llama(1, hidden=32, heads=2, kv_heads=1, intermediate=64, vocabulary=300, layers=3).build(
        tmp_path / "models"
    )
    for number, (other, said) in enumerate(((wider, "is for another shape"), (deeper, "changes what .* has not"))):
        adapter = write_adapter(tmp_path / f"a{number}", other, Adapter(seed=1))
        with pytest.raises(UsageError, match=said):
            merged(tmp_path / f"m{number}", base, adapter)


def test_an_adapter_for_nothing_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has none of the modules w9"):
        write_adapter(tmp_path / "a", base, Adapter(seed=1, modules=("w9",)))
    with pytest.raises(UsageError, match="rank 0"):
        Adapter(seed=1, rank=0)


def test_an_adapter_of_a_checkpoint_is_part_of_its_identity(tmp_path: Path) -> None:
    plain = tiny_llama(1).build(tmp_path)
    first, second = (adapted_llama(1, adapter=seed).build(tmp_path) for seed in (1, 2))
    assert adapter_of(plain) is None
    assert adapter_of(first) == first / ADAPTER
    assert len({weights_id(each) for each in (plain, first, second)}) == 3
    assert adapted_llama(1, adapter=1).build(tmp_path) == first

    scaled = private_copy(first, tmp_path / "scaled")
    config = json.loads((scaled / ADAPTER / ADAPTER_CONFIG).read_text())
    (scaled / ADAPTER / ADAPTER_CONFIG).write_text(json.dumps({**config, "lora_alpha": 99}))
    assert weights_id(scaled) != weights_id(first), "the same factors, scaled otherwise, are another adapter"


def test_an_adapter_is_no_checkpoint_that_was_moved_into_another(tmp_path: Path) -> None:
    made = private_copy(adapted_llama(1).build(tmp_path / "models"), tmp_path / "made")
    assert not find_defects(made)
    (made / ADAPTER / ADAPTER_CONFIG).unlink()
    assert [defect.reason for defect in find_defects(made)] == ["nested_checkpoint"]


def test_a_seed_below_zero_is_refused_before_anything_is_written() -> None:
    with pytest.raises(UsageError, match="seed of an adapter is -1"):
        adapted_llama(adapter=-1)
