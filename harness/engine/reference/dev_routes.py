"""The development endpoints, as vLLM answers them: open to whoever reaches the port, and there only in development mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from harness.engine.reference.completions import error_body
from harness.engine.reference.live import LiveModel, NotNow
from harness.engine.reference.weight_update import NOT_CONFIGURED, UpdateRefused, WeightUpdate
from harness.errors import CheckpointDefect

Answered = tuple[int, dict[str, Any]]

DEV_MODE_VARIABLE = "VLLM_SERVER_DEV_MODE"
_WEIGHT_TRANSFER = frozenset(
    {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
)


def get(live: LiveModel, path: str) -> Answered | None:
    """Answer a GET, or return None for a route that is not one of these."""
    match path:
        case "/weight_info":
            return 200, {"weight_version": live.version}
        case "/is_paused":
            return 200, {"is_paused": live.scheduler.is_paused}
        case "/is_sleeping":
            return 200, {"is_sleeping": False}
        case _:
            return None


def post(live: LiveModel, update: WeightUpdate | None, target: str, body: bytes) -> Answered | None:
    """Answer a POST, or return None for a route that is not one of these."""
    path, _, query = target.partition("?")
    if path in _WEIGHT_TRANSFER:
        return _failed(500, NOT_CONFIGURED) if update is None else _update(update, path, _fields(body))
    match path:
        case "/collective_rpc":
            return _collective_rpc(live, _fields(body))
        case "/pause":
            return _pause(live, parse_qs(query).get("mode", ["abort"])[0])
        case "/resume":
            live.scheduler.resume()
            return 200, {"status": "resumed"}
        case "/reset_prefix_cache":
            return 200, {"success": live.scheduler.forget_prefixes()}
        case "/weight_checker":
            return _weight_checker(live, _fields(body))
        case "/update_weight_version":
            live.version = str(_fields(body).get("new_version"))
            return 200, {"success": True, "new_version": live.version}
        case "/sleep" | "/wake_up":
            return _failed(
                500, "NotImplementedError: the reference engine has no accelerator whose memory could be freed"
            )
        case _:
            return None


def _collective_rpc(live: LiveModel, fields: dict[str, Any]) -> Answered:
    method, arguments = fields.get("method"), fields.get("kwargs") or {}
    if method != "reload_weights" or not isinstance(arguments, dict):
        return _failed(400, f"the reference engine knows the method reload_weights alone, got {method!r}")
    path = arguments.get("weights_path")
    try:
        live.reload(None if path is None else Path(str(path)))
    except NotNow as error:
        return _failed(409, f"NotNow: {error}")
    except (CheckpointDefect, OSError) as error:
        return _failed(500, f"{type(error).__name__}: {error}")
    return 200, {"results": [None]}


def _update(update: WeightUpdate, path: str, fields: dict[str, Any]) -> Answered:
    try:
        update.answer(path, fields)
    except (UpdateRefused, NotNow, CheckpointDefect, OSError) as error:
        return _failed(500, f"{type(error).__name__}: {error}")
    return 200, {"message": f"{path.removeprefix('/')} done"}


def _pause(live: LiveModel, mode: str) -> Answered:
    if mode not in ("wait", "keep", "abort"):
        return _failed(400, f"mode is {mode!r}, expected wait, keep or abort")
    if not live.scheduler.pause(mode):
        return _failed(500, "requests under way did not end in time")
    return 200, {"status": "paused"}


def _weight_checker(live: LiveModel, fields: dict[str, Any]) -> Answered:
    action, baseline = fields.get("action"), fields.get("baseline")
    if action == "checksum":
        return 200, {"checksums": live.checksums()}
    if action == "reset":
        live.reset()
        return 200, {"status": "reset"}
    if action == "compare" and isinstance(baseline, dict):
        now = live.checksums()
        wrong = sorted(name for name in now.keys() | baseline.keys() if now.get(name) != baseline.get(name))
        return 200, {"match": not wrong, "mismatches": wrong}
    return _failed(400, "action must be checksum, reset, or compare with a baseline")


def _failed(status: int, message: str) -> Answered:
    return status, error_body(
        message, status=status, kind="InternalServerError" if status >= 500 else "BadRequestError"
    )


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
