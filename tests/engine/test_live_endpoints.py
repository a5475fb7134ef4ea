"""The development endpoints one by one, on every engine that is there: what each answers, and what is served afterwards.

An engine is started once for all of them. What a platform cannot do it refuses, and the test is skipped with its words.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine_kinds import API_KEY, CONTAINER, PROCESS, REFERENCE, EngineKind, opened

from harness.checkpoint.models import tiny_llama
from harness.clock import poll_until
from harness.engine.dev_api import DevApi, Reply, reloadable
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.engine.ready import HEALTHY, probe_health
from harness.guards.canary import LogprobRows, complete, largest_difference, prompt_logprobs_of, request_body
from harness.guards.decoded import decode_body
from harness.guards.engine_api import EngineApi
from harness.guards.publish import publish

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23]]
LIMIT_S = 60.0
STILL_S = 0.5  # a request that is not held back is answered in a fraction of it
SAME = 1e-3
OTHER = 1e-2
NOT_ON_CPU = "sleep mode is not supported on CPU, ignore it"
KINDS = (
    pytest.param(REFERENCE, id="reference"),
    pytest.param(CONTAINER, id="container", marks=(pytest.mark.docker, pytest.mark.slow)),
    pytest.param(PROCESS, id="process", marks=pytest.mark.slow),
)


@dataclass(frozen=True, slots=True)
class Live:
    """An engine that serves the old checkpoint, with its development endpoints open."""

    engine: Engine
    root: Path
    old: Path
    new: Path

    @property
    def api(self) -> DevApi:
        return DevApi(url=self.engine.endpoint, limit_s=LIMIT_S)  # no key is asked for

    def rows(self) -> LogprobRows:
        body = request_body(SERVED_MODEL_NAME, PROMPTS)
        return prompt_logprobs_of(complete(self.engine.endpoint, body, api_key=API_KEY, limit_s=LIMIT_S), PROMPTS)

    def log(self) -> str:
        return self.engine.log_path.read_text(errors="replace")

    def serves_as(self, before: LogprobRows) -> None:
        """Make sure that it is healthy and answers as it did."""
        assert probe_health(self.engine.endpoint, limit_s=LIMIT_S) == HEALTHY
        assert largest_difference(self.rows(), before) < SAME


@pytest.fixture(scope="module", params=KINDS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    kind: EngineKind = request.param
    place = tmp_path_factory.mktemp("live")
    old, new = (tiny_llama(seed).build(place / "models") for seed in (1, 2))
    root = place / "checkpoints"
    root.mkdir()
    publish(old, root, name="live")
    with opened(kind, place) as starter:
        launch = reloadable(Launch(checkpoint_root=root, checkpoint_name="live", max_model_len=256))
        engine = starter.start(launch, incarnation="old-1")
        engine.wait_ready(kind.ready_limit_s)
        yield Live(engine, root, old, new)


@dataclass(slots=True)
class Asked:
    """A request that is asked on a thread of its own."""

    ask: Callable[[], LogprobRows]
    answers: list[LogprobRows] = field(default_factory=list)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=lambda: self.answers.append(self.ask()), daemon=True)
        self.thread.start()

    def is_held_back(self) -> bool:
        self.thread.join(STILL_S)
        return self.thread.is_alive()

    def answer(self) -> LogprobRows:
        self.thread.join(LIMIT_S)
        assert self.answers, "no answer came"
        return self.answers[0]


def require_ok(*replies: Reply) -> None:
    for reply in replies:
        assert reply.is_ok, reply


def digests_of(reply: Reply) -> dict[str, str]:
    require_ok(reply)
    found: dict[str, str] = reply.body["checksums"]
    return found


def test_a_version_is_told_and_set_and_says_nothing_about_the_weights(live: Live) -> None:
    before = live.rows()
    first = live.api.weight_info()
    require_ok(first, live.api.update_weight_version("7"))
    assert live.api.weight_info().body == {"weight_version": "7"}
    live.serves_as(before)
    publish(live.new, live.root, name="live")
    try:
        require_ok(live.api.pause(), live.api.reload_weights(), live.api.reset_prefix_cache(), live.api.resume())
        assert largest_difference(live.rows(), before) > OTHER
        assert live.api.weight_info().body == {"weight_version": "7"}, "other weights, the same version"
    finally:
        publish(live.old, live.root, name="live")
        require_ok(live.api.pause(), live.api.reload_weights(), live.api.reset_prefix_cache(), live.api.resume())
        live.api.update_weight_version(str(first.body["weight_version"]))
    live.serves_as(before)


def test_checksums_match_themselves_and_name_what_differs(live: Live) -> None:
    baseline = digests_of(live.api.checksums())
    assert live.api.compare_checksums(baseline).body == {"match": True, "mismatches": []}
    name = sorted(baseline)[0]
    compared = live.api.compare_checksums({**baseline, name: "0" * 64})
    assert compared.body == {"match": False, "mismatches": [name]}
    gone = live.api.compare_checksums({**baseline, "never.there": "0" * 64})
    assert gone.body == {"match": False, "mismatches": ["never.there"]}


def test_a_reset_shows_in_answers_and_a_reload_brings_everything_back(live: Live) -> None:
    before, baseline = live.rows(), digests_of(live.api.checksums())
    require_ok(live.api.pause(), live.api.reset_weights(), live.api.reset_prefix_cache(), live.api.resume())
    try:
        changed = live.api.compare_checksums(baseline).body["mismatches"]
        assert changed, "no digest differs from before"
        unchanged = sorted(set(baseline) - set(changed))
        print(f"{len(changed)} of {len(baseline)} digests changed; unchanged: {', '.join(unchanged) or 'none'}")
        assert largest_difference(live.rows(), before) > OTHER
    finally:
        require_ok(live.api.pause(), live.api.reload_weights(), live.api.reset_prefix_cache(), live.api.resume())
    assert live.api.compare_checksums(baseline).body["match"]
    live.serves_as(before)


def test_a_pause_holds_requests_back_and_health_does_not_show_it(live: Live) -> None:
    before = live.rows()
    require_ok(live.api.pause())
    try:
        assert live.api.is_paused().body == {"is_paused": True}
        assert probe_health(live.engine.endpoint, limit_s=LIMIT_S) == HEALTHY
        asked = Asked(live.rows)
        assert asked.is_held_back()
    finally:
        require_ok(live.api.resume())
    assert largest_difference(asked.answer(), before) < SAME
    assert live.api.is_paused().body == {"is_paused": False}
    live.serves_as(before)


def test_a_pause_that_aborts_ends_what_is_under_way(live: Live) -> None:
    before = live.rows()
    body = {**decode_body(SERVED_MODEL_NAME, PROMPTS[0], max_tokens=200, stream=True), "stream_options": None}
    received: list[bytes] = []

    def read() -> None:
        api = EngineApi(url=live.engine.endpoint, api_key=API_KEY, limit_s=LIMIT_S)
        try:
            with api.stream(body) as chunks:
                received.extend(chunks)
        except (OSError, ValueError) as error:
            received.append(str(error).encode())

    def has_begun() -> bool | None:
        return True if received else None

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    poll_until(has_begun, what="the answer has begun", limit_s=LIMIT_S, every_s=0.001)
    require_ok(live.api.pause(mode="abort"))
    reading.join(LIMIT_S)
    require_ok(live.api.resume())
    assert not reading.is_alive()
    text = b"".join(received)
    assert b'"finish_reason":"abort"' in text.replace(b" ", b"") or b"abort" in text, text[-300:]
    live.serves_as(before)


@pytest.mark.parametrize("level", [1, 2])
def test_who_sleeps_answers_nobody_until_it_wakes(live: Live, level: int) -> None:
    before = live.rows()
    slept = live.api.sleep(level=level, mode="wait")
    if not slept.is_ok:
        live.serves_as(before)
        pytest.skip(f"this engine does not sleep: HTTP {slept.status}: {slept.said}")
    try:
        assert live.api.is_sleeping().body == {"is_sleeping": True}
        assert probe_health(live.engine.endpoint, limit_s=LIMIT_S) == HEALTHY
        asked = Asked(live.rows)
        assert asked.is_held_back()
    finally:
        woken = live.api.wake_up()
    assert woken.body["status"] == "awake"
    assert live.api.is_sleeping().body == {"is_sleeping": False}
    if level == 1 or NOT_ON_CPU in live.log():
        assert largest_difference(asked.answer(), before) < SAME
    else:  # the weights were dropped: they have to come again
        asked.answer()
        require_ok(live.api.pause(), live.api.reload_weights(), live.api.reset_prefix_cache(), live.api.resume())
    live.serves_as(before)
    if NOT_ON_CPU in live.log():
        pytest.skip(f'this engine only pauses: it answered HTTP 200, and its log says "{NOT_ON_CPU}"')


def test_a_weight_update_without_a_transfer_engine_is_refused_and_does_no_harm(live: Live) -> None:
    before, version = live.rows(), live.api.weight_info().body
    for reply in (
        live.api.init_weight_transfer(),
        live.api.start_weight_update(),
        live.api.update_weights(),
        live.api.finish_weight_update("9"),
    ):
        assert reply.status == 500, reply
        assert "Weight transfer not configured" in reply.said
    assert live.api.weight_info().body == version
    live.serves_as(before)
