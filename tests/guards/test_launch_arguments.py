"""What a launch asks for is compared with the checkpoint that it is to serve."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint import models
from harness.checkpoint.copy import RawTensor, load_shard, private_copy, save_shard
from harness.guards.preflight import Severity, check

REFUSES, SILENT, RISK = Severity.REFUSES, Severity.SILENT, Severity.RISK
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(hidden=64, intermediate=96).build(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    return private_copy(sound, tmp_path / "checkpoint")


def edit_config(path: Path, **changes: Any) -> None:
    content = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(content))


def found(path: Path, *arguments: str, **more: Any) -> set[tuple[str, Severity]]:
    return {(finding.id, finding.severity) for finding in check(path, arguments=arguments, **more)}


@pytest.mark.parametrize(
    ("size", "is_refused"),
    [("1", False), ("2", False), ("4", False), ("3", True), ("8", True), ("0", True), ("-2", True), ("$TP", False)],
)
def test_tensor_parallel_size(sound: Path, size: str, is_refused: bool) -> None:
    assert found(sound, "-tp", size) == ({("L03", REFUSES)} if is_refused else set())


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        ({"num_attention_heads": 6}, {"num_attention_heads 6"}),
        ({"num_key_value_heads": 6}, {"num_key_value_heads 6"}),
        ({"num_key_value_heads": 3}, {"num_key_value_heads 3"}),  # each part needs a whole copy of a head
        ({"intermediate_size": 98}, {"intermediate_size 98"}),
        ({"vocab_size": 513}, set()),  # padded to 576, which 4 divides
        ({"num_experts": 3, "moe_intermediate_size": 34}, {"moe_intermediate_size 34", "tensor parallel size 4"}),
        ({"text_config": {"num_attention_heads": 6}}, {"num_attention_heads 6"}),
    ],
)
def test_what_tensor_parallel_size_4_must_divide(path: Path, config: dict[str, Any], seen: set[str]) -> None:
    edit_config(path, **config)
    said = {finding.seen for finding in check(path, arguments=["-tp", "4"]) if finding.id == "L03"}
    assert len(said) == len(seen)
    assert all(any(text.endswith(part) for text in said) for part in seen)


def test_padded_vocabulary_and_pipeline_stages(sound: Path) -> None:
    (finding,) = [finding for finding in check(sound, arguments=["-tp", "16"]) if "vocab" in finding.seen] or [None]
    assert finding is None  # 512 rows are 16 times 32
    assert any("vocab_size 512, padded 512" in one.seen for one in check(sound, arguments=["-tp", "3"]))
    assert found(sound, "-pp", "2") == set()
    assert found(sound, "-pp", "3") == {("L03", RISK)}
    assert found(sound, "-tp", "4", "-dcp", "3") == {("L03", REFUSES)}


@pytest.mark.parametrize(
    ("config", "longest", "release"),
    [
        ({}, 2048, "0.32.0"),
        ({"max_position_embeddings": 256}, 256, "0.32.0"),
        ({"max_position_embeddings": 256, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 1024, "0.32.0"),
        ({"max_position_embeddings": 256, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 512, "0.32.0"),
        ({"max_position_embeddings": 256, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 256, "0.32.0"),
        ({"max_position_embeddings": 256, "rope_scaling": {"rope_type": "linear", "factor": None}}, 256, "0.32.0"),
        ({"max_position_embeddings": 256, "rope_scaling": YARN}, 256, "0.30.0"),
        ({"max_position_embeddings": 256, "rope_scaling": YARN}, 512, "0.29.0"),
        ({"max_position_embeddings": 256, "model_max_length": 1000}, 1000, "0.32.0"),
        ({"max_position_embeddings": 256, "text_config": {"max_position_embeddings": 99}}, 99, "0.32.0"),
    ],
)
def test_max_model_len(path: Path, config: dict[str, Any], longest: int, release: str) -> None:
    edit_config(path, **config)
    engine = f"vllm=={release}"
    assert found(path, "--max-model-len", str(longest), engine=engine) == set()
    assert found(path, "--max-model-len", str(longest + 1), engine=engine) == {("L04", REFUSES)}
    assert found(path, "--max-model-len", "auto", engine=engine) == set()


@pytest.mark.parametrize(
    ("arguments", "severities"),
    [
        (("--max-model-len", "0"), {REFUSES}),
        (("--max-num-batched-tokens", "8", "--max-num-seqs", "16"), {REFUSES}),
        (("--max-num-batched-tokens", "64", "--no-enable-chunked-prefill"), {REFUSES}),
        (("--max-num-batched-tokens", "64"), set()),
        (("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1", "vllm", "serve", "m", "--max-model-len", "1M"), {RISK}),
        (("--hf-overrides", '{"max_position_embeddings": 5000}', "--max-model-len", "4096"), set()),
        (("--hf-overrides.max_position_embeddings", "50", "--max-model-len", "51"), {REFUSES}),
    ],
)
def test_lengths(sound: Path, arguments: tuple[str, ...], severities: set[Severity]) -> None:
    assert found(sound, *arguments) == {("L04", severity) for severity in severities}


def test_overrides_count_for_the_layout_too(sound: Path) -> None:
    assert found(sound, "--hf-overrides", '{"intermediate_size": 64}') == {("C02", SILENT)}
    assert found(sound, "--hf-overrides", "some.function") == set()


@pytest.mark.parametrize(
    ("declared", "arguments", "expected"),
    [
        (None, ("-q", "awq"), {("C08", REFUSES)}),
        (None, ("-q", "fp8"), set()),  # quantises while loading
        (None, ("-q", "strange"), {("C08", REFUSES)}),
        (None, ("-q", "None"), set()),
        ("awq", ("-q", "gptq"), {("C08", REFUSES)}),
        ("awq", ("-q", "awq_marlin"), set()),
        ("awq", ("-q", "humming"), set()),
        ("fp8", ("-q", "fp8_per_tensor"), {("C08", REFUSES)}),
        ("awq", ("--dtype", "float32"), {("C07", REFUSES)}),
        ("awq", ("--dtype", "bfloat16"), set()),
    ],
)
def test_quantisation(
    path: Path, declared: str | None, arguments: tuple[str, ...], expected: set[tuple[str, Severity]]
) -> None:
    if declared is not None:
        complete = {"activation_scheme": "dynamic", "bits": 4, "group_size": 128, "zero_point": True}
        edit_config(path, quantization_config={"quant_method": declared, **complete})
    assert found(path, *arguments) - found(path) == expected


def test_model_types_that_are_not_served_in_float16(path: Path) -> None:
    edit_config(path, model_type="gemma2")
    assert ("C07", REFUSES) in found(path, "--dtype", "half")
    assert ("C07", REFUSES) not in found(path, "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("load_format", "files", "expected"),
    [
        ("auto", (), set()),
        ("safetensors", (), set()),
        ("npcache", (), {("D13", REFUSES)}),
        ("pt", (), {("D13", REFUSES)}),
        ("dummy", (), {("D15", SILENT)}),
        ("rollout_weight_cache", (), {("L01", RISK)}),
        ("ipc_cache", (), {("K05", RISK)}),
        ("sharded_state", (), {("D23", REFUSES)}),
    ],
)
def test_load_format_against_the_files(
    sound: Path, load_format: str, files: tuple[str, ...], expected: set[tuple[str, Severity]]
) -> None:
    assert found(sound, "--load-format", load_format) == expected


def test_ipc_cache_is_known_from_0_30_on(sound: Path) -> None:
    assert found(sound, "--load-format", "ipc_cache", engine="vllm==0.29.0") == {("L01", RISK)}


def test_npcache_writes_into_the_checkpoint_and_serves_what_it_wrote(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    before = found(path)
    assert found(path, "--load-format", "npcache") - before == {("D22", RISK)}
    (path / "np").mkdir()
    os.utime(path / "np", ns=(1, 1))
    assert ("D22", SILENT) in found(path, "--load-format", "npcache") - before


def test_presharded_state_must_fit_the_parallel_size(path: Path) -> None:
    for rank in range(2):
        os.link(path / "model.safetensors", path / f"model-rank-{rank}-part-0.safetensors")
    assert ("D23", REFUSES) not in found(path, "--load-format", "sharded_state", "-tp", "2")
    assert ("D23", REFUSES) in found(path, "--load-format", "sharded_state", "-tp", "4")
    assert ("D23", REFUSES) in found(path, "--load-format", "sharded_state")  # "Missing keys": the attention's scales


def test_presharded_state_of_more_ranks_is_read_in_part(path: Path) -> None:
    tensors = load_shard(path / "model.safetensors")
    half = {name: RawTensor("F32", (1,), bytes(4)) for name in (*tensors, "model.layers.0.self_attn.attn._k_scale")}
    (path / "model.safetensors").unlink()
    for rank in range(2):
        save_shard(path / f"model-rank-{rank}-part-0.safetensors", half)
    assert found(path, "--load-format", "sharded_state") == {("D23", SILENT)}, "names and shapes are the state's own"
    assert found(path, "--load-format", "sharded_state", "-tp", "2") == set()


def test_tokenizer_and_template_from_elsewhere(path: Path, sound: Path, tmp_path: Path) -> None:
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    assert ("D19", REFUSES) in found(path)
    assert found(path, "--tokenizer", str(sound)) == set()
    assert found(path, "--skip-tokenizer-init") == set()
    assert found(path, "--tokenizer", "/nowhere") == {("C12", RISK)}
    assert found(path, "--tokenizer", "org/name") == set()
    assert found(sound, "--chat-template", "/nowhere.jinja") == {("C10", RISK)}
    assert found(sound, "--chat-template", "{{ messages }}") == set()


def test_unknown_variables_of_the_line(sound: Path) -> None:
    line = ("VLLM_WEIGHT_CACHE_PATH=/x", "VLLM_USE_V1=1", "vllm", "serve", "m")
    assert ("L02", RISK) in found(sound, *line)
    assert ("L02", REFUSES) in found(sound, *line, "--fail-on-environ-validation")
    assert found(sound, "VLLM_LOGGING_LEVEL=DEBUG", "OTHER=1", "vllm", "serve", "m") == set()


def test_which_checkpoint_a_launch_names(sound: Path, path: Path) -> None:
    assert found(sound, "vllm", "serve", str(sound)) == set()
    assert found(sound, "vllm", "serve", str(path)) == {("L06", RISK)}
    assert found(sound, "vllm", "serve", "/not/here") == set()
    named = ("vllm", "serve", "m", "--served-model-name", "chat")
    assert found(sound, *named) == set()
    assert found(sound, *named, against=path) == {("L06", RISK)}
    assert found(sound, *named, sound.name, against=path) == set()


@pytest.mark.parametrize("value", [0, -1, 2**60, "4", None, [], {}, True, 1e300, float("nan")])
@pytest.mark.parametrize(
    "key",
    [
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "rope_scaling",
        "model_type",
    ],
)
def test_strange_configs_give_findings_never_an_exception(path: Path, key: str, value: object) -> None:
    edit_config(path, **{key: value})
    arguments = (
        "-tp",
        "3",
        "-pp",
        "9",
        "--max-model-len",
        "9k",
        "-q",
        "awq",
        "--dtype",
        "half",
        "--disable-sliding-window",
    )
    for finding in check(path, arguments=arguments):
        assert finding.as_text()
    edit_config(path, rope_scaling={"rope_type": value, "factor": value, "original_max_position_embeddings": value})
    assert check(path, arguments=arguments, engine="vllm==0.28.0")
