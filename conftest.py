"""This repository's own tiers; the fixtures come from the installed plug-in."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

TIERS = ("docker", "gpu", "slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the short spelling of `--rollout-require`, which also names tiers."""
    parser.addoption(
        "--require",
        dest="rollout_require",
        default="",
        help="comma-separated tiers and resources (docker, gpu, slow, ...) that must run: their absence fails",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare what tests may need; the plug-in refuses to require what does not exist."""
    config.addinivalue_line("markers", "docker: needs a Docker engine")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "slow: takes minutes; runs only when required")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Skip a test whose resource is missing, with the reason; fail it where the resource is required."""
    required = item.config.getoption("rollout_require").split(",")
    for tier in TIERS:
        if item.get_closest_marker(tier) is None:
            continue
        missing = _missing(tier, item.config, is_required=tier in required)
        if missing and tier in required:
            pytest.fail(f"{tier} is required, but {missing}", pytrace=False)
        if missing:
            pytest.skip(f"{tier}: {missing}")
    return (yield from _decide_absence(required))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Treat what a test itself finds missing like what its fixtures do."""
    return (yield from _decide_absence(item.config.getoption("rollout_require").split(",")))


def _decide_absence(required: list[str]) -> Iterator[None]:
    """Skip for a resource that is found missing only now, such as an image that cannot be built, or fail if required."""
    from harness.errors import EnvironmentMissing

    try:
        return (yield)
    except EnvironmentMissing as missing:
        if missing.resource in required or (missing.resource == "image" and "docker" in required):
            pytest.fail(f"{missing} (required)", pytrace=False)
        pytest.skip(str(missing))


def _missing(tier: str, config: pytest.Config, *, is_required: bool) -> str:
    if tier == "slow":
        return "" if is_required else "it takes minutes; run it with --require slow"
    key = _KEYS[tier]
    if key not in config.stash:
        config.stash[key] = _docker_missing() if tier == "docker" else _gpu_missing()
    return config.stash[key]


_KEYS = {"docker": pytest.StashKey[str](), "gpu": pytest.StashKey[str]()}


def _docker_missing() -> str:
    from harness.engine.image import connect
    from harness.errors import EnvironmentMissing

    try:
        connect().close()
    except EnvironmentMissing as missing:
        return str(missing)
    return ""


def _gpu_missing() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no NVIDIA driver is installed (nvidia-smi not found)"
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:  # of a broken driver it may hang
        return f"nvidia-smi does not answer: {error}"
    return "" if done.returncode == 0 else f"nvidia-smi failed: {done.stderr.strip() or done.stdout.strip()}"
