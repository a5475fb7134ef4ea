"""vLLM's own weight cache: a process per GPU that keeps the weights in device memory and outlives their checkpoint.

From 0.30.0 `vllm preload` fills it and `--load-format ipc_cache` maps it. A checkpoint is known to it by the headers of its
safetensors files, which no training step changes: an engine that is started on new weights maps the old ones, in silence.
The daemon and its engines share device memory by handles of CUDA, on one host. Source: taxonomy row K05.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.checkpoint.manifest import weights_id
from harness.engine.beside import Beside, Hosting
from harness.engine.cpu_ranks import RANK_OPTIONS
from harness.engine.engine import Engine, EngineIdentity
from harness.errors import CheckpointDefect, EnvironmentMissing, FaultNotApplicable
from harness.faults.facts import weight_files
from harness.faults.fault import Injected, Racing, Struck, Surroundings, parameters_of
from harness.faults.struckdown import Struckdown

SINCE = (0, 30)
SOCKETS = "w"  # beside the engines' directories; short, since the path of a socket holds 107 characters
SOCKET_NAMES = "vllm_weight_cache_*.sock"
LOG_NAME = "weight-daemon.log"
READY_LIMIT_S = 600.0
ANSWER_LIMIT_S = 10.0
END_LIMIT_S = 30.0
HEADER_LIMIT_BYTES = 100_000_000
MESSAGE_LIMIT_BYTES = 1_000_000
# Each engine of a run has a directory of its own, in which it runs; the sockets lie beside.
ENGINE_ARGUMENTS = (
    "--load-format",
    "ipc_cache",
    "--model-loader-extra-config",
    f'{{"socket_dir": "../{SOCKETS}"}}',
)
ALSO_IN_KEY = (("--dtype",), ("--quantization", "-q"), *RANK_OPTIONS)  # each with its other spellings
_LENGTH = struct.Struct("!Q")
_SENT = re.compile(r"Weight cache \w+ daemon rank \d+ sent (\d+) tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleWeightDaemon:
    """A weight cache daemon that was filled from the old checkpoint and answers for the new one."""

    name: ClassVar[str] = "stale_weight_daemon"
    fault_id: ClassVar[str] = "K05"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return "end the process `vllm preload`, remove its sockets, and start it anew before the next engine"

    def require(self, identity: EngineIdentity) -> None:
        """Return for vLLM as a child process that has such a daemon, on a GPU.

        Raises: EnvironmentMissing.
        """
        if identity.name != "vllm":
            raise EnvironmentMissing("gpu", f"a weight cache daemon shares device memory, and {identity.name} has none")
        if identity.kind != "process":
            raise EnvironmentMissing(
                "vllm", f"a weight cache daemon runs beside its engines, not outside their {identity.kind}"
            )
        if tuple(int(part) for part in re.findall(r"\d+", identity.version)[:2]) < SINCE:
            raise EnvironmentMissing("vllm", f"`vllm preload` came with 0.30.0, this is {identity.version}")

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        if not isinstance(engine, Hosting):
            raise FaultNotApplicable(f'beside engine "{engine.incarnation}" no other command of its vLLM can be run')
        sockets, log = engine.scratch.parent / SOCKETS, surroundings.shared / LOG_NAME
        before = {"layout": layout_key(surroundings.live), "weights": _weights(surroundings.live)}
        new = {"layout": layout_key(surroundings.other), "weights": _weights(surroundings.other)}
        sockets.mkdir(mode=0o700)
        daemon: Beside | None = None

        def end() -> None:
            if daemon is not None:
                daemon.end(limit_s=END_LIMIT_S)
                with suppress(OSError):  # kept with the engines' own; the place it was written to goes with the run
                    shutil.copyfile(log, engine.log_path.parent / LOG_NAME)
            shutil.rmtree(sockets, ignore_errors=True)

        surroundings.undos.append(end)
        try:
            arguments = preload_arguments(surroundings.live, engine.serve_arguments)
            daemon = engine.run_beside(*arguments, directory=sockets, log_path=log)
            # It binds its socket when the weights are in place, and answers nothing before.
            daemon.poll_until(
                lambda: held_bytes(sockets), what="the weight cache daemon answers", limit_s=READY_LIMIT_S
            )
        except BaseException:  # an interrupt too
            end()
            raise
        running = daemon

        def prove() -> Injected:
            held = None
            with suppress(OSError, ValueError):  # it does not answer: the proof says so
                held = held_bytes(sockets) if running.is_running() else None
            is_alike = before["layout"] == new["layout"] and before["weights"] != new["weights"]
            return Injected.of(
                self,
                proved=held is not None and held > 0 and is_alike,
                because=f"the daemon was filled from {before['weights']} and "
                + (f"holds {held:,} bytes" if held is not None else "does not answer")
                + f"; the new checkpoint is {new['weights']}, its headers are "
                + ("the same" if before["layout"] == new["layout"] else "others: it would not be answered for"),
                before={"old": before, "new": new},
                after={"held_bytes": held, "pid": running.pid},
            )

        def prove_end() -> Injected:
            left = sorted(path.name for path in sockets.glob("*")) if sockets.exists() else []
            runs = running.is_running()
            because = f"the daemon {'still runs' if runs else 'has ended'}; of its sockets {len(left)} are left"
            return Injected.of(self, proved=not runs and not left, because=because, after={"left": left})

        return Struckdown(prove(), prove, end, prove_end)

    def after_start(self, cache_directory: Path) -> Racing:
        """Look, when the new engine is up, whether the daemon has given it what it holds."""
        return Served(self, cache_directory.parent / LOG_NAME)


class Served:
    """What the daemon's log says of engines that asked it."""

    def __init__(self, fault: StaleWeightDaemon, log_path: Path) -> None:
        self._fault = fault
        self._log_path = log_path
        self.injected = self.state()

    def state(self) -> Injected:
        """Say how many tensors an engine was given."""
        sent = sent_tensors(self._log_path)
        because = f"the daemon sent {sum(sent)} tensors to {len(sent)} engines that were started since"
        return Injected.of(
            self._fault,
            proved=any(sent),
            because=because,
            after={"sent_tensors": list(sent)},
        )

    def engine_is_ready(self) -> None:
        """Return: the daemon acts by itself."""

    def finish(self, *, limit_s: float) -> None:
        """Return: the strike ends the daemon."""


