"""A rollout in place: the running engine reads its weights again, and is asked what it now serves.

Published is where the engine reads. Then: ask a long prompt, so that its keys and values are in the prefix cache; pause;
reload; reset the prefix cache; resume; ask again. What only a guard would do is done when there is one: without, the long
prompt is asked as canaries are, to see what became of the cache, and nothing follows from it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.clock import now_ns
from harness.engine.dev_api import DevApi, Reply
from harness.engine.engine import Engine
from harness.engine.rollout import How, Pause, Rollout
from harness.guards.canary import Answer, Golden
from harness.guards.canary_pass import check_deep
from harness.guards.engine_api import EngineApi
from harness.judge.reloads import LAG_LIMIT_MS, reloads
from harness.observe.history import EventKind
from harness.service import CANARY_LIMIT_S, Service
from harness.under_way import UnderWay

CALL_LIMIT_S = 120.0
DEEP_ROTATION = -1  # the long prompt is a pass of its own: short ones that are right do not clear it
UNDER_WAY_ROTATION = -2  # and so are answers that met the reload
UNDER_WAY_TOKENS = 200
NAMES_MAX = 20
_DIGEST = re.compile(r"(?:[a-z0-9]+:)?[0-9a-fA-F]{8,}")
OF_NO_BYTES = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The calls that gave the engine other weights, and what else there is to tell of them."""

    calls: tuple[Reply, ...]
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reply(self) -> Reply:
        """Return the answer that decides whether it has them: the first that says no, or the last."""
        return next((reply for reply in self.calls if not reply.is_ok), self.calls[-1])


def reload_weights(api: DevApi) -> Changed:
    """Let the engine read its weights again, from where it read last."""
    return Changed(calls=(api.reload_weights(),))


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """Gives other weights to the engine that users are sent to."""

    service: Service
    rollout: Rollout
    change: Callable[[DevApi], Changed] = reload_weights
    look: Callable[[Answer], bool] | None = None  # what else is to be asked at once; says whether it was as expected
    wants_checksums: bool = False
    wants_requests_under_way: bool = False

    def roll(self, engine: Engine, *, is_gated: bool) -> str:
        """Let the engine reload and return why the rollout did not come about; empty when it did.

        With the gate, an engine that then answers wrongly is stopped: users are better off without answers. One that
        refused the reload and still answers from the old weights goes on serving them.
        """
        self._ask_deep(engine, Answer.OLD)
        under_way = self._begin_answers(engine) if self.wants_requests_under_way else None
        begun_ns = now_ns()
        succeeded = self._reload(engine, under_way)
        if under_way is not None:
            self._witness(engine, under_way, begun_ns, succeeded=succeeded)
        expected = Answer.NEW if succeeded else Answer.OLD
        is_right = self.look is None or self.look(expected)
        if is_gated and is_right:
            is_right = self.service.answers_from(engine, expected)
        if succeeded:
            is_right = self._ask_deep(engine, expected) and is_right
        if is_gated and not is_right:
            self.service.stop(engine, how="refused by the canary gate")
            return f"the canary gate refused the engine after the {_what(self.rollout.how)}"
        return "" if succeeded else f"the engine refused the {self.rollout.how}"

    def _reload(self, engine: Engine, under_way: UnderWay | None) -> bool:
        rollout = self.rollout
        self._event(
            EventKind.RELOAD_STARTED,
            incarnation=engine.incarnation,
            expects=Answer.NEW,
            resets_prefix_cache=rollout.resets_prefix_cache,
            pause=rollout.pause,
            how=rollout.how,
        )
        api = self._api(engine)
        checksums = [api.checksums(), api.weight_info()] if self.wants_checksums else []
        calls = [] if rollout.pause is Pause.NONE else [api.pause(mode=rollout.pause)]
        if under_way is not None and rollout.pause is Pause.WAIT:
            under_way.settle(limit_s=LAG_LIMIT_MS / 1000)
        called_ns = now_ns()
        changed = self.change(api)
        call_ns = [called_ns, now_ns()]
        reloaded = changed.reply
        calls += changed.calls
        if rollout.resets_prefix_cache:
            calls.append(api.reset_prefix_cache())
        if rollout.pause is not Pause.NONE:
            calls.append(api.resume())
        if self.wants_checksums:
            checksums += [api.checksums(), api.weight_info()]
        failed = [reply for reply in calls if not reply.is_ok]
        because = "; ".join(f"{reply.call} answered {reply.status or 'nothing'}: {reply.said}" for reply in failed)
        self._event(
            EventKind.RELOAD_ENDED,
            incarnation=engine.incarnation,
            succeeded=reloaded.is_ok,
            was_answered=reloaded.status != 0,
            because=because,
            calls=[reply.as_json() for reply in calls],
            call_ns=call_ns,
            weights=compared(checksums),
            how=rollout.how,
            update=dict(changed.told),
        )
        self.service.look_after()
        self.service.note_logs()
        return reloaded.is_ok

    def _begin_answers(self, engine: Engine) -> UnderWay:
        ground = self.service.ground
        prompts = ground.goldens.old.prompts
        room = ground.launch.max_model_len - max(len(prompt) for prompt in prompts)
        return UnderWay(
            EngineApi(url=engine.endpoint, api_key=ground.api_key, limit_s=CALL_LIMIT_S),
            ground.launch.asked_model,
            prompts,
            max_tokens=min(UNDER_WAY_TOKENS, room),
        )

    def _witness(self, engine: Engine, under_way: UnderWay, begun_ns: int, *, succeeded: bool) -> None:
        """Record what became of the answers that were under way."""
        reload = reloads(self.service.ground.recorder.snapshot())[-1]
        seen = under_way.witness(begun_ns, call_ns=reload.call_ns[0], after_ns=reload.after_ns)
        is_mixed = succeeded and seen.mixed > 0
        unmixed = Answer.NEW if succeeded else Answer.OLD
        self._event(
            EventKind.CANARY_CHECKED,
            incarnation=engine.incarnation,
            answer=Answer.NEITHER if is_mixed else unmixed if seen.unmixed > 0 else Answer.AMBIGUOUS,
            difference_old=None,
            difference_new=None,
            because=seen.because if is_mixed else "",
            when="that was under way at the reload",
            rotation=UNDER_WAY_ROTATION,
            **seen.as_json(),
        )

    def _ask_deep(self, engine: Engine, expected: Answer) -> bool:
        """Ask a prompt of several KV blocks twice; say whether both answers are those of the expected weights."""
        goldens = self.service.ground.goldens
        golden: Golden = goldens.new if expected is Answer.NEW else goldens.old
        if golden.deep is None:
            return True
        api = EngineApi(url=engine.endpoint, api_key=self.service.ground.api_key, limit_s=CANARY_LIMIT_S)
        model = self.service.ground.launch.asked_model
        difference, because = None, ""
        try:
            checked = check_deep(api, model, golden.deep)
            answer = str(expected)
            difference, because = checked.difference, checked.because
            if because:  # of the other checkpoint through and through, or of none
                other = goldens.old if expected is Answer.NEW else goldens.new
                is_other = other.deep is not None and not check_deep(api, model, other.deep).because
                answer = str((Answer.OLD if expected is Answer.NEW else Answer.NEW) if is_other else Answer.NEITHER)
                because = "" if is_other else because
        except (OSError, ValueError) as failure:
            answer = f"no answer ({type(failure).__name__}: {failure}"[:211] + ")"
        self._event(
            EventKind.CANARY_CHECKED,
            incarnation=engine.incarnation,
            answer=answer,
            difference_old=difference if expected is Answer.OLD else None,
            difference_new=difference if expected is Answer.NEW else None,
            because=because,
            when=f"of {len(golden.deep.prompt)} tokens "
            f"{'after' if expected is Answer.NEW else 'before'} the {_what(self.rollout.how)}",
            rotation=DEEP_ROTATION,
        )
        return answer == expected

    def _api(self, engine: Engine) -> DevApi:
        ground = self.service.ground
        limit_s = min(CALL_LIMIT_S, self.rollout.ready_limit_s, max(ground.deadline.remaining_s(), 1.0))
        return DevApi(url=engine.endpoint, api_key=ground.api_key, limit_s=limit_s)

    def _event(self, kind: EventKind, **data: Any) -> None:
        self.service.ground.recorder.event("operator", kind, **data)


