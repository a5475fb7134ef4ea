"""The known-good answers of a run, measured once per engine build, flags and weights, and kept between runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.checkpoint.manifest import read_checkpoint, weights_id
from harness.checkpoint.models import default_cache
from harness.engine.engine import EngineIdentity, EngineStarter
from harness.engine.launch import Launch
from harness.guards.canary import Golden, GoldenPair, TokenRows
from harness.observe.golden import GoldenRequest, canary_prompts, choose_pair, golden_key, measure_golden

READY_LIMIT_S = 600.0


class Goldens:
    """Gives the pair of goldens for two checkpoints, measuring what is not there yet."""

    def __init__(
        self,
        starter: EngineStarter,
        identity: EngineIdentity,
        *,
        api_key: str,
        seed: int,
        progress: Callable[[str], None],
    ) -> None:
        self._starter = starter
        self._identity = identity
        self._api_key = api_key
        self._seed = seed
        self._progress = progress
        self._known: dict[str, Golden] = {}

    def pair(self, old: Path, new: Path, launch: Launch) -> GoldenPair:
        """Return the known-good answers of both checkpoints for prompts that tell them apart.

        Raises: GoldenUnusable; EngineNotReady when the engine does not start on an undamaged checkpoint.
        """
        vocabulary = int(read_checkpoint(old).config["vocab_size"])

        def measure(attempt: int) -> GoldenPair:
            prompts = canary_prompts(vocabulary, seed=self._seed, attempt=attempt)
            return GoldenPair(*(self._golden(source, prompts, vocabulary, launch) for source in (old, new)))

        pair, warnings = choose_pair(measure)
        for warning in warnings:
            self._progress(f"warning: {warning}")
        return pair

    def _golden(self, source: Path, prompts: TokenRows, vocabulary: int, launch: Launch) -> Golden:
        request = GoldenRequest(
            source=source,
            weights_id=weights_id(source),
            launch=replace(launch, checkpoint_root=source.parent, checkpoint_name=source.name),
            prompts=prompts,
            vocabulary_size=vocabulary,
        )
        key = golden_key(self._identity, request)
        if key not in self._known:
            kept = default_cache() / "goldens" / f"{key}.json"
            kept.parent.mkdir(parents=True, exist_ok=True)
            if not kept.is_file():
                self._progress(f'measuring known-good answers of "{source.name}" on {self._identity.label} (once)')
                measure_golden(
                    self._starter,
                    request,
                    api_key=self._api_key,
                    seed=self._seed,
                    ready_limit_s=READY_LIMIT_S,
                    forward=_forward_pass_for(source),
                ).save(kept)
            self._known[key] = Golden.load(kept)
        return self._known[key]


def _forward_pass_for(source: Path) -> Callable[[Path, Any], Any] | None:
    """Return our own forward pass for small checkpoints of the Llama family, None for others."""
    from harness.engine.reference.check import forward_logprobs, is_supported

    return forward_logprobs if is_supported(source) else None
