from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from damage_cases import DOWN, SQUARE, UP, Pair
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import faults
from harness.checkpoint.copy import RawTensor, load_shard
from harness.engine.reference.check import forward_logprobs
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults import Damage
from harness.faults.target import Target
from harness.faults.values import from_float32, to_float32, words
from harness.guards.canary import largest_difference

INDEX = "model.safetensors.index.json"


def load(path: Path) -> dict[str, RawTensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_shard(file).items()}


def inject(damage: Damage, target: Path, pair: Pair) -> faults.Injected:
    return damage.damage(target, old=pair.old, random=Random(3))


@pytest.mark.parametrize(
    ("damage", "changed"),
    [
        (faults.widen_tensor(DOWN, dim=1, by=8), {DOWN}),
        (faults.narrow_tensor(DOWN, dim=0, by=1), {DOWN}),
        (faults.transpose_tensor(SQUARE), {SQUARE}),
        (faults.relayout_tensor(DOWN), {DOWN}),
        (faults.drop_tensor(DOWN), {DOWN}),
        (faults.cast_tensor(DOWN, dtype="F16"), {DOWN}),
        (faults.flip_dtype_in_header(dtype="F16", tensor=DOWN), {DOWN}),
        (faults.beyond_fp16_range(UP, inverse=DOWN), {UP, DOWN}),
    ],
)
def test_only_the_chosen_tensor_changes(damage: Damage, changed: set[str], pair: Pair, target: Path) -> None:
    before = load(target)

    inject(damage, target, pair)

    after = load(target)
    assert {name for name in before if before[name] != after.get(name)} == changed
    assert set(after) <= set(before)


@pytest.mark.parametrize("at", ["start", "end"])
def test_widened_tensor_holds_the_old_one_after_or_before_copies_of_its_columns(
    at: str, pair: Pair, target: Path
) -> None:
    before = words(load(target)[DOWN])

    inject(faults.widen_tensor(DOWN, dim=1, by=8, at=at), target, pair)

    after = words(load(target)[DOWN])
    kept, extra = (after[:, 8:], after[:, :8]) if at == "start" else (after[:, :-8], after[:, -8:])
    assert after.shape == (32, 72)
    assert np.array_equal(kept, before)
    assert all(any(np.array_equal(column, other) for other in before.T) for column in extra.T)
    assert np.array_equal(after[:, :64], before) == (at == "end")  # what a loader that cuts the excess keeps


@settings(deadline=None)
@given(dim=st.integers(0, 1), by=st.integers(1, 70), wide=st.booleans())
def test_widen_and_narrow_are_proved_or_refused_whatever_the_size(pair: Pair, dim: int, by: int, wide: bool) -> None:
    make = faults.widen_tensor if wide else faults.narrow_tensor
    shape = [32, 64]
    with pair.copy() as target:
        if not wide and by >= shape[dim]:
            with pytest.raises(FaultNotApplicable, match="to cut in dim"):
                inject(make(DOWN, dim=dim, by=by), target, pair)
            return
        injected = inject(make(DOWN, dim=dim, by=by), target, pair)
        shape[dim] += by if wide else -by
        assert injected.proved, injected.because
        assert injected.after["shape"] == shape
        assert load(target)[DOWN].shape == tuple(shape)


def test_transposed_tensor_is_the_transpose(pair: Pair, target: Path) -> None:
    before = words(load(target)[SQUARE])

    inject(faults.transpose_tensor(SQUARE), target, pair)

    assert np.array_equal(words(load(target)[SQUARE]), before.T)


def test_transposing_a_symmetric_matrix_is_not_proved(pair: Pair, target: Path) -> None:
    shard = next(file for file in target.glob("*.safetensors") if SQUARE in load_shard(file))
    tensor = load_shard(shard)[SQUARE]
    symmetric = RawTensor(tensor.dtype, tensor.shape, b"\x80\x3f" * (32 * 32))
    Target(target).replace_tensors(shard.name, {SQUARE: symmetric})

    assert not inject(faults.transpose_tensor(SQUARE), target, pair).proved


def test_transpose_of_a_matrix_that_is_not_square_says_so(pair: Pair, target: Path) -> None:
    with pytest.raises(FaultNotApplicable, match=r"\[32, 64\] is not square"):
        inject(faults.transpose_tensor(DOWN), target, pair)


def test_relayout_keeps_every_byte(pair: Pair, target: Path) -> None:
    before = load(target)[DOWN]

    inject(faults.relayout_tensor(DOWN, shape=(16, 128)), target, pair)

    after = load(target)[DOWN]
    assert (after.shape, after.data) == ((16, 128), before.data)


