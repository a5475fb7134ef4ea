"""The directory of a qualification: one call at a time works in it, and no verdict in it is of an earlier call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.clock import wall_time
from harness.errors import UsageError
from harness.guards.publish_lock import held_lock
from harness.judge.qualification import PARTS, Part, Qualification
from harness.report.qualification_page import VERDICT, write_qualification

LOCK = ".qualify.lock"


@contextmanager
def held(place: Path) -> Iterator[None]:
    """Hold the directory of a qualification, which is made where it is not there.

    Raises: UsageError when it cannot be written; HarnessError naming the call that holds it.
    """
    with ExitStack() as stack:
        try:
            place.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held_lock(place / LOCK, limit_s=0, taken=f'"{place}" is worked in'))
        except OSError as error:
            raise not_written(place, error) from error
        yield


def withdraw(place: Path, *, candidate: str, baseline: str, commit: str, command: str) -> None:
    """Let a verdict that is there say that this call has not come to its end; it does nothing where none is there.

    Whoever reads the files after a call that was killed, or refused, must not take the verdict of the call before for its own.
    Raises: UsageError when it cannot be written.
    """
    if not (place / VERDICT).exists():
        return
    began_at = wall_time()
    unfinished = Qualification(
        candidate=candidate,
        baseline=baseline,
        parts=tuple(Part(name=part, is_required=True, required=0) for part in PARTS),
        sources={part: () for part in PARTS},
        notes=(
            f"this qualification began at {began_at} and has not come to its end: an earlier verdict was withdrawn",
        ),
    )
    try:
        write_qualification(unfinished, place, judged_at=began_at, commit=commit, command=command)
    except OSError as error:
        raise not_written(place, error) from error


def not_written(place: Path, error: OSError) -> UsageError:
    """Return the sentence about a directory that no verdict can be written to."""
    return UsageError(f'the verdict cannot be written to "{place}": {error.strerror or error}')
