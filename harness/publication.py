"""The checkpoints of a scenario on disk: what engines read, the copy that is damaged, and how one becomes the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.copy import private_copy
from harness.checkpoint.difference import differing_files
from harness.faults.fault import PublishFault
from harness.ground import LIVE, Ground
from harness.guards import publish
from harness.guards.versions import MANIFEST, READY


@dataclass(frozen=True, slots=True)
class Publication:
    """What is published where the engines of a scenario read."""

    ground: Ground

    @property
    def root(self) -> Path:
        """Return the directory that is mounted into engines."""
        return self.ground.launch.checkpoint_root

    @property
    def live(self) -> Path:
        """Return what engines are started on."""
        return self.root / LIVE

    @property
    def staged(self) -> Path:
        """Return the private, damaged copy of the new checkpoint."""
        return self.ground.work / "staged"

    @property
    def fault(self) -> PublishFault | None:
        """Return the wrong way in which the new checkpoint is published; None when it is published as it should be."""
        return next((fault for fault in self.ground.scenario.faults if isinstance(fault, PublishFault)), None)

    def lay_out(self) -> None:
        """Put the old checkpoint where the engine reads it, and stage a private copy of the new one."""
        self.root.mkdir(parents=True, exist_ok=True)
        if self.fault is None:
            publish.publish(self.ground.old, self.root, name=LIVE)
        else:  # a wrong way meets a directory, as whoever goes it has one
            private_copy(self.ground.old, self.live)
        private_copy(self.ground.new, self.staged)

    def publish_staged(self) -> None:
        """Publish the damaged copy; links that lead nowhere, which no publish copies, are then put where they were."""
        links = [path for path in self.staged.rglob("*") if path.is_symlink() and not path.exists()]
        dangling = {path.relative_to(self.staged): path.readlink() for path in links}
        for path in links:
            path.unlink()
        publish.publish(self.staged, self.root, name=LIVE)
        for name, target in dangling.items():
            (self.live / name).symlink_to(target)

    def repair(self) -> None:
        """Publish the undamaged new checkpoint, whole."""
        if self.fault is None:
            publish.publish(self.ground.new, self.root, name=LIVE)
        else:
            repaired = self.ground.work / "repaired"
            private_copy(self.ground.new, repaired)
            publish.exchange(repaired, self.live)

    def differing(self) -> tuple[str, ...]:
        """Say of each file that engines read in what it is not as in the undamaged new checkpoint, as `differing_files` does."""
        return differing_files(self.live.resolve(), self.ground.new, leave_out=(READY, MANIFEST))
