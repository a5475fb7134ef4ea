"""Publishes again and again in children that are killed, or fail, and prints what a reader finds afterwards.

Run as a program: it has one thread, so it may fork. Every call from Python into the kernel passes a profile function;
between two of them nothing on the disk can change, so ending before each of them covers every moment.
Usage: kill_sweep.py MODE HOW DIRECTORY [KILLS]. MODE is link or exchange. HOW is kill or fail (before every call in turn), full
(no file may be longer than so many bytes), or random (killed at random times).
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from harness.clock import pause
from harness.errors import HarnessError
from harness.guards.publish import publish, rollback

FILES = ("config.json", "model.safetensors")
BYTES = 20_000
MOST_STEPS = 2000


def checkpoint(path: Path, release: str) -> Path:
    """Make a checkpoint whose every file tells its release."""
    path.mkdir(parents=True)
    for name in FILES:
        (path / name).write_text(release * (BYTES // len(release)))
    return path


def release_of(directory: Path) -> str:
    """Return the release that a reader finds, "nothing", or "mixture"."""
    found = set()
    for name in FILES:
        try:
            text = (directory / name).read_text()
        except FileNotFoundError:
            found.add("nothing")
            continue
        found.add(text[:3] if text == text[:3] * (BYTES // 3) else "torn")
    return found.pop() if len(found) == 1 else f"mixture of {sorted(found)}"


def enters_the_kernel(called: Any) -> bool:
    """Say whether a built-in function may change or read a file system."""
    owner = getattr(called, "__self__", None)
    module = getattr(called, "__module__", None) or type(owner).__module__
    return module in ("posix", "fcntl") or type(owner).__module__ == "_io"


def at_step(step: int, act: Callable[[], None]) -> Callable[[], int]:
    """Do `act` before the call number `step`; the function returned gives the calls seen."""
    seen = 0

    def profile(frame: FrameType, event: str, called: Any) -> None:
        nonlocal seen
        if event == "c_call" and enters_the_kernel(called):
            seen += 1
            if seen == step:
                act()

    sys.setprofile(profile)
    return lambda: seen


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def child(work: Callable[[], None], step: int, act: Callable[[], None]) -> tuple[str, bool]:
    """Run `work` in a child; return what it said and whether it came to its end without reaching the step."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        said, finished = "", False
        seen = at_step(step, act)
        try:
            work()
            finished = True
        except (HarnessError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            sys.setprofile(None)
        os.write(writer, json.dumps([said, finished and seen() < step]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    said, finished = json.loads(text) if text else ("killed", False)
    return said, finished


def remains(root: Path) -> list[str]:
    """Return the names below a root that no finished state has."""
    names = [path.name for path in (*root.glob("*"), *root.glob("versions/*"))]
    return sorted(name for name in names if name.startswith(".") and name != ".publish.lock")


def try_once(
    root: Path, sources: dict[str, Path], *, by_exchange: bool, run: Callable[[Path], tuple[str, bool]]
) -> Any:
    """Make what was live before, let `run` do its harm, publish and roll back afterwards; return all that was seen."""
    root.mkdir()
    if by_exchange:  # what lay there before anything was published
        shutil.copytree(sources["old"], root / "live")
    else:
        publish(sources["old"], root, with_manifest=False)
    said, finished = run(root)
    seen: dict[str, Any] = {"said": said, "finished": finished, "found": release_of(root / "live")}
    publish(sources["3rd"], root, by_exchange=by_exchange, with_manifest=False)
    seen |= {"afterwards": release_of(root / "live"), "remains": remains(root)}
    seen["versions"] = sorted(path.name for path in root.glob("versions/*"))
    rollback(root)
    seen["rolled_back"] = release_of(root / "live")
    shutil.rmtree(root)
    return seen


def at_every_step(sources: dict[str, Path], directory: Path, *, by_exchange: bool, act: Callable[[], None]) -> None:
    """Kill or fail before every call of a publish and of a rollback; print one JSON line for each."""
    for action in ("publish", "rollback"):
        for step in range(1, MOST_STEPS):

            def run(root: Path, action: str = action, step: int = step) -> tuple[str, bool]:
                if action == "publish":
                    return child(lambda: publish(sources["new"], root, by_exchange=by_exchange), step, act)
                publish(sources["new"], root, by_exchange=by_exchange, with_manifest=False)
                return child(lambda: rollback(root), step, act)

            seen = try_once(directory / f"root-{action}-{step}", sources, by_exchange=by_exchange, run=run)
            print(json.dumps({"action": action, "step": step, **seen}), flush=True)
            if seen["finished"]:
                break


def at_every_limit(sources: dict[str, Path], directory: Path, *, by_exchange: bool) -> None:
    """Publish where every file fails beyond so many bytes, as on a disk that stays full."""

    for limit in (*range(0, 400, 7), *range(400, BYTES, 977), BYTES):

        def run(root: Path, limit: int = limit) -> tuple[str, bool]:
            def work() -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                publish(sources["new"], root, by_exchange=by_exchange)

            return child(work, MOST_STEPS, fail)

        seen = try_once(directory / f"root-{limit}", sources, by_exchange=by_exchange, run=run)
        print(json.dumps({"action": "publish", "limit": limit, **seen}), flush=True)


def at_random_times(sources: dict[str, Path], directory: Path, *, by_exchange: bool, kills: int) -> None:
    """Kill a child that publishes without end, so many times, and let the next one find what is left."""
    random = Random(4)
    root = directory / "root"
    publish(sources["old"], root, by_exchange=by_exchange)
    for number in range(kills):
        pid = os.fork()
        if pid == 0:
            while True:
                for release in random.sample(sorted(sources), 3):
                    publish(sources[release], root, by_exchange=by_exchange, keep=2)
        pause(random.uniform(0.0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        seen = {"kill": number, "found": release_of(root / "live"), "left": len(remains(root))}
        print(json.dumps(seen), flush=True)
    publish(sources["new"], root, by_exchange=by_exchange, keep=2)
    versions = sorted(path.name for path in root.glob("versions/*"))
    print(json.dumps({"found": release_of(root / "live"), "remains": remains(root), "versions": versions}), flush=True)


def main(mode: str, how: str, directory: Path, kills: int = 0) -> None:
    sources = {release: checkpoint(directory / release, release) for release in ("old", "new", "3rd")}
    by_exchange = mode == "exchange"
    if how == "full":
        at_every_limit(sources, directory, by_exchange=by_exchange)
    elif how == "random":
        at_random_times(sources, directory, by_exchange=by_exchange, kills=kills)
    else:
        at_every_step(sources, directory, by_exchange=by_exchange, act=kill if how == "kill" else fail)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
