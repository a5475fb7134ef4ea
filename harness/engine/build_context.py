"""Hand the host's package settings to an image build through a temporary build context.

Index addresses, certificates and wheels differ from host to host and may hold credentials: they go into the context's
`host/` directory, which only the build's first stages see, and never into the repository or the finished image.
"""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from harness.errors import HarnessError

# PyPI's torch for Linux brings several GB of CUDA; the CPU builds are only here.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SYSTEM_CA_BUNDLES = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))

# Docker hands these to every step of a build, and keeps them out of the image and its history.
PROXY_VARIABLES = tuple(
    spelt
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for spelt in (name, name.lower())
)

_PASSED_ON = ("index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """What a build in a container needs to reach the same packages as its host."""

    pip: Mapping[str, str]
    ca_bundle: Path | None
    apt_mirror: str  # empty: the image's and debootstrap's own
    proxies: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a password

    @classmethod
    def read(cls) -> HostSettings:
        """Read pip's settings, the certificate bundle, apt's mirror and the proxies of this host."""
        pip = _pip_settings()
        proxies = {name: os.environ[name] for name in PROXY_VARIABLES if os.environ.get(name)}
        return cls(pip=pip, ca_bundle=_ca_bundle(pip, os.environ), apt_mirror=_apt_mirror(), proxies=proxies)


def assemble(directory: Path, *, dockerfiles: Iterable[Path], settings: HostSettings) -> None:
    """Fill `directory` with a build context: the Docker files and, under `host/`, the host's settings.

    Raises: HarnessError when the certificate bundle or a constraint file cannot be read.
    """
    wheels = directory / "host" / "wheels"
    wheels.mkdir(parents=True)
    try:
        for file in dockerfiles:
            shutil.copy(file, directory / file.name)
        (directory / "host" / "ca.pem").write_bytes(settings.ca_bundle.read_bytes() if settings.ca_bundle else b"")
        constraints = [Path(name) for name in settings.pip.get("constraint", "").split() if "://" not in name]
        text = "\n".join(path.read_text(encoding="utf-8") for path in constraints)
    except OSError as error:
        raise HarnessError(f"the image's build context cannot be assembled: {error}") from error
    (directory / "host" / "constraints.txt").write_text(text + "\n", encoding="utf-8")
    local_wheels = torch_wheels(settings.pip)
    for wheel in local_wheels:
        try:
            os.link(wheel, wheels / wheel.name)
        except OSError:  # another file system
            shutil.copy(wheel, wheels / wheel.name)
    (directory / "host" / "pip.conf").write_text(
        pip_configuration(settings.pip, has_torch_wheel=bool(local_wheels)), encoding="utf-8"
    )


def pip_configuration(settings: Mapping[str, str], *, has_torch_wheel: bool) -> str:
    """Return the `pip.conf` for the build: what a container can reach, nothing that lies on the host's disk."""
    lines = [f"{name} = {settings[name]}" for name in _PASSED_ON if settings.get(name)]
    indexes = _reachable(settings.get("extra-index-url", ""))
    if not has_torch_wheel and TORCH_CPU_INDEX not in (*indexes, settings.get("index-url")):
        indexes.append(TORCH_CPU_INDEX)
    for name, values in (
        ("extra-index-url", indexes),
        ("find-links", _reachable(settings.get("find-links", ""))),
        ("constraint", ["/host/constraints.txt", *_reachable(settings.get("constraint", ""))]),
    ):
        if values:
            lines.append("\n    ".join([f"{name} =", *values]))
    return "\n".join(["[global]", *lines, ""])


def torch_wheels(settings: Mapping[str, str]) -> list[Path]:
    """Return the torch wheels for this machine in the local directories that pip is told to look into."""
    found: dict[str, Path] = {}
    for place in settings.get("find-links", "").split():
        directory = Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place)
        if "://" in str(place) and not place.startswith("file:"):
            continue
        for wheel in sorted(directory.glob(f"torch-*linux*_{platform.machine()}.whl")):
            found.setdefault(wheel.name, wheel)
    return list(found.values())


def parse_pip_settings(listing: str) -> dict[str, str]:
    """Read the output of `pip config list`; the environment beats the `install` section, which beats `global`."""
    ranks = {"global": 0, "install": 1, ":env:": 2}
    best: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, _, quoted = line.partition("=")
        section, _, name = key.strip().rpartition(".")
        if section not in ranks:
            continue
        try:
            value = ast.literal_eval(quoted.strip())
        except (ValueError, SyntaxError):
            continue
        if name not in best or ranks[section] > best[name][0]:
            best[name] = (ranks[section], str(value))
    return {name: value for name, (_, value) in best.items()}


def debian_mirror(index_targets: str) -> str | None:
    """Return the first Debian archive in the lines `URI` that apt lists, or None."""
    for line in index_targets.splitlines():
        uri = line.strip().rstrip("/")
        if uri.startswith(("http://", "https://")) and uri.endswith("/debian"):
            return uri
    return None


def _reachable(values: str) -> list[str]:
    return [value for value in values.split() if value.startswith(("http://", "https://"))]


def _pip_settings() -> dict[str, str]:
    for command in ([sys.executable, "-m", "pip"], ["pip3"]):
        listing = _output([*command, "config", "list"])
        if listing is not None:
            return parse_pip_settings(listing)
    # No pip here (an environment made by another installer): its variables still mean something.
    prefix = "PIP_"
    return {k[len(prefix) :].lower().replace("_", "-"): v for k, v in os.environ.items() if k.startswith(prefix)}


def _ca_bundle(pip: Mapping[str, str], environment: Mapping[str, str]) -> Path | None:
    named = (pip.get("cert"), environment.get("SSL_CERT_FILE"), environment.get("REQUESTS_CA_BUNDLE"))
    for path in (*(Path(name) for name in named if name), *SYSTEM_CA_BUNDLES):
        if path.is_file():
            return path
    return None


def _apt_mirror() -> str:
    listing = _output(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"])
    return debian_mirror(listing or "") or ""


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
