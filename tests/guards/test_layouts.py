"""Names and shapes of every family: silence about what transformers writes, the right name for every single damage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.guards.expected import ExpectedTensor, Fate, Loading
from harness.guards.families import FAMILIES, expected_tensors
from harness.guards.finding import BLOCKING, PreflightFinding, Severity
from harness.guards.layout import layout_findings
from harness.guards.preflight import check
from tests.guards.layout_files import Layout, load, names, write

REFUSES, SILENT, RISK = Severity.REFUSES, Severity.SILENT, Severity.RISK
LAYOUTS = {name: load(name) for name in names(with_formula=True)}
DAMAGES = ("drop", "widen 1", "widen 32", "narrow", "transpose", "rename", "misname", "surplus", "swap")
SHAPE_IDS = {"C02", "C03", "D07", "D08"}


def blocking(layout: Layout) -> list[PreflightFinding]:
    return [finding for finding in layout_findings(layout.as_checkpoint()) if finding.severity in BLOCKING]


def found(layout: Layout) -> list[tuple[str, Severity, str]]:
    return [(finding.id, finding.severity, finding.where) for finding in blocking(layout)]


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_stops_what_transformers_writes(name: str, sharded: bool, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    findings = check(write(layout, tmp_path / "checkpoint", sharded=sharded))
    assert [finding for finding in findings if finding.blocks] == []
    # transformers gives these a bias in every layer which vLLM's model does not have: said, without stopping anything
    expected = {"qwen3-biases-tied", "qwen3-moe-some-dense"}
    assert [finding.id for finding in findings] == (["D10"] if name in expected else [])


@pytest.mark.parametrize("name", names(with_formula=False))
def test_other_architectures_are_said_to_be_unchecked_and_nothing_else(name: str) -> None:
    (finding,) = layout_findings(load(name).as_checkpoint())
    assert (finding.id, finding.severity) == ("C06", RISK)


def test_every_family_was_captured() -> None:
    assert {layout.config["architectures"][0] for layout in LAYOUTS.values()} == set(FAMILIES)
    assert len(names()) >= 30


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_is_promised_and_nothing_more(name: str) -> None:
    layout = LAYOUTS[name]
    expected = expected_tensors(layout.config)
    assert expected is not None
    promised = set(expected.of_model)
    for number in range(expected.layers):
        promised |= {f"model.layers.{number}.{inner}" for inner in expected.kind(number).tensors}
    assert promised == set(layout.tensors)
    assert {tensor: expected.shape(tensor) for tensor in layout.tensors} == layout.shapes


def damaged(layout: Layout, damage: str, name: str, dimension: int) -> Layout | None:
    """Return the layout with one damage to one tensor; None where the headers would stay the same."""
    shapes = layout.shapes
    shape = shapes[name]
    dimension %= len(shape)
    if damage == "drop":
        del shapes[name]
    elif damage in ("widen 1", "widen 32", "narrow"):
        by = {"widen 1": 1, "widen 32": 32, "narrow": -1}[damage]
        if shape[dimension] + by < 1:
            return None
        shapes[name] = (*shape[:dimension], shape[dimension] + by, *shape[dimension + 1 :])
    elif damage == "transpose":
        shapes[name] = shape[::-1]
    elif damage == "rename":
        shapes[f"{name}.old"] = shapes.pop(name)
    elif damage == "misname":
        shapes[name.replace("weight", "wieght").replace("bias", "bais")] = shapes.pop(name)
    elif damage == "surplus":
        shapes[f"{name.rpartition('.')[0]}_extra.weight"] = shape
    elif damage == "swap":
        other = next((other for other in shapes if shapes[other] != shape and len(shapes[other]) == len(shape)), None)
        if other is None:
            return None
        shapes[name], shapes[other] = shapes[other], shape
    return None if shapes == layout.shapes else layout.with_shapes(shapes)


def absence(layout: Layout, name: str) -> tuple[str, Severity]:
    """Return what the absence of one tensor is, by its name alone."""
    if name == "lm_head.weight":
        return "C04", SILENT
    if "norm" in name:
        return "D06", REFUSES
    if re.search(r"\.(q|k|v|gate|up)_proj\.|\.experts\.", name):
        return "D05", SILENT
    return ("D06" if name.endswith(".bias") else "D04"), SILENT


def is_dropped_by_the_engine(layout: Layout, name: str) -> bool:
    expected = expected_tensors(layout.config)
    return expected is not None and name.split(".", 3)[-1] in expected.dropped


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_single_damage_is_named(name: str, damage: str) -> None:
    """Over every tensor and dimension of the layout."""
    layout = LAYOUTS[name]
    count = 0
    for tensor, shape in layout.shapes.items():
        for dimension in range(len(shape) if damage in ("widen 1", "widen 32", "narrow") else 1):
            broken = damaged(layout, damage, tensor, dimension)
            if broken is not None and not is_dropped_by_the_engine(layout, tensor):
                check_named(layout, broken, damage, tensor)
                count += 1
    assert count > 0


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_two_damages_are_both_named(data: st.DataObject) -> None:
    layout = LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))]
    read = sorted(name for name in layout.tensors if not is_dropped_by_the_engine(layout, name))
    one, other = data.draw(st.lists(st.sampled_from(read), min_size=2, max_size=2, unique=True))
    first, second = data.draw(st.sampled_from(("drop", "widen 32"))), data.draw(st.sampled_from(("drop", "widen 1")))
    half = damaged(layout, first, one, 0)
    assert half is not None
    both = damaged(half, second, other, 0)
    assert both is not None
    seen = " ".join(finding.where for finding in layout_findings(both.as_checkpoint()))
    assert f'"{one}"' in seen
    assert f'"{other}"' in seen


def check_named(layout: Layout, broken: Layout, damage: str, tensor: str) -> None:
    """Check that a finding names the tensor and is of the right kind, and that nothing else is accused."""
    everything = found(broken)
    of_tensor = {(fault_id, severity) for fault_id, severity, where in everything if where == f'tensor "{tensor}"'}
    case = f"{layout.name}, {damage}, {tensor}: {everything}"
    if damage == "drop":
        assert of_tensor == {absence(layout, tensor)}, case
        assert len(everything) == 1, case
    elif damage in ("rename", "misname"):
        # the new name is not known, and the old one is absent
        assert of_tensor == {absence(layout, tensor)}, case
        # below a module that is there the engine looks for a parameter of that name, also among experts, and refuses
        rest = {(fault_id, severity) for fault_id, severity, where in everything if where != f'tensor "{tensor}"'}
        assert rest == {("D09", REFUSES)}, case
    elif damage == "surplus":
        extra = f'tensor "{tensor.rpartition(".")[0]}_extra.weight"'
        is_dropped = ".experts." in tensor  # vLLM 0.32.0 passes over names below experts that it does not know
        assert everything == [("D09", SILENT if is_dropped else REFUSES, extra)], case
    elif damage == "swap":
        assert len(everything) == 2, case
        assert {fault_id for fault_id, _ in of_tensor} <= SHAPE_IDS, case
        assert of_tensor, case
    else:
        assert len(everything) == 1, case
        ((fault_id, severity),) = of_tensor
        if fault_id == "D08":
            assert severity is SILENT, case
            assert damage != "narrow", case
        assert fault_id in SHAPE_IDS - {"C02"}, case


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("by", [1, 32])
def test_surplus_is_silent_exactly_where_the_engine_shards(name: str, by: int) -> None:
    """Column-parallel layers cut rows, row-parallel ones columns; everything else is refused."""
    layout = LAYOUTS[name]
    for tensor, shape in layout.shapes.items():
        if is_dropped_by_the_engine(layout, tensor):
            continue
        for dimension in range(len(shape)):
            broken = damaged(layout, f"widen {by}", tensor, dimension)
            assert broken is not None
            ((fault_id, severity, _),) = found(broken)
            part = tensor.split(".")[-2]
            rows = part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
            columns = part in ("o_proj", "down_proj") and tensor.endswith(".weight")
            cut = (rows and dimension == 0) or (columns and dimension == 1)
            is_cut = cut and ".experts." not in tensor
            assert (fault_id == "D08", severity) == (is_cut, SILENT if is_cut else REFUSES), (tensor, dimension)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_too_many_and_too_few(name: str) -> None:
    layout = LAYOUTS[name]
    layers = layout.config["num_hidden_layers"]
    last = {tensor: shape for tensor, shape in layout.shapes.items() if f".layers.{layers - 1}." in tensor}
    more = layout.shapes | {tensor.replace(f".{layers - 1}.", f".{layers}.", 1): last[tensor] for tensor in last}
    kinds = found(layout.with_shapes(more))
    assert ("C01", REFUSES, '"config.json"') in kinds
    assert len(kinds) == 1
    fewer = {tensor: shape for tensor, shape in layout.shapes.items() if tensor not in last}
    (finding,) = blocking(layout.with_shapes(fewer))
    assert finding.seen == f"no tensors of 1 layer (the first is {layers - 1})"
    assert blocking(layout.with_shapes(fewer, num_hidden_layers=layers - 1)) == []


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "moe" in name or name == "mixtral"])
def test_experts(name: str) -> None:
    layout = LAYOUTS[name]
    third = {tensor: shape for tensor, shape in layout.shapes.items() if ".experts.3." in tensor}
    without = {tensor: shape for tensor, shape in layout.shapes.items() if tensor not in third}
    assert {(fault_id, severity) for fault_id, severity, _ in found(layout.with_shapes(without))} == {("D05", SILENT)}
    fifth = {tensor.replace(".experts.3.", ".experts.4."): shape for tensor, shape in third.items()}
    (finding,) = blocking(layout.with_shapes(layout.shapes | fifth))
    assert (finding.id, finding.severity) == ("C02", SILENT)
    assert "expert 4" in finding.seen
    small = {tensor: (shape[0] - 8, shape[1]) for tensor, shape in third.items()}
    assert {severity for _, severity, _ in found(layout.with_shapes(layout.shapes | small))} == {SILENT}


def fused(layout: Layout, number: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes with query, key, value and gate, up stored as one, in one layer or in all."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in layout.shapes.items():
        new = name
        if number is None or f".layers.{number}." in name:
            new = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
            if ".experts." not in name:
                new = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", new)
        shapes[new] = (shapes[new][0] + shape[0], *shape[1:]) if new in shapes else shape
    return shapes


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.startswith("phi3")])
def test_fused_parts_are_right_in_any_family(name: str) -> None:
    layout = LAYOUTS[name]
    for number in (None, 1):
        together = fused(layout, number)
        assert len(together) < len(layout.shapes)
        assert blocking(layout.with_shapes(together)) == []
        for tensor in together:
            if "qkv_proj" in tensor or "gate_up_proj" in tensor:
                wide = {**together, tensor: (together[tensor][0] + 32, *together[tensor][1:])}
                assert found(layout.with_shapes(wide)) == [("D08", SILENT, f'tensor "{tensor}"')]
    both = layout.shapes | {name: shape for name, shape in fused(layout, 1).items() if "qkv_proj.weight" in name}
    assert found(layout.with_shapes(both)) == [("D11", SILENT, 'tensor "model.layers.1.self_attn.qkv_proj.weight"')]


def test_unfused_parts_of_a_family_that_fuses() -> None:
    layout = LAYOUTS["phi3"]
    apart = {}
    for name, (rows, *rest) in layout.shapes.items():
        if "qkv_proj" in name:
            apart |= {name.replace("qkv", part): (size, *rest) for part, size in (("q", 32), ("k", 16), ("v", 16))}
        elif "gate_up_proj" in name:
            apart |= {name.replace("gate_up", part): (rows // 2, *rest) for part in ("gate", "up")}
        else:
            apart[name] = (rows, *rest)
    assert blocking(layout.with_shapes(apart)) == []
    del apart["model.layers.0.self_attn.v_proj.weight"]
    assert found(layout.with_shapes(apart)) == [("D05", SILENT, 'tensor "model.layers.0.self_attn.v_proj.weight"')]


@pytest.mark.parametrize(
    ("name", "prefix", "both", "down", "size"),
    [
        ("mixtral", "block_sparse_moe.experts", "w13", "w2", 48),
        ("qwen3-moe", "mlp.experts", "gate_up_proj", "down_proj", 24),
    ],
)
def test_experts_stored_as_one(name: str, prefix: str, both: str, down: str, size: int) -> None:
    layout = LAYOUTS[name]
    rest = {tensor: shape for tensor, shape in layout.shapes.items() if ".experts." not in tensor}
    for number in range(3):
        rest[f"model.layers.{number}.{prefix}.{both}"] = (4, 2 * size, 32)
        rest[f"model.layers.{number}.{prefix}.{down}"] = (4, 32, size)
    assert blocking(layout.with_shapes(rest)) == []
    one = f"model.layers.1.{prefix}.{both}"
    assert found(layout.with_shapes(rest | {one: (3, 2 * size, 32)})) == [("D07", SILENT, f'tensor "{one}"')]
    assert found(layout.with_shapes({key: shape for key, shape in rest.items() if key != one})) == [
        ("D04", SILENT, f'tensor "{one}"')
    ]


def test_a_config_that_does_not_fit_is_one_finding_a_tensor_kind() -> None:
    kinds = found(LAYOUTS["mixtral"].with_shapes(LAYOUTS["mixtral"].shapes, intermediate_size=64))
    assert [(fault_id, severity) for fault_id, severity, _ in kinds] == [("C02", SILENT)] * 3
    kinds = found(LAYOUTS["gemma2"].with_shapes(LAYOUTS["gemma2"].shapes, head_dim=8))
    assert {fault_id for fault_id, _, _ in kinds} == {"C02"}
    assert len(kinds) == 4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral", {"num_local_experts": 10**9}),
        ("qwen3-moe", {"num_local_experts": -1}),
        ("qwen2-moe", {"decoder_sparse_step": 0}),
        ("qwen2-moe", {"shared_expert_intermediate_size": "40"}),
        ("gemma", {"head_dim": 2.5}),
    ],
)
def test_sizes_that_are_no_sizes(name: str, change: dict[str, Any]) -> None:
    (finding,) = blocking(LAYOUTS[name].with_shapes(LAYOUTS[name].shapes, **change))
    assert (finding.id, finding.severity) == ("C02", REFUSES)
    assert next(iter(change)) in finding.seen


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("gemma", ("tie_word_embeddings",)),  # older files leave out what is the default of the class
        ("gemma2", ("tie_word_embeddings", "attention_bias")),
        ("smollm3", ("tie_word_embeddings",)),
        ("llama", ("tie_word_embeddings", "head_dim", "attention_bias", "mlp_bias")),
        ("qwen2-moe", ("qkv_bias", "decoder_sparse_step", "mlp_only_layers")),
        ("qwen3-moe", ("attention_bias",)),
    ],
)
def test_absent_keys_mean_the_default_of_their_class(name: str, absent: tuple[str, ...]) -> None:
    layout = LAYOUTS[name]
    config = {key: value for key, value in layout.config.items() if key not in absent}
    assert blocking(Layout(name, config, True, layout.tensors)) == []


def test_head_dim_of_qwen3_is_not_what_its_heads_suggest() -> None:
    config = {key: value for key, value in LAYOUTS["qwen3"].config.items() if key != "head_dim"}
    expected = expected_tensors(config)
    assert expected is not None
    assert expected.shape("model.layers.0.self_attn.q_norm.weight") == (128,)


# What the methods cannot do without.
COMPLETE = {"activation_scheme": "dynamic", "bits": 4, "group_size": 128, "desc_act": False}


def quantised(layout: Layout, method: str) -> Layout:
    """Return the layout as a quantised writer would store it."""
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, (dtype, shape, _) in layout.tensors.items():
        if "_proj.weight" not in name:
            tensors[name] = (dtype, shape, 0)
        elif method == "fp8":
            tensors |= {name: ("F8_E4M3", shape, 0), f"{name}_scale": ("F32", (1,), 0)}
        else:
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}qweight": ("I32", (shape[1] // 8, shape[0]), 0), f"{stem}scales": (dtype, (1, 1), 0)}
    return Layout(
        layout.name, layout.config | {"quantization_config": {"quant_method": method, **COMPLETE}}, True, tensors
    )


@pytest.mark.parametrize("method", ["fp8", "gptq"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "qwen3-moe"])
def test_of_a_quantised_checkpoint_the_rest_is_checked_and_what_is_not_is_said(name: str, method: str) -> None:
    layout = quantised(LAYOUTS[name], method)
    (finding,) = layout_findings(layout.as_checkpoint())
    assert (finding.id, finding.severity) == ("C06", RISK)
    assert "packed tensors were not checked" in finding.seen
    tensors = dict(layout.tensors)
    del tensors["model.layers.1.input_layernorm.weight"]
    tensors["model.embed_tokens.weight"] = ("BF16", (161, 32), 0)
    for part in [tensor for tensor in tensors if tensor.startswith("model.layers.0.self_attn.o_proj.")]:
        del tensors[part]
    kinds = {fault_id for fault_id, _, _ in found(Layout(name, layout.config, True, tensors))}
    assert kinds == {"D06", "C03", "D04"}


def test_shape_of_an_fp8_weight_is_checked() -> None:
    layout = quantised(LAYOUTS["llama"], "fp8")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = {**layout.tensors, name: ("F8_E4M3", (32, 80), 0)}
    assert found(Layout("llama", layout.config, True, tensors)) == [("D08", SILENT, f'tensor "{name}"')]


@pytest.mark.parametrize(("method", "part"), [("fp8", "weight"), ("gptq", "qweight")])
def test_a_scale_alone_is_no_weight(method: str, part: str) -> None:
    layout = quantised(LAYOUTS["llama"], method)
    tensors = dict(layout.tensors)
    del tensors[f"model.layers.1.self_attn.v_proj.{part}"]
    kinds = found(Layout("llama", layout.config, True, tensors))
    assert kinds == [("D05" if method == "fp8" else "D04", SILENT, 'tensor "model.layers.1.self_attn.v_proj.weight"')]


@pytest.mark.parametrize(
    ("loading", "shape", "seen", "fate"),
    [
        (Loading.COLUMNS, (4096, 12288), (4096, 12320), Fate.CUT),  # the documented case
        (Loading.COLUMNS, (4096, 12288), (4097, 12320), Fate.REFUSED),
        (Loading.COLUMNS, (4096, 12288), (4096, 12287), Fate.REFUSED),
        (Loading.ROWS, (8, 4), (9, 4), Fate.CUT),
        (Loading.ROWS, (8,), (9,), Fate.CUT),
        (Loading.ROWS, (8, 4), (8, 5), Fate.REFUSED),
        (Loading.ROWS, (8, 4), (9, 4, 1), Fate.REFUSED),
        (Loading.WHOLE, (8,), (9,), Fate.REFUSED),
        (Loading.VOCABULARY, (8, 4), (9, 4), Fate.REFUSED),
        (Loading.EXPERT, (8, 4), (7, 3), Fate.FILLED_IN_PART),
        (Loading.EXPERT, (8, 4), (9, 4), Fate.REFUSED),
        (Loading.EXPERT, (8, 4), (9, 3), Fate.REFUSED),
    ],
)
def test_fate(loading: Loading, shape: tuple[int, ...], seen: tuple[int, ...], fate: Fate) -> None:
    assert ExpectedTensor(shape, loading).fate(seen) is fate


def test_captured_layouts_are_small() -> None:
    sizes = {name: len(json.dumps(load(name).config)) + len(load(name).tensors) for name in names()}
    assert max(sizes.values()) < 4000
