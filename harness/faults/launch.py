"""Wrong launch arguments. Source: incident write-up (`--dtype`, `--disable-weight-cache`); taxonomy rows C07, L01, L02."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from harness.engine.launch import Launch
from harness.errors import ScenarioInvalid
from harness.faults.fault import Injected, parameters_of

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
        return altered, Injected(
            fault=self.name,
            fault_id=self.fault_id,
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
        return altered, Injected(
            fault=self.name,
            fault_id=self.fault_id,
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
        return altered, Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=after == self.value and after != before,
            because=f'environment variable "{self.variable}" was {"unset" if before is None else "set"}, is {after!r}',
            before={"is_set": before is not None},
            after={"value": after},
        )


def _line(launch: Launch) -> tuple[str, ...]:
    return launch.arguments(model="MODEL", host="HOST", port=0)


def _argument_after(flag: str, launch: Launch) -> str:
    line = _line(launch)
    return line[line.index(flag) + 1]


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
