"""The command of the reference engine, with the arguments of `vllm serve`: read them, load, serve until stopped.

Exit codes: 0 stopped, 1 the checkpoint is refused or the port is taken, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from harness.engine.launch import WEIGHT_CACHE_LOAD_FORMAT
from harness.engine.reference.defects import DEFECT_VARIABLE, PlantedDefect, parse_defects
from harness.engine.reference.dev_routes import DEV_MODE_VARIABLE
from harness.engine.reference.live import LiveModel
from harness.engine.reference.loading import Contract, load
from harness.engine.reference.metrics import Metrics
from harness.engine.reference.model import Llama
from harness.engine.reference.prefixes import PrefixCache
from harness.engine.reference.scheduler import Scheduler
from harness.engine.reference.server import ReferenceServer, Service
from harness.engine.reference.tensor_source import CheckpointFiles, TensorSource
from harness.engine.reference.version import PARENT_VARIABLE, REFERENCE_VERSION, STEP_MS_VARIABLE
from harness.engine.reference.weight_cache import WeightCacheSource
from harness.engine.reference.weight_update import WeightUpdate, backend_of
from harness.errors import CheckpointDefect

EXIT_REFUSED = 1
EXIT_ARGUMENTS = 2

_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
_SAME_DTYPE = {"half": "float16", "float": "float32"}
_DISTURBANCE = 0.5  # far beyond any tolerance, small enough to keep plausible text
_SWITCH_INTERVAL_S = 0.0005  # how long the computing thread may keep the server threads from answering
_PARENT_CHECK_S = 0.5
_LATE_STOP_S = 1.0


def main(arguments: Sequence[str]) -> int:
    """Load, serve until SIGTERM or SIGINT, and return the exit code."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        defects = parse_defects(os.environ.get(DEFECT_VARIABLE, ""))
        step_s = float(os.environ.get(STEP_MS_VARIABLE, "0")) / 1000.0
        source = _source(options, parser)
        transfers = backend_of(options.weight_transfer_config) is not None
    except ValueError as error:
        parser.error(str(error))
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        is_deaf = PlantedDefect.IGNORES_STOP in defects and number == signal.SIGTERM
        lag_s = _LATE_STOP_S if PlantedDefect.HEARS_STOP_LATE in defects and number == signal.SIGTERM else 0.0
        signal.signal(number, signal.SIG_IGN if is_deaf else partial(_end_after, lag_s, stopped))
    log("INFO", f"reference engine {REFERENCE_VERSION}: loading {options.model}, dtype {options.dtype}")
    try:
        bound = _bound_socket(options.host, options.port, options.uds)
    except OSError as error:
        where = options.uds or f"{options.host}:{options.port}"
        log("ERROR", f"{type(error).__name__}: cannot bind {where}: {error.strerror or error}")
        return EXIT_REFUSED
    try:
        loaded = load(
            Path(options.model),
            dtype=_SAME_DTYPE.get(options.dtype, options.dtype),
            max_model_len=options.max_model_len,
            source=source,
            contract=Contract(defects),
        )
    except CheckpointDefect as defect:
        log("ERROR", f"CheckpointDefect {defect}")
        return EXIT_REFUSED
    except OSError as error:
        log("ERROR", f"{type(error).__name__}: {error}")
        return EXIT_REFUSED
    heads, ranks = loaded.shape.heads, options.tensor_parallel_size
    if ranks < 1 or heads % ranks:
        log("ERROR", f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({ranks}).")
        return EXIT_REFUSED
    if PlantedDefect.NEVER_READY in defects:
        _wait(stopped)
        return 0
    metrics = Metrics(options.served_model_name or options.model)
    scheduler = Scheduler(
        Llama(loaded.shape, loaded.tensors),
        metrics,
        end_ids=loaded.end_ids,
        step_s=step_s,
        is_slower=PlantedDefect.SLOWER_30_PERCENT in defects,
        disturbance=_DISTURBANCE if defects & {PlantedDefect.WRONG_ANSWER, PlantedDefect.WRONG_UNDER_LOAD} else 0.0,
        is_right_when_idle=PlantedDefect.WRONG_ANSWER not in defects,
        prefixes=PrefixCache() if options.enable_prefix_caching else None,
    )
    live = LiveModel(
        path=Path(options.model),
        dtype=_SAME_DTYPE.get(options.dtype, options.dtype),
        max_model_len=options.max_model_len,
        source=source,
        defects=defects,
        scheduler=scheduler,
        loaded=loaded,
    )
    service = Service(
        loaded=loaded,
        scheduler=scheduler,
        metrics=metrics,
        model_name=options.served_model_name or options.model,
        model_root=options.model,
        max_model_len=loaded.shape.max_positions,
        api_key=os.environ.get("VLLM_API_KEY") or None,
        defects=defects,
        live=live if os.environ.get(DEV_MODE_VARIABLE) == "1" else None,
        update=WeightUpdate(live) if transfers else None,
    )
    scheduler.start()
    server = ReferenceServer(bound, service)
    threading.Thread(target=server.serve_forever, name="server", daemon=True).start()
    where = f"unix:{options.uds}" if options.uds else f"http://{options.host}:{server.server_port}"
    log("INFO", f"Application startup complete: {where}, {loaded.dtype}")
    _wait(stopped)
    log("INFO", "Shutting down")
    scheduler.close()
    sys.stdout.flush()
    # Connections are cut, as a stopped server cuts them; their threads are not waited for.
    os._exit(0)


def log(level: str, message: str) -> None:
    """Print one line in the layout of vLLM's log, so that one reader fits all engines."""
    message = " ".join(message.splitlines())
    print(f"{level} {datetime.now():%m-%d %H:%M:%S} [reference] {message}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve.py", description="Serve a checkpoint with the reference engine.", allow_abbrev=False
    )
    parser.add_argument("model", help="directory of the checkpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds", default=None, help="path of a Unix socket to serve on, and on no port")
    parser.add_argument("--served-model-name", default=None)
    parser.add_argument("--dtype", choices=_DTYPES, default="auto")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--load-format", choices=("auto", "safetensors", WEIGHT_CACHE_LOAD_FORMAT), default="auto")
    parser.add_argument("--enable-prefix-caching", action="store_true")
    parser.add_argument("--weight-transfer-config", default=None, help="JSON, whose backend reads tensors from files")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="checked; one process computes everything")
    ignored = parser.add_argument_group("accepted because vLLM has them; they make no difference here")
    for flag in ("--enforce-eager", "--no-enable-prefix-caching", "--disable-log-stats"):
        ignored.add_argument(flag, action="store_true")
    for option in ("--max-num-seqs", "--gpu-memory-utilization", "--seed", "--block-size", "--swap-space"):
        ignored.add_argument(option)
    return parser


def _source(options: argparse.Namespace, parser: argparse.ArgumentParser) -> TensorSource:
    if options.max_model_len is not None and options.max_model_len < 1:
        parser.error(f"argument --max-model-len: {options.max_model_len} is not positive")
    if options.load_format == WEIGHT_CACHE_LOAD_FORMAT:
        return WeightCacheSource(model=options.model, environment=os.environ, log=log)
    return CheckpointFiles()


def _bound_socket(host: str, port: int, path: str | None) -> socket.socket:
    if path:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind(path)
        return local
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    return bound


def _end_after(lag_s: float, stopped: threading.Event, *_: object) -> None:
    """Answer a signal that asks to end."""
    if not lag_s:
        stopped.set()
    else:
        threading.Timer(lag_s, stopped.set).start()


def _wait(stopped: threading.Event) -> None:
    """Wait to be stopped; a child whose parent was killed does not stay behind."""
    parent = os.environ.get(PARENT_VARIABLE)
    while not stopped.wait(_PARENT_CHECK_S):
        if parent is not None and parent != str(os.getppid()):
            log("ERROR", f"the parent process {parent} has gone")
            return
