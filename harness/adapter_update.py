"""A LoRA adapter is exchanged in a running engine, and what its name and its base then answer is looked at.

The engine was started with the adapter of the old checkpoint under a name; users ask for that name. Published is the new
checkpoint: the same base, another adapter. What is loaded is named as the engine sees it: by the path it was started on, or
by that of the published version, which vLLM advises, since its prefix cache knows an adapter by name and path alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from harness.checkpoint.adapter import ADAPTER, adapter_of
from harness.clock import now_ns
from harness.engine.dev_api import PREFIX_CACHING, DevApi, Reply
from harness.engine.engine import Engine, EngineIdentity
from harness.engine.launch import ADAPTER_NAME, SERVED_MODEL_NAME, Launch
from harness.engine.rollout import Adapter, Rollout
from harness.errors import EnvironmentMissing, HarnessError
from harness.guards.canary import Answer, LogprobRows, largest_difference
from harness.guards.canary_pass import ask
from harness.guards.engine_api import EngineApi
from harness.observe.history import EventKind
from harness.reload import CALL_LIMIT_S, Changed
from harness.scenario import Guard
from harness.service import CANARY_LIMIT_S, Service

TRIAL_NAME = "trial"  # under which a gate loads an adapter that nobody has asked yet
MAX_RANK = 16
# One sequence at a time: with adapters, vLLM 0.32.0 on CPU dies of a request for prompt logprobs that it computes together
# with another one, and every canary is such a request.
ARGUMENTS = (
    "--enable-lora",
    "--max-lora-rank",
    str(MAX_RANK),
    "--max-loras",
    "2",
    "--max-num-seqs",
    "1",
    PREFIX_CACHING,
)
RUNTIME_UPDATES = ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
LISTED_MAX = 10


def adaptable(launch: Launch) -> Launch:
    """Return the same launch with the checkpoint's own adapter, which may be exchanged at runtime."""
    return replace(
        launch,
        serves_adapter=True,
        extra_arguments=(*launch.extra_arguments, *ARGUMENTS),
        environment=(*launch.environment, RUNTIME_UPDATES),
    )


def require_adapters(identity: EngineIdentity) -> None:
    """Return if such an engine serves LoRA adapters.

    Raises: EnvironmentMissing with the reason.
    """
    if identity.kind == "reference":
        raise EnvironmentMissing("vllm", "the reference engine serves no LoRA adapters; vLLM does, also on a CPU")


