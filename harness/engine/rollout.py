"""The ways from the old checkpoint to the new one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from harness.errors import ScenarioInvalid


class How(StrEnum):
    """The procedure of a rollout."""

    RESTART = "restart"  # stop the old engine, start the new one in its place
    BLUE_GREEN = "blue_green"  # start the new one beside the old, move traffic, stop the old
    RELOAD = "reload"  # the running engine reads its weights again, from the same path
    ADAPTER = "adapter"  # the running engine loads another LoRA adapter under the name of the one that it serves
    UPDATE = "update"  # the running engine is sent its weights, over a transfer engine


class Pause(StrEnum):
    """What a reload does with the requests that are under way."""

    WAIT = "wait"  # they are finished before it, new ones wait
    KEEP = "keep"  # they stand still and go on afterwards, with the new weights upon what the old ones computed
    NONE = "none"  # they go on


class Flaw(StrEnum):
    """What is wrong with an update of weights that are sent."""

    NONE = "none"
    NOTHING_SENT = "nothing_sent"  # it is begun and finished, with nothing in between
    LAYER_NOT_SENT = "layer_not_sent"  # no tensor of the last layer comes
    PART_NOT_SENT = "part_not_sent"  # one part of a tensor that the engine fuses never comes
    CHUNK_REFUSED = "chunk_refused"  # the second chunk cannot be read
    REQUEST_BETWEEN = "request_between"  # a request comes between the start and the first chunk, and nothing is paused


class Adapter(StrEnum):
    """How a running engine is given another adapter under the same name."""

    IN_PLACE = "in_place"  # loaded with `load_inplace`
    AGAIN = "again"  # loaded without it
    UNLOADED = "unloaded"  # the one before is unloaded first
    UNTOLD = "untold"  # its files alone are replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A procedure and how long its engine may take to become ready."""

    how: How
    ready_limit_s: float = 180.0
    resets_prefix_cache: bool = True  # of a reload or an update
    pause: Pause = Pause.WAIT  # of a reload or an update
    flaw: Flaw = Flaw.NONE  # of an update
    adapter: Adapter = Adapter.IN_PLACE
    from_new_path: bool = True  # of an adapter

    @property
    def is_in_place(self) -> bool:
        """Say whether the running engine is given other weights."""
        return self.how in (How.RELOAD, How.UPDATE, How.ADAPTER)

    def as_remedy(self, *, beside: bool) -> Rollout:
        """Return how the repaired checkpoint is rolled out: never in place, an engine is trusted only once.

        `beside`: the old engine may go on serving until the new one is admitted.
        """
        if not self.is_in_place:
            return self
        return (blue_green if beside else restart)(ready_limit_s=self.ready_limit_s)


def restart(*, ready_limit_s: float = 180.0) -> Rollout:
    """Stop the old engine, then start the new one; nobody is served in between."""
    return Rollout(how=How.RESTART, ready_limit_s=ready_limit_s)


def blue_green(*, ready_limit_s: float = 180.0) -> Rollout:
    """Start the new engine beside the old one, move traffic when it is ready, then stop the old one."""
    return Rollout(how=How.BLUE_GREEN, ready_limit_s=ready_limit_s)


def reload_in_place(
    *, reset_prefix_cache: bool = True, pause: bool | str = True, ready_limit_s: float = 180.0
) -> Rollout:
    """Publish the new checkpoint where the running engine reads it, and let it reload through its development endpoints.

    Such an engine is started with `VLLM_SERVER_DEV_MODE=1`. Its development endpoints are not protected by the API key:
    whoever reaches the port can replace its weights, so it must listen on a loopback device or a private network alone.
    `pause` is what becomes of the requests under way: True or "wait", "keep", False or "none".
    Raises: ScenarioInvalid for another word.
    """
    chosen = (Pause.WAIT if pause else Pause.NONE) if isinstance(pause, bool) else pause
    if chosen not in tuple(Pause):  # which, unlike a set, also looks for what has no hash
        raise ScenarioInvalid(f'pause is "{chosen}", expected True, False or one of {", ".join(Pause)}')
    return Rollout(
        how=How.RELOAD, ready_limit_s=ready_limit_s, resets_prefix_cache=reset_prefix_cache, pause=Pause(chosen)
    )


def update_weights(*, flaw: Flaw | str = Flaw.NONE, ready_limit_s: float = 180.0) -> Rollout:
    """Send the running engine the tensors of the new checkpoint in two chunks, over a transfer engine that reads files.

    Such an engine is started with `VLLM_SERVER_DEV_MODE=1`, `--weight-transfer-config` and the plug-in of the harness; see
    `reload_in_place` about its endpoints. `flaw` is what is wrong with the update: "nothing_sent", "layer_not_sent",
    "part_not_sent", "chunk_refused", or "request_between", in which nothing is paused.
    Raises: ScenarioInvalid for another word.
    """
    if flaw not in tuple(Flaw):
        raise ScenarioInvalid(f'flaw is "{flaw}", expected one of {", ".join(Flaw)}')
    pause = Pause.NONE if flaw == Flaw.REQUEST_BETWEEN else Pause.WAIT
    return Rollout(how=How.UPDATE, ready_limit_s=ready_limit_s, pause=pause, flaw=Flaw(flaw))


def update_adapter(how: str = Adapter.IN_PLACE, *, from_new_path: bool = True, ready_limit_s: float = 180.0) -> Rollout:
    """Publish the new checkpoint and let the running engine load its LoRA adapter under the name of the one it serves.

    Such an engine is started with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, users ask for the adapter by
    its name, and both checkpoints have the same base. `how` is "in_place", "again" (without `load_inplace`), "unloaded"
    (first) or "untold": nothing but the files changes. `from_new_path` names the published version instead of the path
    that the engine was started on: vLLM's prefix cache knows an adapter by name and path, and not by what is in it.
    Raises: ScenarioInvalid for another word.
    """
    if how not in tuple(Adapter):
        raise ScenarioInvalid(f'an adapter is updated "{how}", expected one of {", ".join(Adapter)}')
    return Rollout(
        how=How.ADAPTER,
        ready_limit_s=ready_limit_s,
        resets_prefix_cache=False,
        pause=Pause.NONE,
        adapter=Adapter(how),
        from_new_path=from_new_path,
    )
