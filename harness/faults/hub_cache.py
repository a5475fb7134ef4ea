"""A hub cache that is not whole: a reference to a snapshot without weights, or a blob that is still incomplete.

Source: taxonomy row D21. The engine is started by model name, offline, with the damaged directory as its hub cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.fault import Injected, parameters_of
from harness.faults.target import Target

MODEL_NAME = "rollout/checkpoint"
REPOSITORY = "models--" + MODEL_NAME.replace("/", "--")
STATES = ("snapshot_without_weights", "incomplete_blob")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenHubCache:
    """The checkpoint as a hub cache, of which the part that the engine resolves is not whole."""

    name: ClassVar[str] = "broken_hub_cache"
    fault_id: ClassVar[str] = "D21"
    state: str

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ScenarioInvalid(f'broken_hub_cache: state "{self.state}" is unknown; known: {", ".join(STATES)}')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        weights = own.weight_files()
        if not weights:
            raise FaultNotApplicable(f'no safetensors file in "{target}"')
        names = sorted(file.name for file in target.iterdir() if file.is_file())
        whole, resolved = random.randbytes(20).hex(), random.randbytes(20).hex()
        for name in names:
            blob = random.randbytes(20).hex()
            is_late = self.state == "incomplete_blob" and name == weights[-1]
            own.rename(name, f"{REPOSITORY}/blobs/{blob}{'.incomplete' if is_late else ''}")
            if not is_late:
                own.link(f"{REPOSITORY}/snapshots/{whole}/{name}", f"../../blobs/{blob}")
            if name not in weights:
                own.link(f"{REPOSITORY}/snapshots/{resolved}/{name}", f"../../blobs/{blob}")
        moved = self.state == "snapshot_without_weights"
        own.write(f"{REPOSITORY}/refs/main", (resolved if moved else whole).encode())
        seen = _resolved(target)
        absent = [name for name in weights if name not in seen.get("files", ())]
        incomplete = [file.name for file in target.glob(f"{REPOSITORY}/blobs/*.incomplete")]
        small = [name for name in names if name not in weights and name in seen.get("files", ())]
        proved = bool(small) and absent == (list(weights) if moved else [weights[-1]]) and bool(incomplete) != moved
        return Injected.of(
            self,
            proved=proved,
            because=f'"{MODEL_NAME}" resolves to snapshot {seen.get("revision", "none")[:12]}, which lacks '
            f"{len(absent)} of {len(weights)} weight files; {len(incomplete)} blobs are incomplete",
            before={"files": names},
            after={**seen, "absent": absent, "incomplete": len(incomplete)},
        )


def _resolved(cache: Path) -> dict[str, Any]:
    """Follow the reference as a hub client does: revision, and the files whose links lead somewhere."""
    try:
        revision = (cache / REPOSITORY / "refs" / "main").read_text(encoding="utf-8")
        snapshot = cache / REPOSITORY / "snapshots" / revision
        files = sorted(link.name for link in snapshot.iterdir() if link.is_file())
    except OSError:
        return {}
    return {"revision": revision, "files": files}


def broken_hub_cache(*, state: str = "snapshot_without_weights") -> BrokenHubCache:
    """Turn the checkpoint into the hub cache of "rollout/checkpoint" that is not whole.

    "snapshot_without_weights": the reference has moved to a snapshot whose weights never came, an older one is whole;
    "incomplete_blob": the last weight file is still being downloaded. Source: taxonomy row D21.
    """
    return BrokenHubCache(state=state)
