"""Compiled kernels that another runtime has made, where the new engine looks for its own: a cache kept across an upgrade.

Kernels of a GPU (Triton's, Inductor's), the libraries around them, and what Inductor compiles for a CPU are ELF files, and each
says in its head for which version of its ABI it was made. A cache whose key forgets the runtime finds such a file after the
upgrade. On a CPU the library with which Inductor asks for vector instructions is among them. Source: taxonomy row K03.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from blake3 import blake3

from harness.engine.engine import EngineIdentity
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.compile_cache import filled, require_compiling
from harness.faults.fault import Injected, parameters_of
from harness.faults.proof import prove

MAGIC = b"\x7fELF"
ABI_VERSION_BYTE = 8  # of an ELF file: which version of its platform's ABI it was made for
FOREIGN_ABI_VERSION = 255  # no runtime has got that far


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKernels:
    """Every compiled kernel of the cache says that it was made for another version of the runtime's ABI."""

    name: ClassVar[str] = "foreign_kernels"
    fault_id: ClassVar[str] = "K03"
    abi_version: int

    def __post_init__(self) -> None:
        if not 0 <= self.abi_version <= 255:
            raise ScenarioInvalid(f"foreign_kernels: abi_version={self.abi_version}, expected 0 to 255")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def require(self, identity: EngineIdentity) -> None:
        """Return for engines that compile.

        Raises: EnvironmentMissing.
        """
        require_compiling(identity)

    def spoil(self, cache: Path, *, random: Random) -> tuple[Path, Injected]:
        kernels = [name for name in filled(cache) if _abi_version(cache / name) is not None]
        if not kernels:
            raise FaultNotApplicable(f'no compiled kernel lies in "{cache}": what engines keep there is of other kinds')

        def look() -> dict[str, Any]:
            return {name: {"abi_version": _abi_version(cache / name), "rest": _rest(cache / name)} for name in kernels}

        def is_foreign(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> bool:
            was, now = before[name], after[name]
            is_other = was["abi_version"] != now["abi_version"] == self.abi_version
            return bool(is_other and was["rest"] == now["rest"])

        def change() -> None:
            for name in kernels:
                _restamp(cache / name, self.abi_version)

        proof = prove(
            self,
            change,
            look=look,
            holds=lambda before, after: all(is_foreign(before, after, name) for name in kernels),
            told=lambda before, after: (
                f"{sum(is_foreign(before, after, name) for name in kernels)} of {len(kernels)} compiled kernels are for ABI "
                f"version {self.abi_version} now, and were for another; nothing else in them has changed"
            ),
        )
        return cache, proof


def _abi_version(path: Path) -> int | None:
    """Return for which ABI version a file was made; None for one that is not compiled."""
    with path.open("rb") as file:
        head = file.read(ABI_VERSION_BYTE + 1)
    return head[ABI_VERSION_BYTE] if head[: len(MAGIC)] == MAGIC and len(head) > ABI_VERSION_BYTE else None


def _rest(path: Path) -> str:
    content = path.read_bytes()
    return blake3(content[:ABI_VERSION_BYTE] + content[ABI_VERSION_BYTE + 1 :]).hexdigest()


def _restamp(path: Path, abi_version: int) -> None:
    """Write the file aside and give it the name: whoever has mapped the old one keeps it."""
    content = bytearray(path.read_bytes())
    content[ABI_VERSION_BYTE] = abi_version
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.chmod(path.stat().st_mode & 0o777)
    partial.replace(path)


def foreign_kernels(*, abi_version: int = FOREIGN_ABI_VERSION) -> ForeignKernels:
    """Let every compiled kernel in the cache say that it was made for another runtime's ABI. Source: taxonomy row K03."""
    return ForeignKernels(abi_version=abi_version)
