"""Faults that make a new engine slow at first and change no answer.

Source: taxonomy rows P02, P03, P04, P06. What else changes latency alone is `slow_storage`, and rows that the fault list gives reasons for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.engine.launch import Launch
from harness.errors import FaultNotApplicable
from harness.faults.fault import Injected, parameters_of
from harness.faults.launch import LaunchEnvironment

CACHES, CACHES_NOT = "--enable-prefix-caching", "--no-enable-prefix-caching"
COMPILER_SWITCH = "TORCHDYNAMO_DISABLE"  # engines on a CPU are launched with "1", so that nothing is compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileInTraffic:
    """An engine that compiles what it needs when the first requests come, with nothing compiled before."""

    name: ClassVar[str] = "compile_in_traffic"
    fault_id: ClassVar[str] = "P03"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        altered, injected = LaunchEnvironment(variable=COMPILER_SWITCH, value="0").alter(launch)
        return altered, replace(injected, fault=self.name, fault_id=self.fault_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdCompileCache:
    """A new engine that finds nothing of what the old one compiled."""

    name: ClassVar[str] = "cold_compile_cache"
    fault_id: ClassVar[str] = "P02"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def spoil(self, cache: Path, *, random: Random) -> tuple[Path, Injected]:
        """Return another, empty cache for the new engine; that of the old one stays as it is."""
        filled = _files(cache)
        if not filled:
            raise FaultNotApplicable(
                f'no engine wrote a compile cache into "{cache}": it does not compile, or did not yet'
            )
        cold = cache.with_name(f"{cache.name}-cold")
        cold.mkdir(mode=0o755)
        left = _files(cold)
        return cold, Injected.of(
            self,
            proved=not left,
            because=f'the old engine compiled into {filled} files below "{cache.name}"; "{cold.name}" has {left}',
            before={"files": filled},
            after={"files": left},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdPrefixCache:
    """An engine that is started with nothing in its prefix cache, for users whose prompts begin alike."""

    name: ClassVar[str] = "cold_prefix_cache"
    fault_id: ClassVar[str] = "P04"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        kept = tuple(argument for argument in launch.extra_arguments if argument not in (CACHES, CACHES_NOT))
        altered = replace(launch, extra_arguments=(*kept, CACHES))
        given = [argument for argument in altered.extra_arguments if argument in (CACHES, CACHES_NOT)]
        return altered, Injected.of(
            self,
            proved=given == [CACHES],
            because=f"the new process is launched with {', '.join(given)}, and a new process has nothing cached",
            before={"extra_arguments": list(launch.extra_arguments)},
            after={"extra_arguments": list(altered.extra_arguments)},
        )


def _files(directory: Path) -> int:
    return sum(path.is_file() for path in directory.rglob("*"))


def cold_compile_cache() -> ColdCompileCache:
    """Start the new engine with an empty compile cache, as on a machine that has none: it is ready later.

    Engines of such a scenario compile. Source: taxonomy row P02.
    """
    return ColdCompileCache()


def cold_prefix_cache() -> ColdPrefixCache:
    """Start the new engine with prefix caching, for a load with `shared_tokens`: what was cached went with the old process.

    That it bites is claimed with `claims.prefix_cache_went_cold`. Source: taxonomy row P04.
    """
    return ColdPrefixCache()


def compile_in_traffic() -> CompileInTraffic:
    """Launch an engine whose first requests with logprobs have to wait for a compiler: 16 to 21 s on vLLM 0.32.0 for CPUs.

    The engine is healthy before, so users are the ones who warm it up unless somebody asks it first. That it bites is
    claimed with `claims.spike_at_least`: an engine that compiles nothing makes the verdict unknown. Source: taxonomy rows
    P03, P06.
    """
    return CompileInTraffic()
