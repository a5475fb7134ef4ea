"""Publishing shows a reader the whole old or the whole new checkpoint, and can be taken back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from harness.clock import pause
from harness.errors import HarnessError, UsageError, WaitExpired
from harness.guards import publish
from harness.guards.publish import exchange, rollback, versions_of


def checkpoint(path: Path, release: str, *, files: int = 4) -> Path:
    path.mkdir()
    for number in range(files):
        (path / f"file{number}").write_text(release)
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "old", "old")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "new", "new")


def releases(path: Path) -> set[str]:
    return {file.read_text() for file in path.iterdir() if file.name.startswith("file")}


def test_live_is_a_relative_link_to_a_version(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    first = publish.publish(old, root)
    assert first.previous is None
    assert os.readlink(root / "live") == "versions/1"
    second = publish.publish(new, root)
    assert second.previous == first.version_path
    assert releases(root / "live") == {"new"}
    moved = root.rename(tmp_path / "mounted elsewhere")
    assert releases(moved / "live") == {"new"}


def test_a_published_version_shares_nothing_with_the_source(old: Path, tmp_path: Path) -> None:
    version = publish.publish(old, tmp_path / "root").version_path
    (old / "file0").write_text("changed later")
    assert releases(version) == {"old"}
    assert all(file.stat().st_nlink == 1 for file in version.iterdir())


def test_rollback_and_publish_again(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    publish.publish(old, root)
    publish.publish(new, root)
    back = rollback(root)
    assert releases(root / "live") == {"old"}
    assert back.previous is not None
    assert back.previous.name == "2"
    with pytest.raises(UsageError, match="no version before 1"):
        rollback(root)
    again = publish.publish(new, root)
    assert again.version_path.name == "3"
    assert releases(root / "live") == {"new"}


def test_nothing_to_roll_back(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing was ever published"):
        rollback(tmp_path)
    (tmp_path / "versions").mkdir()
    with pytest.raises(UsageError, match="nothing is live"):
        rollback(tmp_path)


def test_keeps_so_many_versions_and_always_the_last_live_one(old: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for _ in range(5):
        publish.publish(old, root, keep=2)
    assert [path.name for path in versions_of(root)] == ["4", "5"]
    publish.publish(old, root, keep=1)
    assert [path.name for path in versions_of(root)] == ["5", "6"]
    assert releases(root / "live") == {"old"}
    with pytest.raises(UsageError, match="keep is 0"):
        publish.publish(old, root, keep=0)


def test_what_is_not_ours_is_left_alone(old: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "live").mkdir()
    with pytest.raises(UsageError, match="is not a link"):
        publish.publish(old, root)
    (root / "live").rmdir()
    (root / "live").symlink_to(old)
    with pytest.raises(UsageError, match="it is left as it is"):
        publish.publish(old, root)
    assert (root / "live").resolve() == old
    with pytest.raises(UsageError, match="cannot be the name"):
        publish.publish(old, root, name="../x")
    with pytest.raises(UsageError, match="is not a directory"):
        publish.publish(tmp_path / "none", root)
    assert versions_of(root) == ()


def test_a_failed_copy_leaves_the_old_version_live(
    old: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    publish.publish(old, root)

    def fail(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "file0").write_text("new")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish, "private_copy", fail)
    with pytest.raises(OSError, match="No space"):
        publish.publish(new, root)
    assert releases(root / "live") == {"old"}
    assert [path.name for path in (root / "versions").iterdir()] == ["1"]


def test_remains_of_a_killed_publish_are_cleared_and_never_taken_for_a_version(old: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "versions" / ".unfinished-1").mkdir(parents=True)
    (root / "versions" / "7").mkdir()  # without its ready marker
    published = publish.publish(old, root)
    assert published.version_path.name == "8"
    assert [path.name for path in versions_of(root)] == ["8"]
    assert not (root / "versions" / ".unfinished-1").exists()


def test_two_publishes_at_once_wait_for_each_other(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    threads = [threading.Thread(target=publish.publish, args=(source, root)) for source in (old, new, old, new)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [path.name for path in versions_of(root)] == ["2", "3", "4"]
    assert len(releases(root / "live")) == 1


def test_a_publish_that_never_ends_is_named(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    publish.publish(old, root)
    monkeypatch.setattr(publish, "LOCK_LIMIT_S", 0.05)
    with publish._locked(root), pytest.raises(WaitExpired, match="held by another publish"):
        publish.publish(old, root)


def test_a_reader_never_sees_a_mixture(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    publish.publish(old, root)
    seen: list[set[str]] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            directory = os.open(root / "live", os.O_RDONLY | os.O_DIRECTORY)
            try:
                names = [name for name in os.listdir(directory) if name.startswith("file")]
                found = set()
                for name in names:
                    with open(os.open(name, os.O_RDONLY, dir_fd=directory)) as file:
                        found.add(file.read())
                seen.append(found if len(names) == 4 else {"incomplete"})
            finally:
                os.close(directory)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(10):
            publish.publish(new, root, keep=50)
            publish.publish(old, root, keep=50)
    finally:
        done.set()
        reader.join(timeout=30)
    assert len(seen) > 20
    assert all(found in ({"old"}, {"new"}) for found in seen)


PROGRAM = """
import sys
from pathlib import Path
from harness.guards.publish import publish
print("ready", flush=True)
while True:
    for release in ("new", "old"):
        publish(Path(sys.argv[1]) / release, Path(sys.argv[1]) / "root", keep=2)
"""


def test_killed_at_any_moment_the_live_checkpoint_is_whole(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    publish.publish(old, root)
    for attempt in range(6):
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            pause(0.003 + attempt * 0.007)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(timeout=30)
            child.stdout.close()
        live = root / "live"
        assert releases(live) in ({"old"}, {"new"})
        assert len(list(live.glob("file*"))) == 4
    publish.publish(new, root)
    assert releases(root / "live") == {"new"}
    assert not [path.name for path in (root / "versions").iterdir() if path.name.startswith(".")]


def test_exchange_swaps_two_real_directories(old: Path, new: Path, tmp_path: Path) -> None:
    where_old_is = exchange(new, old)
    assert releases(old) == {"new"}
    assert releases(where_old_is) == {"old"}
    link = tmp_path / "link"
    link.symlink_to(old)
    with pytest.raises(UsageError, match="not a real directory"):
        exchange(new, link)
    with pytest.raises(UsageError, match="not a real directory"):
        exchange(tmp_path / "none", old)
    with pytest.raises(HarnessError, match="EINVAL"):
        exchange(old.parent, old)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no second file system")
def test_exchange_across_file_systems_is_refused(old: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if Path(other).stat().st_dev == old.stat().st_dev:
            pytest.skip("one file system")
        with pytest.raises(UsageError, match="different file systems"):
            exchange(Path(other), old)
