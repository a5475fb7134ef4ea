"""What a scenario's engines read: laid out, damaged with all its links, and repaired whole, the right way and a wrong one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import faults, models
from harness.checkpoint.manifest import weights_id
from harness.engine.launch import Launch
from harness.ground import LIVE
from harness.publication import Publication

SMALL = {"hidden": 32, "intermediate": 32, "layers": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    cache = tmp_path_factory.mktemp("models")
    return models.tiny_llama(seed=1, **SMALL).build(cache), models.tiny_llama(seed=2, **SMALL).build(cache)


def laid_out(checkpoints: tuple[Path, Path], place: Path, *injected: faults.Fault) -> Publication:
    work = place / "work"
    work.mkdir()
    ground: Any = SimpleNamespace(
        scenario=SimpleNamespace(faults=injected),
        old=checkpoints[0],
        new=checkpoints[1],
        work=work,
        launch=Launch(checkpoint_root=place / "checkpoints", checkpoint_name=LIVE),
    )
    publication = Publication(ground)
    publication.lay_out()
    return publication


@pytest.mark.parametrize(("injected", "is_link"), [((), True), ((faults.overwrite_in_place(),), False)])
def test_the_old_checkpoint_is_live_and_the_undamaged_new_one_replaces_it(
    checkpoints: tuple[Path, Path], tmp_path: Path, injected: tuple[faults.Fault, ...], is_link: bool
) -> None:
    publication = laid_out(checkpoints, tmp_path, *injected)
    assert publication.fault == (injected[0] if injected else None)
    assert publication.live.is_symlink() == is_link, "a wrong way to publish meets a directory"
    assert weights_id(publication.live) == weights_id(checkpoints[0])
    assert weights_id(publication.staged) == weights_id(checkpoints[1])
    assert publication.differing() == ("model.safetensors differs",)

    publication.repair()

    assert publication.live.is_symlink() == is_link
    assert publication.differing() == ()
    assert weights_id(publication.live) == weights_id(checkpoints[1])


def test_links_that_lead_nowhere_are_published_where_they_were(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    publication = laid_out(checkpoints, tmp_path)
    (publication.staged / "inner").mkdir()
    (publication.staged / "inner" / "model.safetensors").symlink_to("../../blobs/absent")
    (publication.staged / "model.safetensors").unlink()

    publication.publish_staged()

    link = publication.live / "inner" / "model.safetensors"
    assert link.is_symlink()
    assert str(link.readlink()) == "../../blobs/absent"
    assert not (publication.live / "model.safetensors").exists()
    assert "inner/model.safetensors" in " ".join(publication.differing())
