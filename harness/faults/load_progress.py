"""How far a process is in reading a weight file, as the kernel tells it: by pages of its mapping, or by a descriptor's place.

That a process has a file open or mapped says little: engines list files and read headers before they read tensors. What a look
at the header brings in is bounded, though, and whoever has more of the file has asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.manifest import read_shard
from harness.engine.proc import STOPPED, FileId, Proc

BUFFER_BYTES = 128 * 1024  # that a reader of a header may read ahead
FOLIO_BYTES = (
    2 * 1024**2
)  # that the kernel may map at once around a byte that is asked for (whole folios, since Linux 6.18)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How much of a file one process had read at a moment at which it stood still."""

    pid: int
    how: str  # "mapped", "open", or "no longer"
    read_bytes: int
    is_frozen: bool


@dataclass(frozen=True, slots=True)
class Load:
    """The reading of one weight file, from its header to its last tensor."""

    file: FileId
    data_start_byte: int
    size_bytes: int

    @classmethod
    def of(cls, path: Path) -> Load:
        """Return the load that is to come of a whole file.

        Raises: CheckpointDefect when it is damaged.
        """
        shard = read_shard(path)
        return cls(FileId.of(path), data_start_byte=shard.data_start_byte, size_bytes=shard.size_bytes)

    def progress(self, proc: Proc) -> Progress:
        """Ask the kernel how much of the file a process has read."""
        mapped = proc.mapped_in_bytes(self.file)
        read = proc.read_to_byte(self.file)
        how = "mapped" if proc.maps(self.file) else "open" if proc.has_open(self.file) else "no longer"
        return Progress(pid=proc.pid, how=how, read_bytes=max(mapped, read), is_frozen=proc.state() == STOPPED)

    @property
    def header_reach_bytes(self) -> int:
        """Return how much of the file a look at its header may bring in; more than that was asked for."""
        return -(-(self.data_start_byte + BUFFER_BYTES) // FOLIO_BYTES) * FOLIO_BYTES

    def is_in_the_middle(self, seen: Progress) -> bool:
        """Say whether it stands still, has read of the tensors, and not all of them."""
        is_held = seen.is_frozen and seen.how != "no longer"
        return is_held and self.header_reach_bytes < seen.read_bytes and not self.is_over(seen)

    def is_over(self, seen: Progress) -> bool:
        """Say whether it has read the file to its end."""
        return seen.read_bytes >= self.size_bytes

    def told(self, moment: Progress | None, closest: Progress | None) -> str:
        """Say how far which process was at the moment of the change, or how far one was seen to be without it."""
        if moment is not None:
            return f"process {moment.pid} had it {moment.how} and had read {moment.read_bytes:,} bytes at that moment"
        if closest is None:
            return "no process of the engine was seen to hold it"
        return (
            f"no process of the engine was seen in the middle of it: the farthest, {closest.pid}, had it {closest.how} and "
            f"had read {closest.read_bytes:,} bytes, expected more than {self.header_reach_bytes:,} and less than "
            f"{self.size_bytes:,}"
        )
