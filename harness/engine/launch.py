"""How an engine is asked to serve a checkpoint: the same arguments for every engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from harness.checkpoint.adapter import ADAPTER

ADAPTER_NAME = "tuned"  # under which a checkpoint's own LoRA adapter is served
SERVED_MODEL_NAME = "rollout"  # the same for the old and the new checkpoint, as in a real rollout
WEIGHT_CACHE_LOAD_FORMAT = "rollout_weight_cache"
WEIGHT_CACHE_ROOT = "/dev/shm/vllm_weight_cache"  # the incident write-up's default place
WEIGHT_CACHE_PATH_VARIABLE = "VLLM_WEIGHT_CACHE_PATH"
WEIGHT_CACHE_KEY_VARIABLE = "VLLM_WEIGHT_CACHE_KEY"  # "path" (as documented) or "content"
WEIGHT_CACHE_DISABLED_VARIABLE = "VLLM_WEIGHT_CACHE_DISABLED"  # "1": load as if there were no cache
WEIGHT_TRANSFER = ("--weight-transfer-config", '{"backend": "rollout_files"}')  # the backend of our plug-in
COMPILE_CACHE_VARIABLE = "VLLM_CACHE_ROOT"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCache:
    """The incident's weight cache: a host directory that outlives the engine."""

    directory: Path
    key: str = "path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything that decides what an engine serves and how.

    `checkpoint_root` is mounted read-only; `checkpoint_name` is the entry in it that is served (it may be a relative
    symlink, which is why the root is mounted and not the entry).
    """

    checkpoint_root: Path
    checkpoint_name: str
    dtype: str = "auto"
    max_model_len: int = 256
    weight_cache: WeightCache | None = None
    compile_cache: Path | None = (
        None  # a host directory that outlives the engine, which then compiles; None: eager on CPU
    )
    extra_arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    shared_memory_bytes: int | None = None  # of a container; None: what containers here get
    port: int | None = None  # of this host, whoever listens on it; None: a free one
    serves_adapter: bool = False  # the checkpoint's own LoRA adapter, which then is what canaries and users ask
    draft_name: str | None = None  # the entry of `checkpoint_root` that proposes tokens; None: nobody does
    draft_tokens: int = 0  # how many it proposes at a time
    beside: str = ""  # the endpoint of the engine that serves meanwhile

    def arguments(self, *, model: str, host: str, port: int) -> tuple[str, ...]:
        """Return the arguments after `vllm serve` for a checkpoint at `model`; the API key is never among them."""
        load_format = () if self.weight_cache is None else ("--load-format", WEIGHT_CACHE_LOAD_FORMAT)
        adapter = ("--lora-modules", f"{ADAPTER_NAME}={model}/{ADAPTER}") if self.serves_adapter else ()
        return (
            model,
            "--host",
            host,
            "--port",
            str(port),
            "--served-model-name",
            SERVED_MODEL_NAME,
            "--dtype",
            self.dtype,
            "--max-model-len",
            str(self.max_model_len),
            *load_format,
            *adapter,
            *self._speculation(model),
            *self.extra_arguments,
        )

    def _speculation(self, model: str) -> tuple[str, ...]:
        if self.draft_name is None:
            return ()
        draft = {
            "method": "draft_model",
            "model": str(PurePosixPath(model).parent / self.draft_name),
            "num_speculative_tokens": self.draft_tokens,
        }
        return ("--speculative-config", json.dumps(draft))

    @property
    def transfers_weights(self) -> bool:
        """Say whether weights may be sent to the engine, which then needs the plug-in that reads them from files."""
        return WEIGHT_TRANSFER[1] in self.extra_arguments

    @property
    def asked_model(self) -> str:
        """Return the name that canaries and users ask for."""
        return ADAPTER_NAME if self.serves_adapter else SERVED_MODEL_NAME

    def flags(self) -> tuple[str, ...]:
        """Return what of this launch decides the answers, for keys of stored goldens: no paths, ports or names."""
        compiled = () if self.compile_cache is None else ("compiled",)
        environment = (f"{name}={value}" for name, value in self.environment)
        adapted = ("adapter",) if self.serves_adapter else ()
        return (self.dtype, str(self.max_model_len), *compiled, *adapted, *self.extra_arguments, *environment)

    def with_dtype(self, dtype: str) -> Launch:
        """Return the same launch with another `--dtype`."""
        return replace(self, dtype=dtype)

    def as_json(self) -> dict[str, Any]:
        """Return what the history records of this launch; environment values may be secrets and stay out."""
        return {
            "checkpoint": self.checkpoint_name,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "weight_cache_key": None if self.weight_cache is None else self.weight_cache.key,
            "compile_cache": None if self.compile_cache is None else self.compile_cache.name,
            "extra_arguments": list(self.extra_arguments),
            "environment": [name for name, _ in self.environment],
        }
