"""A compile cache that the old engine filled and the new one finds damaged, moved, or closed to it.

The cache is `torch_compile_cache` below `VLLM_CACHE_ROOT`: its key is made of config, code and versions, and knows nothing
of what the files hold. The documented remedy is to delete it. Source: taxonomy rows K01, K02, K04.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.engine.engine import EngineIdentity
from harness.errors import EnvironmentMissing, FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import digest_of, file_facts
from harness.faults.fault import Injected, parameters_of
from harness.faults.proof import prove

CACHE_NAME = "torch_compile_cache"
PROBE_NAME = ".rollout-harness-probe"
MOVED = "-moved"
DAMAGES = ("cut", "flip", "empty")
HOW = ("mode", "file")
READ_ONLY = 0o555


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedCompileCache:
    """Files of the compile cache with other bytes than were written there."""

    name: ClassVar[str] = "damaged_compile_cache"
    fault_id: ClassVar[str] = "K01"
    how: str
    pattern: str

    def __post_init__(self) -> None:
        if self.how not in DAMAGES:
            raise ScenarioInvalid(f'damaged_compile_cache: how "{self.how}" is unknown; known: {", ".join(DAMAGES)}')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def require(self, identity: EngineIdentity) -> None:
        require_compiling(identity)

    def spoil(self, cache: Path, *, random: Random) -> tuple[Path, Injected]:
        matching = [name for name in filled(cache) if Path(name).match(self.pattern)]
        chosen = [name for name in matching if (cache / name).stat().st_size > 0]  # locks are empty: nothing to damage
        if not chosen:
            raise FaultNotApplicable(f'no file of the compile cache "{cache}" matches "{self.pattern}"')

        def change() -> None:
            for name in chosen:
                _damage(cache / name, self.how, random)

        proof = prove(
            self,
            change,
            look=lambda: {name: file_facts(cache / name) for name in chosen},
            holds=lambda before, after: all(after[name] not in (None, before[name]) for name in chosen),
            told=lambda before, after: (
                f"{sum(after[name] not in (None, before[name]) for name in chosen)} of {len(chosen)} files that match "
                f'"{self.pattern}" hold other bytes than the old engine wrote'
            ),
        )
        return cache, proof


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedCompileCache:
    """A whole compile cache in another place than it was made in, as a volume mounted elsewhere is."""

    name: ClassVar[str] = "moved_compile_cache"
    fault_id: ClassVar[str] = "K02"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def require(self, identity: EngineIdentity) -> None:
        require_compiling(identity)

    def spoil(self, cache: Path, *, random: Random) -> tuple[Path, Injected]:
        names = filled(cache)
        moved = cache.with_name(cache.name + MOVED)
        wanted = _digest(cache, names)

        def look() -> dict[str, Any]:
            return {
                "files": len(names),
                "at_first_place": _digest(cache, names),
                "at_other_place": _digest(moved, names),
            }

        proof = prove(
            self,
            lambda: cache.rename(moved),
            look=look,
            holds=lambda before, after: (
                before["at_other_place"] != wanted
                and after["at_other_place"] == wanted
                and after["at_first_place"] != wanted
            ),
            told=lambda before, after: (
                f'{len(names)} files that were written below "{cache.name}" are '
                f'{"" if after["at_other_place"] == wanted else "not "}below "{moved.name}", byte for byte'
            ),
        )
        return (moved if proof.proved else cache), proof


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwritableCompileCache:
    """A compile cache that nobody can write to: no permission, or a file where its directory belongs."""

    name: ClassVar[str] = "unwritable_compile_cache"
    fault_id: ClassVar[str] = "K04"
    how: str

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise ScenarioInvalid(f'unwritable_compile_cache: how "{self.how}" is unknown; known: {", ".join(HOW)}')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def require(self, identity: EngineIdentity) -> None:
        require_compiling(identity)

    def spoil(self, cache: Path, *, random: Random) -> tuple[Path, Injected]:
        if not cache.is_dir():
            raise FaultNotApplicable(f'the compile cache "{cache}" is not a directory')

        def change() -> None:
            if self.how == "file":
                shutil.rmtree(cache / CACHE_NAME, ignore_errors=True)
                (cache / CACHE_NAME).write_bytes(b"")
                return
            for directory in (cache, *(path for path in cache.rglob("*") if path.is_dir() and not path.is_symlink())):
                directory.chmod(READ_ONLY)

        proof = prove(
            self,
            change,
            look=lambda: {"error": _write_error(cache)},
            holds=lambda before, after: before["error"] is None and after["error"] is not None,
            told=lambda before, after: (
                f'writing below "{cache.name}/{CACHE_NAME}" gave {before["error"] or "no error"} before, gives '
                f"{after['error'] or 'no error: this user may write everywhere'}"
            ),
        )
        return cache, proof


def clear_compile_cache(cache: Path) -> str:
    """Make an empty cache that can be written to out of a spoilt one, and return what is wrong with it all the same.

    This is the documented remedy, and undoes every fault here. Empty text: nothing is wrong.
    """
    for each in (cache, cache.with_name(cache.name + MOVED)):
        if each.is_dir():
            for directory in (each, *(path for path in each.rglob("*") if path.is_dir() and not path.is_symlink())):
                directory.chmod(0o755)
            shutil.rmtree(each)
    cache.mkdir(mode=0o755)
    left = sorted(path.name for path in cache.iterdir())
    if left:
        return f'"{cache.name}" still holds {", ".join(left[:5])}'
    error = _write_error(cache)
    return "" if error is None else f'"{cache.name}" cannot be written to: {error}'


def require_compiling(identity: EngineIdentity) -> None:
    if identity.kind == "reference":
        raise EnvironmentMissing("vllm", "the reference engine compiles nothing, so that it has no compile cache")


def filled(cache: Path) -> list[str]:
    """Return the names of the files that an engine wrote.

    Raises: FaultNotApplicable when there are none: then nothing can be stale or damaged.
    """
    root = cache / CACHE_NAME
    names = sorted(str(path.relative_to(cache)) for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    if not names:
        raise FaultNotApplicable(f'no engine wrote a compile cache into "{cache}": it does not compile, or did not yet')
    return names


def _digest(root: Path, names: list[str]) -> str:
    return digest_of([file_facts(root / name) for name in names])


def _damage(path: Path, how: str, random: Random) -> None:
    """Write other bytes aside and give them the file's name: whoever has the file open or mapped keeps the old one."""
    content = bytearray(path.read_bytes())
    if how == "flip" and content:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    else:
        del content[len(content) // 2 if how == "cut" else 0 :]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.chmod(path.stat().st_mode & 0o777)
    partial.replace(path)


def _write_error(cache: Path) -> str | None:
    """Try to write where an engine would, and return what went wrong."""
    probe = cache / CACHE_NAME / PROBE_NAME
    try:
        existed = probe.parent.is_dir()
        probe.parent.mkdir(exist_ok=True)
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.close(descriptor)
        probe.unlink()
        if not existed:
            probe.parent.rmdir()
    except OSError as error:
        return f"{type(error).__name__} ({error.strerror})"
    return None


def damaged_compile_cache(*, how: str = "cut", pattern: str = "*") -> DamagedCompileCache:
    """Damage the files of the compile cache whose name matches `pattern`: "cut" in half, one bit to "flip", or "empty".

    Source: taxonomy row K01.
    """
    return DamagedCompileCache(how=how, pattern=pattern)


def moved_compile_cache() -> MovedCompileCache:
    """Give the new engine the whole compile cache in another place than it was made in. Source: taxonomy row K02."""
    return MovedCompileCache()


def unwritable_compile_cache(*, how: str = "file") -> UnwritableCompileCache:
    """Put a "file" where the cache's directory belongs, or take the permission to write with "mode" (root writes anyway).

    Source: taxonomy row K04.
    """
    return UnwritableCompileCache(how=how)
