"""The header parser accepts and refuses what the safetensors library does, and names what is wrong."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import safetensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness.checkpoint.copy import RawTensor, load_shard, save_shard
from harness.checkpoint.header import BITS_OF_DTYPE
from harness.checkpoint.manifest import Defect, read_shard
from harness.errors import CheckpointDefect


def shard_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype: str = "U8", shape: object = (1,), begin: int = 0, end: int = 1, **more: object) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": [begin, end],
    } | more


TWO = {"a": entry(shape=(2, 2), end=4), "b": entry("BF16", (3,), 4, 10)}


def library_accepts(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


def we_accept(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        read_shard(path)
    except CheckpointDefect:
        return False
    return True


@pytest.mark.parametrize(
    ("content", "reason", "tensor", "offset_bytes"),
    [
        (b"", Defect.EMPTY_FILE, None, None),
        (b"abc", Defect.HEADER_TOO_SMALL, None, None),
        (bytes(100), Defect.ZERO_FILE, None, None),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", Defect.POINTER_FILE, None, None),
        (b"<!DOCTYPE html><html>log in first</html>", Defect.HTML_FILE, None, None),
        (b"\n <HTML>" + b"x" * 50_000, Defect.HTML_FILE, None, None),
        (b"PK\x03\x04" + bytes(60), Defect.ZIP_FILE, None, None),
        (shard_bytes("{}", length=100_000_001), Defect.HEADER_TOO_LARGE, None, 0),
        (shard_bytes("{}", length=3), Defect.HEADER_TRUNCATED, None, 10),
        (shard_bytes("{]"), Defect.HEADER_NOT_JSON, None, None),
        (shard_bytes("[]"), Defect.HEADER_NOT_JSON, None, None),
        (b"\x02" + bytes(7) + b"\xff\xff", Defect.HEADER_NOT_JSON, None, None),
        (shard_bytes({"__metadata__": {"a": 1}}), Defect.METADATA_INVALID, None, None),
        (shard_bytes({"a": entry("U9")}, b"x"), Defect.TENSOR_INFO_INVALID, "a", None),
        (shard_bytes({"a": entry(), "b": entry("U9", begin=1, end=2)}, b"xy"), Defect.TENSOR_INFO_INVALID, "b", None),
        (
            shard_bytes({"a": entry(), "__metadata__": entry(begin=1, end=2)}, b"xy"),
            Defect.METADATA_INVALID,
            None,
            None,
        ),
        (shard_bytes({"a": entry(shape=(1.0,))}, b"x"), Defect.TENSOR_INFO_INVALID, "a", None),
        (shard_bytes({"a": {"dtype": "U8", "shape": []}}, b"x"), Defect.TENSOR_INFO_INVALID, "a", None),
        (shard_bytes({"a": entry(), "b": entry(begin=2, end=3)}, b"xyz"), Defect.OFFSET_HOLE, "b", 102),
        (
            shard_bytes({"a": entry(shape=(2,), end=2), "b": entry(begin=1, end=2)}, b"xy"),
            Defect.OFFSET_OVERLAP,
            "b",
            101,
        ),
        (shard_bytes({"a": entry(begin=0, end=0, shape=(0,)), "b": entry(begin=1, end=0)}), None, "b", None),
        (shard_bytes({"a": entry(shape=(2**63, 4), end=8)}, bytes(8)), Defect.SIZE_OVERFLOW, "a", None),
        (shard_bytes({"a": entry(shape=(2,))}, b"x"), Defect.SIZE_MISMATCH, "a", None),
        (shard_bytes({"a": entry("F4", (3,))}, b"x"), Defect.SIZE_MISMATCH, "a", None),
        (shard_bytes(TWO, bytes(9)), Defect.DATA_SECTION_SHORT, "b", None),
        (shard_bytes(TWO, bytes(11)), Defect.DATA_SECTION_LONG, None, None),
    ],
)
def test_every_way_to_be_broken_has_its_name(
    tmp_path: Path, content: bytes, reason: Defect | None, tensor: str | None, offset_bytes: int | None
) -> None:
    assert not library_accepts(content)
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointDefect) as caught:
        read_shard(path)
    defect = caught.value
    assert defect.path == path
    if reason is not None:
        assert defect.reason == reason
    assert defect.tensor == tensor
    if offset_bytes is not None:
        assert defect.offset_bytes is not None
        assert defect.offset_bytes - offset_bytes in range(-40, 40)


def test_the_offset_points_at_the_first_missing_byte(tmp_path: Path) -> None:
    content = shard_bytes(TWO, bytes(7))
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointDefect, match=f'tensor "b", byte {len(content):,}') as caught:
        read_shard(path)
    assert caught.value.offset_bytes == len(content)


@pytest.mark.parametrize(
    "header",
    [
        "{}",
        " {} \n",
        '{"__metadata__":null}',
        '{"x":["U8",[1],[0,1]]}',
        '{"x":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}',
        '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":[1.5,null,-3]}}',
        '{"x":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"q":' + "[" * 124 + "]" * 124 + "}}",
        '{"\\ud83d\\ude00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
    ],
)
def test_odd_headers_that_the_library_reads_are_read(tmp_path: Path, header: str) -> None:
    content = shard_bytes(header, b"\1" if "U8" in header else b"")
    assert library_accepts(content)
    assert we_accept(tmp_path / "model.safetensors", content)


@pytest.mark.parametrize(
    "header",
    [
        '{"x":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}',
        '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"q":Infinity}}',
        '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"q":1e999}}',
        '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"q":1' + "0" * 400 + "}}",
        '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"q":' + "[" * 130 + "]" * 130 + "}}",
        '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"q":' + "[" * 90_000 + "]" * 90_000 + "}}",
        '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"shape":[1]}}',
        '{"x":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
        '{"x":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}',
        '{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"__metadata__":{},"__metadata__":{},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} {}',
    ],
)
def test_odd_headers_that_the_library_refuses_are_refused(tmp_path: Path, header: str) -> None:
    content = shard_bytes(header, b"\1")
    assert not library_accepts(content)
    assert not we_accept(tmp_path / "model.safetensors", content)


TOKENS = [
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "0",
    "1",
    "-",
    "4",
    "10",
    "F4",
    "U8",
    "\\",
    "null",
    " ",
    "9" * 20,
    "e",
    ".",
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Return a small valid file with edits in its header text, its length or its data."""
    text = json.dumps(
        draw(st.sampled_from([TWO, {"a": entry()}, {"__metadata__": {"k": "v"}, "a": entry("F4", (2,))}]))
    )
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 4))
        text = text[:at] + draw(st.sampled_from(["", *TOKENS])) + text[at + cut :]
    size = draw(st.sampled_from([0, 1, 4, 9, 10, 11]))
    moved = draw(st.sampled_from([0, 0, 0, 0, 0, -1, 1, 8]))
    return shard_bytes(text, bytes(size), length=max(0, len(text.encode()) + moved))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(mutated(), st.binary(max_size=64), st.binary(max_size=40).map(lambda raw: shard_bytes("{}", raw)))
)
@example(content=shard_bytes(TWO, bytes(10)))
def test_agrees_with_the_library_on_mutated_files(tmp_path: Path, content: bytes) -> None:
    assert we_accept(tmp_path / "model.safetensors", content) == library_accepts(content)