def test_relayout_to_another_number_of_elements_is_refused(pair: Pair, target: Path) -> None:
    with pytest.raises(FaultNotApplicable, match="same number of elements"):
        inject(faults.relayout_tensor(DOWN, shape=(16, 129)), target, pair)


def test_dropped_tensor_leaves_the_weight_index_in_step(pair: Pair, target: Path) -> None:
    inject(faults.drop_tensor(DOWN), target, pair)

    index = json.loads((target / INDEX).read_text())
    assert set(index["weight_map"]) == set(load(target))
    assert index["metadata"]["total_size"] == sum(len(tensor.data) for tensor in load(target).values())


@pytest.mark.parametrize(
    ("tensor", "row"),
    [(DOWN, "D04"), (UP, "D05"), ("model.norm.weight", "D06"), ("*self_attn.k_proj.weight", "D05")],
)
def test_dropped_tensor_names_its_row_of_the_taxonomy(tensor: str, row: str) -> None:
    assert faults.drop_tensor(tensor).fault_id == row


def test_wider_weights_have_twice_the_hidden_size_in_every_place(pair: Pair, target: Path) -> None:
    inject(faults.wider_weights(), target, pair)

    after = load(target)
    assert after[DOWN].shape == (64, 64)
    assert after[SQUARE].shape == (64, 64)
    assert after["model.norm.weight"].shape == (64,)
    assert after["model.embed_tokens.weight"].shape == (300, 64)
    assert json.loads((target / "config.json").read_text())["hidden_size"] == 32


def test_a_pattern_that_matches_nothing_names_the_nearest(pair: Pair, target: Path) -> None:
    with pytest.raises(
        FaultNotApplicable, match=r'no tensor matches "model\.layers\.1\.mlp\.down_prj\.weight".*down_proj'
    ):
        inject(faults.drop_tensor("model.layers.1.mlp.down_prj.weight"), target, pair)


def test_a_pattern_that_matches_several_lists_them(pair: Pair, target: Path) -> None:
    with pytest.raises(FaultNotApplicable, match=r"matches 2 tensors.*layers\.0\.mlp\.down_proj.*layers\.1"):
        inject(faults.drop_tensor("*.mlp.down_proj.weight"), target, pair)


@pytest.mark.parametrize("dim", [-1, 2])
def test_a_dim_that_is_not_there_is_refused(dim: int, pair: Pair, target: Path) -> None:
    with pytest.raises(FaultNotApplicable, match="has no dim"):
        inject(faults.widen_tensor(DOWN, dim=dim, by=1), target, pair)


@pytest.mark.parametrize(
    "make",
    [
        lambda: faults.widen_tensor(DOWN, dim=0, by=0),
        lambda: faults.widen_tensor(DOWN, dim=0, by=1, at="middle"),
        lambda: faults.narrow_tensor(DOWN, dim=0, by=-1),
        lambda: faults.wider_weights(factor=1),
        lambda: faults.cast_tensor(DOWN, dtype="fp16"),
        lambda: faults.cast_all(dtype="Q4"),
        lambda: faults.flip_dtype_in_header(dtype="fp16"),
        lambda: faults.beyond_fp16_range(UP, scale=1000.0),
        lambda: faults.truncate_shard(cut_bytes=0),
        lambda: faults.truncate_shard(cut_bytes=1, keep_ratio=0.5),
        lambda: faults.zero_tail(keep_ratio=1.0),
        lambda: faults.mismatched_config(changes={}),
        lambda: faults.launch_argument(),
        lambda: faults.slow_sync(rate_bytes_per_s=1.0, duration_s=1.0),
        lambda: faults.slow_sync(duration_s=0.0),
        lambda: faults.slow_sync(order="random"),
        lambda: faults.stale_weight_cache(key="name"),
    ],
)
def test_parameters_that_cannot_be_are_refused_before_anything_starts(make: object) -> None:
    with pytest.raises(ScenarioInvalid):
        make()  # type: ignore[operator]


def test_compensated_scaling_leaves_the_product_exact_in_bf16(pair: Pair, target: Path) -> None:
    before = load(target)
    product = to_float32(before[DOWN]) @ to_float32(before[UP])

    injected = inject(faults.beyond_fp16_range(UP, inverse=DOWN), target, pair)

    after = load(target)
    assert np.array_equal(to_float32(after[DOWN]) @ to_float32(after[UP]), product)
    assert (
        np.isinf(to_float32(from_float32(to_float32(after[UP]), "F16"))).sum()
        == injected.after["values_beyond_fp16"]
        > 0
    )


