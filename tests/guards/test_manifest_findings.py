"""A manifest names every byte of a published checkpoint, and what differs from it is named: the file and the tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import cli
from harness.checkpoint import hashing, models
from harness.checkpoint.copy import RawTensor, load_shard, private_copy, rewrite_shard, save_shard
from harness.checkpoint.manifest import read_shard
from harness.errors import EXIT_BROKEN, EXIT_HELD, EXIT_USAGE, CheckpointDefect, HarnessError, UsageError
from harness.guards.finding import PreflightFinding, Severity
from harness.guards.manifest import manifest_findings, write_manifest
from harness.guards.manifest_document import parse_manifest

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = models.tiny_llama(shards=2, hidden=32, heads=2, kv_heads=2, intermediate=48)
    return source.build(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    return private_copy(sound, tmp_path / "checkpoint")


@pytest.fixture
def manifest(path: Path, tmp_path: Path) -> Path:
    """The manifest of the sound checkpoint; damage `path` afterwards."""
    write_manifest(path, tmp_path / "manifest.json")
    return tmp_path / "manifest.json"


def find(path: Path, manifest: Path) -> list[PreflightFinding]:
    return list(manifest_findings(path, manifest))


def holder(path: Path, tensor: str) -> Path:
    return next(file for file in path.glob("*.safetensors") if tensor in load_shard(file))


def patch(file: Path, offset_bytes: int, put: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset_bytes)
        opened.write(put)


def test_a_manifest_holds_what_other_tools_would_compute(path: Path, manifest: Path) -> None:
    document = json.loads(manifest.read_text())
    assert document["files"].keys() == {file.name for file in path.iterdir()}
    for file in path.iterdir():
        entry = document["files"][file.name]
        assert entry["size_bytes"] == file.stat().st_size
        assert entry["blake3"] == blake3(file.read_bytes()).hexdigest()
    for name, tensor in load_shard(path / FIRST).items():
        entry = document["files"][FIRST]["tensors"][name]
        assert entry == {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "blake3": blake3(tensor.data).hexdigest(),
        }
    assert "tensors" not in document["files"]["config.json"]


def test_nothing_differs_in_a_copy(path: Path, manifest: Path, tmp_path: Path) -> None:
    assert find(path, manifest) == []
    assert find(private_copy(path, tmp_path / "copy"), manifest) == []


def test_files_in_directories_and_behind_links_are_covered(path: Path, tmp_path: Path) -> None:
    (path / "deep").mkdir()
    (path / "deep" / "extra.json").write_text("{}")
    (path / "config.json").rename(tmp_path / "blob")
    (path / "config.json").symlink_to(tmp_path / "blob")
    write_manifest(path, tmp_path / "manifest.json")
    assert find(path, tmp_path / "manifest.json") == []
    (tmp_path / "blob").write_text("{}")
    (path / "deep" / "extra.json").unlink()
    found = {(finding.where, finding.seen) for finding in find(path, tmp_path / "manifest.json")}
    assert ('"deep/extra.json"', "absent") in found
    assert any(where == '"config.json"' for where, _ in found)


@pytest.mark.parametrize("name", [".manifest.json", "manifest.json"])
def test_a_manifest_inside_the_checkpoint_lists_neither_itself_nor_signature_nor_marker(path: Path, name: str) -> None:
    write_manifest(path, path / name)
    (path / f"{name}.sig").touch()
    (path / ".ready").touch()
    assert find(path, path / name) == []
    write_manifest(path, path / name)
    assert parse_manifest((path / name).read_bytes()).files.keys().isdisjoint({name, f"{name}.sig", ".ready"})


def test_a_transposed_square_is_named_by_tensor_and_byte(path: Path, manifest: Path) -> None:
    file = holder(path, O_PROJ)
    before = read_shard(file)

    def transpose(tensors: dict[str, RawTensor]) -> dict[str, RawTensor]:
        old = tensors[O_PROJ]
        rows, columns = old.shape
        cells = [old.data[2 * cell : 2 * cell + 2] for cell in range(rows * columns)]
        turned = b"".join(cells[row * columns + column] for column in range(columns) for row in range(rows))
        return tensors | {O_PROJ: RawTensor(old.dtype, old.shape, turned)}

    rewrite_shard(file, transpose)
    (finding,) = find(path, manifest)
    assert (finding.id, finding.severity) == ("D15", Severity.SILENT)
    tensor = next(one for one in before.tensors if one.name == O_PROJ)
    assert finding.where == f'"{file.name}", tensor "{O_PROJ}", byte {before.data_start_byte + tensor.begin_byte:,}'
    assert finding.seen == "other bytes than were published"


def test_the_first_of_several_tensors_is_named_and_the_others_are_counted(path: Path, manifest: Path) -> None:
    shard = read_shard(path / FIRST)
    for tensor in (shard.tensors[5], shard.tensors[2], shard.tensors[7]):
        patch(path / FIRST, shard.data_start_byte + tensor.begin_byte, b"\x12\x34\x56\x78")
    (finding,) = find(path, manifest)
    assert f'tensor "{shard.tensors[2].name}"' in finding.where
    assert "2 more tensors differ" in finding.seen


def relabelled(tensors: dict[str, RawTensor]) -> dict[str, RawTensor]:
    return {name: RawTensor("F16", one.shape, one.data) for name, one in tensors.items()}


def without_norm(tensors: dict[str, RawTensor]) -> dict[str, RawTensor]:
    return {name: one for name, one in tensors.items() if name != "model.norm.weight"}


def with_more(tensors: dict[str, RawTensor]) -> dict[str, RawTensor]:
    return {**tensors, "zz": RawTensor("U8", (1,), b"x")}


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (relabelled, "F16 [32], published was BF16 [32]"),
        (without_norm, "is absent"),
        (with_more, "was not published"),
    ],
)
def test_what_a_header_shows_is_named_too(
    path: Path, manifest: Path, change: Callable[[dict[str, RawTensor]], dict[str, RawTensor]], seen: str
) -> None:
    rewrite_shard(holder(path, "model.norm.weight"), change)
    (finding,) = find(path, manifest)
    assert finding.blocks
    assert seen in finding.seen or seen.replace("[32]", "[512, 32]") in finding.seen


def test_another_header_round_the_same_tensors_does_not_block(path: Path, manifest: Path) -> None:
    save_shard(path / FIRST, load_shard(path / FIRST), {"format": "pt", "more": "metadata"})
    (finding,) = find(path, manifest)
    assert finding.severity is Severity.RISK
    assert "another header" in finding.seen


def cut(path: Path) -> None:
    os.truncate(path / SECOND, (path / SECOND).stat().st_size - 1)


def replace_by_directory(path: Path) -> None:
    (path / SECOND).unlink()
    (path / SECOND).mkdir()


def replace_by_pipe(path: Path) -> None:
    (path / SECOND).unlink()
    os.mkfifo(path / SECOND)


@pytest.mark.parametrize(
    ("damage", "fault_id", "severity", "where", "seen"),
    [
        (lambda path: (path / SECOND).unlink(), "D03", Severity.SILENT, SECOND, "absent"),
        (replace_by_directory, "D03", Severity.SILENT, SECOND, "absent"),
        (replace_by_pipe, "D20", Severity.REFUSES, SECOND, "not_a_regular_file"),
        (cut, "D15", Severity.SILENT, SECOND, "data_section_short"),
        (lambda path: (path / "config.json").write_text("{}"), "C05", Severity.SILENT, "config.json", "other bytes"),
        (lambda path: (path / "tokenizer.json").unlink(), "D19", Severity.SILENT, "tokenizer.json", "absent"),
        (lambda path: (path / "README.md").write_text("x"), "D19", Severity.RISK, "README.md", "not published"),
        (lambda path: (path / "modeling.py").write_text("x"), "C06", Severity.SILENT, "modeling.py", "not published"),
        (
            lambda path: (path / "chat_template.jinja").write_text("x"),
            "C10",
            Severity.SILENT,
            "chat_template.jinja",
            "not published",
        ),
        (
            lambda path: (path / "consolidated.safetensors").write_bytes(b"x"),
            "D11",
            Severity.SILENT,
            "consolidated.safetensors",
            "not published",
        ),
        (
            lambda path: (path / "config.json").write_bytes(
                (path / "config.json").read_bytes().replace(b"silu", b"gelu")
            ),
            "C05",
            Severity.SILENT,
            "config.json",
            "other bytes",
        ),
    ],
)
def test_absent_surplus_and_different_files(
    path: Path,
    manifest: Path,
    damage: Callable[[Path], object],
    fault_id: str,
    severity: Severity,
    where: str,
    seen: str,
) -> None:
    damage(path)
    (finding,) = find(path, manifest)
    assert (finding.id, finding.severity) == (fault_id, severity)
    assert f'"{where}"' in finding.where
    assert seen in finding.seen


def test_a_file_that_shrinks_while_it_is_read_is_a_finding(
    path: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = hashing.open_regular

    def opened_then_cut(file: Path) -> int:
        descriptor = original(file)
        if file.name == FIRST:
            os.truncate(file, 1000)
        return descriptor

    monkeypatch.setattr(hashing, "open_regular", opened_then_cut)
    (finding,) = find(path, manifest)
    assert (finding.id, finding.severity) == ("D20", Severity.REFUSES)
    assert "became shorter" in finding.seen


def test_parts_are_hashed_right_whatever_their_sizes_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(hashing, "WIDE_BLOCK_BYTES", 3000)
    content = bytes(number * number % 251 for number in range(20_000))
    (tmp_path / "file").write_bytes(content)
    ranges = [(0, 20_000), (0, 0), (5, 6), (100, 1100), (100, 1101), (19_999, 20_000), (3, 9003)]
    parts = [hashing.Part(tmp_path / "file", begin, end) for begin, end in ranges]
    expected = [blake3(content[begin:end]).digest() for begin, end in ranges]
    for threads in (1, 2, 3, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, threads=threads: set(range(threads)))
        assert hashing.hash_parts(parts) == expected
        assert [hashing.hash_parts([part])[0] for part in parts] == expected
    assert hashing.hash_parts([]) == []
    with pytest.raises(CheckpointDefect, match="became shorter"):
        hashing.hash_parts([*parts, hashing.Part(tmp_path / "file", 0, 20_001)])


def test_a_manifest_is_replaced_in_one_step_or_not_at_all(path: Path, manifest: Path, tmp_path: Path) -> None:
    before = manifest.read_bytes()
    (path / FIRST).unlink()
    (path / FIRST).symlink_to("nowhere")
    with pytest.raises(HarnessError, match=FIRST):
        write_manifest(path, manifest)
    assert manifest.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint", "manifest.json"]
    with pytest.raises(UsageError, match="not a directory"):
        write_manifest(tmp_path / "none", manifest)


def test_a_manifest_that_cannot_be_read_is_a_wrong_call(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        find(path, tmp_path / "none")
    with pytest.raises(UsageError, match="a directory"):
        find(path, path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"format": "vllm-rollout-harness manifest", "version": 2, "files": {}}',
        b'{"format": "vllm-rollout-harness manifest", "version": 1}',
        b'{"format": "vllm-rollout-harness manifest", "version": 1, "files": []}',
        b'{"format": "vllm-rollout-harness manifest", "version": 1, "files": {"a": 3}}',
        b'{"format": "vllm-rollout-harness manifest", "version": 1, "files": {"a": {"size_bytes": -1, "blake3": ""}}}',
        b'{"format": "vllm-rollout-harness manifest", "version": 1, "files": {"a": {"size_bytes": 1, "blake3": 3}}}',
    ],
)
def test_a_manifest_that_says_nothing_is_one_finding(path: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    (finding,) = find(path, tmp_path / "manifest.json")
    assert finding.blocks
    assert finding.where == '"manifest.json"'


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 6000), put=st.binary(max_size=12), cut=st.integers(0, 40))
def test_any_bytes_in_a_manifest_give_findings_never_an_exception(
    sound: Path, tmp_path: Path, at: int, put: bytes, cut: int
) -> None:
    manifest = tmp_path / "m.json"
    if not manifest.exists():
        write_manifest(sound, manifest)
    raw = manifest.read_bytes()
    changed = tmp_path / "changed.json"
    changed.write_bytes(raw[:at] + put + raw[at + cut :])
    for finding in find(sound, changed):
        assert finding.as_text()


def test_names_in_a_manifest_are_never_opened(path: Path, manifest: Path, tmp_path: Path) -> None:
    document: dict[str, Any] = json.loads(manifest.read_text())
    (tmp_path / "secret").write_text("x")
    record = {"size_bytes": 1, "blake3": blake3(b"x").hexdigest()}
    document["files"] |= {"../secret": record, str(tmp_path / "secret"): record}
    manifest.write_text(json.dumps(document))
    found = find(path, manifest)
    assert [finding.seen for finding in found] == ["absent", "absent"]


def test_command(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.json"
    assert cli.main(["manifest", str(path), "--out", str(out)]) == EXIT_HELD
    assert "7 files, 21 tensors" in capsys.readouterr().out
    assert list(manifest_findings(path, out)) == []
    assert cli.main(["manifest", str(path), "--out", str(out), "--json"]) == EXIT_HELD
    assert json.loads(capsys.readouterr().out)["signature"] is None
    assert cli.main(["manifest", str(tmp_path / "none"), "--out", str(out)]) == EXIT_USAGE
    assert cli.main(["manifest", str(path), "--out", str(tmp_path / "none" / "m.json")]) == EXIT_USAGE
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("nowhere")
    assert cli.main(["manifest", str(path), "--out", str(out)]) == EXIT_BROKEN
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("out", ["", "there"])
def test_a_manifest_that_would_be_a_directory_is_refused(tmp_path: Path, out: str) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="is to be a file, but"):
        write_manifest(tmp_path, tmp_path / out if out else Path(out))
