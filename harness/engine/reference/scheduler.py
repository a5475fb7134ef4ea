"""One thread that computes: every running request gets one step per round, so that all of them advance together.

Each request is computed by itself, never batched with others: its answer is the same to the last bit under any load.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from harness.clock import now_ns, pause, seconds_between
from harness.engine.reference.metrics import Metrics
from harness.engine.reference.model import Floats, KvCache, Llama, log_softmax
from harness.engine.reference.prefixes import PrefixCache
from harness.guards.canary import PROMPTS_PER_PASS

MAX_RUNNING = 64
PAUSE_LIMIT_S = 60.0
SLOWER_FACTOR = 1.3


@dataclass(frozen=True, slots=True)
class RankedLogprob:
    """The logprob of one token at one position, and how many tokens are at least as likely."""

    token: int
    logprob: float
    rank: int


Position = tuple[RankedLogprob, ...]  # the token that is there, then the most likely others


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One generated token; `finish_reason` is "stop" or "length" on the last one."""

    token: int
    logprobs: Position | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """The request cannot go on."""

    message: str


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """One prompt and its answer; the server reads `outputs`, and `prompt_positions` once the first output is there."""

    prompt: Sequence[int]
    max_tokens: int
    ignores_end: bool
    top_logprobs: int | None = None
    top_prompt_logprobs: int | None = None
    salt: str = ""  # prompts with different salts share no prefix
    outputs: SimpleQueue[Step | Failure] = field(default_factory=SimpleQueue)
    prompt_positions: list[Position] = field(default_factory=list)
    is_cancelled: bool = False
    arrived_ns: int = field(default_factory=now_ns)
    last_token_ns: int = 0
    generated: list[int] = field(default_factory=list)
    cache: KvCache | None = None


