"""A plain locust user as people write it, run by `load_peers.py`; writes what locust says of each request.

Environment: PEER_USER (fast or http), PEER_MODE (streams, freeze or faults), PEER_TOKENS, PEER_COUNT, PEER_OUT.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from locust import FastHttpUser, HttpUser, constant_throughput, events

MODE, COUNT = os.environ["PEER_MODE"], int(os.environ["PEER_COUNT"])
BODY = {"model": "m", "prompt": "hello", "max_tokens": int(os.environ["PEER_TOKENS"]), "stream": True}
LIMIT_S = 2.0
SEEN: list[dict[str, Any]] = []


@events.request.add_listener
def note(response_time: float, exception: BaseException | None, **_: Any) -> None:
    """Keep what locust's statistics are told."""
    if MODE == "freeze":
        SEEN.append({"first_token_s": response_time / 1e3, "is_failed": exception is not None})
    elif exception is not None:
        SEEN[-1]["is_failed"] = True


@events.user_error.add_listener
def note_error(**_: Any) -> None:
    """Keep that a task ended in an exception: locust lists it beside its statistics."""
    SEEN[-1]["has_raised"] = True


@events.quitting.add_listener
def save(**_: Any) -> None:
    """Write everything down."""
    with open(os.environ["PEER_OUT"], "w", encoding="utf-8") as file:
        json.dump(SEEN, file)


def ask(user: Any) -> None:
    """Send one request as the mode wants it."""
    if MODE == "freeze":
        user.client.post("/v1/completions", json=BODY, **user.options)
        return
    if len(SEEN) >= COUNT:
        user.environment.runner.quit()
        return
    seen: dict[str, Any] = {"first_token_s": None, "is_failed": False, "has_raised": False}
    SEEN.append(seen)
    started = time.perf_counter()
    for line in user.lines():
        text = line if isinstance(line, bytes) else line.encode()
        if seen["first_token_s"] is None and b'"text"' in text:
            seen["first_token_s"] = time.perf_counter() - started


class Fast(FastHttpUser):
    """A user on geventhttpclient."""

    abstract = os.environ["PEER_USER"] != "fast"
    tasks = [ask]  # noqa: RUF012 - locust's users are made so
    network_timeout = connection_timeout = LIMIT_S
    concurrency = 100
    options: dict[str, Any] = {}  # noqa: RUF012
    if MODE == "freeze":
        wait_time = constant_throughput(5)

    def lines(self) -> Iterator[str]:
        """Yield the lines of a streamed answer."""
        yield from self.client.iter_lines("/v1/completions", method="POST", json=BODY)


class Http(HttpUser):
    """A user on requests."""

    abstract = os.environ["PEER_USER"] != "http"
    tasks = [ask]  # noqa: RUF012
    options: dict[str, Any] = {"timeout": LIMIT_S}  # noqa: RUF012
    if MODE == "freeze":
        wait_time = constant_throughput(5)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of a streamed answer."""
        yield from self.client.post("/v1/completions", json=BODY, stream=True, **self.options).iter_lines()
