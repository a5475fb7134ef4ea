"""Make the known-good answers: those of a cold start on the undamaged checkpoint, and of our own forward pass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.engine.engine import EngineIdentity, EngineStarter
from harness.engine.launch import Launch
from harness.errors import GoldenUnusable
from harness.guards.canary import Golden, GoldenPair, LogprobRows, TokenRows
from harness.guards.engine_api import EngineApi
from harness.observe.noise import ASK_LIMIT_S, Answers, mean_difference, measure_answers

# Mean absolute difference of an engine in bfloat16 to our forward pass in float32: 0.01 on the tiny model, 0.08 on SmolLM2-135M
# (largest single value 0.39); the mildest silent damage tried on the latter, another rope_theta, is 0.19.
FORWARD_MEAN_MAX = 0.15
# Where an engine is beyond that, our own pass rounded to bfloat16 says how far rounding alone moves this checkpoint: each layer
# rounds what it hands on, and deep or badly conditioned ones amplify it. An engine rounds elsewhere and so otherwise, but as much.
ROUNDING_FACTOR = 2.0
ROUNDING_MEAN_MAX = 0.5  # beyond it a right answer can no longer be told from a wrong one
FORMAT = 2  # of what is measured; stored goldens of another are not taken

Forward = Callable[..., LogprobRows]  # of a checkpoint and prompts, and `rounded=True` for results rounded to bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequest:
    """Which checkpoint a golden is wanted for."""

    source: Path
    weights_id: str
    launch: Launch
    prompts: TokenRows
    vocabulary_size: int
    deep: tuple[int, ...] | None = None  # a long prompt, to be asked too


def golden_key(identity: EngineIdentity, request: GoldenRequest) -> str:
    """Return the name under which a golden is kept: everything that may change an answer."""
    parts = [
        FORMAT,
        identity.name,
        identity.version,
        identity.build,
        identity.hardware,
        request.weights_id,
        request.launch.flags(),
        request.prompts,
        *(() if request.deep is None else (request.deep,)),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def measure_golden(
    starter: EngineStarter,
    request: GoldenRequest,
    *,
    api_key: str,
    seed: int,
    ready_limit_s: float,
    forward: Forward | None,
) -> Golden:
    """Start an engine cold on an undamaged checkpoint, ask it idle and under load, and stop it.

    `forward` is our own forward pass; an engine that disagrees with it must not bless itself.
    Raises: EngineNotReady; GoldenUnusable naming the difference and the limit.
    """
    identity = starter.identity()
    engine = starter.start(request.launch, incarnation=f"golden-{request.weights_id}")
    try:
        engine.wait_ready(ready_limit_s)
        answers = measure_answers(
            EngineApi(url=engine.endpoint, api_key=api_key, limit_s=ASK_LIMIT_S),
            request.launch.asked_model,
            request.prompts,
            vocabulary_size=request.vocabulary_size,
            seed=seed,
            deep=request.deep,
            under_load=not request.launch.serves_adapter,  # one sequence at a time: no batch that load could change
        )
    finally:
        engine.stop()
    who = f'{identity.label} on "{request.source}" (log: {engine.log_path})'
    require_agreement(answers, request.source, request.prompts, forward, who)
    return Golden(
        weights_id=request.weights_id,
        engine=identity.label,
        build=identity.build,
        hardware=identity.hardware,
        flags=request.launch.flags(),
        prompts=request.prompts,
        prompt_logprobs=answers.prompt_logprobs,
        noise_max=answers.noise_max,
        noise_checks=answers.noise_checks,
        tolerance=answers.tolerance,
        vocabulary_size=request.vocabulary_size,
        streamed=answers.streamed,
        deep=answers.deep,
    )


def require_agreement(
    answers: Answers, source: Path | None, prompts: TokenRows, forward: Forward | None, who: str
) -> None:
    """Check that an engine's answers are those of our own forward pass on the same weights, and stay so under load.

    Raises: GoldenUnusable naming the mean difference and the limit.
    """
    found = {"from itself once other requests are under way": answers.noise_mean}
    limit, because = ROUNDING_MEAN_MAX, ""
    if forward is not None and source is not None:
        computed = forward(source, prompts)
        own = {"from our own forward pass on the same weights": mean_difference(answers.prompt_logprobs, computed)}
        found, limit = own | found, FORWARD_MEAN_MAX
        if max(found.values()) > limit:
            rounding = mean_difference(forward(source, prompts, rounded=True), computed)
            limit = max(limit, min(ROUNDING_FACTOR * rounding, ROUNDING_MEAN_MAX))
            because = f"; rounding to bfloat16 alone makes {rounding:.3g}"
    for what, difference in found.items():
        if difference > limit:
            raise GoldenUnusable(
                f"{who} differs by {difference:.3g} on average {what} (limit {limit:.3g}{because}), so it cannot say what "
                "is right"
            )


def choose_pair(measure: Callable[[int], GoldenPair], *, attempts: int = 3) -> tuple[GoldenPair, tuple[str, ...]]:
    """Return the first pair of goldens whose prompts tell the checkpoints apart, and a warning per pair that did not.

    `measure` gives the pair for an attempt's prompts.
    Raises: GoldenUnusable when no prompts do.
    """
    warnings: list[str] = []
    for attempt in range(attempts):
        pair = measure(attempt)
        if pair.old.weights_id == pair.new.weights_id:
            raise GoldenUnusable(
                f"the old and the new checkpoint are the same ({pair.old.weights_id}): nothing can be told apart"
            )
        if not pair.are_alike:
            return pair, tuple(warnings)
        warnings.append(
            f"the answers of the old and the new checkpoint differ by {pair.separation:.3g} only (tolerance "
            f"{pair.tolerance:.3g}) on prompts of {len(pair.old.prompts[0])} tokens; other prompts are tried"
        )
    raise GoldenUnusable("; ".join(warnings))
