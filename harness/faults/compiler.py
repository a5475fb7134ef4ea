"""An engine without the C++ compiler that it needs at its first requests. Source: an image without g++; taxonomy row M09."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from harness.engine.engine import EngineIdentity
from harness.engine.launch import Launch
from harness.errors import EnvironmentMissing
from harness.faults.fault import Injected, parameters_of
from harness.faults.latency import COMPILER_SWITCH

COMPILER = "CXX"  # where torch looks for the compiler before it tries g++
ABSENT = "/nonexistent/g++"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingCompiler:
    """An engine that compiles as in production, with a compiler that is not there."""

    name: ClassVar[str] = "missing_compiler"
    fault_id: ClassVar[str] = "M09"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def require(self, identity: EngineIdentity) -> None:
        if identity.kind == "reference":
            raise EnvironmentMissing("vllm", "the reference engine compiles nothing, so that it misses no compiler")

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        before = dict(launch.environment)
        others = tuple(pair for pair in launch.environment if pair[0] not in (COMPILER_SWITCH, COMPILER))
        altered = replace(launch, environment=(*others, (COMPILER_SWITCH, "0"), (COMPILER, ABSENT)))
        after = dict(altered.environment)
        return altered, Injected.of(
            self,
            proved=(after.get(COMPILER), after.get(COMPILER_SWITCH)) == (ABSENT, "0")
            and before.get(COMPILER) != ABSENT,
            because=f'it compiles, and environment variable "{COMPILER}" was {before.get(COMPILER)!r}, is {after.get(COMPILER)!r}',
            before={"compiler": before.get(COMPILER)},
            after={"compiler": after.get(COMPILER)},
        )


def missing_compiler() -> MissingCompiler:
    """Launch an engine that compiles as in production, and finds no C++ compiler.

    vLLM on a CPU is healthy then, and dies at the first request with logprobs. Source: an image without g++; taxonomy row M09.
    """
    return MissingCompiler()
