"""Pre-flight names what is wrong with a checkpoint before any engine is started, and says nothing about a sound one."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.checkpoint import models
from harness.checkpoint.copy import RawTensor, load_shard, private_copy, save_shard
from harness.checkpoint.defect import Defect
from harness.errors import EXIT_BROKEN
from harness.guards import preflight_command
from harness.guards.preflight import PreflightFinding, Severity, check
from harness.guards.structure import MEANING

REFUSES, SILENT, RISK = Severity.REFUSES, Severity.SILENT, Severity.RISK
SHARD = "model.safetensors"
LAYER = "model.layers.1."
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(hidden=32, intermediate=48).build(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    return private_copy(sound, tmp_path / "checkpoint")


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def edit_tensors(path: Path, edit: Callable[[dict[str, RawTensor]], object]) -> None:
    tensors = load_shard(path / SHARD)
    edit(tensors)
    save_shard(path / SHARD, tensors)


def resized(tensor: RawTensor, shape: tuple[int, ...]) -> RawTensor:
    size = 2
    for length in shape:
        size *= length
    return RawTensor(tensor.dtype, shape, (tensor.data * 9)[:size])


def seen(findings: tuple[PreflightFinding, ...]) -> set[tuple[str, Severity]]:
    return {(finding.id, finding.severity) for finding in findings}


@pytest.mark.parametrize(
    "source",
    [
        models.tiny_llama(),
        models.tiny_llama(shards=3, tied=True),
        models.tiny_llama(dtype="F32", layers=1),
        models.tiny_llama(dtype="F16", heads=4, kv_heads=4, vocabulary=300),
    ],
    ids=lambda source: source.name,
)
def test_nothing_is_found_in_a_sound_checkpoint(source: models.ModelSource, tmp_path: Path) -> None:
    built = source.build(tmp_path)
    assert check(built, read_tensors=True, against=built, arguments=["--max-model-len", "256", "-tp", "2"]) == ()


@pytest.mark.parametrize(
    ("name", "fault_id", "severity"),
    [
        (LAYER + "mlp.down_proj.weight", "D04", SILENT),
        (LAYER + "self_attn.o_proj.weight", "D04", SILENT),
        ("model.embed_tokens.weight", "D04", SILENT),
        (LAYER + "self_attn.k_proj.weight", "D05", SILENT),
        (LAYER + "mlp.up_proj.weight", "D05", SILENT),
        (LAYER + "input_layernorm.weight", "D06", REFUSES),
        ("model.norm.weight", "D06", REFUSES),
        ("lm_head.weight", "C04", SILENT),
    ],
)
def test_absent_tensor(path: Path, name: str, fault_id: str, severity: Severity) -> None:
    edit_tensors(path, lambda tensors: tensors.pop(name))
    (finding,) = check(path)
    assert (finding.id, finding.severity) == (fault_id, severity)
    assert name in finding.where


@pytest.mark.parametrize(
    ("name", "shape", "fault_id", "severity"),
    [
        (LAYER + "mlp.down_proj.weight", (32, 80), "D08", SILENT),  # cut by the engine
        (LAYER + "mlp.gate_proj.weight", (80, 32), "D08", SILENT),
        (LAYER + "self_attn.v_proj.weight", (24, 32), "D08", SILENT),
        (LAYER + "mlp.down_proj.weight", (32, 16), "D07", REFUSES),
        (LAYER + "mlp.down_proj.weight", (48, 32), "D07", REFUSES),  # transposed
        (LAYER + "mlp.down_proj.weight", (64, 24), "D07", REFUSES),  # same number of elements
        (LAYER + "input_layernorm.weight", (64,), "D07", REFUSES),
        ("model.embed_tokens.weight", (600, 32), "C03", REFUSES),
        ("model.embed_tokens.weight", (512, 64), "D07", REFUSES),
    ],
)
def test_wrong_shape(path: Path, name: str, shape: tuple[int, ...], fault_id: str, severity: Severity) -> None:
    edit_tensors(path, lambda tensors: tensors.update({name: resized(tensors[name], shape)}))
    findings = check(path)
    assert seen(findings) == {(fault_id, severity)}
    assert f"{list(shape)}" in findings[0].seen


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"num_hidden_layers": 3}, {("C01", REFUSES)}),
        ({"num_hidden_layers": 1}, {("C01", REFUSES)}),
        ({"num_hidden_layers": 10**9}, {("C01", REFUSES)}),
        ({"intermediate_size": 32}, {("C02", SILENT)}),
        ({"intermediate_size": 64}, {("C02", REFUSES)}),
        ({"num_key_value_heads": 1}, {("C02", SILENT)}),
        ({"num_attention_heads": 2}, {("C02", SILENT)}),
        ({"head_dim": 16}, {("C02", REFUSES)}),
        ({"vocab_size": 500}, {("C03", REFUSES)}),
        ({"tie_word_embeddings": True}, {("C04", RISK)}),
        ({"torch_dtype": "float16"}, {("D16", SILENT)}),
        ({"hidden_size": "32"}, {("C02", REFUSES)}),
        ({"hidden_size": -1}, {("C02", REFUSES)}),
        ({"hidden_size": ...}, {("C02", REFUSES)}),
        ({"architectures": ["StrangeForCausalLM"]}, {("C06", RISK), ("C06", REFUSES)}),
        ({"architectures": ...}, {("C06", RISK)}),
        ({"architectures": [{}]}, {("C06", RISK)}),
        ({"quantization_config": FP8}, {("C06", RISK), ("C08", SILENT)}),  # taken for stored as fp8
        ({"quantization_config": {"quant_method": "fp8"}}, {("C06", RISK), ("C08", SILENT), ("C08", REFUSES)}),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, {("C06", RISK), ("C08", RISK)}),
        ({"eos_token_id": 512}, {("C09", SILENT)}),
        ({"eos_token_id": [2, 9999]}, {("C09", SILENT)}),
    ],
)
def test_config_that_does_not_fit_the_weights(
    path: Path, change: dict[str, Any], found: set[tuple[str, Severity]]
) -> None:
    edit_json(path / "config.json", **change)
    assert seen(check(path)) == found


def test_a_skewed_config_is_one_finding_a_kind_not_one_a_layer(path: Path) -> None:
    edit_json(path / "config.json", intermediate_size=32)
    assert sorted(finding.seen for finding in check(path)) == [
        "shape [32, 48], which the engine cuts without a word, in all 2 layers",
        "shape [48, 32], which the engine cuts without a word, in all 2 layers",
        "shape [48, 32], which the engine cuts without a word, in all 2 layers",
    ]


def test_a_shard_that_cannot_be_read_is_one_finding_not_one_a_tensor(tmp_path: Path) -> None:
    path = private_copy(models.tiny_llama(shards=2, hidden=32).build(tmp_path / "cache"), tmp_path / "copy")
    shard = path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert seen(check(path)) == {("D01", REFUSES)}
    shard.unlink()
    assert seen(check(path)) == {("D03", REFUSES)}


def test_many_absent_tensors_are_counted_not_listed(tmp_path: Path) -> None:
    path = private_copy(models.tiny_llama(layers=8, hidden=32).build(tmp_path / "cache"), tmp_path / "copy")
    edit_tensors(path, lambda tensors: [tensors.pop(f"model.layers.{n}.mlp.down_proj.weight") for n in range(8)])
    findings = check(path)
    assert seen(findings) == {("D04", SILENT)}
    assert len(findings) == 6
    assert "3 more tensors are absent" in {finding.seen for finding in findings}


def test_names_that_the_architecture_does_not_have(path: Path) -> None:
    def rename(tensors: dict[str, RawTensor]) -> None:
        tensors["model.layers.1.mlp.down_projj.weight"] = tensors["model.norm.weight"]
        tensors[LAYER + "self_attn.q_proj.bias"] = tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"]  # engines skip it

    edit_tensors(path, rename)
    findings = check(path)
    assert seen(findings) == {("D09", REFUSES), ("D10", SILENT)}
    assert 'example "model.layers.1.mlp.down_proj.weight"' in findings[0].expected


def test_many_unknown_names_are_counted_not_listed(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.update({f"x{n}": tensors["model.norm.weight"] for n in range(40)}))
    findings = check(path)
    assert len(findings) == 6
    assert "35 more names" in findings[-1].seen


@pytest.mark.parametrize(
    ("names", "dtype", "severity"),
    [
        ((LAYER + "mlp.down_proj.weight",), "F16", SILENT),
        ((LAYER + "mlp.down_proj.weight",), "I16", SILENT),
        (("model.norm.weight",), "F32", RISK),
    ],
)
def test_dtype_of_some_tensors(path: Path, names: tuple[str, ...], dtype: str, severity: Severity) -> None:
    def flip(tensors: dict[str, RawTensor]) -> None:
        for name in names:
            data = tensors[name].data * (2 if dtype == "F32" else 1)
            tensors[name] = RawTensor(dtype, tensors[name].shape, data)

    edit_tensors(path, flip)
    (finding,) = check(path)
    assert (finding.id, finding.severity) == ("D16", severity)
    assert f"1 of 21 tensors are {dtype}" in finding.seen


def test_scales_without_a_quantisation_config(path: Path) -> None:
    name = LAYER + "mlp.down_proj.weight_scale"
    edit_tensors(path, lambda tensors: tensors.update({name: RawTensor("F32", (1,), bytes(4))}))
    assert ("C08", REFUSES) in seen(check(path))


@pytest.mark.parametrize(
    ("arguments", "dtype", "found"),
    [
        ((), "fp16", {("L01", REFUSES)}),
        (("--dtype", "bf16"), "auto", {("L01", REFUSES)}),
        (("--dtype", "auto"), "fp16", set()),  # the arguments win
        ((), "float16", {("C07", RISK)}),
        (("--dtype", "half"), "bfloat16", {("C07", RISK)}),
    ],
)
def test_dtype_of_the_launch(
    sound: Path, arguments: tuple[str, ...], dtype: str, found: set[tuple[str, Severity]]
) -> None:
    assert seen(check(sound, dtype=dtype, arguments=arguments)) == found


def test_fp16_spelling_says_what_to_write(sound: Path) -> None:
    assert check(sound, dtype="fp16")[0].remedy == "use --dtype float16"


def test_tokenizer(path: Path) -> None:
    content = json.loads((path / "tokenizer.json").read_text())
    content["added_tokens"].append({"id": 512, "content": "<new>"})
    (path / "tokenizer.json").write_text(json.dumps(content))
    (finding,) = check(path)
    assert (finding.id, finding.severity, finding.seen) == ("C09", SILENT, "token id 512")
    (path / "tokenizer.json").write_text("{")
    assert seen(check(path)) == {("C12", REFUSES)}
    (path / "tokenizer.json").unlink()
    assert seen(check(path)) == {("D19", REFUSES)}


def change_bf16(path: Path, name: str, value: bytes, *, at: int = 100) -> None:
    def put(tensors: dict[str, RawTensor]) -> None:
        old = tensors[name]
        tensors[name] = RawTensor(old.dtype, old.shape, old.data[: 2 * at] + value + old.data[2 * at + len(value) :])

    edit_tensors(path, put)


def bf16(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite(tmp_path: Path, dtype: str, value: float) -> None:
    path = private_copy(models.tiny_llama(dtype=dtype, hidden=32).build(tmp_path), tmp_path / "copy")
    packed = {"BF16": bf16(value), "F32": struct.pack("<f", value), "F16": struct.pack("<e", value)}[dtype]
    change_bf16(path, LAYER + "mlp.down_proj.weight", packed)
    assert check(path) == ()
    (finding,) = check(path, read_tensors=True)
    assert (finding.id, finding.severity) == ("D15", SILENT)
    assert finding.seen.startswith("1 values that are infinite")
    assert "mlp.down_proj" in finding.where


@pytest.mark.parametrize(
    ("value", "is_beyond"),
    [(65280.0, False), (65536.0, True), (-65536.0, True), (131072.0, True), (32768.0, False)],
)
def test_values_beyond_fp16(path: Path, value: float, is_beyond: bool) -> None:
    change_bf16(path, LAYER + "mlp.down_proj.weight", bf16(value) * 3)
    found = [finding for finding in check(path, dtype="float16", read_tensors=True) if finding.severity is SILENT]
    assert [finding.id for finding in found] == (["C07"] if is_beyond else [])
    if is_beyond:
        assert found[0].seen.startswith("3 values")
        assert all(not finding.blocks for finding in check(path, dtype="bfloat16", read_tensors=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_that_no_trained_model_has(path: Path, dtype: str) -> None:
    change_bf16(path, LAYER + "mlp.down_proj.weight", bf16(1e38) + bf16(2.0**65) + bf16(2.0**64) + bf16(70000.0))
    found = check(path, dtype=dtype, read_tensors=True)
    assert ("D15", SILENT, "2 values of 2^65 or more") in {(item.id, item.severity, item.seen) for item in found}
    assert any(item.seen.startswith("2 values of 65536 or more") for item in found if item.id == "C07")


def test_zero_tensor_and_zero_tail(path: Path) -> None:
    name = LAYER + "mlp.down_proj.weight"
    edit_tensors(path, lambda tensors: tensors.update({name: RawTensor("BF16", (32, 48), bytes(3072))}))
    assert ("D15", "all values are zero") in {(item.id, item.seen) for item in check(path, read_tensors=True)}
    raw = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(raw[:-1000] + bytes(1000))
    assert check(path) == ()  # no header shows it
    tail = [finding for finding in check(path, read_tensors=True) if "last 1,000 bytes" in finding.seen]
    assert [finding.severity for finding in tail] == [SILENT]


def test_differences_to_the_running_checkpoint_that_weights_cannot_show(path: Path, sound: Path) -> None:
    edit_json(path / "config.json", rope_theta=1e6, rms_norm_eps=1e-6, transformers_version="5")
    edit_json(path / "generation_config.json", temperature=0.2)
    edit_json(path / "tokenizer_config.json", chat_template="{{ x }}")
    assert check(path) == ()
    found = check(path, against=sound)
    assert [(finding.id, finding.where) for finding in found] == [
        ("C05", '"config.json", "rms_norm_eps"'),
        ("C05", '"config.json", "rope_theta"'),
        ("C11", '"generation_config.json", "temperature"'),
        ("C10", '"tokenizer_config.json"'),
    ]
    assert {finding.severity for finding in found} == {SILENT}


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-1]), {("D01", REFUSES)}),
        (lambda path: (path / SHARD).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), {("D02", REFUSES)}),
        (lambda path: (path / SHARD).unlink(), {("D19", REFUSES)}),
        (lambda path: (path / SHARD).rename(path / "pytorch_model.bin"), {("D13", RISK)}),
        (lambda path: (path / "config.json").write_text("{"), {("C12", REFUSES)}),
        (lambda path: (path / "pytorch_model.bin").touch(), {("D13", SILENT)}),
        (lambda path: (path / "notes.tmp").touch(), {("D19", RISK)}),
        (lambda path: (path / "model.safetensors.part").touch(), {("D19", SILENT)}),
        (lambda path: private_copy(path, path.parent / "x").rename(path / "new"), {("D17", SILENT)}),
    ],
)
def test_structure(path: Path, damage: Callable[[Path], object], found: set[tuple[str, Severity]]) -> None:
    damage(path)
    assert seen(check(path)) == found


def test_every_structural_defect_has_a_meaning() -> None:
    assert set(MEANING) == set(Defect)


def test_names_from_a_checkpoint_cannot_steer_a_terminal(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_tensors(path, lambda tensors: tensors.update({"\x1b[2Jx\n": tensors["model.norm.weight"]}))
    (path / "\udcff\x1b.part").touch()
    assert preflight_command.main([str(path)]) == EXIT_BROKEN
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b[2Jx\\n" in printed
    printed.encode("utf-8")


def test_guards_import_neither_numpy_nor_docker_nor_locust() -> None:
    program = (
        "import sys; from harness.guards import canary, preflight, publish, purge; "
        "print([name for name in ('numpy', 'docker', 'locust', 'gevent', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [
        "architectures",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "torch_dtype",
        "quantization_config",
        "eos_token_id",
        "max_position_embeddings",
        "model",
        "added_tokens",
        "weight_map",
        "metadata",
    ]
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"]),
    changes=st.dictionaries(KEYS, VALUES, max_size=4),
)
def test_any_json_gives_findings_never_an_exception(sound: Path, name: str, changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = private_copy(sound, Path(scratch) / "c")
        content = json.loads((path / name).read_text()) if (path / name).exists() else {}
        (path / name).write_text(json.dumps(content | changes))
        for finding in check(path, arguments=["-tp", "2", "--max-model-len", "9"], against=sound):
            assert finding.as_text()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"]),
    at=st.integers(0, 3000),
    put=st.binary(max_size=12),
    cut=st.integers(0, 40),
)
def test_any_bytes_give_findings_never_an_exception(sound: Path, name: str, at: int, put: bytes, cut: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = private_copy(sound, Path(scratch) / "c")
        raw = (path / name).read_bytes()
        (path / name).write_bytes(raw[:at] + put + raw[at + cut :])
        for finding in check(path, read_tensors=True, against=sound):
            assert finding.as_text()
