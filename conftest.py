"""This repository's own tiers; the fixtures come from the installed plug-in."""

from __future__ import annotations

import shutil
import subprocess

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
    """Declare what tests may need."""
    config.addinivalue_line("markers", "docker: needs a Docker engine")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "slow: takes minutes; runs only when required")
    config.addinivalue_line("markers", "core: one variant per fault family")


def pytest_runtest_setup(item: pytest.Item) -> None:
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
    done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return "" if done.returncode == 0 else f"nvidia-smi failed: {done.stderr.strip() or done.stdout.strip()}"