JSON_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 2**66),
        st.floats(allow_nan=False),
        st.sampled_from(["U8", "F4", "", "a"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["dtype", "U8", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.just("U8"), st.just("F4"), JSON_VALUES),
            "shape": st.one_of(st.lists(st.integers(0, 3), max_size=3), JSON_VALUES),
            "data_offsets": st.one_of(st.just([0, 1]), st.just([0, 0]), JSON_VALUES),
        },
        optional={"more": JSON_VALUES},
    ),
    as_list=st.booleans(),
    size=st.integers(0, 2),
)
def test_agrees_with_the_library_on_strange_entries(
    tmp_path: Path, fields: dict[str, object], as_list: bool, size: int
) -> None:
    content = shard_bytes({"x": list(fields.values()) if as_list else fields}, bytes(size))
    assert we_accept(tmp_path / "model.safetensors", content) == library_accepts(content)


def test_layout_is_what_the_header_says(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"b": RawTensor("BF16", (1, 2), b"\1\2\3\4"), "a": RawTensor("U8", (3,), b"xyz")}
    save_shard(path, tensors, {"format": "pt"})
    shard = read_shard(path)
    assert {tensor.name: (tensor.dtype, tensor.shape, tensor.size_bytes) for tensor in shard.tensors} == {
        "a": ("U8", (3,), 3),
        "b": ("BF16", (1, 2), 4),
    }
    assert shard.data_start_byte == 8 + shard.header_bytes
    assert shard.size_bytes == path.stat().st_size == shard.data_start_byte + 7
    assert load_shard(path) == tensors


