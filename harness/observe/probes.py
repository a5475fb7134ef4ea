"""Watch engines, host and GPUs while a scenario runs, and write what is seen into its history."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from harness.clock import Deadline, now_ns, seconds_between
from harness.observe.gpu import GpuSample, NoGpu, sample_gpus
from harness.observe.history import EventKind, Recorder
from harness.observe.host import HostSampler
from harness.observe.metrics import scrape

NO_ANSWER = 0
TELLING_UNANSWERED = 2  # probes in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverLimits:
    """How often observers look, and how long they wait for an answer."""

    health_every_s: float = 0.25
    health_repeat_s: float = 5.0  # an unchanged status is written again after this time
    health_limit_s: float = 2.0
    metrics_every_s: float = 2.0
    metrics_limit_s: float = 2.0
    host_every_s: float = 2.0
    gpu_every_s: float = 2.0
    stop_limit_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    endpoint: str
    incarnation: str
    api_key: str | None
    gone: threading.Event
    writing: threading.Lock  # held while an event is written, so that `unwatch` can promise silence

    def record(self, recorder: Recorder, source: str, kind: EventKind, **data: Any) -> bool:
        """Write an event about this engine, unless it is no longer watched."""
        with self.writing:
            if self.gone.is_set():
                return False
            recorder.event(source, kind, incarnation=self.incarnation, **data)
            return True

    def leave(self) -> None:
        """Write nothing more."""
        with self.writing:
            self.gone.set()


class Observers:
    """A context in which host and GPUs are sampled, and every watched engine is asked for health and metrics.

    An observer that raises is stopped and becomes one event; it never ends the run. Threads are daemons and stop within
    `limits.stop_limit_s`. Engines of which nothing answers are a status of 0, not a failure.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        limits: ObserverLimits | None = None,
        gpus: Callable[[], tuple[GpuSample, ...] | NoGpu] = sample_gpus,
    ) -> None:
        self._recorder = recorder
        self._limits = limits or ObserverLimits()
        self._gpus = gpus
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._targets: dict[str, _Target] = {}
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Observers:
        host = HostSampler()
        self._start("host", lambda: self._sample_host(host), self._limits.host_every_s, self._stopping)
        self._start("gpu", self._sample_gpus, self._limits.gpu_every_s, self._stopping)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def watch(self, endpoint: str, incarnation: str, api_key: str | None = None) -> None:
        """Begin to ask an engine for its health and metrics; watching the same incarnation again changes nothing."""
        with self._lock:
            if incarnation in self._targets or self._stopping.is_set():
                return
            target = _Target(
                endpoint=endpoint,
                incarnation=incarnation,
                api_key=api_key,
                gone=threading.Event(),
                writing=threading.Lock(),
            )
            self._targets[incarnation] = target
        health = _HealthWatch(self._recorder, target, self._limits)
        self._start(f"health of {incarnation}", health.look, self._limits.health_every_s, target.gone)
        self._start(
            f"metrics of {incarnation}", lambda: self._sample_metrics(target), self._limits.metrics_every_s, target.gone
        )

    def unwatch(self, incarnation: str) -> None:
        """Stop asking an engine; nothing is recorded about it once this returns, not even an answer that is under way."""
        with self._lock:
            target = self._targets.pop(incarnation, None)
        if target is not None:
            target.leave()

    def stop(self) -> None:
        """Stop all observers and wait for them, at most `limits.stop_limit_s` in all. Idempotent."""
        self._stopping.set()
        with self._lock:
            targets, self._targets = list(self._targets.values()), {}
        for target in targets:
            target.leave()
        deadline = Deadline.after(self._limits.stop_limit_s)
        for thread in self._threads:
            thread.join(timeout=deadline.remaining_s())
        late = [thread.name for thread in self._threads if thread.is_alive()]
        self._threads.clear()
        for name in late:
            self._fail(name, f"it did not stop within {self._limits.stop_limit_s:g} s")

    def _start(self, name: str, look: Callable[[], object], every_s: float, gone: threading.Event) -> None:
        def run() -> None:
            try:
                while not gone.is_set() and look() is not False:
                    gone.wait(every_s)
            except Exception as error:  # whatever it is, the run goes on without this observer and says so
                self._fail(name, f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fail(self, observer: str, because: str) -> None:
        self._recorder.event("observe", EventKind.OBSERVER_FAILED, observer=observer, because=because)

    def _sample_host(self, host: HostSampler) -> None:
        self._recorder.event("host", EventKind.HOST, **asdict(host.sample()))

    def _sample_gpus(self) -> bool:
        """Record one event per GPU; without any, one event that says so, and no more."""
        seen = self._gpus()
        if isinstance(seen, NoGpu):
            self._recorder.event("nvml", EventKind.NO_GPU, because=seen.because)
            return False
        for gpu in seen:
            self._recorder.event("nvml", EventKind.GPU, **asdict(gpu))
        return True

    def _sample_metrics(self, target: _Target) -> None:
        try:
            values: Mapping[str, float] = scrape(
                target.endpoint, api_key=target.api_key, limit_s=self._limits.metrics_limit_s
            )
        except (OSError, ValueError):
            return  # an engine that does not answer is what the health observer tells
        target.record(self._recorder, "metrics", EventKind.METRICS, values=values)


class _HealthWatch:
    """Writes the health of one engine when it changes, and now and then when it does not.

    The second probe in a row without an answer is always written: one alone tells nothing.
    """

    def __init__(self, recorder: Recorder, target: _Target, limits: ObserverLimits) -> None:
        self._recorder = recorder
        self._target = target
        self._limits = limits
        self._status: int | None = None
        self._unanswered = 0  # in a row
        self._written_ns = 0

    def look(self) -> None:
        asked_ns = now_ns()
        status, refused = health_probe(self._target.endpoint, limit_s=self._limits.health_limit_s)
        self._unanswered = self._unanswered + 1 if status == NO_ANSWER else 0
        is_due = seconds_between(self._written_ns, now_ns()) >= self._limits.health_repeat_s
        if status == self._status and not is_due and self._unanswered != TELLING_UNANSWERED:
            return
        took_ms = round(seconds_between(asked_ns, now_ns()) * 1000, 2)
        if self._target.record(
            self._recorder, "health", EventKind.HEALTH, status=status, refused=refused, took_ms=took_ms
        ):
            self._status, self._written_ns = status, now_ns()


def health_status(endpoint: str, *, limit_s: float) -> int:
    """Ask `/health` once, without retries; return the HTTP status, or 0 when nothing answers within the limit."""
    return health_probe(endpoint, limit_s=limit_s)[0]


def health_probe(endpoint: str, *, limit_s: float) -> tuple[int, bool]:
    """Ask as `health_status` does; return the status too, and whether the connection was refused."""
    parts = urlsplit(endpoint)
    connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connection_type(parts.hostname or "", parts.port, timeout=limit_s)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        return connection.getresponse().status, False
    except (OSError, http.client.HTTPException) as error:
        return NO_ANSWER, isinstance(error, ConnectionRefusedError)
    finally:
        connection.close()
