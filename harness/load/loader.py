"""Sends a loader's share of a plan, when the plan says so, and writes one record per arrival. Imported under gevent alone."""

from __future__ import annotations

import json
import math
import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from gevent.pool import Group

from harness.clock import NS_PER_S, now_ns
from harness.guards.canary import of_pass, pass_count, request_body
from harness.load.client import Outcome, send_canary, send_completion
from harness.load.connections import IdleConnections
from harness.load.plan import Arrival, LoadPlan
from harness.load.pulse import Counted, Pulse
from harness.load.sse import completion_body
from harness.load.stamps import StampedSocket
from harness.observe.history import Request, RequestResult

TIMER_STEP_S = 0.0012  # gevent's timers are late by up to 1 ms: the last bit is waited for by yielding

OnEnded = Callable[[Request, int], None]  # with the bytes received


class Loader:
    """Follows its share of the plan: one greenlet per arrival, never later than planned because of an earlier one.

    `on_ended` is called once per arrival, after its record was written.
    """

    def __init__(
        self,
        plan: LoadPlan,
        *,
        number: int,
        loaders: int,
        model: str,
        api_key: str,
        directory: Path,
        on_ended: OnEnded,
    ) -> None:
        self.finished = Event()
        self._number = number
        self._arrivals = plan.shard(number, loaders)
        self._canary_prompts = plan.canary_prompts
        self._limits = plan.shape.limits
        self._late_ns = round(plan.shape.late_s * NS_PER_S)
        self._in_flight_limit = math.ceil(plan.shape.in_flight_limit / loaders)
        self._model = model
        self._api_key = api_key
        self._on_ended = on_ended
        self._records = (directory / f"requests-{number}.jsonl").open("a", encoding="utf-8")
        self._pulse = Pulse(directory / f"heartbeats-{number}.jsonl", loader=number, counted=self._counted)
        self._target: tuple[str, str] | None = None
        self._idle = IdleConnections()
        self._stamping = StampedSocket(socket.AF_INET)  # never connected: while it is open the kernel goes on stamping
        self._in_flight = Group()
        self._begun = Event()
        self._stopping = Event()
        self._start_ns = 0
        self._stop_ns: int | None = None
        self._dispatched = 0
        self._on_time = 0
        self._results: Counter[RequestResult] = Counter()
        self._lag_ms_max = 0.0  # since the last heartbeat

    def begin(self, start_ns: int) -> None:
        """Set the time that arrivals count from."""
        self._start_ns = start_ns
        self._pulse.begin(self.finished).link_exception(end_process)
        self._begun.set()

    def admit(self, endpoint: str, incarnation: str) -> None:
        """Send arrivals from now on to this endpoint."""
        self._idle.close()
        self._target = (endpoint, incarnation)

    def stop(self) -> int:
        """Take no arrival after now, and return that time; those under way go on."""
        if self._stop_ns is None:
            self._on_time = self._dispatched - self._results[RequestResult.DROPPED] - self._results[RequestResult.LATE]
            self._stop_ns = now_ns()
            self._stopping.set()
        return self._stop_ns

    def follow_plan(self) -> None:
        """Dispatch every arrival at its time, then wait for the last to end."""
        self._begun.wait()
        for arrival in self._arrivals:
            planned_ns = arrival.planned_ns(self._start_ns)
            while self._stop_ns is None and (remaining_s := (planned_ns - now_ns()) / NS_PER_S) > 0:
                if remaining_s > TIMER_STEP_S:
                    self._stopping.wait(remaining_s - TIMER_STEP_S)
                else:
                    gevent.sleep(0)
            if self._stop_ns is not None and planned_ns > self._stop_ns:
                break
            self._dispatch(arrival, planned_ns)
        self._stopping.wait()
        self._in_flight.join()
        self._idle.close()
        self._stamping.close()
        self._records.close()
        self.finished.set()

    def report(self) -> dict[str, Any]:
        """Say how well the plan was kept."""
        return {
            "recorded": self._results.total(),
            "dropped": self._results[RequestResult.DROPPED],
            "late": self._results[RequestResult.LATE],
            "on_time": self._on_time,
            "closed_while_idle": self._idle.closed_while_idle,
            **self._pulse.report(),
        }

    def _dispatch(self, arrival: Arrival, planned_ns: int) -> None:
        self._dispatched += 1
        target = self._target
        at_ns = now_ns()
        ours = None
        if at_ns - planned_ns > self._late_ns:
            ours = RequestResult.LATE
        elif target is None:
            ours = RequestResult.NO_ENDPOINT
        elif len(self._in_flight) >= self._in_flight_limit:
            ours = RequestResult.DROPPED
        if ours is not None or target is None:
            result = ours or RequestResult.NO_ENDPOINT
            outcome = Outcome(result=result, error="", sent_ns=None, ended_ns=at_ns)
            self._record(arrival, planned_ns, at_ns, target, outcome)
        else:
            # An arrival without a record would be a hole in the evidence: rather no load than that.
            self._in_flight.spawn(self._send, arrival, planned_ns, target).link_exception(end_process)

    def _send(self, arrival: Arrival, planned_ns: int, target: tuple[str, str]) -> None:
        dispatched_ns = now_ns()
        try:
            outcome = self._outcome(arrival, target[0])
        except Exception as error:
            because = f"{type(error).__name__}: {error}".replace(self._api_key or "\0", "***")[:300]
            outcome = Outcome(result=RequestResult.HARNESS_BUG, error=because, sent_ns=None, ended_ns=now_ns())
        self._record(arrival, planned_ns, dispatched_ns, target, outcome)

    def _outcome(self, arrival: Arrival, endpoint: str) -> Outcome:
        limits, key, idle = self._limits, self._api_key, self._idle if arrival.keep_alive else None
        if arrival.kind == "canary":
            prompts = of_pass(self._canary_prompts, self._rotation(arrival))
            body = request_body(self._model, prompts, max_tokens=arrival.max_tokens)
            return send_canary(endpoint, body, prompts=prompts, limits=limits, api_key=key, idle=idle)
        body = completion_body(self._model, arrival.prompt, arrival.max_tokens)
        return send_completion(endpoint, body, max_tokens=arrival.max_tokens, limits=limits, api_key=key, idle=idle)

    def _rotation(self, arrival: Arrival) -> int | None:
        """Return which pass of the canary prompts an arrival asks: canaries are numbered, and take turns."""
        if arrival.kind != "canary":
            return None
        return int(arrival.id.rpartition("-")[2]) % pass_count(self._canary_prompts)

    def _record(
        self, arrival: Arrival, planned_ns: int, dispatched_ns: int, target: tuple[str, str] | None, outcome: Outcome
    ) -> None:
        endpoint, incarnation = target or ("", "")
        request = Request(
            id=arrival.id,
            kind=arrival.kind,
            planned_ns=planned_ns,
            dispatched_ns=dispatched_ns,
            connected_ns=outcome.connected_ns,
            sent_ns=outcome.sent_ns,
            headers_ns=outcome.headers_ns,
            first_token_ns=outcome.first_token_ns,
            token_ns=outcome.token_ns,
            ended_ns=outcome.ended_ns,
            endpoint=endpoint,
            incarnation=incarnation,
            connection=outcome.connection,
            loader=self._number,
            result=outcome.result,
            status=outcome.status,
            error=outcome.error,
            output_sha256=outcome.output_sha256,
            output_tokens=outcome.output_tokens,
            prompt_logprobs=outcome.prompt_logprobs,
            rotation=self._rotation(arrival),
        )
        self._records.write(json.dumps({name: getattr(request, name) for name in Request.__slots__}) + "\n")
        self._records.flush()
        self._results[outcome.result] += 1
        self._lag_ms_max = max(self._lag_ms_max, (dispatched_ns - planned_ns) / 1e6)
        self._on_ended(request, outcome.received_bytes)

    def _counted(self) -> Counted:
        lag_ms_max, self._lag_ms_max = self._lag_ms_max, 0.0
        return Counted(
            dispatched=self._dispatched,
            ended=self._results.total(),
            in_flight=len(self._in_flight),
            lag_ms_max=lag_ms_max,
        )


def end_process(_: object) -> None:
    """End this process at once, so that its parent notices: a greenlet that may not fail has failed."""
    os._exit(1)
