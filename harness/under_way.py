"""Answers that are under way while an engine is given other weights: which of them has tokens of both checkpoints?

A mixed answer is no answer of either checkpoint: what came later was computed with the new weights upon keys and values of
the old ones. It arrives with HTTP 200 and an orderly end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.clock import Deadline, now_ns, poll_until
from harness.errors import WaitExpired
from harness.guards.decoded import decode_body
from harness.guards.engine_api import EngineApi

STREAMS = 4
BEGIN_LIMIT_S = 30.0
END_LIMIT_S = 120.0


@dataclass(slots=True, eq=False)
class _Stream:
    """One answer as it arrives."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    failed: str = ""
    thread: threading.Thread | None = None

    def read(self, api: EngineApi, model: str, max_tokens: int) -> None:
        try:
            with api.stream(decode_body(model, self.prompt, max_tokens=max_tokens, stream=True)) as chunks:
                for tokens in _tokens(chunks):
                    self.tokens += tokens
                    self.token_ns += [now_ns()] * len(tokens)
        except (OSError, ValueError) as error:
            self.failed = f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """What became of the answers that were under way."""

    under_way: int  # that had begun and not ended when the engine began to reload
    mixed: int
    undecided: int  # whose last token came while the engine changed its weights
    failed: int
    because: str  # the longest mixed one, in words; empty when none is

    @property
    def unmixed(self) -> int:
        """Return how many at least met the reload and came whole from one checkpoint."""
        return max(self.under_way - self.failed - self.mixed - self.undecided, 0)

    def as_json(self) -> dict[str, int | str]:
        """Return it for a history."""
        return {
            "under_way": self.under_way,
            "mixed": self.mixed,
            "undecided": self.undecided,
            "failed": self.failed,
        }


class UnderWay:
    """Long answers that were begun before a reload."""

    def __init__(self, api: EngineApi, model: str, prompts: Sequence[tuple[int, ...]], *, max_tokens: int) -> None:
        """Ask every prompt as a stream and return when each answer has begun, or failed to within a limit."""
        self._streams = [_Stream(prompt) for prompt in prompts[:STREAMS]]
        for stream in self._streams:
            stream.thread = threading.Thread(
                target=stream.read, args=(api, model, max_tokens), name="answer under way", daemon=True
            )
            stream.thread.start()

        def begun() -> bool | None:
            return True if all(stream.tokens or stream.failed for stream in self._streams) else None

        try:
            poll_until(begun, what="answers begun", limit_s=BEGIN_LIMIT_S, every_s=0.005)
        except WaitExpired:
            return

    def settle(self, *, limit_s: float) -> None:
        """Wait until every answer has ended here too, or the limit has passed: the engine may be ahead of us."""
        deadline = Deadline.after(limit_s)
        for stream in self._streams:
            if stream.thread is not None:
                stream.thread.join(deadline.remaining_s())

    def witness(self, begun_ns: int, *, call_ns: int, after_ns: int) -> Witnessed:
        """Wait for the answers, and look at which have tokens of both checkpoints.

        `call_ns`: when the engine was told to change its weights; `after_ns`: since when tokens are of the other ones.
        """
        for stream in self._streams:
            if stream.thread is not None:
                stream.thread.join(END_LIMIT_S)
        under_way = [s for s in self._streams if s.token_ns and s.token_ns[0] < begun_ns and _last_ns(s) > begun_ns]
        whole = [s for s in under_way if not s.failed]
        mixed = [s for s in whole if _last_ns(s) > after_ns]
        undecided = [s for s in whole if call_ns <= _last_ns(s) <= after_ns]
        because = ""
        if mixed:
            longest = max(mixed, key=lambda s: len(s.tokens))
            before = sum(at_ns < call_ns for at_ns in longest.token_ns)
            because = (
                f"{len(mixed)} of {len(self._streams)} answers that were under way have tokens of both checkpoints, one of them "
                f"{before} from before the reload and {len(longest.tokens) - before} since"
            )
        return Witnessed(
            under_way=len(under_way),
            mixed=len(mixed),
            undecided=len(undecided),
            failed=sum(bool(stream.failed) for stream in self._streams),
            because=because,
        )


def _last_ns(stream: _Stream) -> int:
    return stream.token_ns[-1]


def _tokens(chunks: Iterator[bytes]) -> Iterator[list[int]]:
    """Yield the token ids of each event of a stream.

    Raises: ValueError for an event that is no JSON, or holds an error.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if not data or data == b"[DONE]":
                continue
            message = json.loads(data)
            if not isinstance(message, dict) or message.get("error") is not None:
                raise ValueError(f"an error inside the stream: {data[:200]!r}")
            for choice in message.get("choices") or ():
                yield list(choice.get("token_ids") or ())