@st.composite
def generated(draw: st.DrawFn) -> bytes:
    """Return a file of several tensors, mostly right, with every kind of fault that headers have."""
    entries: list[str] = []
    position = 0
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from([*BITS_OF_DTYPE, "F4", "F6_E2M3", "BF16", "F17"]))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 2**32, 2**63]), max_size=3))
        bits = prod(shape) * BITS_OF_DTYPE.get(dtype, 8)
        size = bits // 8 + draw(st.sampled_from([0] * 12 + [-1, 1]))
        begin = position + draw(st.sampled_from([0] * 12 + [-1, 1, 4]))
        end = begin + size
        name = draw(
            st.sampled_from([f"t{number}"] * 6 + ["t0", "__metadata__", "", "\\ud83d\\ude00", "\\ud800", "\\u00e9"])
        )
        fields = [f'"dtype":"{dtype}"', f'"shape":{json.dumps(shape)}', f'"data_offsets":[{begin},{end}]']
        fields += draw(
            st.sampled_from([[]] * 8 + [['"more":1e400'], ['"more":{"a":[]}'], ['"shape":[1]'], ['"x":1,"x":2']])
        )
        fields = draw(st.permutations(fields))
        space = draw(st.sampled_from(["", "", " ", "\n", "\t", "\r", "\f", "\u00a0"]))
        entries.append(f'"{name}"{space}:{space}{{{space}' + f",{space}".join(fields) + f"{space}}}")
        position = end
    entries += draw(
        st.sampled_from(
            [[]] * 6
            + [
                ['"__metadata__":{"format":"pt"}'],
                ['"__metadata__":{"a":"b","a":"c"}'],
                ['"__metadata__":{"a":1}'],
                ['"__metadata__":[]'],
                ['"__metadata__":"text"'],
                ['"__metadata__":null'],
                ['"__metadata__":{}', '"__metadata__":null'],
            ]
        )
    )
    entries = draw(st.permutations(entries))
    text = "{" + ",".join(entries) + "}" + draw(st.sampled_from(["", "", "", " ", "   \n", "x", "\0", ","]))
    data_bytes = max(0, min(position, 300) + draw(st.sampled_from([0] * 10 + [-1, 1])))
    return shard_bytes(text, bytes(data_bytes))


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=generated())
def test_agrees_with_the_library_on_generated_headers(tmp_path: Path, content: bytes) -> None:
    assert we_accept(tmp_path / "model.safetensors", content) == library_accepts(content)


@pytest.mark.parametrize("depth", range(120, 134))
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_agrees_with_the_library_on_depth(tmp_path: Path, depth: int, brackets: str) -> None:
    opened = brackets[0] if brackets == "[]" else '{"a":'
    nested = opened * depth + "1" + brackets[1] * depth
    content = shard_bytes('{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"q":' + nested + "}}", b"x")
    assert we_accept(tmp_path / "model.safetensors", content) == library_accepts(content)


def test_the_one_header_that_the_library_reads_and_we_refuse(tmp_path: Path) -> None:
    """A shape of 30,000 dimensions: no engine has such a tensor, and a list of them would cost memory."""
    content = shard_bytes({"x": entry(shape=[1] * 30_000)}, b"x")
    assert library_accepts(content)
    assert not we_accept(tmp_path / "model.safetensors", content)
    content = shard_bytes({"x": entry(shape=[1] * 10_000)}, b"x")
    assert library_accepts(content)
    assert we_accept(tmp_path / "model.safetensors", content)
