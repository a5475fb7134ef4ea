"""Options and environment, read once into one frozen value."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import UsageError

ENGINES = ("auto", "container", "process", "reference")
MODELS = ("tiny", "smollm2")
DEFAULT_VLLM_VERSION = "0.32.0"
MODEL_LEN_MIN = 128  # the longest canary prompts have 32 tokens, the longest answers 32
# The last of two counts: another host would open an engine to the network, another port or name make it unreachable.
OWN_ARGUMENTS = ("--host", "--port", "--uds", "--api-key", "--served-model-name")
# What a run can be told, by the command line as --NAME and by pytest as --rollout-NAME.
EXPLAINED = {
    "engine": "engine to use: auto, container, process or reference",
    "image": "container image with vLLM (default: the CPU image built from docker/)",
    "vllm-version": "vLLM release of the CPU image",
    "gpus": "GPUs for the container of --image: ids, comma-separated, or all, or count=N",
    "python": "interpreter with vLLM, for the process engine",
    "model": "checkpoints to roll out: tiny or smollm2 (default: what each scenario declares)",
    "old": "directory with your old checkpoint",
    "new": "directory with your new checkpoint",
    "max-model-len": "context length that engines are started with (default: 256)",
    "engine-arguments": "further launch arguments of engines, as one text in shell quoting",
    "memory-gib": "memory limit of a container in GiB (default: 8)",
    "patience": "factor on every time limit, for engines that start slowly (default: 1)",
    "rate-rps": "requests per second (default: the scenario's own; 1 for checkpoints that are not tiny)",
    "seed": "seed of the load and of everything random",
    "results": "directory for results",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one run is made with; saved with its results."""

    engine: str = "auto"
    image: str | None = None  # None: the CPU image built from docker/
    vllm_version: str = DEFAULT_VLLM_VERSION
    gpus: tuple[str, ...] = ()  # device ids for the container, "all" or "count=N"; empty: none
    python: Path | None = None  # interpreter with vLLM, for the process engine
    model: str | None = None  # None: what the scenario declares
    old: Path | None = None  # the user's own checkpoints, both or none
    new: Path | None = None
    max_model_len: int = 256
    engine_arguments: tuple[str, ...] = ()
    memory_gib: float = 8.0
    patience: float = 1.0
    rate_rps: float | None = None  # None: the scenario's own, or MODEL_RATE_RPS for checkpoints that are not tiny
    seed: int = 1
    locust_web_ui: bool = False  # serve locust's own page while load runs; for looking only
    results: Path = Path("results")

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UsageError(f'engine "{self.engine}" is unknown; engines: {", ".join(ENGINES)}')
        if self.model is not None and self.model not in MODELS:
            raise UsageError(f'model "{self.model}" is unknown; models: {", ".join(MODELS)}')
        if self.max_model_len < MODEL_LEN_MIN:
            raise UsageError(f"max_model_len must be at least {MODEL_LEN_MIN} tokens, got {self.max_model_len}")
        if not 1 <= self.patience < math.inf:
            raise UsageError(f"patience must be at least 1, got {self.patience:g}")
        if not 0 < self.memory_gib < math.inf:
            raise UsageError(f"memory must be a positive number of GiB, got {self.memory_gib:g}")
        if self.rate_rps is not None and not 0 < self.rate_rps < math.inf:
            raise UsageError(f"rate must be a positive number of requests/s, got {self.rate_rps:g}")
        if (self.old is None) != (self.new is None):
            raise UsageError("the old and the new checkpoint must be given together")
        if self.model is not None and self.old is not None:
            raise UsageError("give either a model or an old and a new checkpoint")
        require_free(self.engine_arguments)
        for name, path in (("old", self.old), ("new", self.new)):
            if path is not None and not (path.is_dir() and os.access(path, os.R_OK | os.X_OK)):
                raise UsageError(f'{name} checkpoint "{path}" is not a readable directory')

    @property
    def replaced(self) -> tuple[str, ...]:
        """Return what scenarios declare and these settings replace: starts recorded without them say little of these."""
        given = {
            "model": self.model is not None,
            "old and new": self.old is not None,
            "engine-arguments": bool(self.engine_arguments),
        }
        return tuple(name for name, is_given in given.items() if is_given)

    def require_as_declared(self) -> None:
        """Check that scenarios are run as they are declared, so that what is seen can be recorded under their names.

        Raises: UsageError naming what is not.
        """
        if self.replaced:
            raise UsageError(
                f"recorded starts are of checkpoints and launch lines as scenarios declare them, but given was: {', '.join(self.replaced)}; "
                "declare a scenario of your own with them"
            )

    def as_json(self) -> dict[str, Any]:
        """Return the settings ready for JSON."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


def require_free(arguments: Sequence[str]) -> None:
    """Return if a user's launch arguments name none of those that the harness sets itself.

    Raises: UsageError naming the first that does; its value may be a secret and is not repeated.
    """
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in OWN_ARGUMENTS:
            own = ", ".join(OWN_ARGUMENTS)
            raise UsageError(f'engine argument "{name}" cannot be given: the harness chooses {own} itself')


def settings_from(options: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Read settings: an option given wins over `ROLLOUT_<NAME>` in the environment, which wins over the default.

    Raises: UsageError naming the value that cannot be used.
    """
    given: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        value = options.get(name)
        if value in (None, "", []):
            value = environment.get(f"ROLLOUT_{name.upper()}") or None
        if value is None:
            continue
        try:
            given[name] = kind(value)
        except ValueError as error:
            if kind is _arguments:
                raise UsageError(f'{name} "{value}" cannot be read as a command line: {error}') from None
            raise UsageError(f'{name} must be a {"whole " if kind is int else ""}number, got "{value}"') from None
    return Settings(**given)


def _names(value: str | list[str]) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())


def _arguments(value: str) -> tuple[str, ...]:
    return tuple(shlex.split(value))


def _flag(value: bool | str) -> bool:
    return value is True or str(value).lower() in ("1", "true", "yes", "on")


def path_of(value: str) -> Path:
    """Return the absolute path that a user or an environment variable names; a leading `~` is a home directory.

    Raises: UsageError for the home directory of nobody.
    """
    # Not resolved: the symlink of a virtual environment's interpreter is what makes it one.
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:  # "~name/..." of nobody here
        raise UsageError(f'"{value}" is no path here: {error}') from error


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "engine": str,
    "image": str,
    "vllm_version": str,
    "gpus": _names,
    "python": path_of,
    "model": str,
    "old": path_of,
    "new": path_of,
    "max_model_len": int,
    "engine_arguments": _arguments,
    "memory_gib": float,
    "patience": float,
    "rate_rps": float,
    "seed": int,
    "locust_web_ui": _flag,
    "results": path_of,
}
