"""The development endpoints of a running vLLM server: other weights without a restart.

They exist when the server was started with `VLLM_SERVER_DEV_MODE=1`. vLLM asks for the API key below `/v1` and a few other
prefixes, and these routes are not among them (0.32.0, `entrypoints/serve/middleware/authenticate.py`): whoever reaches the
port can replace, zero or pause the model. The harness opens them in scenarios that reload, on loopback, and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from harness.clock import now_ns, seconds_between
from harness.engine.launch import WEIGHT_TRANSFER, Launch
from harness.guards.engine_api import EngineApi, Refused

DEV_MODE = ("VLLM_SERVER_DEV_MODE", "1")
SLEEP_MODE = "--enable-sleep-mode"
PREFIX_CACHING = "--enable-prefix-caching"
SAID_CHARACTERS_MAX = 300
_CAUSE = re.compile(
    r"Worker failed with error '(.*)', please check the stack trace"
)  # what vLLM wraps a worker's words in


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one call was answered; status 0 means that no answer came."""

    call: str
    status: int
    took_s: float
    said: str
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        """Say whether the server says that it did what it was asked to."""
        return self.status == 200 and self.body.get("success", True) is not False

    def as_json(self) -> dict[str, Any]:
        """Return it for a history."""
        return {"call": self.call, "status": self.status, "took_s": round(self.took_s, 4), "said": self.said}


@dataclass(frozen=True, slots=True, kw_only=True)
class DevApi(EngineApi):
    """Speaks with the development endpoints; a call that fails is a reply too, never an exception."""

    def reload_weights(self, path: str | None = None) -> Reply:
        """Let every worker read its weights again, from a path as the engine sees it.

        Without one from where it read last: that is where it was started only until a reload from elsewhere.
        """
        body: dict[str, Any] = {"method": "reload_weights"}
        if path is not None:
            body["kwargs"] = {"weights_path": path}
        return self.call("POST", "/collective_rpc", body, name="reload_weights")

    def pause(self, *, mode: str = "wait", clear_cache: bool = False) -> Reply:
        """Stop computing. Requests under way: `wait` finishes them, `abort` ends them, `keep` freezes them."""
        return self.call("POST", f"/pause?{urlencode({'mode': mode, 'clear_cache': str(clear_cache).lower()})}")

    def resume(self) -> Reply:
        """Compute again."""
        return self.call("POST", "/resume")

    def reset_prefix_cache(self) -> Reply:
        """Forget every computed prefix; `success` is false while requests hold blocks of it."""
        return self.call("POST", "/reset_prefix_cache")

    def is_paused(self) -> Reply:
        """Ask whether it computes, `is_paused` in the body."""
        return self.call("GET", "/is_paused")

    def checksums(self) -> Reply:
        """Ask for a digest per parameter, `checksums` in the body."""
        return self.call("POST", "/weight_checker", {"action": "checksum"}, name="weight_checker")

    def compare_checksums(self, baseline: Mapping[str, str]) -> Reply:
        """Let it compare the digests of now with these, `match` and `mismatches` in the body."""
        return self.call("POST", "/weight_checker", {"action": "compare", "baseline": dict(baseline)})

    def reset_weights(self) -> Reply:
        """Let it zero its weights in place, so that weights that do not arrive afterwards show."""
        return self.call("POST", "/weight_checker", {"action": "reset"})

    def weight_info(self) -> Reply:
        """Ask for the version of the weights, `weight_version` in the body."""
        return self.call("GET", "/weight_info")

    def update_weight_version(self, version: str) -> Reply:
        """Give the weights a version; they stay as they are."""
        return self.call("POST", "/update_weight_version", {"new_version": version})

    def init_weight_transfer(self, **how: Any) -> Reply:
        """Prepare a transfer engine; what it takes is its own."""
        return self.call("POST", "/init_weight_transfer_engine", {"init_info": how})

    def start_weight_update(self) -> Reply:
        """Begin an update of weights that come over a transfer engine."""
        return self.call("POST", "/start_weight_update")

    def update_weights(self, **what: Any) -> Reply:
        """Let weights come over the transfer engine; what it takes is its own."""
        return self.call("POST", "/update_weights", {"update_info": what})

    def finish_weight_update(self, version: str | None = None) -> Reply:
        """End such an update, and give the weights a version."""
        return self.call("POST", "/finish_weight_update", {"weight_version": version})

    def sleep(self, *, level: int = 1, mode: str = "abort") -> Reply:
        """Give memory back: level 1 keeps the weights on the host, level 2 drops them. Requests under way: as in a pause."""
        return self.call("POST", f"/sleep?{urlencode({'level': level, 'mode': mode})}")

    def wake_up(self) -> Reply:
        """Take memory again, `status` in the body: "awake" when all of it is there."""
        return self.call("POST", "/wake_up")

    def is_sleeping(self) -> Reply:
        """Ask whether it sleeps, `is_sleeping` in the body."""
        return self.call("GET", "/is_sleeping")

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, name: str = "") -> Reply:
        """Make one call and return what was answered."""
        started_ns = now_ns()
        status, text = 200, ""
        try:
            with self._exchange(method, path, body) as (_, chunks):
                text = b"".join(chunks).decode("utf-8", "replace")
        except Refused as refused:
            status, text = refused.status, refused.text
        except (OSError, ValueError) as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        answered = _object(text)
        return Reply(
            call=name or path.partition("?")[0].removeprefix("/"),
            status=status,
            took_s=seconds_between(started_ns, now_ns()),
            said=_said(text, answered)[:SAID_CHARACTERS_MAX],
            body=answered,
        )


def reloadable(launch: Launch) -> Launch:
    """Return the same launch with development endpoints and a prefix cache."""
    arguments = launch.extra_arguments
    if not {PREFIX_CACHING, "--no-enable-prefix-caching"} & set(arguments):
        arguments = (*arguments, PREFIX_CACHING)
    return replace(launch, extra_arguments=arguments, environment=(*launch.environment, DEV_MODE))


def updatable(launch: Launch) -> Launch:
    """Return the same launch with the transfer engine that reads files."""
    return replace(launch, extra_arguments=(*launch.extra_arguments, *WEIGHT_TRANSFER))


def sleepable(launch: Launch) -> Launch:
    """Return the same launch with development endpoints and the allocator that can give memory back."""
    arguments = launch.extra_arguments
    if SLEEP_MODE not in arguments:
        arguments = (*arguments, SLEEP_MODE)
    return replace(launch, extra_arguments=arguments, environment=(*launch.environment, DEV_MODE))


def _said(text: str, body: Mapping[str, Any]) -> str:
    """Return the message of an error, or the whole answer in one line."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    said = " ".join(str(message or text).split())
    cause = _CAUSE.search(said)
    return cause[1] if cause else said


def _object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
