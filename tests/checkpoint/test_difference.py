"""Two checkpoints are the same only if every file of one is in the other, with what an engine reads of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.checkpoint.copy import private_copy
from harness.checkpoint.difference import differing_files
from harness.checkpoint.models import tiny_llama
from harness.faults.shard_rewrite import rewrite_tensors

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(seed=1, hidden=32, heads=2, kv_heads=1, intermediate=64, vocabulary=300).build(
        tmp_path_factory.mktemp("models")
    )


@pytest.fixture
def live(wanted: Path, tmp_path: Path) -> Path:
    return private_copy(wanted, tmp_path / "live")


def test_a_copy_differs_in_nothing(live: Path, wanted: Path) -> None:
    assert differing_files(live, wanted) == ()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_one_changed_byte_of_a_small_file_is_seen(name: str, live: Path, wanted: Path) -> None:
    content = (live / name).read_bytes()
    (live / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    assert differing_files(live, wanted) == (f"{name} differs",)


def test_one_changed_bit_of_the_weights_is_seen(live: Path, wanted: Path) -> None:
    with (live / WEIGHTS).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))

    assert differing_files(live, wanted) == (f"{WEIGHTS} differs",)


def test_the_same_tensors_and_texts_under_another_header_are_the_same(live: Path, wanted: Path) -> None:
    raw = (wanted / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    text = json.dumps(dict(reversed(header.items())), indent=1).encode()
    (live / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])

    assert header["__metadata__"] == {"format": "pt"}
    assert (live / WEIGHTS).read_bytes() != raw
    assert differing_files(live, wanted) == ()


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"format": "tf"}, '"format" is "tf", not "pt"'),
        ({}, '"format" is absent, not "pt"'),
        ({"format": "pt", "step": "7"}, '"step" is "7", not absent'),
        ({"format": "pt", **{f"w{n}": "" for n in range(9)}}, '"w2" is "", not absent and 6 more'),
    ],
)
def test_other_texts_beside_the_same_tensors_are_named(
    live: Path, wanted: Path, texts: dict[str, str], said: str
) -> None:
    rewrite_tensors(live / WEIGHTS, {}, texts)

    (named,) = differing_files(live, wanted)
    assert named.startswith(f"{WEIGHTS} differs in __metadata__ (")
    assert named.endswith(f"{said})")


def test_absent_and_surplus_files_are_named_and_those_left_out_are_not(live: Path, wanted: Path) -> None:
    (live / "tokenizer.json").unlink()
    (live / "np").mkdir()
    (live / "np" / "a").write_bytes(b"old")
    (live / ".ready").write_bytes(b"")
    (live / "np" / ".ready").write_bytes(b"")

    assert differing_files(live, wanted, leave_out=(".ready",)) == (
        "np/.ready is surplus",
        "np/a is surplus",
        "tokenizer.json is absent",
    )


def test_files_that_cannot_be_read_are_named(live: Path, wanted: Path) -> None:
    (live / "config.json").unlink()
    (live / "config.json").symlink_to("nowhere")
    (live / WEIGHTS).write_bytes(b"no weights")

    said = differing_files(live, wanted)

    assert said[0].startswith('config.json cannot be read (a link to "nowhere"')
    assert said[1:] == (f"{WEIGHTS} differs",)


def test_a_link_counts_as_what_it_points_to(live: Path, wanted: Path, tmp_path: Path) -> None:
    (live / "config.json").rename(tmp_path / "blob")
    (live / "config.json").symlink_to("../blob")
    assert json.loads((live / "config.json").read_text())

    assert differing_files(live, wanted) == ()