class Scheduler:
    """Runs generations on one model until closed."""

    def __init__(
        self,
        model: Llama,
        metrics: Metrics,
        *,
        end_ids: frozenset[int],
        step_s: float = 0.0,
        is_slower: bool = False,
        disturbance: float = 0.0,
        is_right_when_idle: bool = False,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """Compute with `model`; each step takes at least `step_s`.

        `is_slower` stretches every step by 30 %, `disturbance` is the size of a fixed error added to all logits; with
        `is_right_when_idle` only while more prompts are computed than one canary has.
        """
        self._model = model
        self._metrics = metrics
        self._end_ids = end_ids
        self._step_s = step_s
        self._is_slower = is_slower
        noise = np.random.default_rng(0).normal(0.0, disturbance, model.shape.vocabulary) if disturbance else 0.0
        self._disturbance = np.asarray(noise, np.float32)
        self._is_right_when_idle = is_right_when_idle
        self._changed = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._is_closed = False
        self._is_paused = False
        self._is_frozen = False  # paused, and what is under way stands still
        self._computing = threading.Lock()  # held in a round: weights change between two of them
        self._prefixes = prefixes
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start computing."""
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Queue a request."""
        with self._changed:
            self._waiting.append(generation)
            self._show_queue()
            self._changed.notify_all()

    @property
    def is_paused(self) -> bool:
        """Say whether no new request is taken up."""
        return self._is_paused

    def is_busy(self) -> bool:
        """Say whether requests are under way, or would be at once."""
        with self._changed:
            return bool(self._running or (self._waiting and not self._is_paused))

    def pause(self, mode: str, *, limit_s: float = PAUSE_LIMIT_S) -> bool:
        """Take up no new request. What is under way is finished ("wait"), ended ("abort") or stands still ("keep").

        Returns whether it came to that within the limit.
        """
        with self._changed:
            self._is_paused, self._is_frozen = True, mode == "keep"
            if mode == "abort":
                for generation in self._running:
                    generation.is_cancelled = True
                    generation.outputs.put(Failure("the request was aborted by a pause"))
            return self._is_frozen or self._changed.wait_for(lambda: not self._running, limit_s)

    def resume(self) -> None:
        """Take up requests again."""
        with self._changed:
            self._is_paused = self._is_frozen = False
            self._changed.notify_all()

    def exchange(self, model: Llama, *, keeps_prefixes: bool = False) -> None:
        """Compute with another model of the same shape from the next round on."""
        with self._computing:
            self._model = model
            if self._prefixes is not None and not keeps_prefixes:
                self._prefixes.clear()

    def forget_prefixes(self) -> bool:
        """Forget every computed prefix; refused while requests are under way, which hold some of them."""
        with self._changed:
            if self._running:
                return False
        with self._computing:
            if self._prefixes is not None:
                self._prefixes.clear()
        return True

    def close(self, limit_s: float = 5.0) -> None:
        """Stop computing after the step in progress. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._is_closed or self._has_work()):
                    self._changed.wait()
                if self._is_closed:
                    return
                while self._waiting and not self._is_paused and len(self._running) < MAX_RUNNING:
                    self._running.append(self._waiting.popleft())
                self._show_queue()
            with self._computing:
                self._round()

    def _has_work(self) -> bool:
        return bool((self._waiting and not self._is_paused) or (self._running and not self._is_frozen))

    def _round(self) -> None:
        prompt_tokens = generation_tokens = 0
        still_running: list[Generation] = []
        for generation in self._running:
            if generation.is_cancelled:
                self._finish(generation, "abort")
                continue
            prompt_tokens += 0 if generation.generated else len(generation.prompt)
            generation_tokens += 1
            try:
                step = self._step(generation)
            except Exception as error:  # the request fails, the server goes on
                generation.outputs.put(Failure(f"{type(error).__name__}: {error}"))
                self._finish(generation, "error")
                continue
            if step.finish_reason is None:
                still_running.append(generation)
            else:
                self._finish(generation, step.finish_reason)
            generation.outputs.put(step)
        self._metrics.count_iteration(prompt_tokens=prompt_tokens, generation_tokens=generation_tokens)
        with self._changed:
            self._running = still_running
            self._show_queue()
            self._changed.notify_all()  # somebody may wait for it to be idle

    def _step(self, generation: Generation) -> Step:
        started_ns = now_ns()
        with np.errstate(all="ignore"):  # broken weights may give infinities; whoever asked for logprobs sees them
            token, position = self._compute(generation)
        took_s = seconds_between(started_ns, now_ns())
        wanted_s = max(took_s, self._step_s) * (SLOWER_FACTOR if self._is_slower else 1.0)
        if wanted_s > took_s:
            pause(wanted_s - took_s)
        ended_ns = now_ns()
        is_first = not generation.generated
        since_ns = generation.arrived_ns if is_first else generation.last_token_ns
        self._metrics.observe_token(seconds_between(since_ns, ended_ns), is_first=is_first)
        generation.last_token_ns = ended_ns
        generation.generated.append(token)
        reason = None
        if token in self._end_ids and not generation.ignores_end:
            reason = "stop"
        elif len(generation.generated) >= generation.max_tokens:
            reason = "length"
        return Step(token=token, logprobs=position, finish_reason=reason)

    def _compute(self, generation: Generation) -> tuple[int, Position | None]:
        if generation.cache is None:
            generation.cache = self._model.new_cache(len(generation.prompt) + generation.max_tokens)
            wants_all = generation.top_prompt_logprobs is not None  # such a request is computed from its first token
            prefixes = None if wants_all else self._prefixes
            known = 0 if prefixes is None else prefixes.fill(generation.cache, generation.prompt, salt=generation.salt)
            logits = self._model.forward(generation.prompt[known:], generation.cache, last_only=not wants_all)
            if prefixes is not None:
                prefixes.store(generation.cache, generation.prompt, salt=generation.salt)
            logits += self._error()
            if generation.top_prompt_logprobs is not None:
                rows = log_softmax(logits[:-1])
                for token, row in zip(generation.prompt[1:], rows, strict=True):
                    generation.prompt_positions.append(_position(row, token, generation.top_prompt_logprobs))
        else:
            logits = self._model.forward(generation.generated[-1:], generation.cache)
            logits += self._error()
        token = int(logits[-1].argmax())
        if generation.top_logprobs is None:
            return token, None
        return token, _position(log_softmax(logits[-1]), token, generation.top_logprobs)

    def _error(self) -> Floats | float:
        is_idle = len(self._running) <= PROMPTS_PER_PASS
        return 0.0 if self._is_right_when_idle and is_idle else self._disturbance

    def _finish(self, generation: Generation, reason: str) -> None:
        generation.cache = None
        self._metrics.finish(reason, seconds_between(generation.arrived_ns, now_ns()))

    def _show_queue(self) -> None:
        self._metrics.set_queue(running=len(self._running), waiting=len(self._waiting))


def _position(logprobs: Floats, token: int, top: int) -> Position:
    own = logprobs[token]
    ranked = [RankedLogprob(token, float(own), int((logprobs >= own).sum()))]
    count = min(top, logprobs.size)
    if count:
        likely = np.argpartition(-logprobs, count - 1)[:count]
        likely = likely[np.argsort(-logprobs[likely], kind="stable")]
        for rank, other in enumerate(likely, start=1):
            if other != token:
                ranked.append(RankedLogprob(int(other), float(logprobs[other]), rank))
    return tuple(ranked)