def _what(how: How) -> str:
    """Return what was done to the engine, as one says it after "before the" or "after the"."""
    return "exchange of its adapter" if how is How.ADAPTER else str(how)


def compared(asked: list[Reply]) -> Mapping[str, Any]:
    """Compare checksums and version of the weights before and after; of many names the first are kept."""
    if not asked:
        return {}
    sums, versions = asked[::2], [reply.body.get("weight_version") for reply in asked[1::2]]
    silent = next((reply for reply in sums if not reply.body.get("checksums")), None)
    if silent is not None:
        return {"count": 0, "said": f"HTTP {silent.status}: {silent.said}"}
    try:
        before, after = (digests(reply.body["checksums"]) for reply in sums)
    except (ValueError, RecursionError) as error:
        return {"count": 0, "said": str(error)}
    if not before or not after:
        return {"count": 0, "said": "no digest is in its answer"}
    names = sorted(before.keys() | after.keys())
    in_one_only = [name for name in names if name not in before or name not in after]
    unchanged = [name for name in names if name in after and after[name] == before.get(name)]
    empty = [name for name in names if after.get(name, "").rpartition(":")[2].lower() == OF_NO_BYTES]
    return {
        "count": len(names),
        "version_before": versions[0],
        "version_after": versions[1],
        "unchanged_count": len(unchanged),
        "unchanged": unchanged[:NAMES_MAX],
        "of_no_bytes_count": len(empty),
        "of_no_bytes": empty[:NAMES_MAX],
        "in_one_only_count": len(in_one_only),
        "in_one_only": in_one_only[:NAMES_MAX],
    }


def digests(answered: Any, at: str = "") -> dict[str, str]:
    """Return the digest of every parameter from an answer that may be nested by rank.

    Raises: ValueError saying where something else than a digest is.
    """
    if isinstance(answered, str) and at and _DIGEST.fullmatch(answered):
        return {at: answered}
    if isinstance(answered, dict):
        parts = [(str(name), part) for name, part in answered.items()]
    elif isinstance(answered, list):
        parts = [(str(number), part) for number, part in enumerate(answered)]
    else:
        where = f'at "{at}"' if at else "in place of all"
        seen = f"{repr(answered)[:80]} {where}"
        raise ValueError(f"{seen} is no hexadecimal digest, so the shape of its answer is not known")
    return {
        key: digest for name, part in parts for key, digest in digests(part, f"{at}/{name}" if at else name).items()
    }