def preload_arguments(model: Path, serve_arguments: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command after `vllm` that fills a daemon from a checkpoint; its sockets lie where it runs.

    What else the daemon tells checkpoints apart by is taken from the line of an engine.
    """
    known = {spelling: spellings[0] for spellings in ALSO_IN_KEY for spelling in spellings}
    kept: list[str] = []
    for word, following in pairwise((*serve_arguments, "")):
        name, equals, explicit = word.partition("=")
        value = explicit if equals else following
        option = known.get(name.replace("_", "-"))
        if option is not None and value:
            kept += (option, value)
    return ("preload", "--model", str(model), "--weight-cache-socket-dir", ".", *kept)


def layout_key(path: Path) -> str:
    """Return what the daemon knows a checkpoint by: a digest of the names and headers of its safetensors files.

    Source: vLLM 0.32.0, `weight_cache/protocol.py`, `hash_checkpoint`.
    Raises: FaultNotApplicable when there is no such file, or one is cut.
    """
    names = weight_files(path)
    if not names:
        raise FaultNotApplicable(f'no safetensors file in "{path}": a weight cache daemon knows such by their path')
    digest = hashlib.md5(usedforsecurity=False)
    for name in sorted(names):
        with (path / name).open("rb") as file:
            length = file.read(8)
            size_bytes = int.from_bytes(length, "little")
            header = file.read(min(size_bytes, HEADER_LIMIT_BYTES))
        if len(length) < 8 or len(header) < size_bytes:
            raise FaultNotApplicable(
                f'"{path / name}" ends within its header, of which {size_bytes} bytes are announced'
            )
        digest.update(name.encode() + length + header)
    return digest.hexdigest()


def held_bytes(sockets: Path) -> int | None:
    """Ask the daemon whose sockets these are how much device memory it holds; None while there is no socket.

    Raises: OSError or ValueError when it does not answer as such a daemon does.
    """
    found = sorted(sockets.glob(SOCKET_NAMES))
    if not found:
        return None
    with _opened(sockets) as directory, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWER_LIMIT_S)
        asking.connect(f"/proc/self/fd/{directory}/{found[0].name}")  # its own path may be too long for a socket
        question = pickle.dumps({"cmd": "get_memory"})
        asking.sendall(_LENGTH.pack(len(question)) + question)
        (size_bytes,) = _LENGTH.unpack(_exactly(asking, _LENGTH.size))
        if size_bytes > MESSAGE_LIMIT_BYTES:
            raise ValueError(f"an answer of {size_bytes} bytes, expected a number")
        said = _exactly(asking, size_bytes)
    try:
        answer = _Plain(BytesIO(said)).load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"it answered with no message of its protocol: {error}") from error
    held = answer.get("memory_bytes") if isinstance(answer, dict) and answer.get("status") == "ok" else None
    if not isinstance(held, int):
        raise ValueError(f"it answered {str(answer)[:200]}")
    return held


def sent_tensors(log_path: Path) -> tuple[int, ...]:
    """Return how many tensors the daemon says it gave, per engine that it says so of; it says it once for equal numbers."""
    try:
        text = log_path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(int(count) for count in _SENT.findall(text))


class _Plain(pickle.Unpickler):
    """Reads numbers, words and dicts of them, and nothing that would import or run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"{module}.{name} is no plain value")


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _exactly(asking: socket.socket, size_bytes: int) -> bytes:
    received = b""
    while len(received) < size_bytes:
        chunk = asking.recv(size_bytes - len(received))
        if not chunk:
            raise ConnectionError(f"the connection ended after {len(received)} of {size_bytes} bytes")
        received += chunk
    return received


def _weights(path: Path) -> str:
    try:
        return weights_id(path)
    except CheckpointDefect as error:
        raise FaultNotApplicable(f"the checkpoint cannot be read: {error}") from error


def stale_weight_daemon() -> StaleWeightDaemon:
    """Fill vLLM's weight cache daemon (`vllm preload`) from the checkpoint that is served, and let it outlive that.

    For a rollout whose engines are launched with `weight_daemon.ENGINE_ARGUMENTS`; struck before it. Source: taxonomy row K05.
    """
    return StaleWeightDaemon()
