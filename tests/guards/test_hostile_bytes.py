"""Pre-flight survives any bytes in any file that it reads: named findings, never an exception."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.checkpoint import models
from harness.checkpoint.copy import private_copy
from harness.guards.preflight import check

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = models.tiny_llama(hidden=8, heads=2, kv_heads=1, layers=1, intermediate=8, vocabulary=259)
    return source.build(tmp_path_factory.mktemp("cache"))


def survives(sound: Path, name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = private_copy(sound, Path(scratch) / "checkpoint")
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(content)
        for finding in check(path, arguments=["-tp", "2"], against=sound, read_tensors=True):
            assert finding.id
            assert finding.as_text()
            finding.as_text().encode("utf-8")


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, 2**64, 10**400, -1]),
    st.floats(),
    st.sampled_from([1e308, -0.0]),
)
TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["../../etc/passwd", "\0", "\ud800", "\x1b[2J", "BF16", "model.safetensors", "bfloat16", "a" * 5000]
    ),
)
# Names that the readers of each file ask for, so that values of any kind get to them.
KEYS = st.one_of(
    st.sampled_from(
        [
            "architectures",
            "model_type",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "torch_dtype",
            "dtype",
            "tie_word_embeddings",
            "rope_theta",
            "rope_scaling",
            "quantization_config",
            "quant_method",
            "text_config",
            "layer_types",
            "num_experts",
            "num_local_experts",
            "sliding_window",
            "max_position_embeddings",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "auto_map",
            "model",
            "vocab",
            "merges",
            "added_tokens",
            "id",
            "content",
            "type",
            "chat_template",
            "weight_map",
            "metadata",
            "total_size",
            "temperature",
            "attention_bias",
            "mlp_bias",
            "hidden_act",
        ]
    ),
    TEXTS,
)
TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=25,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(SIDE_FILES), changes=st.dictionaries(KEYS, TREES, max_size=6), keep=st.booleans())
def test_any_tree_of_values_in_a_side_file(sound: Path, name: str, changes: dict[str, Any], keep: bool) -> None:
    before = json.loads((sound / name).read_text()) if keep and (sound / name).exists() else {}
    survives(sound, name, json.dumps(before | changes).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("name", [*SIDE_FILES, "model.safetensors", "chat_template.jinja"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 5000,
        b"\xff\xfe{\0}\0",
        b"\xef\xbb\xbf{}",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"model":{"vocab":{"a":1,"a":2}},"model":null}',
        b'{"weight_map":{"a":NaN},"vocab_size":Infinity}',
        b'{"vocab_size":' + b"9" * 100_000 + b"}",
        b'{"vocab_size":1e999999}',
        b'{"a":"\\ud800"}',
        b'{"\\u0000":"\xc3\x28"}',
        b"{}" + b" " * 100_000,
        b"version https://git-lfs.github.com/spec/v1\n",
    ],
    ids=range(14),
)
def test_known_nastinesses(sound: Path, name: str, content: bytes) -> None:
    survives(sound, name, content)
    survives(sound, name, len(content).to_bytes(8, "little") + content)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*SIDE_FILES, "model.safetensors", "chat_template.jinja"]),
    edits=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 60), st.binary(max_size=20)), max_size=6),
    length=st.one_of(st.none(), st.integers(0, 20_000)),
)
def test_any_edits_of_bytes(sound: Path, name: str, edits: list[tuple[int, int, bytes]], length: int | None) -> None:
    raw = (sound / name).read_bytes() if (sound / name).exists() else b'{"weight_map":{"a":"model.safetensors"}}'
    for at, cut, put in edits:
        raw = raw[:at] + put + raw[at + cut :]
    survives(sound, name, raw[:length])
