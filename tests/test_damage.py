"""A damaged copy is damaged as it says, costs what was changed, and never touches the user's files."""

from __future__ import annotations

import fcntl
import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import cli, damage, faults, models
from harness.checkpoint.adapter import ADAPTER
from harness.checkpoint.copy import RawTensor
from harness.damage import damage_copy
from harness.damage_command import fault_from
from harness.errors import FaultNotApplicable, FaultNotProved, UsageError
from harness.faults import FAULTS, Damage, Injected, facts
from harness.faults.documents import is_damage, is_of_adapter, parameters_of
from harness.faults.fault import AdapterFault

sys.path.insert(0, str(Path(__file__).parent / "faults"))

from damage_cases import DAMAGES, DOWN, Pair, contents, seen, small, templated_copy

ROOT = Path(__file__).parent.parent
LIMIT_S = 120.0
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    cache = tmp_path_factory.mktemp("models")
    new = templated_copy(small(2).build(cache), cache / "new")
    return Pair(old=small(1, intermediate=96).build(cache), new=new, alike=small(3).build(cache))


@pytest.fixture
def linking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share every file by hard link, however small: then any write in place reaches the original."""
    monkeypatch.setattr(damage, "LINKED_BYTES_MIN", 1)


@pytest.mark.usefixtures("linking")
@pytest.mark.parametrize("name", DAMAGES)
def test_no_fault_changes_a_file_of_the_user(name: str, pair: Pair, tmp_path: Path) -> None:
    fault = DAMAGES[name]
    old = pair.old_for(fault)
    before = seen(pair.new), seen(old)

    damaged = damage_copy(pair.new, tmp_path / "out", fault, old=old)

    assert (seen(pair.new), seen(old)) == before
    assert damaged.injected.proved
    assert contents(tmp_path / "out") != contents(pair.new)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("linking")
@pytest.mark.parametrize("name", ["widen_columns", "truncate_half", "zero_tail", "flip_bit", "cut_config"])
def test_only_what_was_damaged_is_written(name: str, pair: Pair, tmp_path: Path) -> None:
    damaged = damage_copy(pair.new, tmp_path / "out", DAMAGES[name], old=pair.old)

    changed = {file for file, digest in contents(tmp_path / "out").items() if contents(pair.new).get(file) != digest}
    assert set(damaged.linked) | set(damaged.reflinked) == set(contents(pair.new)) - changed
    assert damaged.written_bytes == sum((tmp_path / "out" / file).stat().st_blocks * 512 for file in changed)
    for file in damaged.linked:
        assert (tmp_path / "out" / file).samefile(pair.new / file)


def test_a_copy_with_hard_links_is_read_only_and_one_without_is_not(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_copy(pair.new, tmp_path / "copied", DAMAGES["config_rope"], share="none")
    monkeypatch.setattr(damage, "LINKED_BYTES_MIN", 1)
    damage_copy(pair.new, tmp_path / "linked", DAMAGES["nested_checkpoint"], old=pair.old)

    assert stat.S_IMODE((tmp_path / "copied").stat().st_mode) & stat.S_IWUSR
    for directory in (tmp_path / "linked", tmp_path / "linked" / "new"):
        assert not stat.S_IMODE(directory.stat().st_mode) & 0o222
    (tmp_path / "copied" / FIRST).write_bytes(b"written over")
    assert (pair.new / FIRST).stat().st_size > 1000


def test_without_hard_links_the_file_is_copied(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(damage, "LINKED_BYTES_MIN", 1)
    monkeypatch.setattr(os, "link", refuse)

    damaged = damage_copy(pair.new, tmp_path / "out", DAMAGES["config_rope"])

    assert damaged.linked == ()


def test_a_killed_damage_leaves_the_originals_whole_and_the_next_one_cleans_up(pair: Pair, tmp_path: Path) -> None:
    sweep = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "damage_kill_sweep.py"),
            str(pair.new),
            str(pair.old),
            str(tmp_path),
            "23",
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert sweep.returncode == 0, sweep.stderr
    kills = [json.loads(line) for line in sweep.stdout.splitlines()]

    assert len(kills) > 40
    assert {kill["originals"] for kill in kills} == {"same"}
    assert {kill["out"] for kill in kills} == {"nothing", "whole"}
    assert {kill["afterwards"] for kill in kills} == {"whole"}
    assert any(kill["left"] for kill in kills)
    assert not any(kill["left_afterwards"] for kill in kills)


def test_what_another_running_damage_makes_is_left_alone(pair: Pair, tmp_path: Path) -> None:
    running = tmp_path / ".out.0123.damaging"
    running.mkdir()
    descriptor = os.open(running, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        damage_copy(pair.new, tmp_path / "out", DAMAGES["config_rope"])
        assert running.exists()
    finally:
        os.close(descriptor)
    damage_copy(pair.new, tmp_path / "again", DAMAGES["config_rope"])
    assert running.exists(), "it belongs to another place"


class LostDamage:
    """A damage whose writes never reach the disk."""

    name = "lost"
    fault_id = "D00"

    def parameters(self) -> Mapping[str, object]:
        return {}

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        return Injected(fault=self.name, fault_id=self.fault_id, proved=False, because="nothing changed")


def test_a_damage_that_is_not_proved_leaves_nothing(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(FaultNotProved, match="nothing changed"):
        damage_copy(pair.new, tmp_path / "out", LostDamage())
    assert list(tmp_path.iterdir()) == []


def test_a_damage_that_cannot_be_made_leaves_nothing(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(FaultNotApplicable, match="no tensor matches") as raised:
        damage_copy(pair.new, tmp_path / "out", faults.drop_tensor("nowhere"))
    assert f'in "{pair.new.absolute()}"' in str(raised.value)  # and not in a directory that is gone
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["a file in it", "a file", "a link", "inside the checkpoint", "around the checkpoint"])
def test_places_that_are_refused(what: str, pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = seen(pair.new)
    if what == "a file in it":
        out.mkdir()
        (out / "mine").write_text("mine")
    elif what == "a file":
        out.write_text("mine")
    elif what == "a link":
        out.symlink_to(tmp_path / "elsewhere")
    else:
        out = pair.new / "out" if what == "inside the checkpoint" else pair.new.parent

    with pytest.raises(UsageError, match=r"expected a new or empty|overlap"):
        damage_copy(pair.new, out, DAMAGES["config_rope"])

    assert seen(pair.new) == before


def test_an_empty_directory_is_used(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert damage_copy(pair.new, tmp_path / "out", DAMAGES["config_rope"]).injected.proved
    assert (tmp_path / "out" / "config.json").exists()


# The command line


def tell(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["damage", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_command_prints_the_proof(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = tell(
        capsys,
        str(pair.new),
        *("--fault", "widen_tensor", "--set", f"tensor={DOWN}", "--set", "dim=1", "--set", "by=8", "--set", "at=end"),
        *("--out", str(tmp_path / "out"), "--json", "--seed", "3"),
    )

    told = json.loads(output)
    assert (code, errors) == (0, "")
    assert (told["fault"], told["fault_id"], told["proved"], told["seed"]) == ("widen_tensor", "D08", True, 3)
    assert told["parameters"] == {"tensor": DOWN, "dim": 1, "by": 8, "at": "end"}
    assert told["after"]["shape"] == [32, 72]
    code, output, _ = tell(capsys, str(pair.new), "--fault", "cut_json", "--out", str(tmp_path / "text"))
    assert code == 0
    assert output.startswith("cut_json (C12) is in ")
    assert output.count("\n") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fault", "widen_tensr", "--out", "o"], 'fault "widen_tensr" is unknown; nearest: widen_tensor'),
        (["--fault", "slow_sync", "--out", "o"], "injected in a scenario"),
        (["--fault", "stale_index", "--out", "o"], "--old"),
        (["--fault", "drop_tensor", "--out", "o"], '"drop_tensor" needs --set tensor=...'),
        (["--fault", "drop_tensor", "--set", "tensor", "--out", "o"], "expected KEY=VALUE"),
        (["--fault", "drop_tensor", "--set", "tensr=x", "--out", "o"], "with KEY among: tensor"),
        (["--fault", "drop_tensor", "--set", "tensor.x=1", "--out", "o"], "has no parts"),
        (["--fault", "widen_tensor", "--set", "tensor=x", "--set", "dim=a", "--set", "by=1", "--out", "o"], "expected int"),
        (["--fault", "widen_tensor", "--set", "tensor=x", "--set", "dim=true", "--set", "by=1", "--out", "o"], "expected int"),
        (["--fault", "widen_tensor", "--set", "tensor=x", "--set", "dim=1", "--set", "by=0", "--out", "o"], "by >= 1"),
        (["--fault", "mismatched_config", "--set", "changes=3", "--out", "o"], "expected Mapping"),
        (["--out", "o"], "missing: --fault"),
        (["--fault", "cut_json"], "missing: --out"),
    ],
)  # fmt: skip
def test_wrong_calls_are_one_sentence(
    arguments: list[str],
    said: str,
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    code, output, errors = tell(capsys, str(pair.new), *arguments)

    assert (code, output) == (3, "")
    assert said in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_proved_is_unknown(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = ["--old", str(pair.new), "--fault", "leftover_consolidated"]

    code, _, errors = tell(capsys, str(pair.new), *same, "--out", str(tmp_path / "out"))

    assert code == 2
    assert "did not happen" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", DAMAGES)
def test_every_fault_can_be_asked_for_on_the_command_line(name: str) -> None:
    fault = DAMAGES[name]
    given_settings = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in fault.parameters().items()
        if value is not None
    ]

    assert fault_from(fault.name, given_settings) == fault


def test_parts_of_a_mapping_can_be_set_one_by_one() -> None:
    made = fault_from("mismatched_config", ["changes.rope_theta=500.0", "changes.hidden_act=gelu"])

    assert made == faults.mismatched_config(changes={"rope_theta": 500.0, "hidden_act": "gelu"})


@settings(deadline=None, max_examples=200)
@given(name=st.sampled_from(sorted(FAULTS)), given_settings=st.lists(st.text(max_size=30), max_size=4))
def test_any_setting_gives_a_fault_or_a_sentence(name: str, given_settings: list[str]) -> None:
    try:
        made = fault_from(name, given_settings)
    except UsageError:
        return
    assert isinstance(made, Damage | AdapterFault)


def test_the_list_names_every_damage_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = tell(capsys, "--list")
    listed = {line.split()[0] for line in output.splitlines() if not line.startswith(" ")}
    assert code == 0
    of_adapters = {name for name in FAULTS if is_of_adapter(name)}
    assert of_adapters == {"adapter_prefix", "adapter_rank", "adapter_width"}
    assert {damage.name for damage in DAMAGES.values()} == {name for name in FAULTS if is_damage(name)}
    assert listed == of_adapters | {damage.name for damage in DAMAGES.values()}
    assert "tensor=STR, dim=INT, by=INT, at=start" in output
    as_json = json.loads(tell(capsys, "--list", "--json")[1])
    assert {entry["fault"]: entry["parameters"] for entry in as_json} == {name: parameters_of(name) for name in listed}


def test_an_adapter_is_damaged_beside_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = models.adapted_llama(seed=1).build(tmp_path / "models")
    adapter, out = base / ADAPTER, tmp_path / "out"
    before = seen(base)

    asked = (str(adapter), "--fault", "adapter_width", "--set", "by=32", "--base", str(base), "--out", str(out))
    code, output, _ = tell(capsys, *asked)

    assert code == 0
    assert "16 of 16 tensors are other ones" in output
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in adapter.iterdir())
    assert seen(base) == before, "the adapter it was made from has changed"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--fault", "adapter_rank"], '"adapter_rank" is of an adapter: give its checkpoint with --base'),
        (["--fault", "damage_header", "--base", "BASE"], '"damage_header" is of no adapter: it takes no --base'),
        (["--fault", "adapter_rank", "--base", "BASE"], 'has no "adapter_model.safetensors", expected the directory'),
        (["--fault", "adapter_rank", "--base", "absent"], 'absent" is not a directory'),
    ],
)
def test_what_is_no_adapter_or_has_no_base_is_an_error(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    words = [str(pair.old) if word == "BASE" else word for word in given]
    code, _, errors = tell(capsys, str(pair.new), *words, "--out", str(tmp_path / "out"))
    assert code == 3
    assert said in errors
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_hub_links_is_copied_by_what_the_links_lead_to(pair: Pair, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in pair.new.iterdir():
        (snapshot / file.name).symlink_to(file)
    before = seen(pair.new)

    damaged = damage_copy(snapshot, tmp_path / "out", DAMAGES["widen_columns"])

    assert damaged.injected.proved
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert seen(pair.new) == before


def test_a_tensor_that_the_system_reads_in_pieces_is_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads no more than 2 GiB at once."""
    name = max(facts.read_shard(pair.new / FIRST).tensors, key=lambda tensor: tensor.size_bytes).name
    whole, opened = facts.read_tensor(pair.new, FIRST, name), Path.open

    class InPieces(io.FileIO):
        def readinto(self, place: memoryview) -> int:  # type: ignore[override]
            return super().readinto(place[:1000]) or 0

    def open_in_pieces(path: Path, *words: str, **how: int) -> object:
        return InPieces(path) if how.get("buffering") == 0 else opened(path, *words, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", open_in_pieces)
    found = facts.read_tensor(pair.new, FIRST, name)
    assert whole is not None
    assert found is not None
    assert len(found.data) > 2000
    assert bytes(found.data) == bytes(whole.data)


@pytest.mark.usefixtures("linking")
def test_a_file_that_is_cut_while_it_is_damaged_is_an_error_and_leaves_nothing(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Somebody else cuts the original, whose bytes the copy shares, after its header was read. In a mapping that is SIGBUS."""
    source = templated_copy(small(2).build(tmp_path / "models"), tmp_path / "new")
    reading, cut = facts.read_tensor, []

    def cut_then_read(path: Path, shard: str, name: str) -> RawTensor | None:
        header = facts.read_shard(path / shard)
        os.truncate(path / shard, header.data_start_byte + 1)
        monkeypatch.setattr(facts, "read_shard", lambda _: header)
        cut.append(seen(source))
        found = reading(path, shard, name)
        assert found is not None
        return RawTensor(found.dtype, found.shape, bytes(found.data))

    monkeypatch.setattr("harness.faults.target.read_tensor", cut_then_read)
    call = ["damage", str(source), "--out", str(tmp_path / "out"), "--fault", "widen_tensor"]
    assert cli.main([*call, "--set", f"tensor={DOWN}", "--set", "dim=1", "--set", "by=32"]) == 2
    assert "the file became shorter while it was read" in capfd.readouterr().err
    assert [seen(source)] == cut
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))
