"""Parts of files are copied byte for byte from any place to any place, shared or not, and a file that is too short is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checkpoint import file_range
from harness.checkpoint.file_range import ALIGNMENT_BYTES, BLOCK_BYTES, SHARED_BYTES_MIN, allocate, copy_range
from harness.errors import HarnessError

SIZE_BYTES = SHARED_BYTES_MIN + 3 * ALIGNMENT_BYTES + 100


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, bytes]]:
    path = tmp_path_factory.mktemp("source") / "file"
    content = os.urandom(SIZE_BYTES)
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor, content
    os.close(descriptor)


def copied(source: int, begin: int, size: int, path: Path, *, head: bytes = b"") -> bytes:
    with path.open("wb", buffering=0) as target:
        allocate(target.fileno(), len(head) + size)
        target.write(head)
        copy_range(source, target.fileno(), begin, size)
        assert os.lseek(target.fileno(), 0, os.SEEK_CUR) == len(head) + size
    return path.read_bytes()


@settings(deadline=None, max_examples=40)
@given(begin=st.integers(0, SIZE_BYTES), head=st.integers(0, 2 * ALIGNMENT_BYTES), data=st.data())
def test_any_part_goes_to_any_place(
    begin: int, head: int, data: st.DataObject, source: tuple[int, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    descriptor, content = source
    size = data.draw(st.integers(0, SIZE_BYTES - begin) | st.just(SIZE_BYTES - begin))
    path = tmp_path_factory.getbasetemp() / "copied"

    assert copied(descriptor, begin, size, path, head=b"h" * head) == b"h" * head + content[begin : begin + size]


@pytest.mark.parametrize("begin", [0, 100, ALIGNMENT_BYTES - 1])
def test_what_a_file_system_shares_is_the_aligned_middle_and_the_ends_are_copied(
    begin: int, source: tuple[int, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor, content = source
    shares = []

    def share(given: int, target: int, first: int, size: int, position: int) -> bool:
        shares.append((first, size, position))
        os.pwrite(target, os.pread(given, size, first), position)  # what a reflink does, as far as readers see
        return True

    monkeypatch.setattr(file_range, "_share", share)
    head = b"h" * begin

    assert copied(descriptor, begin, SIZE_BYTES - begin, tmp_path / "t", head=head) == head + content[begin:]
    ((first, size, position),) = shares
    assert first % ALIGNMENT_BYTES == size % ALIGNMENT_BYTES == position % ALIGNMENT_BYTES == 0
    assert size > SIZE_BYTES - begin - 2 * ALIGNMENT_BYTES


def test_nothing_is_shared_at_another_place_within_a_page(
    source: tuple[int, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_range, "_share", lambda *arguments: pytest.fail("cannot be shared"))

    assert copied(source[0], 0, SIZE_BYTES, tmp_path / "t", head=b"h") == b"h" + source[1]


def test_a_file_that_ends_early_is_refused(source: tuple[int, bytes], tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="ended 7 bytes before"):
        copied(source[0], 0, SIZE_BYTES + 7, tmp_path / "t")


def test_space_is_there_before_anything_is_written_and_none_is_no_error(tmp_path: Path) -> None:
    with (tmp_path / "t").open("wb") as file:
        allocate(file.fileno(), 0)
        assert os.fstat(file.fileno()).st_size == 0
        allocate(file.fileno(), BLOCK_BYTES)
        state = os.fstat(file.fileno())
    assert state.st_size in (0, BLOCK_BYTES)  # 0 where the file system cannot
    allocate(-1, BLOCK_BYTES)
