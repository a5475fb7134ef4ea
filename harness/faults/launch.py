"""Wrong launch arguments. Source: incident write-up (`--dtype`, `--disable-weight-cache`); taxonomy rows C07, L01 to L06."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from harness.checkpoint.digest import weights_id
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.errors import CheckpointDefect, FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import CONFIG_NAME, read_json
from harness.faults.fault import Injected, parameters_of

PROBE_LIMIT_S = 2.0
DTYPE_SPELLINGS = ("auto", "half", "float16", "bfloat16", "float", "float32")  # all that vLLM accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchDtype:
    """An engine launched with another `--dtype`."""

    name: ClassVar[str] = "launch_dtype"
    dtype: str

    @property
    def fault_id(self) -> str:
        return "C07" if self.dtype in DTYPE_SPELLINGS else "L01"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        altered = launch.with_dtype(self.dtype)
        seen = _argument_after("--dtype", altered)
        spelling = "a spelling vLLM accepts" if seen in DTYPE_SPELLINGS else "a spelling vLLM refuses"
        return altered, Injected.of(
            self,
            proved=seen == self.dtype and seen != launch.dtype,
            because=f'"--dtype" was "{launch.dtype}", is "{seen}" ({spelling})',
            before={"dtype": launch.dtype},
            after={"dtype": seen},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArgument:
    """An engine launched with arguments it should not have."""

    name: ClassVar[str] = "launch_argument"
    fault_id: ClassVar[str] = "L01"
    arguments: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.arguments or not all(self.arguments):
            raise ScenarioInvalid("launch_argument: expected at least one argument that is not empty")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        altered = replace(launch, extra_arguments=(*launch.extra_arguments, *self.arguments))
        before, after = _line(launch), _line(altered)
        added = [argument for argument in self.arguments if argument in after and argument not in before]
        return altered, Injected.of(
            self,
            proved=bool(added) and after[-len(self.arguments) :] == self.arguments,
            because=f"the launch line had {len(before)} arguments, has {len(after)}; new: {added or 'nothing'}",
            before={"extra_arguments": list(launch.extra_arguments)},
            after={"extra_arguments": list(altered.extra_arguments)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """An engine launched with an environment variable it does not know. Its value is no secret and is recorded."""

    name: ClassVar[str] = "launch_environment"
    fault_id: ClassVar[str] = "L02"
    variable: str
    value: str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        others = tuple(pair for pair in launch.environment if pair[0] != self.variable)
        altered = replace(launch, environment=(*others, (self.variable, self.value)))
        before, after = dict(launch.environment).get(self.variable), dict(altered.environment).get(self.variable)
        return altered, Injected.of(
            self,
            proved=after == self.value and after != before,
            because=f'environment variable "{self.variable}" was {"unset" if before is None else "set"}, is {after!r}',
            before={"is_set": before is not None},
            after={"value": after},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSize:
    """An engine asked to split the model over a number of ranks that does not divide its heads."""

    name: ClassVar[str] = "parallel_size"
    fault_id: ClassVar[str] = "L03"
    size: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ScenarioInvalid(f"parallel_size: size={self.size}, expected at least 2")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        heads = _config_value(launch, "num_attention_heads")
        altered = replace(launch, extra_arguments=(*launch.extra_arguments, "--tensor-parallel-size", str(self.size)))
        before, after = _last_after("--tensor-parallel-size", launch), _last_after("--tensor-parallel-size", altered)
        return altered, Injected.of(
            self,
            proved=after == str(self.size) and before != after and heads % self.size != 0,
            because=f'"--tensor-parallel-size" was {before or "not given"}, is {after or "not given"}; '
            f"{heads} heads over {self.size} ranks leave {heads % self.size}",
            before={"tensor_parallel_size": before, "heads": heads},
            after={"tensor_parallel_size": after},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLength:
    """An engine asked for a longer context than the config allows."""

    name: ClassVar[str] = "context_length"
    fault_id: ClassVar[str] = "L04"
    max_model_len: int | None

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        allowed = _config_value(launch, "max_position_embeddings")
        altered = replace(launch, max_model_len=self.max_model_len or 2 * allowed)
        before, after = (_argument_after("--max-model-len", each) for each in (launch, altered))
        return altered, Injected.of(
            self,
            proved=after != before and int(after) > allowed,
            because=f'"--max-model-len" was {before}, is {after}; the config allows {allowed}',
            before={"max_model_len": int(before), "max_position_embeddings": allowed},
            after={"max_model_len": int(after)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPort:
    """An engine told to listen where another process listens: health checks there are answered by the other one."""

    name: ClassVar[str] = "held_port"
    fault_id: ClassVar[str] = "L05"
    port: int

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ScenarioInvalid(f"held_port: port={self.port}, expected 1 to 65535")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        altered = replace(launch, extra_arguments=(*launch.extra_arguments, "--port", str(self.port)))
        before, after = _last_after("--port", launch), _last_after("--port", altered)
        is_held = _answers(self.port)
        return altered, Injected.of(
            self,
            proved=is_held and after == str(self.port) and before != after,
            because=f"the launch line ends with port {after}; on it {'a process' if is_held else 'nobody'} listens",
            before={"port": before},
            after={"port": after, "is_held": is_held},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnonymousWeights:
    """A launch by which nobody can tell which checkpoint is served: the old served name at the old path."""

    name: ClassVar[str] = "anonymous_weights"
    fault_id: ClassVar[str] = "L06"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        kept = _without("--served-model-name", launch.extra_arguments)
        altered = replace(launch, extra_arguments=kept)
        try:
            identity = weights_id(launch.checkpoint_root / launch.checkpoint_name)
        except CheckpointDefect as error:
            raise FaultNotApplicable(f"the checkpoint that is launched cannot be read: {error}") from error
        names = [_last_after("--served-model-name", each) or "" for each in (launch, altered)]
        tells = [part for part in (names[1], altered.checkpoint_name) if identity in part]
        return altered, Injected.of(
            self,
            proved=not tells and names[1] == SERVED_MODEL_NAME,
            because=f'"{altered.checkpoint_name}" is served as "{names[1]}", which '
            + (f'names its content "{identity}"' if tells else f'does not name its content "{identity}"'),
            before={"served_model_name": names[0]},
            after={"served_model_name": names[1], "path": altered.checkpoint_name, "weights_id": identity},
        )


def _line(launch: Launch) -> tuple[str, ...]:
    return launch.arguments(model="MODEL", host="HOST", port=0)


def _argument_after(flag: str, launch: Launch) -> str:
    line = _line(launch)
    return line[line.index(flag) + 1]


def _last_after(flag: str, launch: Launch) -> str | None:
    """Return the value of the last such flag, which is the one that counts."""
    line = _line(launch)
    return next((line[index + 1] for index in range(len(line) - 2, -1, -1) if line[index] == flag), None)


def _without(flag: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    kept = list(arguments)
    while flag in kept:
        index = kept.index(flag)
        del kept[index : index + 2]
    return tuple(kept)


def _config_value(launch: Launch, key: str) -> int:
    """Return a number of the config that is launched.

    Raises: FaultNotApplicable when it cannot be read: then nothing can be proved about the launch.
    """
    path = launch.checkpoint_root / launch.checkpoint_name / CONFIG_NAME
    value = read_json(path).get(key)
    if not isinstance(value, int) or value < 1:
        raise FaultNotApplicable(f'"{path}" has no usable "{key}": {json.dumps(value)[:80]}')
    return value


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PROBE_LIMIT_S):
            return True
    except OSError:
        return False


def launch_dtype(dtype: str) -> LaunchDtype:
    """Launch with this `--dtype`: "float16" is cast to without a word, "fp16" is no valid spelling (exit code 2).

    Source: taxonomy rows C07, L01.
    """
    return LaunchDtype(dtype=dtype)


def launch_argument(*arguments: str) -> LaunchArgument:
    """Launch with these arguments at the end, for example "--disable-weight-cache". Source: taxonomy row L01."""
    return LaunchArgument(arguments=arguments)


def launch_environment(variable: str, value: str) -> LaunchEnvironment:
    """Launch with an environment variable. Source: taxonomy row L02."""
    return LaunchEnvironment(variable=variable, value=value)


def parallel_size(size: int = 3) -> ParallelSize:
    """Launch with a `--tensor-parallel-size` that does not divide the attention heads. Source: taxonomy row L03."""
    return ParallelSize(size=size)


def context_length(max_model_len: int | None = None) -> ContextLength:
    """Launch with a `--max-model-len` beyond the config; twice what it allows by default. Source: taxonomy row L04."""
    return ContextLength(max_model_len=max_model_len)


def held_port(port: int) -> HeldPort:
    """Launch on a port of this host where something listens, such as an engine that was not stopped.

    For engines that share the host's network: vLLM as a child process, the reference engine. Source: taxonomy row L05.
    """
    return HeldPort(port=port)


def anonymous_weights() -> AnonymousWeights:
    """Launch under the old served name at the old path, so that `/v1/models` tells nothing. Source: taxonomy row L06."""
    return AnonymousWeights()
