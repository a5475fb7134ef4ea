"""Where checkpoints come from: made from a seed, a real small model, or a directory of the user's."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.clock import poll_until
from harness.errors import UsageError
from harness.settings import path_of

FORMAT = 1  # raised whenever the same parameters give other files
BUILD_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A checkpoint to be: its name says everything that decides its content."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    given: Path | None = None  # a directory of the user's, which is never written
    write: Callable[[Path], None] | None = field(default=None, compare=False, repr=False)

    def build(self, cache: Path | None = None) -> Path:
        """Return a directory with the checkpoint, made once in `cache` and read-only from then on.

        Raises: UsageError when the user's directory cannot be used; EnvironmentMissing when an extra is not installed.
        """
        if self.given is not None:
            return _usable(self.given)
        if self.write is None:
            raise UsageError(f'model "{self.name}" has neither a directory nor a way to make one')
        cache = default_cache() if cache is None else cache
        finished = cache / self.name
        if finished.is_dir():
            return finished
        cache.mkdir(parents=True, exist_ok=True)
        with _only_builder(cache / f".{self.name}.lock"):
            if not finished.is_dir():
                unfinished = cache / f".{self.name}.building"
                shutil.rmtree(unfinished, ignore_errors=True)  # of a builder that was killed
                unfinished.mkdir()
                try:
                    self.write(unfinished)
                    for file in unfinished.rglob("*"):
                        file.chmod(0o755 if file.is_dir() else 0o444)
                    unfinished.rename(finished)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
        return finished


def default_cache() -> Path:
    """Return where made checkpoints are kept: `$ROLLOUT_CACHE`, else a directory in the user's cache."""
    named = os.environ.get("ROLLOUT_CACHE")
    if named:
        return path_of(named)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return path_of(base) / "vllm-rollout-harness"


def tiny_llama(
    seed: int = 1,
    *,
    shards: int = 1,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 256,
    vocabulary: int = 512,
    dtype: str = "BF16",
    tied: bool = False,
) -> ModelSource:
    """Return a Llama with random weights: about 1 MB, every seed another model with clearly other logprobs.

    Raises: UsageError when the sizes do not fit together, or one is no whole number.
    """
    from harness.checkpoint.tiny import TinyShape, write_tiny

    shape = TinyShape(
        seed=seed,
        shards=shards,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        vocabulary=vocabulary,
        dtype=dtype,
        tied=tied,
    )
    return _made(f"tiny-llama-seed{seed}", shape.as_json(), partial(write_tiny, shape))


def adapted_llama(seed: int = 1, *, adapter: int = 1) -> ModelSource:
    """Return the tiny Llama of a seed with a LoRA adapter of its own beside its weights, random from a seed as well.

    Raises: UsageError when a seed is below 0, or no whole number.
    """
    from harness.checkpoint.adapter import ADAPTER
    from harness.checkpoint.lora import Adapter, write_adapter

    base, added = tiny_llama(seed).write, Adapter(seed=adapter)

    def write(target: Path) -> None:
        if base is not None:
            base(target)
        write_adapter(target / ADAPTER, target, added)

    return _made(f"adapted-llama-seed{seed}", {"seed": seed, "adapter": adapter}, write)


def smollm2(shards: int = 2, seed: int | None = None) -> ModelSource:
    """Return SmolLM2-135M-Instruct in bf16 (269 MB); with a seed, a "fine-tune": the same plus seeded noise.

    `build` raises EnvironmentMissing when the extra "models" is not installed.
    Raises: UsageError when the number of shards is not 1 to 99, or the seed no whole number of at least 0.
    """
    from harness.checkpoint.smollm2 import write_smollm2

    if not isinstance(shards, int) or not 1 <= shards <= 99:
        raise UsageError(f"shards is {shards!r}, expected 1 to 99")
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise UsageError(f"seed is {seed!r}, expected a whole number of at least 0")
    name = "smollm2-135m" if seed is None else f"smollm2-135m-tuned-seed{seed}"
    return _made(name, {"shards": shards, "seed": seed}, partial(write_smollm2, shards=shards, seed=seed))


def directory(path: Path | str) -> ModelSource:
    """Return a checkpoint that the user has; its directory is read, never written.

    Raises: UsageError when the path begins with the home directory of nobody.
    """
    given = path_of(str(path))
    return ModelSource(name=given.name or "root", parameters={"directory": str(given)}, given=given)


def _made(stem: str, parameters: Mapping[str, Any], write: Callable[[Path], None]) -> ModelSource:
    described = repr((FORMAT, sorted(parameters.items())))
    digest = hashlib.sha256(described.encode()).hexdigest()[:10]
    return ModelSource(name=f"{stem}-{digest}", parameters=dict(parameters), write=write)


def _usable(path: Path) -> Path:
    """Return the user's directory.

    Raises: UsageError saying why it cannot be read.
    """
    if not path.exists():
        raise UsageError(f'the checkpoint directory "{path}" does not exist')
    if not path.is_dir():
        raise UsageError(f'the checkpoint "{path}" is not a directory')
    try:
        names = os.listdir(path)
    except OSError as error:
        raise UsageError(f'the checkpoint directory "{path}" cannot be read: {error.strerror}') from None
    if not names:
        raise UsageError(f'the checkpoint directory "{path}" is empty')
    return path


@contextmanager
def _only_builder(lock: Path) -> Iterator[None]:
    """Hold a lock file while building; the system frees it if the builder is killed."""

    def take() -> bool:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True

    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        poll_until(take, what=f'lock "{lock}" of another builder', limit_s=BUILD_LIMIT_S)
        yield
    finally:
        os.close(descriptor)
