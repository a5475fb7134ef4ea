"""Which engine a run uses: by name, or the best that is there."""

from __future__ import annotations

from collections.abc import Callable

from harness.engine.engine import EngineStarter
from harness.errors import EnvironmentMissing, UsageError
from harness.settings import Settings

Progress = Callable[[str], None]


def starter_for(settings: Settings, *, progress: Progress) -> EngineStarter:
    """Return what starts the engines of a run.

    Raises: EnvironmentMissing when the engine asked for cannot be had here; UsageError when a needed option is absent.
    """
    if settings.engine == "auto" and (settings.image is not None or settings.gpus):
        return _container(settings, progress)  # who names an image or GPUs does not want the reference engine
    if settings.engine == "auto" and settings.python is not None:
        return _process(settings, progress)
    if settings.engine == "auto":
        return _best(settings, progress)
    return STARTERS[settings.engine](settings, progress)


def _container(settings: Settings, progress: Progress) -> EngineStarter:
    from harness.engine.container import ContainerStarter
    from harness.engine.image import ensure_image

    if settings.image is not None:
        return ContainerStarter(settings.image, gpus=_gpus(settings))
    if settings.gpus:
        raise UsageError(
            f'GPUs "{",".join(settings.gpus)}" need an image with a GPU build of vLLM: name it, such as vllm/vllm-openai:v0.32.0'
        )
    return ContainerStarter(ensure_image(settings.vllm_version, progress=progress).name)


def _gpus(settings: Settings) -> tuple[str, ...] | int:
    """Return ids, or how many: `all`, `count=2`.

    Raises: UsageError when the count is no whole number.
    """
    if settings.gpus == ("all",):
        return -1
    if len(settings.gpus) == 1 and settings.gpus[0].startswith("count="):
        count = settings.gpus[0].removeprefix("count=")
        if not count.isdigit() or count == "0":
            raise UsageError(f'gpus "{settings.gpus[0]}": expected ids such as 0,1, "all", or "count=2"')
        return int(count)
    return settings.gpus or 0


def _process(settings: Settings, progress: Progress) -> EngineStarter:
    from harness.engine.process import ProcessStarter

    if settings.python is None:
        raise UsageError(
            "the process engine needs an interpreter that has vLLM: give --python (--rollout-python to pytest, PYTHON= to make)"
        )
    return ProcessStarter(settings.python)


def _reference(settings: Settings, progress: Progress) -> EngineStarter:
    from harness.engine.reference_starter import ReferenceStarter

    return ReferenceStarter()


STARTERS: dict[str, Callable[[Settings, Progress], EngineStarter]] = {
    "container": _container,
    "process": _process,
    "reference": _reference,
}


def _best(settings: Settings, progress: Progress) -> EngineStarter:
    """Return the container engine where its image is already there, else the reference engine, saying why."""
    from harness.engine.container import ContainerStarter
    from harness.engine.image import image_name

    starter = ContainerStarter(image_name(settings.vllm_version))
    try:
        starter.identity()
    except EnvironmentMissing as missing:
        progress(f"using the reference engine, which is not vLLM, because {missing}")
        return _reference(settings, progress)
    return starter
