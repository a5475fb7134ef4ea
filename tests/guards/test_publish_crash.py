"""However a publish or a rollback ends, the live checkpoint is whole, and the next publish clears what was left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill_sweep
import pytest

from harness.errors import HarnessError
from harness.guards.publish import publish

LIMIT_S = 120
both_ways = pytest.mark.parametrize("mode", ["link", "exchange"])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: on a disk, thousands of fsyncs take minutes."""
    if os.access("/dev/shm", os.W_OK):
        with tempfile.TemporaryDirectory(prefix="publish-crash-", dir="/dev/shm") as directory:
            yield Path(directory)
    else:
        yield tmp_path


def swept(mode: str, how: str, place: Path, *more: object) -> list[dict[str, Any]]:
    command = [sys.executable, kill_sweep.__file__, mode, how, str(place), *map(str, more)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_whole(row: dict[str, Any]) -> None:
    """Check that a reader found one whole release, and that the next publish and rollback were as ever."""
    assert row["found"] in ("old", "new"), row
    assert (row["afterwards"], row["remains"]) == ("3rd", []), row
    # What was live after the harm is what the next publish replaced, and what a rollback brings back.
    assert row["rolled_back"] == row["found"], row


@both_ways
def test_killed_before_any_call_into_the_system_the_live_checkpoint_is_whole(mode: str, place: Path) -> None:
    rows = swept(mode, "kill", place)
    for row in rows:
        require_whole(row)
        assert row["said"] == ("" if row["finished"] else "killed")
    assert len(rows) >= 300
    for action, before, after in (("publish", "old", "new"), ("rollback", "new", "old")):
        found = [row["found"] for row in rows if row["action"] == action]
        switched = found.index(after)
        assert found == [before] * switched + [after] * (len(found) - switched), "it switches once"
        assert switched > 10
        assert rows[-1]["finished"]


@both_ways
def test_failing_at_any_call_into_the_system_it_says_so_and_the_live_checkpoint_is_whole(
    mode: str, place: Path
) -> None:
    rows = swept(mode, "fail", place)
    for row in rows:
        require_whole(row)
        if row["said"]:
            assert "No space left on device" in row["said"], row
            live = {"link": {"old": 1, "new": 2}, "exchange": {"old": 0, "new": 1}}[mode][row["found"]]
            assert f"version {live} is live" in row["said"] or "failed" not in row["said"], row
        else:
            assert row["found"] == ("new" if row["action"] == "publish" else "old"), "it claimed success"
    assert len(rows) >= 300
    assert sum(bool(row["said"]) for row in rows) > 250


@both_ways
def test_where_files_cannot_grow_it_says_so_and_the_old_checkpoint_stays(mode: str, place: Path) -> None:
    rows = swept(mode, "full", place)
    for row in rows:
        require_whole(row)
    outcomes = Counter((row["found"], "File too large" in row["said"]) for row in rows)
    assert outcomes == {("old", True): len(rows) - 1, ("new", False): 1}


@both_ways
@pytest.mark.parametrize("kills", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_killed_at_random_times_the_live_checkpoint_is_whole(mode: str, place: Path, kills: int) -> None:
    *rows, last = swept(mode, "random", place, kills)
    assert len(rows) == kills
    assert {row["found"] for row in rows} <= {"old", "new", "3rd"}
    assert any(row["left"] for row in rows), "no kill came in the middle"
    assert (last["found"], last["remains"]) == ("new", [])


@both_ways
def test_on_a_full_disk_it_says_so_and_the_old_checkpoint_stays(mode: str, tmp_path: Path) -> None:
    """A real small file system, filled so far that publishing fails at another place each time."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        fill(mode, tmp_path, mounted)
    finally:
        subprocess.run(["umount", str(mounted)], timeout=LIMIT_S, check=True)


def fill(mode: str, tmp_path: Path, mounted: Path) -> None:
    by_exchange = mode == "exchange"
    sources = {release: kill_sweep.checkpoint(tmp_path / release, release) for release in ("old", "new")}
    root = mounted / "root"
    publish(sources["old"], root, by_exchange=by_exchange)
    ballast, page = mounted / "ballast", 4096
    said: list[str] = []
    free = 0
    while True:
        ballast.unlink(missing_ok=True)
        state = os.statvfs(mounted)
        filling = (state.f_bavail - free) * page
        ballast.write_bytes(bytes(filling))
        try:
            publish(sources["new"], root, by_exchange=by_exchange)
            break
        except HarnessError as error:
            said.append(str(error))
        assert kill_sweep.release_of(root / "live") == "old"
        assert kill_sweep.remains(root) == []
        free += 1
    assert len(said) > 10
    assert all("No space left on device" in text and text.endswith("version 1 is live") for text in said)
    assert kill_sweep.release_of(root / "live") == "new"
