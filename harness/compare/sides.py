"""The two sides of a comparison, and the second start of the old one: what is started, and what decides its speed."""

from __future__ import annotations

import hashlib
import shlex
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from harness.adapted import SMOLLM2_FINE_TUNE_SEED
from harness.checkpoint.manifest import weights_id
from harness.checkpoint.models import default_cache, directory, smollm2, tiny_llama
from harness.compare.options import Options
from harness.engine.choose import starter_for
from harness.engine.engine import EngineIdentity, EngineStarter
from harness.engine.launch import Launch
from harness.narrator import Progress
from harness.run import Run
from harness.settings import Settings

OLD, NEW, NULL = "old", "new", "null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One arm as it is started."""

    name: str
    starter: EngineStarter
    identity: EngineIdentity
    launch: Launch
    weights: str
    checkpoint: Path

    def key(self, *, driver: str, schedule: str) -> dict[str, str]:
        """Return what decides how fast it is; values of its environment may be secrets and are only digested."""
        launch = self.launch
        plain = replace(launch, environment=()).flags()
        environment = [
            f"{name}={hashlib.sha256(value.encode()).hexdigest()[:12]}" for name, value in launch.environment
        ]
        return {
            "engine": self.identity.label,
            "build": self.identity.build,
            "model": self.weights,
            "flags": shlex.join([*plain, *environment]),
            "hardware": self.identity.hardware,
            "driver": driver,
            "load": schedule,
        }


def make_sides(run: Run, options: Options, stack: ExitStack, *, progress: Progress) -> dict[str, Side]:
    """Build the checkpoints and say how each side is started; a starter of the new side's own is closed by `stack`.

    Raises: EnvironmentMissing; UsageError for settings that cannot be used together.
    """
    settings = run.settings
    old, new = _checkpoints(settings, same=options.same)
    base = Launch(
        checkpoint_root=old.parent,
        checkpoint_name=old.name,
        max_model_len=settings.max_model_len,
        extra_arguments=settings.engine_arguments,
        environment=options.environment,
    )
    launch = replace(
        base,
        checkpoint_root=new.parent,
        checkpoint_name=new.name,
        extra_arguments=(*base.extra_arguments, *options.new_arguments),
        environment=(*options.environment, *options.new_environment),
    )
    starter = _new_starter(run, options, stack, progress=progress)
    of_old = Side(
        name=OLD,
        starter=run.starter,
        identity=run.identity,
        launch=base,
        weights=weights_id(old),
        checkpoint=old,
    )
    of_new = Side(
        name=NEW,
        starter=starter,
        identity=starter.identity(),
        launch=launch,
        weights=weights_id(new),
        checkpoint=new,
    )
    sides = {OLD: of_old, NEW: of_new}
    if options.null_every:
        sides[NULL] = replace(of_old, name=NULL)
    return sides


def _checkpoints(settings: Settings, *, same: bool) -> tuple[Path, Path]:
    if settings.old is not None and settings.new is not None:
        sources = directory(settings.old), directory(settings.new)
    elif settings.model == "smollm2":
        sources = smollm2(), smollm2(seed=SMOLLM2_FINE_TUNE_SEED)
    else:
        sources = tiny_llama(seed=1), tiny_llama(seed=2)
    old = sources[0].build(default_cache())
    return old, old if same else sources[1].build(default_cache())


def _new_starter(run: Run, options: Options, stack: ExitStack, *, progress: Progress) -> EngineStarter:
    """Return what starts the new side: the run's own starter, unless another image or interpreter is asked for."""
    if options.new_image is None and options.new_python is None:
        return run.starter
    changed = replace(
        run.settings,
        engine="container" if options.new_image is not None else "process",
        image=options.new_image,
        python=options.new_python,
    )
    starter = starter_for(changed, progress=progress)
    stack.callback(starter.close)
    starter.open(replace(run.site, work_directory=run.work / "engines-new"))
    return starter