def require_own_adapters(*checkpoints: Path) -> None:
    """Return if each checkpoint has an adapter of its own beside its weights.

    Raises: EnvironmentMissing naming the one that has none, such as one that the settings put in place of another.
    """
    for checkpoint in checkpoints:
        if adapter_of(checkpoint) is None:
            raise EnvironmentMissing(
                "models",
                f'"{checkpoint.name}" has no LoRA adapter in "{ADAPTER}/", and it is adapters that are exchanged',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What answers under the name of an adapter."""

    answer: str
    because: str = ""
    difference_old: float | None = None
    difference_new: float | None = None


@dataclass(slots=True, kw_only=True)
class AdapterUpdate:
    """Exchanges the adapter of the engine that users are sent to."""

    service: Service
    engine: Engine
    rollout: Rollout
    live: Path  # what the engine was started on
    _base: LogprobRows | None = field(default=None, init=False)  # what the base answered before; None: nobody knows

    def passes_trial(self) -> bool:
        """Load the adapter under a name that no user asks for, and say whether it may be loaded under its own.

        Not when it answers otherwise than it should, or moves the base's answers, or is refused: vLLM 0.32.0 spoils the
        adapter that serves when one that does not fit is loaded in its place. After a refusal the one that serves is
        asked; an engine that answers wrongly then is stopped.
        Raises: HarnessError as `carry_out`.
        """
        api = self._dev_api()
        self._base = self._base_before()
        listed, begun_ns = _models(api), now_ns()
        reply = _load(api, TRIAL_NAME, self._path(listed)) if listed.is_ok else listed
        if not reply.is_ok:
            self._record_refusal(reply, begun_ns)
            if not self.is_right(Answer.OLD):
                self.service.stop(self.engine, how="refused by the canary gate")
            return False
        seen = self._seen(TRIAL_NAME)
        self._unload_trial(api)
        is_right = seen.answer == Answer.NEW
        if not is_right:
            self._record(seen, incarnation=f"{self.engine.incarnation}-trial", when="of the adapter under a trial name")
        return is_right

    def carry_out(self, api: DevApi) -> Changed:
        """Make the calls of the rollout; the first that is refused is the last.

        What the base answers is asked first, unless a trial did. Without a call to make, or when the engine does not list
        its models, that list is the only call.
        Raises: HarnessError when the list does not tell where the engine's model is.
        """
        if self._base is None:
            self._base = self._base_before()
        listed = _models(api)
        calls: list[Reply] = []
        how = self.rollout.adapter
        if listed.is_ok and how is not Adapter.UNTOLD:
            path = self._path(listed)
            if how is Adapter.UNLOADED:
                calls.append(_unload(api, ADAPTER_NAME))
            if all(reply.is_ok for reply in calls):
                calls.append(_load(api, ADAPTER_NAME, path, in_place=how is Adapter.IN_PLACE))
        if not calls:
            calls.append(listed)
        told = {"adapter": str(how), "from_new_path": self.rollout.from_new_path, "listed": _names(_models(api))}
        return Changed(calls=tuple(calls), told=told)

    def is_right(self, expected: Answer) -> bool:
        """Ask the adapter and its base everything, and say whether both answer as they should: the base as before."""
        seen = self._seen(ADAPTER_NAME)
        self._record(seen, incarnation=self.engine.incarnation, when="of the adapter and its base after the update")
        return seen.answer == expected

    def _seen(self, model: str) -> _Seen:
        """Return what answers under the name of an adapter, and whether its base was left alone."""
        goldens = self.service.ground.goldens
        try:
            rows, base = self._ask(model), self._ask(SERVED_MODEL_NAME)
        except (OSError, ValueError) as failure:
            return _Seen(answer=_no_answer(failure))
        compared = goldens.compare(rows)
        answer, because = str(compared.answer), ""
        if compared.answer is Answer.NEITHER and largest_difference(rows, base) <= goldens.tolerance:
            because = "the base model answers under its name"
        moved = 0.0 if self._base is None else largest_difference(base, self._base)
        if moved > goldens.tolerance:
            answer, because = str(Answer.NEITHER), f"the base model's own answers moved by {moved:.3g}"
        return _Seen(
            answer=answer,
            because=because,
            difference_old=compared.difference_old,
            difference_new=compared.difference_new,
        )

    def _base_before(self) -> LogprobRows | None:
        """Return what the base answers now; None, and a record of it, when it gives no answer."""
        try:
            return self._ask(SERVED_MODEL_NAME)
        except (OSError, ValueError) as failure:
            seen = _Seen(answer=_no_answer(failure))
            self._record(seen, incarnation=self.engine.incarnation, when="of the base before the update")
            return None

    def _unload_trial(self, api: DevApi) -> None:
        """Unload what was tried, and record it when that fails: nobody asks for it, but it takes the place of another."""
        reply = _unload(api, TRIAL_NAME)
        if not reply.is_ok:
            self.service.ground.recorder.event(
                "operator",
                EventKind.GUARD_ACTED,
                guard=Guard.CANARY_GATE,
                did=f'left the adapter loaded that it tried as "{TRIAL_NAME}": {_answered(reply)}',
            )

    def _record_refusal(self, reply: Reply, begun_ns: int) -> None:
        """Record a trial that the engine refused as what it is: an update that failed before users met it."""
        recorder = self.service.ground.recorder
        about: dict[str, Any] = {"incarnation": self.engine.incarnation, "how": self.rollout.how}
        recorder.event(
            "operator",
            EventKind.RELOAD_STARTED,
            expects=Answer.NEW,
            resets_prefix_cache=False,
            pause=self.rollout.pause,
            **about,
        )
        recorder.event(
            "operator",
            EventKind.RELOAD_ENDED,
            succeeded=False,
            was_answered=reply.status != 0,
            because=_answered(reply),
            calls=[reply.as_json()],
            call_ns=[begun_ns, now_ns()],
            weights={},
            update={"adapter": str(self.rollout.adapter), "loaded_as": TRIAL_NAME},
            **about,
        )

    def _record(self, seen: _Seen, *, incarnation: str, when: str) -> None:
        recorder = self.service.ground.recorder
        recorder.event("operator", EventKind.CANARY_CHECKED, incarnation=incarnation, when=when, **asdict(seen))

    def _ask(self, model: str) -> LogprobRows:
        ground = self.service.ground
        limit_s = min(CANARY_LIMIT_S, max(ground.deadline.remaining_s(), 1.0))
        api = EngineApi(url=self.engine.endpoint, api_key=ground.api_key, limit_s=limit_s)
        return ask(api, model, ground.goldens.old.prompts, rotation=None).rows

    def _dev_api(self) -> DevApi:
        ground = self.service.ground
        limit_s = min(CALL_LIMIT_S, max(ground.deadline.remaining_s(), 1.0))
        return DevApi(url=self.engine.endpoint, api_key=ground.api_key, limit_s=limit_s)

    def _path(self, listed: Reply) -> str:
        """Return where the engine finds the adapter that was published, as it sees it."""
        roots = {card.get("id"): card.get("root") for card in _cards(listed)}
        root = roots.get(SERVED_MODEL_NAME)
        if not isinstance(root, str):
            raise HarnessError(
                f'`/v1/models` tells no "root" of "{SERVED_MODEL_NAME}", so where the engine finds adapters is not known: '
                f"{listed.said}"
            )
        started_on = PurePosixPath(root)
        if self.rollout.from_new_path and self.live.is_symlink():
            started_on = started_on.parent / os.readlink(self.live)
        return str(started_on / ADAPTER)


def _answered(reply: Reply) -> str:
    return f"{reply.call} answered {reply.status or 'nothing'}: {reply.said}"


def _no_answer(failure: Exception) -> str:
    return f"no answer ({type(failure).__name__}: {failure}"[:211] + ")"


def _load(api: DevApi, name: str, path: str, *, in_place: bool = False) -> Reply:
    body = {"lora_name": name, "lora_path": path, "load_inplace": in_place}
    return api.call("POST", "/v1/load_lora_adapter", body, name="load_lora_adapter")


def _unload(api: DevApi, name: str) -> Reply:
    return api.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, name="unload_lora_adapter")


def _models(api: DevApi) -> Reply:
    return api.call("GET", "/v1/models", name="models")


def _cards(listed: Reply) -> list[Mapping[str, Any]]:
    cards = listed.body.get("data")
    return [card for card in cards if isinstance(card, Mapping)] if isinstance(cards, list) else []


def _names(listed: Reply) -> list[str]:
    return [str(card.get("id")) for card in _cards(listed)][:LISTED_MAX]