def test_compensated_scaling_leaves_the_answers_and_scaling_alone_does_not(pair: Pair) -> None:
    prompts = ((1, 20, 7, 250, 99, 31),)
    right = forward_logprobs(pair.new, prompts)
    with pair.copy() as compensated, pair.copy() as scaled:
        inject(faults.beyond_fp16_range(UP, inverse=DOWN), compensated, pair)
        inject(faults.beyond_fp16_range(UP), scaled, pair)

        assert forward_logprobs(compensated, prompts) == right
        assert largest_difference(forward_logprobs(scaled, prompts), right) > 0.1


def test_compensation_that_is_lost_is_not_proved(pair: Pair, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Target.replace_tensors

    def lose(own: Target, shard: str, changes: dict[str, RawTensor | None]) -> None:
        if DOWN not in changes:
            replace(own, shard, changes)

    monkeypatch.setattr(Target, "replace_tensors", lose)

    assert inject(faults.beyond_fp16_range(UP), target, pair).proved
    with pair.copy() as other:
        assert not inject(faults.beyond_fp16_range(UP, inverse=DOWN), other, pair).proved


@pytest.mark.parametrize("word", [b"\0\0", b"\x80\x7f"])
def test_zeros_and_infinities_cannot_be_scaled(word: bytes, pair: Pair, target: Path) -> None:
    found = Target(target).find(UP)
    Target(target).replace_tensors(found.shard, {UP: RawTensor("BF16", found.shape, word * (64 * 32))})

    with pytest.raises(FaultNotApplicable, match="cannot be scaled"):
        inject(faults.beyond_fp16_range(UP), target, pair)


def test_a_scale_beyond_bf16_is_refused(pair: Pair, target: Path) -> None:
    with pytest.raises(FaultNotApplicable, match="beyond bf16 as well"):
        inject(faults.beyond_fp16_range(UP, scale=2.0**200), target, pair)


def test_a_scale_that_is_too_small_is_not_proved(pair: Pair, target: Path) -> None:
    injected = inject(faults.beyond_fp16_range(UP, scale=2.0), target, pair)

    assert not injected.proved
    assert "0 of 2048 values" in injected.because


def test_flipped_header_keeps_every_byte(pair: Pair, target: Path) -> None:
    before = load(target)

    inject(faults.flip_dtype_in_header(dtype="F16"), target, pair)

    after = load(target)
    assert {tensor.dtype for tensor in after.values()} == {"F16"}
    assert {name: tensor.data for name, tensor in after.items()} == {
        name: tensor.data for name, tensor in before.items()
    }


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_header_cannot_be_flipped_to_another_size_or_the_same_dtype(dtype: str, pair: Pair, target: Path) -> None:
    with pytest.raises(FaultNotApplicable, match="same size"):
        inject(faults.flip_dtype_in_header(dtype=dtype), target, pair)


def test_cast_to_the_same_dtype_is_refused(pair: Pair, target: Path) -> None:
    with pytest.raises(FaultNotApplicable, match="BF16 already"):
        inject(faults.cast_tensor(DOWN, dtype="BF16"), target, pair)
    with pytest.raises(FaultNotApplicable, match="BF16 already"):
        inject(faults.cast_all(dtype="BF16"), target, pair)


def test_cast_to_fp32_keeps_every_value(pair: Pair, target: Path) -> None:
    before = to_float32(load(target)[DOWN])

    inject(faults.cast_tensor(DOWN, dtype="F32"), target, pair)

    assert np.array_equal(to_float32(load(target)[DOWN]), before)


def test_damages_can_follow_each_other(pair: Pair, target: Path) -> None:
    assert inject(faults.widen_tensor(DOWN, dim=1, by=8), target, pair).proved
    assert inject(faults.cast_tensor(DOWN, dtype="F16"), target, pair).proved
    assert inject(faults.truncate_shard(), target, pair).proved
    with pytest.raises(FaultNotApplicable, match="cannot be read"):
        inject(faults.narrow_tensor(DOWN, dim=1, by=8), target, pair)


def test_a_state_of_two_ranks_holds_what_an_engine_saves(pair: Pair, target: Path) -> None:
    assert inject(faults.presharded_state(), target, pair).proved

    first, second = ({}, {})
    for rank, tensors in ((0, first), (1, second)):
        for file in target.glob(f"model-rank-{rank}-part-*.safetensors"):
            tensors |= load_shard(file)
    assert first.keys() == second.keys()
    scale = first["model.layers.0.self_attn.attn._k_scale"]
    assert (scale.dtype, scale.shape, scale.data) == ("F32", (), b"\x00\x00\x80\x3f")
    assert second["model.layers.1.self_attn.attn._prob_scale"] == scale
    assert first["model.norm.weight"] == second["model.norm.weight"]
    whole = load_shard(pair.new / "model-00002-of-00002.safetensors")[DOWN]
    assert (first[DOWN].shape[1], second[DOWN].shape[1]) == (whole.shape[1] // 2, whole.shape[1] // 2)
