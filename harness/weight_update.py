"""An update of weights over a transfer engine: the running engine is sent the tensors of the new checkpoint, in two chunks.

Init, start, chunk, chunk, finish with a new version; then the version is asked for. The transfer engine is ours and reads
tensors from the files of the published checkpoint (`harness/engine/weight_transfer_plugin`), since those of vLLM need CUDA: what
the engine does with what it is sent, and with what never comes, is its own. Pause, prefix cache, and who asks the engine before and
after are those of a reload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkpoint.manifest import read_checkpoint
from harness.engine.dev_api import DevApi, Reply
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME
from harness.engine.rollout import Flaw
from harness.errors import HarnessError
from harness.guards.canary_pass import ask
from harness.guards.engine_api import EngineApi
from harness.observe.history import EventKind
from harness.reload import CALL_LIMIT_S, NAMES_MAX, Changed
from harness.service import Service

CHUNKS = 2
ABSENT_FILE = "absent.safetensors"  # what a chunk that is refused is said to be in
BETWEEN_ROTATION = -3  # a canary sent in an update is no pass over the prompts
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FUSED_PARTS = ("gate_proj", "q_proj", "k_proj", "v_proj")  # of gate_up_proj and of qkv_proj


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The tensors of a checkpoint as they are sent."""

    chunks: tuple[Mapping[str, tuple[str, ...]], ...]  # names by the file that holds them, relative to the checkpoint
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Path, flaw: Flaw) -> Sent:
        """Divide the tensors of a checkpoint into chunks, without those that the flaw leaves out.

        Raises: HarnessError when it has no tensor that could be left out so; CheckpointDefect when it cannot be read.
        """
        places = {tensor.name: tensor.shard for tensor in read_checkpoint(checkpoint).tensors}
        absent = frozenset(_left_out(tuple(places), flaw))
        sent = [name for name in places if name not in absent]
        half = -(-len(sent) // CHUNKS)
        chunks = [_by_file(sent[begin : begin + half], places) for begin in range(0, len(sent), half or 1)]
        if flaw is Flaw.CHUNK_REFUSED:
            names = tuple(name for chunk in chunks[1:] for names in chunk.values() for name in names)
            chunks[1:] = [{ABSENT_FILE: names}]
        return cls(chunks=tuple(chunks), left_out=tuple(name for name in places if name in absent))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Sends an engine the tensors of the checkpoint that was published where it reads."""

    service: Service
    engine: Engine
    flaw: Flaw
    sent: Sent  # made before the engine is paused: what cannot be sent so leaves it as it is

    def carry_out(self, api: DevApi) -> Changed:
        """Send what is to be sent and ask for the version; after a call that failed only the update is ended."""
        sent = self.sent
        before = _version(api)
        given = _next_version(before)
        calls: list[Reply] = []
        for call in self._steps(api):
            calls.append(call)
            if not call.is_ok:
                break
        calls.append(api.finish_weight_update(given))
        told = {
            "flaw": str(self.flaw),
            "tensors_sent": [sum(len(names) for names in chunk.values()) for chunk in sent.chunks],
            "left_out_count": len(sent.left_out),
            "left_out": list(sent.left_out[:NAMES_MAX]),
            "version_before": before,
            "version_given": given,
            "version_after": _version(api),
        }
        return Changed(calls=tuple(calls), told=told)

    def _steps(self, api: DevApi) -> Iterator[Reply]:
        yield api.init_weight_transfer()
        yield api.start_weight_update()
        if self.flaw is Flaw.REQUEST_BETWEEN:
            self._ask_between()
        for chunk in self.sent.chunks:
            yield api.update_weights(files={file: list(names) for file, names in chunk.items()})

    def _ask_between(self) -> None:
        """Ask a canary as a user who knows nothing of the update would, and record what came of it."""
        ground = self.service.ground
        api = EngineApi(url=self.engine.endpoint, api_key=ground.api_key, limit_s=CALL_LIMIT_S)
        old = new = None
        try:
            seen = ground.goldens.compare(ask(api, SERVED_MODEL_NAME, ground.goldens.old.prompts, rotation=0).rows, 0)
            answer, old, new = str(seen.answer), seen.difference_old, seen.difference_new
        except (OSError, ValueError) as failure:
            answer = f"no answer ({type(failure).__name__}: {failure}"[:211] + ")"
        ground.recorder.event(
            "operator",
            EventKind.CANARY_CHECKED,
            incarnation=self.engine.incarnation,
            answer=answer,
            difference_old=old,
            difference_new=new,
            when="between the start of the update and its first chunk",
            rotation=BETWEEN_ROTATION,
            is_first_request=True,
        )
        self.service.look_after()


def _left_out(names: Sequence[str], flaw: Flaw) -> Sequence[str]:
    """Return the names of the tensors that are never sent.

    Raises: HarnessError when no name is of a layer, or of a part of a fused tensor.
    """
    if flaw is Flaw.NOTHING_SENT:
        return names
    layers = {name: int(found[1]) for name in names if (found := _LAYER.search(name))}
    last = [name for name, layer in layers.items() if layer == max(layers.values())]
    if flaw is Flaw.PART_NOT_SENT:
        last = [name for part in _FUSED_PARTS for name in last if f".{part}.weight" in name][:1]
    elif flaw is not Flaw.LAYER_NOT_SENT:
        return ()
    if not last:
        raise HarnessError(
            f'flaw "{flaw}" leaves out nothing: of {len(names)} tensors none is named as those of Llama layers are'
        )
    return last


def _by_file(names: Sequence[str], places: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    files = sorted({places[name] for name in names})
    return {file: tuple(name for name in names if places[name] == file) for file in files}


def _version(api: DevApi) -> str | None:
    version: Any = api.weight_info().body.get("weight_version")
    return None if version is None else str(version)


def _next_version(before: str | None) -> str:
    """Return a version that the engine does not have: an update after another gets another one."""
    return str(int(before) + 1) if before is not None and before.isdecimal() else "1"
