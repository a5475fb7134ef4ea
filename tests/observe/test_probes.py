"""Observers write what they see, end in time, and never end a run."""

from __future__ import annotations

import threading

import pytest

from harness.clock import Deadline, poll_until
from harness.observe.gpu import GpuSample, NoGpu
from harness.observe.history import EventKind, Recorder
from harness.observe.probes import ObserverLimits, Observers, health_probe, health_status

FAST = ObserverLimits(
    health_every_s=0.02,
    health_repeat_s=60.0,
    health_limit_s=0.3,
    metrics_every_s=0.02,
    metrics_limit_s=0.3,
    host_every_s=0.02,
    gpu_every_s=0.02,
    stop_limit_s=3.0,
)
GPU = GpuSample(
    index=0,
    name="x",
    memory_used_bytes=1,
    memory_total_bytes=2,
    utilization_ratio=0.5,
    clock_mhz=1,
    temperature_celsius=1,
    throttle=(),
)


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path / "history.jsonl")
    yield recorder
    recorder.close()


def no_gpu():
    return NoGpu(because="none here")


def seen(recorder, kind, *, at_least=1):
    """Wait until so many events of a kind are there, and return their data."""

    def ask():
        events = recorder.snapshot().of(kind)
        return events if len(events) >= at_least else None

    return [event.data for event in poll_until(ask, what=f"{at_least} events of {kind}", limit_s=5.0, every_s=0.01)]


def test_health_is_written_when_it_changes_and_not_in_between(recorder, stand) -> None:
    with Observers(recorder, limits=FAST, gpus=no_gpu) as observers:
        observers.watch(stand.endpoint, "old-1", "key")
        assert seen(recorder, EventKind.HEALTH)[0]["status"] == 200
        asked = len(stand.asked)
        poll_until(lambda: len(stand.asked) > asked + 10 or None, what="more probes", limit_s=5.0)
        assert len(recorder.snapshot().of(EventKind.HEALTH)) == 1
        stand.status = 503
        data = seen(recorder, EventKind.HEALTH, at_least=2)
    assert [entry["status"] for entry in data] == [200, 503]
    assert {entry["incarnation"] for entry in data} == {"old-1"}
    assert data[0]["took_ms"] > 0


def test_unchanged_health_is_written_again_after_a_while(recorder, stand) -> None:
    limits = ObserverLimits(health_every_s=0.02, health_repeat_s=0.1, stop_limit_s=3.0)
    with Observers(recorder, limits=limits, gpus=no_gpu) as observers:
        observers.watch(stand.endpoint, "old-1")
        assert {entry["status"] for entry in seen(recorder, EventKind.HEALTH, at_least=3)} == {200}


def test_an_engine_that_is_gone_or_frozen_has_status_0(recorder, stand) -> None:
    with Observers(recorder, limits=FAST, gpus=no_gpu) as observers:
        observers.watch(stand.endpoint, "frozen-1")
        seen(recorder, EventKind.HEALTH)
        stand.hold.set()
        assert [entry["status"] for entry in seen(recorder, EventKind.HEALTH, at_least=3)] == [200, 0, 0]
    assert recorder.snapshot().of(EventKind.OBSERVER_FAILED) == ()


def test_health_is_asked_without_retries(stand) -> None:
    stand.status = 500
    assert health_status(stand.endpoint, limit_s=1.0) == 500
    assert len(stand.asked) == 1
    assert health_status("http://127.0.0.1:1", limit_s=0.5) == 0


def test_a_refused_connection_is_told_from_silence(stand) -> None:
    assert health_probe("http://127.0.0.1:1", limit_s=0.5) == (0, True)
    stand.hold.set()
    assert health_probe(stand.endpoint, limit_s=0.1) == (0, False)
    stand.hold.clear()
    assert health_probe(stand.endpoint, limit_s=1.0) == (200, False)


def test_metrics_are_written_under_their_short_names(recorder, stand) -> None:
    with Observers(recorder, limits=FAST, gpus=no_gpu) as observers:
        observers.watch(stand.endpoint, "old-1", "key")
        data = seen(recorder, EventKind.METRICS, at_least=2)
    assert data[0] == {"incarnation": "old-1", "values": {"num_requests_running": 1.0}}
    assert ("/metrics", "Bearer key") in stand.asked


def test_an_engine_without_metrics_is_no_failure_of_the_observer(recorder, stand) -> None:
    stand.status = 404
    with Observers(recorder, limits=FAST, gpus=no_gpu) as observers:
        observers.watch(stand.endpoint, "old-1")
        poll_until(lambda: sum(path == "/metrics" for path, _ in stand.asked) > 3 or None, what="probes", limit_s=5.0)
    assert recorder.snapshot().of(EventKind.METRICS, EventKind.OBSERVER_FAILED) == ()


