"""The arrivals of a run, decided before it starts: the same seed gives the same plan, byte for byte.

Arrivals are open-loop: their times never depend on how fast the engine answers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from harness.clock import NS_PER_S
from harness.errors import HarnessError, ScenarioInvalid
from harness.load.arrivals import Rate, arrival_times, busiest_per_s, even_times
from harness.load.recorded import TraceRow
from harness.load.shape import NONCE_TOKENS, LoadShape, RequestLimits, require_positive

FIRST_ORDINARY_TOKEN = 3  # ids below are padding, begin and end in the Llama family
CANARY_TOKENS = 1  # a canary is judged by the logprobs of its prompt
ARRIVALS_MAX = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One planned request; `at_s` counts from the common start. A canary asks all canary prompts and has none here."""

    id: str
    kind: str  # "load" or "canary"
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    keep_alive: bool = False

    def planned_ns(self, start_ns: int) -> int:
        """Return when this request is due on the monotonic clock."""
        return start_ns + round(self.at_s * NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Every arrival of a run in order of time.

    `sha256` names the plan's whole content; `schedule_sha256` the same without what differs between the blocks of one
    comparison, the nonces that the prompts begin with: two arms had the same work when theirs is the same.
    """

    seed: int
    block: int
    shape: LoadShape
    arrivals: tuple[Arrival, ...]
    canary_prompts: tuple[tuple[int, ...], ...]
    schedule_sha256: str
    sha256: str

    def shard(self, loader: int, loaders: int) -> tuple[Arrival, ...]:
        """Return what one of `loaders` loaders sends: every so-manieth arrival, beginning with its own number."""
        return self.arrivals[loader::loaders]

    def due(self, start_ns: int, until_ns: int, *, loader: int = 0, loaders: int = 1) -> int:
        """Return how many arrivals are planned up to and including `until_ns`, for one of `loaders` loaders."""
        return sum(arrival.planned_ns(start_ns) <= until_ns for arrival in self.shard(loader, loaders))

    def busiest_per_s(self) -> tuple[float, float]:
        """Return the requests and the events (tokens) per second of the busiest stretch of five seconds."""
        return busiest_per_s((arrival.at_s, arrival.max_tokens) for arrival in self.arrivals)

    def save(self, path: Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), separators=(",", ":")) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> LoadPlan:
        """Read a saved plan.

        Raises: HarnessError when the file is not a plan, or was changed after it was made.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            shape = dict(fields["shape"])
            shape["limits"] = RequestLimits(**shape["limits"])
            shape["profile"] = tuple(tuple(point) for point in shape["profile"])
            shape["trace"] = tuple(TraceRow(**row) for row in shape["trace"])
            plan = cls(
                seed=fields["seed"],
                block=fields["block"],
                shape=LoadShape(**shape),
                arrivals=tuple(
                    Arrival(**{**arrival, "prompt": tuple(arrival["prompt"])}) for arrival in fields["arrivals"]
                ),
                canary_prompts=tuple(tuple(prompt) for prompt in fields["canary_prompts"]),
                schedule_sha256=fields["schedule_sha256"],
                sha256=fields["sha256"],
            )
        except (OSError, ValueError, KeyError, TypeError, ScenarioInvalid) as error:
            raise HarnessError(f'"{path}" is not a load plan: {type(error).__name__}: {error}') from error
        seen = _digest(asdict(plan))
        if seen != plan.sha256:
            raise HarnessError(f'load plan "{path}" was changed: its content has digest {seen}, it says {plan.sha256}')
        return plan


def make_plan(
    shape: LoadShape,
    *,
    seed: int,
    horizon_s: float,
    vocabulary_size: int,
    canary_prompts: Sequence[Sequence[int]],
    exactly: int | None = None,
    block: int = 0,
) -> LoadPlan:
    """Plan the arrivals of the next `horizon_s` seconds, or exactly so many of them (besides canaries).

    Blocks that are compared with one another have the same seed and each a number of its own: the plans are the same but
    for the nonces, so that no block finds its prompts in a cache that another one filled.
    Raises: ScenarioInvalid when nothing would arrive, too much would, or the prompts cannot be made.
    """
    prompts = tuple(tuple(prompt) for prompt in canary_prompts)
    if shape.canary_ratio > 0 and not prompts:
        raise ScenarioInvalid(f"canary_ratio is {shape.canary_ratio:g}, but there are no canary prompts to send")
    if block < 0:
        raise ScenarioInvalid(f"block is {block}: blocks are counted from 0")
    times = planned_times(shape, seed=seed, horizon_s=horizon_s, exactly=exactly)
    lengths = [(shape.prompt_tokens, shape.output_tokens)] * len(times)
    if shape.trace:
        lengths = [
            (
                max(row.prompt_tokens or shape.prompt_tokens, shape.shared_tokens + NONCE_TOKENS),
                row.output_tokens or shape.output_tokens,
            )
            for row in shape.trace[: len(times)]
        ]
    bodies = _prompts(shape, seed, block, [length for length, _ in lengths], vocabulary_size)
    kept = shape.keep_alive_ratio
    load = [
        Arrival(
            id=f"load-{number}",
            kind="load",
            at_s=at_s,
            prompt=prompt,
            max_tokens=output_tokens,
            keep_alive=math.floor((number + 1) * kept) > math.floor(number * kept),
        )
        for number, (at_s, prompt, (_, output_tokens)) in enumerate(zip(times, bodies, lengths, strict=True))
    ]
    canaries = [
        Arrival(id=f"canary-{number}", kind="canary", at_s=at_s, prompt=(), max_tokens=CANARY_TOKENS)
        for number, at_s in enumerate(even_times(shape.canary_rate_rps, horizon_s))
    ]
    arrivals = tuple(sorted(load + canaries, key=lambda arrival: (arrival.at_s, arrival.id)))
    plan = LoadPlan(
        seed=seed,
        block=block,
        shape=shape,
        arrivals=arrivals,
        canary_prompts=prompts,
        schedule_sha256=_schedule_digest(seed, shape, arrivals, prompts),
        sha256="",
    )
    return replace(plan, sha256=_digest(asdict(plan)))


def planned_times(shape: LoadShape, *, seed: int, horizon_s: float, exactly: int | None = None) -> list[float]:
    """Return when the requests of a plan arrive, canaries left out.

    Raises: ScenarioInvalid when nothing would arrive, or too much.
    """
    require_positive("horizon_s", horizon_s, unit="s")
    if exactly is not None and (exactly < 1 or shape.trace):
        raise ScenarioInvalid(f"exactly {exactly} arrivals: it must be at least 1, and a trace has its own number")
    expected = len(shape.trace) or exactly or Rate(shape.rate_rps, shape.profile).until(horizon_s)
    expected += shape.canary_rate_rps * horizon_s
    if expected > ARRIVALS_MAX:
        raise ScenarioInvalid(
            f"rate_rps = {shape.rate_rps:g} for horizon_s = {horizon_s:g} s means {expected:,.0f} arrivals, "
            f"a plan has at most {ARRIVALS_MAX:,}"
        )
    times = arrival_times(shape, Random(f"{seed}:times"), horizon_s=horizon_s, exactly=exactly)
    if not times:
        raise ScenarioInvalid(
            f"zero arrivals: no request arrives within horizon_s = {horizon_s:g} s at rate_rps = {shape.rate_rps:g} (seed {seed})"
        )
    return times


def _prompts(
    shape: LoadShape, seed: int, block: int, lengths: Sequence[int], vocabulary_size: int
) -> Iterator[tuple[int, ...]]:
    """Yield prompts of which no two have the same `NONCE_TOKENS` tokens after what they share, in all blocks together."""
    base, count = vocabulary_size - FIRST_ORDINARY_TOKEN, len(lengths)
    if base < 2 or base**NONCE_TOKENS < count * (block + 1):
        raise ScenarioInvalid(
            f"vocabulary_size is {vocabulary_size}: too small to give each of {count} prompts in {block + 1} blocks a "
            "beginning of its own"
        )
    nonce = Random(f"{seed}:nonce").randrange(base**NONCE_TOKENS) + block * count
    random, shared = Random(f"{seed}:prompts"), Random(f"{seed}:shared")
    beginnings = [[shared.randrange(base) for _ in range(shape.shared_tokens)] for _ in range(shape.shared_prompts)]
    for number, length in enumerate(lengths):
        nonce = (nonce + 1) % base**NONCE_TOKENS
        digits = [nonce // base**place % base for place in range(NONCE_TOKENS)]
        beginning = beginnings[number % len(beginnings)]
        body = [random.randrange(base) for _ in range(length - NONCE_TOKENS - len(beginning))]
        yield tuple(FIRST_ORDINARY_TOKEN + token for token in beginning + digits + body)


def _schedule_digest(
    seed: int, shape: LoadShape, arrivals: Sequence[Arrival], canary_prompts: Sequence[Sequence[int]]
) -> str:
    nonce = slice(shape.shared_tokens, shape.shared_tokens + NONCE_TOKENS)
    without = (replace(a, prompt=a.prompt[: nonce.start] + a.prompt[nonce.stop :]) for a in arrivals)
    return _digest(
        {
            "seed": seed,
            "shape": asdict(shape),
            "arrivals": [asdict(arrival) for arrival in without],
            "canary_prompts": canary_prompts,
        }
    )


def _digest(fields: Mapping[str, Any]) -> str:
    content = {key: value for key, value in fields.items() if key != "sha256"}
    if not content["shape"]["shared_tokens"]:  # such plans keep the digests that stored baselines have
        content["shape"] = {key: value for key, value in content["shape"].items() if not key.startswith("shared_")}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
