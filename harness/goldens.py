"""The known-good answers of a run, measured once per engine build, flags and weights, and kept between runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.checkpoint.adapter import ADAPTER
from harness.checkpoint.manifest import read_checkpoint, weights_id
from harness.checkpoint.models import default_cache
from harness.engine.engine import EngineIdentity, EngineStarter
from harness.engine.launch import Launch
from harness.errors import GoldenUnusable
from harness.guards.canary import Golden, GoldenPair, LogprobRows, TokenRows
from harness.observe.canary_prompts import canary_prompts, deep_prompt
from harness.observe.golden import Forward, GoldenRequest, choose_pair, golden_key, measure_golden
from harness.observe.noise import mean_difference

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
        self._measured: list[str] = []

    @property
    def engine_starts(self) -> int:
        """Count the engines that were started to measure what was not there yet."""
        return len(self._measured)

    def pair(self, old: Path, new: Path, launch: Launch, *, deep_tokens: int = 0) -> GoldenPair:
        """Return the known-good answers of both checkpoints for prompts that tell them apart.

        With `deep_tokens` also those to one prompt of that length, which is asked through the prefix cache.
        Raises: GoldenUnusable; EngineNotReady when the engine does not start on an undamaged checkpoint.
        """
        vocabulary = int(read_checkpoint(old).config["vocab_size"])

        def measure(attempt: int) -> GoldenPair:
            prompts = canary_prompts(vocabulary, seed=self._seed, attempt=attempt)
            deep = deep_prompt(vocabulary, seed=self._seed, length=deep_tokens) if deep_tokens else None
            return GoldenPair(*(self._golden(source, prompts, vocabulary, launch, deep) for source in (old, new)))

        measured_before = len(self._measured)
        pair, warnings = choose_pair(measure)
        if len(self._measured) > measured_before:
            require_own_weights(pair, old, new, adapted=launch.serves_adapter)
        for warning in warnings:
            self._progress(f"warning: {warning}")
        return pair

    def of(self, source: Path, launch: Launch, *, vocabulary_size: int) -> Golden:
        """Return the known-good answers of one checkpoint, launched so, to the first canary prompts.

        `vocabulary_size` may be less than its own, where another checkpoint is to be asked the same.
        Raises: GoldenUnusable; EngineNotReady when the engine does not start on it.
        """
        prompts = canary_prompts(vocabulary_size, seed=self._seed)
        return self._golden(source, prompts, vocabulary_size, launch, None)

    def _golden(
        self, source: Path, prompts: TokenRows, vocabulary: int, launch: Launch, deep: tuple[int, ...] | None
    ) -> Golden:
        request = GoldenRequest(
            source=source,
            weights_id=weights_id(source),
            launch=replace(launch, checkpoint_root=source.parent, checkpoint_name=source.name),
            prompts=prompts,
            vocabulary_size=vocabulary,
            deep=deep,
        )
        key = golden_key(self._identity, request)
        if key not in self._known:
            kept = default_cache() / "goldens" / f"{key}.json"
            kept.parent.mkdir(parents=True, exist_ok=True)
            if not kept.is_file():
                self._progress(f'measuring known-good answers of "{source.name}" on {self._identity.label} (once)')
                forward = own_forward(source, adapted=launch.serves_adapter)
                if forward is None:
                    self._progress(
                        f'"{source.name}" is no Llama, or too large: its answers are not cross-checked by our own forward pass'
                    )
                own = kept.with_name(f"{kept.name}.{secrets.token_hex(4)}")  # two runs may measure the same at once
                measure_golden(
                    self._starter,
                    request,
                    api_key=self._api_key,
                    seed=self._seed,
                    ready_limit_s=READY_LIMIT_S,
                    forward=forward,
                ).save(own)
                own.replace(kept)
                self._measured.append(key)
            self._known[key] = Golden.load(kept)
        return self._known[key]


def forward_pass_for(source: Path) -> Forward | None:
    """Return our own forward pass for small checkpoints of the Llama family, None for others."""
    from harness.engine.reference.check import forward_logprobs, is_supported

    return forward_logprobs if is_supported(source) else None


def own_forward(source: Path, *, adapted: bool) -> Forward | None:
    """Return our own forward pass; `adapted`: with the checkpoint's own adapter merged into it."""
    forward = forward_pass_for(source)
    if forward is None or not adapted:
        return forward

    def with_adapter(checkpoint: Path, prompts: TokenRows, *, rounded: bool = False) -> LogprobRows:
        from harness.checkpoint.lora import merged

        with TemporaryDirectory(prefix="merged-") as scratch:
            whole = merged(Path(scratch) / "checkpoint", checkpoint, checkpoint / ADAPTER)
            return forward(whole, prompts, rounded=rounded)

    return with_adapter


def require_own_weights(pair: GoldenPair, old: Path, new: Path, *, adapted: bool = False) -> None:
    """Check that each golden is nearer to our forward pass on its own checkpoint than to that on the other.

    Two close checkpoints may both lie within the forward pass's own limit: an engine that served one for the other would
    bless itself. Nothing is checked where there is no forward pass.
    Raises: GoldenUnusable naming the golden and both distances.
    """
    forward = own_forward(old, adapted=adapted), own_forward(new, adapted=adapted)
    if forward[0] is None or forward[1] is None:
        return
    passes = {source: run(source, pair.old.prompts) for source, run in zip((old, new), forward, strict=True) if run}
    for golden, own, other in ((pair.old, old, new), (pair.new, new, old)):
        to_own = mean_difference(golden.prompt_logprobs, passes[own])
        to_other = mean_difference(golden.prompt_logprobs, passes[other])
        if to_own >= to_other:
            raise GoldenUnusable(
                f'the answers measured on "{own.name}" are nearer to our forward pass on "{other.name}" ({to_other:.3g}) than to '
                f"that on itself ({to_own:.3g}): the engine served other weights than it was given"
            )
