"""An engine that was put to sleep, as trainers do between updates, and is used before its weights are there again.

Asleep, an engine has given its device memory back: at level 1 its weights wait on the host, at level 2 they are gone, and who
wakes it has to load them anew. Nothing tells an engine that has its weights from one that has memory where they were.
Source: taxonomy rows U01, U04.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from harness.engine.dev_api import DevApi, Reply
from harness.engine.engine import Engine, EngineIdentity
from harness.engine.ready import probe_health
from harness.errors import EnvironmentMissing, HarnessError, ScenarioInvalid
from harness.faults.device import used_bytes
from harness.faults.fault import Injected, Struck, Surroundings, parameters_of
from harness.faults.struckdown import Struckdown, has_ended

LEVELS = (1, 2)
CALL_LIMIT_S = 120.0
HEALTH_LIMIT_S = 5.0
FREED_BYTES_MIN = 16 * 1024**2  # of the smallest KV cache; what other processes do meanwhile is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class WokenWithoutReload:
    """An engine that slept at level 2 and was woken, and whose weights nobody loaded again."""

    name: ClassVar[str] = "woken_without_reload"
    fault_id: ClassVar[str] = "U01"
    sleeps: ClassVar[bool] = True

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return "let it load its weights (POST /collective_rpc, reload_weights) and reset its caches, or start it anew"

    def require(self, identity: EngineIdentity) -> None:
        _require_device(identity)

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        sleeper = _Sleeper.of(engine, surroundings)
        api = sleeper.api
        before, digests = used_bytes(), _digests(api)
        slept, sleeping, asleep = api.sleep(level=2), _is_sleeping(api), used_bytes()
        woken, still = api.wake_up(), _is_sleeping(api)
        after = _digests(api)
        changed = sorted(name for name in digests.keys() | after.keys() if digests.get(name) != after.get(name))
        freed = _freed(before, asleep)
        is_told = bool(digests) and bool(after)
        is_lost = bool(changed) if is_told else True  # before 0.32.0 nothing tells: what level 2 frees is gone
        injected = Injected.of(
            self,
            proved=sleeping is True and still is False and woken.is_ok and _is_freed(freed) and is_lost,
            because=f"{_told(slept)}, {_asleep(sleeping)}; device memory freed: {_shown(freed)}; {_told(woken)}, "
            f"{_asleep(still)}; "
            + (f"{len(changed)} of {len(after)} parameters have other digests" if is_told else "no digests are told"),
            before={"used_bytes": before, "digests": len(digests)},
            after={"calls": [slept.as_json(), woken.as_json()], "asleep_bytes": asleep, "changed": changed[:20]},
        )

        def prove_back() -> Injected:
            now = _digests(api)
            is_back = is_told and now == digests
            because = f"the engine runs; its digests are {'those of before' if is_back else 'not those of before'}"
            return Injected.of(self, proved=is_back, because=because, after={"digests": len(now)})

        gone = Injected.of(self, proved=True, because="the engine whose weights are gone has ended")
        return sleeper.struck(injected, prove_back, gone=gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedWhileAsleep:
    """An engine that is told to read its weights while it sleeps, and is woken afterwards."""

    name: ClassVar[str] = "updated_while_asleep"
    fault_id: ClassVar[str] = "U04"
    sleeps: ClassVar[bool] = True
    level: int

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ScenarioInvalid(f"updated_while_asleep: level={self.level}, expected 1 or 2")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return "wake it (POST /wake_up), let it load its weights again and reset its caches, or start it anew"

    def require(self, identity: EngineIdentity) -> None:
        _require_device(identity)

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        sleeper = _Sleeper.of(engine, surroundings)
        api = sleeper.api
        before = used_bytes()
        slept, sleeping, freed = api.sleep(level=self.level), _is_sleeping(api), _freed(before, used_bytes())
        updated = api.reload_weights()
        health = probe_health(engine.endpoint, limit_s=HEALTH_LIMIT_S)
        woken = api.wake_up()
        # An engine that answered may end as well, but that it did is not what its answer needs for a proof.
        ended = has_ended(engine.exit_code) if updated.status == 0 else engine.exit_code() is not None
        injected = Injected.of(
            self,
            proved=sleeping is True and _is_freed(freed) and (updated.status != 0 or ended),
            because=f"{_told(slept)}, {_asleep(sleeping)}; device memory freed: {_shown(freed)}; then {_told(updated)}, /health "
            f"answered {health}, {_told(woken)}" + ("; the engine has ended" if ended else ""),
            before={"used_bytes": before},
            after={"calls": [each.as_json() for each in (slept, updated, woken)], "health": health, "ended": ended},
        )

        def prove_awake() -> Injected:
            still = _is_sleeping(api)
            because = f"the engine runs, {_asleep(still)}"
            return Injected.of(self, proved=still is False, because=because, after={"is_sleeping": still})

        gone = Injected.of(self, proved=True, because="the engine that was updated asleep has ended")
        return sleeper.struck(injected, prove_awake, gone=gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sleeper:
    """An engine that is put to sleep; whoever undoes that, or cuts it short, wakes it."""

    engine: Engine
    api: DevApi

    @classmethod
    def of(cls, engine: Engine, surroundings: Surroundings) -> _Sleeper:
        """Take an engine that is awake; from here on its waking is among what is undone."""
        api = DevApi(url=engine.endpoint, api_key="", limit_s=CALL_LIMIT_S)  # these routes ask for no key
        sleeper = cls(engine=engine, api=api)
        surroundings.undos.append(sleeper.wake)
        return sleeper

    def wake(self) -> None:
        """Wake it if it sleeps; one that has ended, or does not answer, is left as it is: the proof says which."""
        with suppress(HarnessError, OSError):
            if self.engine.exit_code() is None and _is_sleeping(self.api) is True:
                self.api.wake_up()

    def struck(self, injected: Injected, prove_end: Callable[[], Injected], *, gone: Injected) -> Struck:
        """Return what struck it; its end is proved by an engine that has ended, or by what one that runs says."""

        def prove() -> Injected:
            return gone if has_ended(self.engine.exit_code) else prove_end()

        return Struckdown(injected, lambda: injected, self.wake, prove)


def _require_device(identity: EngineIdentity) -> None:
    """Return for vLLM on a GPU.

    Raises: EnvironmentMissing.
    """
    if identity.name != "vllm":
        raise EnvironmentMissing("gpu", f"sleep gives device memory back, and {identity.name} has none: it only pauses")


def _is_sleeping(api: DevApi) -> bool | None:
    said = api.is_sleeping().body.get("is_sleeping")
    return said if isinstance(said, bool) else None


def _digests(api: DevApi) -> dict[str, str]:
    """Return what the server says of its parameters; empty where it cannot."""
    told = api.checksums().body.get("checksums")
    return {str(name): str(digest) for name, digest in told.items()} if isinstance(told, dict) else {}


def _freed(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else before - after


def _is_freed(freed_bytes: int | None) -> bool:
    return freed_bytes is not None and freed_bytes >= FREED_BYTES_MIN


def _shown(size_bytes: int | None) -> str:
    return "unknown, there is no GPU that could be asked" if size_bytes is None else f"{size_bytes:,} bytes"


def _asleep(said: bool | None) -> str:
    if said is None:
        return "it does not say whether it sleeps"
    return "it says that it sleeps" if said else "it says that it is awake"


def _told(reply: Reply) -> str:
    return f"/{reply.call} was answered with {reply.status}" + ("" if reply.is_ok else f' ("{reply.said[:120]}")')


def woken_without_reload() -> WokenWithoutReload:
    """Put the engine to sleep at level 2, which drops its weights, wake it, and load none. Source: taxonomy row U01."""
    return WokenWithoutReload()


def updated_while_asleep(*, level: int = 1) -> UpdatedWhileAsleep:
    """Let the engine read its weights while it sleeps at this level, then wake it. Source: taxonomy row U04."""
    return UpdatedWhileAsleep(level=level)
