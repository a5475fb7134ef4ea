"""What pre-flight says about a checkpoint together with the whole line that an engine is about to be launched with."""

from __future__ import annotations

from pathlib import Path

from harness.engine.engine import EngineIdentity
from harness.engine.launch import Launch
from harness.errors import UsageError
from harness.guards import preflight
from harness.guards.finding import BLOCKING, PreflightFinding
from harness.guards.launch import launch_of
from harness.guards.launch_line import line_of
from harness.guards.releases import newest, release_of

HOST, PORT = "127.0.0.1", 8000  # any will do: they are looked at only where this host is, which is not asked here


def preflight_findings(
    path: Path, launch: Launch, *, engine: str | None, against: Path | None = None, manifest: Path | None = None
) -> tuple[PreflightFinding, ...]:
    """Return everything that is found, all values read, the worst first.

    `engine` is the release (`vllm==0.32.0`), None for the newest known; `against` is the running checkpoint, `manifest`
    the publisher's.
    """
    variables = (f"{name}={value}" for name, value in launch.environment)
    line = (*variables, "vllm", "serve", *launch.arguments(model=str(path), host=HOST, port=PORT))
    release = newest() if engine is None else release_of(engine)
    published = None if manifest is None else preflight.Published(manifest=manifest)
    return preflight.examine(
        path, launch=launch_of(line_of(line), release), against=against, read_tensors=True, published=published
    ).findings


def preflight_refusals(path: Path, launch: Launch, *, engine: EngineIdentity) -> list[dict[str, str]]:
    """Return what stops a rollout to this engine; a mere risk does not."""
    return [
        {"id": f.id, "severity": f.severity, "seen": f.seen, "expected": f.expected, "where": f.where}
        for f in preflight_findings(path.resolve(), launch, engine=release_of_engine(engine))
        if f.severity in BLOCKING
    ]


def release_of_engine(engine: EngineIdentity) -> str | None:
    """Return what pre-flight calls a release; None for an engine that is no vLLM, or a build that is no release."""
    if not engine.name.startswith("vllm"):
        return None
    try:
        return str(release_of(engine.version))
    except UsageError:
        return None
