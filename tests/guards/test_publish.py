"""Publishing shows a reader the whole old or the whole new checkpoint, and can be taken back."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from harness.clock import poll_until
from harness.errors import HarnessError, UsageError
from harness.guards import durable, publish, publish_copy
from harness.guards.manifest import manifest_findings
from harness.guards.publish import exchange, rollback, versions_of
from harness.guards.publish_lock import LOCK, locked
from harness.guards.versions import MANIFEST, READY, read_marker

both_ways = pytest.mark.parametrize("by_exchange", [False, True], ids=["link", "exchange"])


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


def kept(root: Path) -> list[str]:
    return sorted((path.name for path in (root / "versions").iterdir()), key=lambda name: (len(name), name))


# versions and what is live


def test_live_is_a_relative_link_to_a_version(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    first = publish.publish(old, root)
    assert (first.previous, first.version) == (None, 1)
    assert os.readlink(root / "live") == "versions/1"
    second = publish.publish(new, root)
    assert second.previous == first.version_path
    assert releases(root / "live") == {"new"}
    moved = root.rename(tmp_path / "mounted elsewhere")
    assert releases(moved / "live") == {"new"}


def test_a_live_directory_stays_one_and_what_lay_there_can_be_had_back(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    checkpoint(root / "live", "before")
    first = publish.publish(old, root, by_exchange=True)
    assert (first.version, first.previous_version, first.version_path) == (1, 0, root / "live")
    publish.publish(new, root, by_exchange=True, keep=1)
    assert not (root / "live").is_symlink()
    assert releases(root / "live") == {"new"}
    assert kept(root) == ["0", "1"]  # what was there before is nobody's to remove
    assert rollback(root).version == 1
    assert (releases(root / "live"), kept(root)) == ({"old"}, ["0", "2"])
    assert rollback(root).version == 0
    assert (releases(root / "live"), kept(root)) == ({"before"}, ["1", "2"])
    with pytest.raises(UsageError, match="no version before 0"):
        rollback(root)
    assert publish.publish(new, root, by_exchange=True).version == 3
    assert kept(root) == ["0", "1", "2"]


def test_the_first_live_directory_is_just_moved_there(old: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert publish.publish(old, root, by_exchange=True).previous is None
    assert (releases(root / "live"), kept(root)) == ({"old"}, [])
    with pytest.raises(UsageError, match="no version before 1"):
        rollback(root)


@both_ways
def test_a_published_version_shares_nothing_with_the_source(old: Path, tmp_path: Path, by_exchange: bool) -> None:
    version = publish.publish(old, tmp_path / "root", by_exchange=by_exchange).version_path
    (old / "file0").write_text("changed later")
    assert releases(version) == {"old"}
    assert all(file.stat().st_nlink == 1 for file in version.iterdir())


@both_ways
def test_rollback_and_publish_again(old: Path, new: Path, tmp_path: Path, by_exchange: bool) -> None:
    root = tmp_path / "root"
    publish.publish(old, root, by_exchange=by_exchange)
    publish.publish(new, root, by_exchange=by_exchange)
    back = rollback(root)
    assert releases(root / "live") == {"old"}
    assert back.previous is not None
    assert back.previous.name == "2"
    assert releases(back.previous) == {"new"}
    with pytest.raises(UsageError, match="no version before 1"):
        rollback(root)
    assert publish.publish(new, root, by_exchange=by_exchange).version == 3
    assert releases(root / "live") == {"new"}


@both_ways
def test_rollback_never_leads_to_a_version_that_was_rolled_back_from(
    old: Path, new: Path, tmp_path: Path, by_exchange: bool
) -> None:
    root = tmp_path / "root"
    publish.publish(old, root, by_exchange=by_exchange)
    publish.publish(checkpoint(tmp_path / "bad", "bad"), root, by_exchange=by_exchange)
    rollback(root)
    publish.publish(new, root, by_exchange=by_exchange)
    assert rollback(root).version == 1
    assert releases(root / "live") == {"old"}


def test_versions_published_before_markers_said_anything_can_be_rolled_back(
    old: Path, new: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    for source in (old, new):
        publish.publish(source, root)
    for version in versions_of(root):
        (version / ".ready").write_bytes(b"")
    assert rollback(root).version == 1


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


def test_a_version_that_another_name_serves_is_kept(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    publish.publish(old, root, name="stable")
    for _ in range(4):
        publish.publish(new, root, name="canary", keep=1)
    assert (releases(root / "stable"), releases(root / "canary")) == ({"old"}, {"new"})
    assert kept(root) == ["1", "4", "5"]


@both_ways
def test_a_reader_that_holds_an_old_version_keeps_it(old: Path, new: Path, tmp_path: Path, by_exchange: bool) -> None:
    root = tmp_path / "root"
    publish.publish(old, root, by_exchange=by_exchange)
    with (root / "live" / "file0").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for _ in range(3):
            publish.publish(new, root, by_exchange=by_exchange, keep=1)
        assert os.fstat(file.fileno()).st_nlink == 0, "this version should be gone"
        assert (file.read(), mapped[:]) == (b"old", b"old")


# what is in a version


def test_the_marker_comes_last_and_says_what_was_before(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    publish.publish(old, root)
    marker = read_marker(publish.publish(new, root).version_path)
    assert marker is not None
    assert (marker.version, marker.previous, marker.linked) == (2, 1, False)
    assert marker.published_at.endswith("+00:00")


@both_ways
def test_a_manifest_says_what_was_published_and_the_marker_says_which_manifest(
    old: Path, tmp_path: Path, by_exchange: bool
) -> None:
    version = publish.publish(old, tmp_path / "root", by_exchange=by_exchange).version_path
    marker = read_marker(version)
    assert marker is not None
    assert marker.manifest_blake3 == blake3((version / MANIFEST).read_bytes()).hexdigest()
    assert list(manifest_findings(version, version / MANIFEST)) == []
    (version / "file2").write_text("bad")
    assert [finding.where for finding in manifest_findings(version, version / MANIFEST)] == ['"file2"']


def test_without_a_manifest_the_marker_names_none(old: Path, tmp_path: Path) -> None:
    version = publish.publish(old, tmp_path / "root", with_manifest=False).version_path
    marker = read_marker(version)
    assert marker is not None
    assert marker.manifest_blake3 == ""
    assert not (version / MANIFEST).exists()


def test_everything_is_on_the_disk_before_it_becomes_live(
    old: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    publish.publish(old, root)
    (new / "inner").mkdir()
    (new / "inner" / "file").write_text("new")
    synced: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}").replace(".unfinished-2", "2")
        synced.append(re.sub(r"/\.(\.manifest\.json)\.\d+\.partial$", r"/\1", path))
        real_fsync(descriptor)

    def replace(source: Any, target: Any, **options: Any) -> None:
        if os.path.islink(source):
            synced.append(f"live: {os.readlink(source)}")
        real_replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    publish.publish(new, root)
    before, after = synced[: synced.index("live: versions/2")], synced[synced.index("live: versions/2") + 1 :]
    version = root / "versions" / "2"
    written = [str(path) for path in (version, *version.rglob("*"))]
    assert set(written) <= set(before)
    marker = before.index(str(version / READY))
    manifest = before.index(str(version / MANIFEST))
    assert all(before.index(str(version / file.name)) < manifest < marker for file in version.glob("file*"))
    assert all(before.index(path) < marker for path in written if path != str(version / ".ready"))
    assert before[marker:] == [str(version / ".ready"), str(version), *[str(root / "versions")] * 2]
    assert after == [str(root)]


def test_a_version_published_anew_gets_a_marker_of_its_own(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    first = publish.publish(old, root).version_path
    publish.publish(new, root)
    again = publish.publish(first, root)
    marker = read_marker(again.version_path)
    assert marker is not None
    assert (marker.version, marker.previous) == (3, 2)
    assert releases(root / "live") == {"old"}


def test_links_in_the_source_are_followed_and_modes_kept(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "x")
    (tmp_path / "blob").write_text("x")
    (source / "file9").symlink_to(tmp_path / "blob")
    (source / "file0").chmod(0o440)
    version = publish.publish(source, tmp_path / "root").version_path
    assert not (version / "file9").is_symlink()
    assert releases(version) == {"x"}
    assert (version / "file0").stat().st_mode & 0o777 == 0o640
    (source / "dangling").symlink_to("nowhere")
    with pytest.raises(UsageError, match="dangling link"):
        publish.publish(source, tmp_path / "root")
    assert kept(tmp_path / "root") == ["1"]


def test_holes_stay_holes_and_bytes_stay_in_place(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "x", files=1)
    size = 300 * 1024 * 1024
    with (source / "file0").open("r+b") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"middle")
    version = publish.publish(source, tmp_path / "root").version_path
    copy = version / "file0"
    assert copy.stat().st_size == size
    assert copy.stat().st_blocks * 512 < 1024 * 1024
    with copy.open("rb") as file:
        assert file.read(3) == b"x\0\0"
        file.seek(size // 2 - 1)
        assert file.read(8) == b"\0middle\0"


@pytest.mark.parametrize("cannot", ["reflink", "copy_file_range", "neither"])
def test_a_file_is_copied_in_whichever_way_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cannot: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    content = os.urandom(3_000_000)
    (source / "file0").write_bytes(content)
    refused = OSError(errno.EOPNOTSUPP, "not supported")

    def refuse(*_: Any) -> int:
        raise refused

    def reflink(writer: int, request: int, reader: int) -> int:
        assert request == publish_copy.FICLONE
        os.pwrite(writer, os.pread(reader, len(content), 0), 0)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", reflink if cannot == "copy_file_range" else refuse)
    if cannot != "reflink":
        monkeypatch.setattr(os, "copy_file_range", refuse)
    done = publish.publish(source, tmp_path / "root").copied
    assert (tmp_path / "root" / "live" / "file0").read_bytes() == content
    assert done is not None
    expected = (len(content), 0) if cannot == "copy_file_range" else (0, len(content))
    assert (done.reflinked_bytes, done.copied_bytes) == expected
    assert done.size_bytes == len(content)


def test_hard_links_only_on_request_and_said_in_the_marker(old: Path, tmp_path: Path) -> None:
    published = publish.publish(old, tmp_path / "root", link=True)
    assert os.path.samefile(old / "file0", published.version_path / "file0")
    marker = read_marker(published.version_path)
    assert marker is not None
    assert marker.linked
    assert published.copied is not None
    assert str(published.copied) == "4 files, 12 bytes by hard link"
    (old / "file0").write_text("danger")
    assert "danger" in releases(tmp_path / "root" / "live")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system at /dev/shm")
def test_hard_links_across_file_systems_are_refused(old: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == old.stat().st_dev:
            pytest.skip("/dev/shm is on the same file system")
        with pytest.raises(UsageError, match="publish without --link"):
            publish.publish(old, Path(other), link=True)
        assert publish.publish(old, Path(other)).version == 1


@pytest.mark.parametrize("change", ["grows", "shrinks", "appears"])
def test_a_source_that_changes_while_it_is_copied_is_refused(
    old: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    root = tmp_path / "root"
    publish.publish(old, root)
    real = publish_copy._reflink

    def meanwhile(reader: int, writer: int) -> bool:
        if change == "appears":
            (new / f"later{reader}").touch()
        else:
            (new / "file2").write_text("longer than it was" if change == "grows" else "")
        return real(reader, writer)

    monkeypatch.setattr(publish_copy, "_reflink", meanwhile)
    with pytest.raises(HarnessError, match=r"while it was copied|became shorter"):
        publish.publish(new, root)
    assert releases(root / "live") == {"old"}
    assert kept(root) == ["1"]


# refusals


def test_what_is_not_ours_is_left_alone(old: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "live").mkdir()
    with pytest.raises(UsageError, match="is a real directory, not a link"):
        publish.publish(old, root)
    (root / "live").rmdir()
    (root / "live").symlink_to(old)
    for by_exchange in (False, True):
        with pytest.raises(UsageError, match="left as it is"):
            publish.publish(old, root, by_exchange=by_exchange)
    assert (root / "live").resolve() == old
    (root / "live").unlink()
    (root / "live").touch()
    with pytest.raises(UsageError, match="neither a link nor a directory"):
        publish.publish(old, root)
    for name in ("../x", "versions", ".publish.lock", ""):
        with pytest.raises(UsageError, match="cannot be the name"):
            publish.publish(old, root, name=name)
    with pytest.raises(UsageError, match="is not a directory"):
        publish.publish(tmp_path / "none", root)
    with pytest.raises(UsageError, match="lies inside"):
        publish.publish(tmp_path, root)
    assert versions_of(root) == ()


def test_a_link_is_not_exchanged(old: Path, tmp_path: Path) -> None:
    publish.publish(old, tmp_path / "root")
    with pytest.raises(UsageError, match="is a link, so nothing needs to be exchanged"):
        publish.publish(old, tmp_path / "root", by_exchange=True)


def test_a_directory_put_there_by_hand_meanwhile_is_not_mixed_up(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    checkpoint(root / "live", "before")
    publish.publish(old, root, by_exchange=True)
    (root / "live").rename(root / "aside")
    checkpoint(root / "live", "by hand")
    with pytest.raises(HarnessError, match="move one of them away"):
        publish.publish(new, root, by_exchange=True)
    assert (releases(root / "live"), releases(root / "versions" / "0")) == ({"by hand"}, {"before"})


def test_where_directories_cannot_be_exchanged_nothing_is_copied(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    checkpoint(root / "live", "before")

    def cannot(source: Path, live: Path) -> None:
        raise HarnessError(f'"{source}" and "{live}" cannot be exchanged: EINVAL')

    monkeypatch.setattr(publish, "swap", cannot)
    monkeypatch.setattr(publish, "copy_checkpoint", lambda *_, **__: pytest.fail("copied"))
    with pytest.raises(HarnessError, match="cannot be exchanged"):
        publish.publish(old, root, by_exchange=True)
    assert (releases(root / "live"), kept(root)) == ({"before"}, [])


@pytest.mark.parametrize(
    ("code", "said"),
    [(errno.EINVAL, "a live link needs no exchange"), (errno.EBUSY, "a mount point cannot be renamed")],
)
def test_what_the_system_says_to_an_exchange_is_explained(code: int, said: str) -> None:
    assert said in durable._why(code)


def test_remains_of_a_killed_publish_are_cleared_and_never_taken_for_a_version(old: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "versions" / ".unfinished-1").mkdir(parents=True)
    (root / "versions" / "7").mkdir()  # without its ready marker
    published = publish.publish(old, root)
    assert published.version_path.name == "8"
    assert [path.name for path in versions_of(root)] == ["8"]
    assert not (root / "versions" / ".unfinished-1").exists()


# two at once


def test_two_publishes_at_once_wait_for_each_other(old: Path, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    threads = [threading.Thread(target=publish.publish, args=(source, root)) for source in (old, new, old, new)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [path.name for path in versions_of(root)] == ["2", "3", "4"]
    assert len(releases(root / "live")) == 1


HOLDER = """
import sys
from pathlib import Path
from harness.guards.publish_lock import locked
with locked(Path(sys.argv[1]), limit_s=0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_publish_that_goes_on_is_named_and_a_dead_one_blocks_nobody(old: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    publish.publish(old, root)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            named = f'by process {holder.pid} on "{os.uname().nodename}" since 20'
            for work in (
                lambda: publish.publish(old, root, wait_limit_s=0.05),
                lambda: publish.publish(old, root, wait_limit_s=0),
                lambda: rollback(root, wait_limit_s=0),
            ):
                with pytest.raises(HarnessError, match=named):
                    work()
        finally:
            holder.kill()
    assert json.loads((root / LOCK).read_text())["pid"] == holder.pid
    assert publish.publish(old, root, wait_limit_s=0).version == 2
    assert (root / LOCK).read_text() == ""


@pytest.mark.parametrize(
    "text", ["", "[]", '{"pid": "x"}', "[" * 100_000, '{"pid": 1, "host": "\\u001b[2J", "since": 1}']
)
def test_a_holder_that_says_nonsense_is_only_quoted(tmp_path: Path, text: str) -> None:
    with locked(tmp_path, limit_s=0):
        (tmp_path / LOCK).write_text(text)
        with pytest.raises(HarnessError, match="is being published to by") as refused, locked(tmp_path, limit_s=0):
            pytest.fail("locked twice")
    assert "\x1b" not in str(refused.value)


def test_a_planted_lock_link_is_not_written_through(old: Path, tmp_path: Path) -> None:
    root, precious = tmp_path / "root", tmp_path / "precious"
    root.mkdir()
    precious.write_text("precious")
    (root / LOCK).symlink_to(precious)
    with pytest.raises(HarnessError, match="Too many levels of symbolic links"):
        publish.publish(old, root)
    assert precious.read_text() == "precious"


# readers


@both_ways
def test_a_reader_never_sees_a_mixture(old: Path, new: Path, tmp_path: Path, by_exchange: bool) -> None:
    root = tmp_path / "root"
    publish.publish(old, root, by_exchange=by_exchange)
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
            publish.publish(new, root, keep=50, by_exchange=by_exchange)
            publish.publish(old, root, keep=50, by_exchange=by_exchange)
        poll_until(lambda: len(seen) > 20 or None, what="20 readings", limit_s=30)
    finally:
        done.set()
        reader.join(timeout=30)
    assert all(found in ({"old"}, {"new"}) for found in seen)


# exchange alone


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


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system at /dev/shm")
@pytest.mark.parametrize("what", ["exchange", "versions"])
def test_two_file_systems_are_refused(old: Path, tmp_path: Path, what: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == old.stat().st_dev:
            pytest.skip("/dev/shm is on the same file system")
        work: Callable[[], object] = lambda: exchange(Path(other), old)  # noqa: E731
        if what == "versions":
            (tmp_path / "root").mkdir()
            (tmp_path / "root" / "versions").symlink_to(other)
            work = lambda: publish.publish(old, tmp_path / "root")  # noqa: E731
        with pytest.raises(UsageError, match="different file systems"):
            work()
