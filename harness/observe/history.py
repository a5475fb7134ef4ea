"""What happened in one scenario: every request and every event, append-only, on one monotonic clock.

Claims read nothing else, so everything a claim needs must be recorded here.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from harness.clock import now_ns
from harness.errors import HarnessError
from harness.guards.canary import Answer

Incarnation = str  # one start of an engine: "old-1", "new-2"; never reused within a scenario


class RequestResult(StrEnum):
    """How a request ended; exactly one per arrival. `status` of the request keeps the code of 4xx and 5xx."""

    OK = "ok"
    DROPPED = "dropped"  # our own in-flight limit: never blamed on the engine
    LATE = "late"  # our own loader was too far behind the plan to send it
    HARNESS_BUG = "harness_bug"  # an unexpected exception of our own
    NO_ENDPOINT = "no_endpoint"  # nothing was ready: what a service without endpoints answers
    DNS = "dns"  # the name of the host was not found
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    CONNECT_TIMEOUT = "connect_timeout"
    RESET = "reset"  # before any byte of the response
    CLOSED = "closed"  # likewise, but an orderly end
    HTTP_4XX = "http_4xx"
    HTTP_5XX = "http_5xx"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 - a token of text; not even the header came
    HEADERS_THEN_SILENCE = "headers_then_silence"
    STALL = "stall"  # between tokens
    DEADLINE = "deadline"
    RESET_MID_STREAM = "reset_mid_stream"
    TRUNCATED_FRAMING = "truncated_framing"  # the connection ended inside the header or the body
    TRUNCATED_PROTOCOL = "truncated_protocol"  # an orderly end without end mark, finish reason or all tokens
    TRUNCATED = "truncated"  # one of the two above, in runs of version 0.1
    INBAND_ERROR = "inband_error"
    ABORTED = "aborted"
    MALFORMED = "malformed"
    WRONG_MODEL = "wrong_model"  # the answer names another model than was asked
    WRONG_CONTENT = "wrong_content"  # a whole answer that cannot be right
    MIXED_VERSION = "mixed_version"  # what answered changed within one stream


OURS = frozenset({RequestResult.DROPPED, RequestResult.LATE, RequestResult.HARNESS_BUG})


class EventKind(StrEnum):
    """Every kind of event; the comment names the keys of `data`."""

    SCENARIO_STARTED = "scenario_started"  # scenario, mode
    PHASE_ENDED = "phase_ended"  # phase, took_s: the harness's own time
    LOAD_STARTED = "load_started"  # plan_sha256, schedule_sha256, rate_rps, seed, loaders, canary_passes
    LOAD_HEARTBEAT = "load_heartbeat"  # once per second and loader: the fields of `load.driver.Heartbeat`
    LOAD_ENDED = "load_ended"  # the fields of `load.driver.LoadReport`
    PUBLISH_STARTED = "publish_started"  # version, how
    PUBLISH_ENDED = "publish_ended"  # version, how, weights_id
    FAULT_INJECTED = "fault_injected"  # fault, fault_id, proved, before, after, because
    FAULT_UNDONE = "fault_undone"  # fault, proved, because
    INCIDENT_STARTED = "incident_started"  # incarnation, undo: {fault: how}; written before the engine is struck
    ROLLOUT_STARTED = "rollout_started"  # how
    ROLLOUT_ENDED = "rollout_ended"  # how, completed, because
    GUARD_PASSED = "guard_passed"  # guard, took_s
    GUARD_REFUSED = "guard_refused"  # guard, findings: list of {id, severity, seen, expected, where}
    GUARD_ACTED = "guard_acted"  # guard, did (for example what a purge removed)
    ENGINE_STARTING = "engine_starting"  # incarnation, expects ("old"/"new"), launch
    ENGINE_READY = "engine_ready"  # incarnation, took_s
    ENGINE_NOT_READY = "engine_not_ready"  # incarnation, reason, exit_code, log_lines, log
    RELOAD_STARTED = "reload_started"  # incarnation, expects, resets_prefix_cache, pause
    RELOAD_ENDED = "reload_ended"  # incarnation, succeeded, was_answered, because, calls, call_ns (start, end), weights
    ENGINE_DIED = "engine_died"  # incarnation, exit_code
    ENGINE_STOPPED = "engine_stopped"  # incarnation, exit_code, how, took_s, because (it had to be killed)
    TRAFFIC_ADMITTED = "traffic_admitted"  # incarnation, endpoint, expects
    # incarnation, answer, difference_old, difference_new, when, because, rotation, health (only after no answer)
    CANARY_CHECKED = "canary_checked"
    DETECTION_SEEN = "detection_seen"  # layer, because: what the runner acted upon; is_cut: too early
    REMEDY_STARTED = "remedy_started"  # what
    REMEDY_ENDED = "remedy_ended"  # what, completed, because
    RECOVERY_SEEN = "recovery_seen"  # what the runner acted upon
    HEALTH = "health"  # incarnation, status (0: no answer), refused, took_ms
    LOG_LINE = "log_line"  # incarnation, class, line
    METRICS = "metrics"  # incarnation, values
    CONTAINER = "container"  # incarnation, action, attributes
    HOST = "host"  # cpu_busy_ratio, steal_ratio, memory_available_bytes, pressure_*_avg10
    GPU = "gpu"  # index, memory_used_bytes, utilization_ratio, clock_mhz, throttle
    NO_GPU = "no_gpu"  # because
    OBSERVER_FAILED = "observer_failed"  # observer, because
    LEFT_OVER = "left_over"  # things
    NOTHING_LEFT = "nothing_left"  # checked
    SCENARIO_ENDED = "scenario_ended"  # because


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One arrival and what became of it. Times are monotonic nanoseconds; None means the point was not reached."""

    id: str
    kind: str  # "load" or "canary"
    planned_ns: int
    dispatched_ns: int | None = None  # when the loader took it up
    connected_ns: int | None = None
    sent_ns: int | None
    headers_ns: int | None = None
    first_token_ns: int | None
    token_ns: tuple[int, ...] = ()
    ended_ns: int
    connection: str = ""  # "fresh", or kept alive: "new" or "reused"; "" when none was tried
    loader: int = 0
    endpoint: str
    incarnation: Incarnation  # "" when nothing was admitted
    result: RequestResult
    status: int | None = None
    error: str = ""
    output_sha256: str = ""
    output_tokens: int = 0
    prompt_logprobs: tuple[tuple[float, ...], ...] = ()  # one row per prompt of the canary's pass
    rotation: int | None = None  # which pass of the canary prompts was asked; None: all of them
    answer: Answer | None = None  # canaries only
    difference_old: float | None = None  # largest absolute difference to the golden of the old checkpoint
    difference_new: float | None = None

    @property
    def is_canary(self) -> bool:
        """Say whether the right answer of this request is known."""
        return self.kind == "canary"

    @property
    def is_ours(self) -> bool:
        """Say whether the failure is the harness's own and not the engine's."""
        return self.result in OURS

    @property
    def ended_as(self) -> RequestResult:
        """Return the class of this arrival: an answer that neither checkpoint would give is wrong content."""
        if self.result is RequestResult.OK and self.answer is Answer.NEITHER:
            return RequestResult.WRONG_CONTENT
        return self.result

    @property
    def first_token_s(self) -> float | None:
        """Return the time to first token counted from the planned start."""
        return None if self.first_token_ns is None else (self.first_token_ns - self.planned_ns) / 1e9

    @property
    def latency_s(self) -> float:
        """Return the whole time counted from the planned start."""
        return (self.ended_ns - self.planned_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Anything that happened and is not a request."""

    id: str
    at_ns: int
    source: str
    kind: EventKind
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class History:
    """All requests by planned start and all events by time."""

    requests: tuple[Request, ...]
    events: tuple[Event, ...]

    def of(self, *kinds: EventKind) -> tuple[Event, ...]:
        """Return the events of these kinds in time order."""
        wanted = frozenset(kinds)
        return tuple(event for event in self.events if event.kind in wanted)

    def first(self, *kinds: EventKind) -> Event | None:
        """Return the first event of these kinds."""
        return next(iter(self.of(*kinds)), None)

    def last(self, *kinds: EventKind) -> Event | None:
        """Return the last event of these kinds."""
        return next(reversed(self.of(*kinds)), None)

    def canaries(self) -> tuple[Request, ...]:
        """Return the canary requests."""
        return tuple(request for request in self.requests if request.is_canary)


class Recorder:
    """Append requests and events to memory and to `path` as they happen; safe to use from several threads."""

    def __init__(self, path: Path, *, on_event: Callable[[Event], None] | None = None) -> None:
        self.path = path
        self._on_event = on_event
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._requests: list[Request] = []
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._failed: OSError | None = None

    def event(self, source: str, kind: EventKind, *, at_ns: int | None = None, **data: Any) -> Event:
        """Record that something happened now, or at `at_ns`."""
        with self._lock:
            event = Event(
                id=f"e{len(self._events)}",
                at_ns=now_ns() if at_ns is None else at_ns,
                source=source,
                kind=kind,
                data=data,
            )
            self._events.append(event)
            self._write({"type": "event", **asdict(event)})
        if self._on_event is not None:
            self._on_event(event)
        return event

    def request(self, request: Request) -> None:
        """Record what became of one arrival."""
        with self._lock:
            self._requests.append(request)
            self._write({"type": "request", **asdict(request)})

    def snapshot(self) -> History:
        """Return everything recorded so far."""
        with self._lock:
            return _ordered(self._requests, self._events)

    def close(self) -> None:
        """Close the file; what was recorded stays readable."""
        with self._lock, contextlib.suppress(OSError):  # of lines that could not be written before
            self._file.close()

    def require_written(self) -> None:
        """Return if everything recorded so far is on disk.

        Raises: HarnessError naming the file and what the system said; nothing is written after the first failure.
        """
        if self._failed is not None:
            said = self._failed.strerror or self._failed
            raise HarnessError(f'history "{self.path}" cannot be written: {said}; the scenario was ended')

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file.closed or self._failed is not None:
            return
        try:
            self._file.write(json.dumps(line, default=str) + "\n")
            self._file.flush()
        except OSError as error:  # observers record from threads of their own, where nobody would see it
            self._failed = error


def _ordered(requests: list[Request], events: list[Event]) -> History:
    return History(
        requests=tuple(sorted(requests, key=lambda request: (request.planned_ns, request.id))),
        events=tuple(sorted(events, key=lambda event: event.at_ns)),
    )


def request_from_json(line: Mapping[str, Any]) -> Request:
    """Build a request from one decoded line of a history or a record file."""
    fields = {key: value for key, value in line.items() if key != "type"}
    fields["token_ns"] = tuple(fields.get("token_ns", ()))
    fields["prompt_logprobs"] = tuple(tuple(row) for row in fields.get("prompt_logprobs", ()))
    fields["result"] = RequestResult(fields["result"])
    answer = fields.get("answer")
    fields["answer"] = None if answer is None else Answer(answer)
    return Request(**fields)


def load_history(path: Path) -> History:
    """Read a saved history; a last line cut by a crash is left out.

    Raises: HarnessError naming the line that is not a request or an event.
    """
    requests: list[Request] = []
    events: list[Event] = []
    for number, line, is_last in _numbered_lines(path):
        try:
            fields = json.loads(line)
            _require_times(fields)
            if fields["type"] == "request":
                requests.append(request_from_json(fields))
            else:
                fields.pop("type")
                events.append(Event(**{**fields, "kind": EventKind(fields["kind"])}))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            if is_last:
                break
            raise HarnessError(f'history "{path}" line {number} is not a request or an event: {error}') from error
    return _ordered(requests, events)


def _require_times(fields: Mapping[str, Any]) -> None:
    """Return if a line has the times that everything is ordered by."""
    names = ("at_ns",) if "at_ns" in fields else ("planned_ns", "ended_ns")
    wrong = [name for name in names if type(fields[name]) is not int]
    if wrong:
        raise TypeError(f"{', '.join(wrong)} must be whole numbers of nanoseconds")


def _numbered_lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, line, number == len(lines)