def test_nothing_is_written_about_an_engine_after_unwatch(recorder, stand) -> None:
    limits = ObserverLimits(health_every_s=0.01, health_repeat_s=0.0, metrics_every_s=0.01, stop_limit_s=3.0)
    with Observers(recorder, limits=limits, gpus=no_gpu) as observers:
        observers.watch(stand.endpoint, "old-1")
        observers.watch(stand.endpoint, "new-2")
        seen(recorder, EventKind.HEALTH, at_least=4)
        observers.unwatch("old-1")
        about_old = [e.id for e in recorder.snapshot().events if e.data.get("incarnation") == "old-1"]
        total = len(recorder.snapshot().events)
        poll_until(lambda: len(recorder.snapshot().events) > total + 10 or None, what="more events", limit_s=5.0)
    assert [e.id for e in recorder.snapshot().events if e.data.get("incarnation") == "old-1"] == about_old


def test_an_answer_under_way_is_not_written_after_unwatch(recorder, stand) -> None:
    limits = ObserverLimits(health_every_s=0.01, health_limit_s=5.0, metrics_every_s=60.0, stop_limit_s=5.0)
    with Observers(recorder, limits=limits, gpus=no_gpu) as observers:
        observers.watch(stand.endpoint, "old-1")
        seen(recorder, EventKind.HEALTH)
        stand.hold.set()
        stand.status = 503
        asked = len(stand.asked)
        poll_until(lambda: len(stand.asked) > asked or None, what="a probe under way", limit_s=5.0, every_s=0.01)
        observers.unwatch("old-1")
        stand.hold.clear()
    assert {event.data["status"] for event in recorder.snapshot().of(EventKind.HEALTH)} == {200}
    assert recorder.snapshot().of(EventKind.OBSERVER_FAILED) == ()


def test_unwatching_what_is_not_watched_and_watching_twice_are_harmless(recorder, stand) -> None:
    with Observers(recorder, limits=FAST, gpus=no_gpu) as observers:
        observers.unwatch("nobody")
        before = threading.active_count()
        observers.watch(stand.endpoint, "old-1")
        observers.watch(stand.endpoint, "old-1")
        watchers = [thread.name for thread in threading.enumerate() if "old-1" in thread.name]
        assert len(watchers) == 2, before


def test_host_is_sampled(recorder) -> None:
    with Observers(recorder, limits=FAST, gpus=no_gpu):
        data = seen(recorder, EventKind.HOST, at_least=2)
    assert {"cpu_busy_ratio", "steal_ratio", "memory_available_bytes", "pressure_cpu_avg10"} <= set(data[0])


def test_no_gpu_is_said_once(recorder) -> None:
    with Observers(recorder, limits=FAST, gpus=no_gpu):
        seen(recorder, EventKind.HOST, at_least=5)
    assert [event.data for event in recorder.snapshot().of(EventKind.NO_GPU)] == [{"because": "none here"}]


def test_gpus_are_sampled_again_and_again(recorder) -> None:
    with Observers(recorder, limits=FAST, gpus=lambda: (GPU, GPU)):
        data = seen(recorder, EventKind.GPU, at_least=4)
    assert data[0]["utilization_ratio"] == 0.5
    assert recorder.snapshot().of(EventKind.NO_GPU) == ()


def test_an_observer_that_raises_is_one_event_and_the_others_go_on(recorder) -> None:
    def broken():
        raise RuntimeError("GPU fell off the bus")

    with Observers(recorder, limits=FAST, gpus=broken):
        failed = seen(recorder, EventKind.OBSERVER_FAILED)
        hosts = len(recorder.snapshot().of(EventKind.HOST))
        seen(recorder, EventKind.HOST, at_least=hosts + 3)
    assert failed == [{"observer": "gpu", "because": "RuntimeError: GPU fell off the bus"}]
    assert len(recorder.snapshot().of(EventKind.OBSERVER_FAILED)) == 1


def test_everything_ends_when_the_run_fails(recorder, stand) -> None:
    def fail():
        with Observers(recorder, limits=FAST, gpus=no_gpu) as observers:
            observers.watch(stand.endpoint, "old-1")
            seen(recorder, EventKind.HEALTH)
            raise KeyError("the run")

    with pytest.raises(KeyError, match="the run"):
        fail()
    names = {"host", "gpu", "health of old-1", "metrics of old-1"}
    assert not [thread for thread in threading.enumerate() if thread.name in names]


def test_an_observer_that_hangs_does_not_hold_up_the_end(recorder) -> None:
    release = threading.Event()
    limits = ObserverLimits(stop_limit_s=0.2)

    def hang():
        release.wait(20)
        return NoGpu(because="late")

    deadline = Deadline.after(5.0)
    with Observers(recorder, limits=limits, gpus=hang):
        seen(recorder, EventKind.HOST)
    assert not deadline.is_expired()
    assert recorder.snapshot().last(EventKind.OBSERVER_FAILED).data == {
        "observer": "gpu",
        "because": "it did not stop within 0.2 s",
    }
    release.set()
