"""A draft model beside the checkpoint that proposes tokens of another vocabulary than its target's. Source: taxonomy row U08."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from harness.checkpoint.tiny import TinyShape, write_tiny
from harness.engine.engine import EngineIdentity
from harness.engine.launch import Launch
from harness.errors import EnvironmentMissing, FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import CONFIG_NAME, read_json
from harness.faults.fault import Injected, parameters_of

DRAFT_NAME = "draft"
PROPOSED_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedDraft:
    """An engine that speculates with a draft model whose vocabulary is larger than its target's."""

    name: ClassVar[str] = "mismatched_draft"
    fault_id: ClassVar[str] = "U08"
    surplus_tokens: int

    def __post_init__(self) -> None:
        if self.surplus_tokens < 0:
            raise ScenarioInvalid(f"mismatched_draft: surplus_tokens={self.surplus_tokens}, expected at least 0")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def require(self, identity: EngineIdentity) -> None:
        """Return for engines that can speculate.

        Raises: EnvironmentMissing.
        """
        if identity.kind == "reference":
            raise EnvironmentMissing("vllm", "the reference engine computes every token itself: it has no draft model")

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        target = _vocabulary(launch.checkpoint_root / launch.checkpoint_name)
        draft = launch.checkpoint_root / DRAFT_NAME  # where engines can read it, and what goes with the scenario
        if not draft.exists():
            draft.mkdir()
            write_tiny(_shape(target + self.surplus_tokens), draft)
        altered = replace(launch, draft_name=DRAFT_NAME, draft_tokens=PROPOSED_TOKENS)
        before, after = (_speculation(each) for each in (launch, altered))
        seen = _vocabulary(draft)
        return altered, Injected.of(
            self,
            proved=before is None and after is not None and after == f"ROOT/{DRAFT_NAME}" and seen != target,
            because=f"the draft model was {before or 'none'}, is {after or 'none'}; it has {seen} tokens, its target {target}",
            before={"draft": before, "vocabulary": target},
            after={"draft": after, "vocabulary": seen},
        )


def _shape(vocabulary: int) -> TinyShape:
    """Return a model as small as they get: what it proposes is of no interest."""
    return TinyShape(
        seed=7,
        shards=1,
        hidden=64,
        layers=1,
        heads=2,
        kv_heads=1,
        intermediate=128,
        vocabulary=vocabulary,
        dtype="BF16",
        tied=False,
    )


def _vocabulary(path: Path) -> int:
    value = read_json(path / CONFIG_NAME).get("vocab_size")
    if not isinstance(value, int) or value < 1:
        raise FaultNotApplicable(f'"{path / CONFIG_NAME}" has no usable "vocab_size": {json.dumps(value)[:80]}')
    return value


def _speculation(launch: Launch) -> str | None:
    """Return the draft model of the line, None when there is none."""
    line = launch.arguments(model="ROOT/MODEL", host="HOST", port=0)
    if "--speculative-config" not in line:
        return None
    return str(json.loads(line[line.index("--speculative-config") + 1])["model"])


def mismatched_draft(*, surplus_tokens: int = 64) -> MismatchedDraft:
    """Launch with a small draft model whose vocabulary has so many tokens more than its target's. Source: taxonomy row U08."""
    return MismatchedDraft(surplus_tokens=surplus_tokens)
