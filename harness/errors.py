"""Every exception the harness raises, on one page.

A claim that does not hold is a finding, not an exception: exceptions are for the harness itself. The two that end
a pytest (`ClaimsBroken`, `ClaimsUnknown`) are how a verdict reaches a test report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

EXIT_HELD = 0
EXIT_BROKEN = 1
EXIT_UNKNOWN = 2
EXIT_USAGE = 3

# What may be missing, by the names that --require takes; tiers of tests have names there too.
RESOURCES = (
    "container",
    "docker",
    "gpu",
    "host network",
    "image",
    "models",
    "python",
    "root",
    "signing",
    "slow",
    "transformers",
    "vllm",
)


class HarnessError(Exception):
    """Something the harness itself could not do; the command line ends with `exit_code`."""

    exit_code = EXIT_UNKNOWN


class UsageError(HarnessError):
    """A command or option names something that does not exist or cannot be used as asked."""

    exit_code = EXIT_USAGE


class ScenarioInvalid(UsageError):
    """A scenario contradicts itself; raised on construction, before anything starts."""


class FaultNotApplicable(UsageError):
    """A fault cannot be injected into this checkpoint, for example because a tensor of that name is absent."""


class FaultNotProved(HarnessError):
    """A fault could not prove that it happened, so nothing can be concluded from it."""


class EnvironmentMissing(HarnessError):
    """A resource (one of RESOURCES) is absent; the only error that becomes a skip, with its reason."""

    exit_code = EXIT_USAGE

    def __init__(self, resource: str, reason: str) -> None:
        super().__init__(f"{resource} is not available: {reason}")
        self.resource = resource
        self.reason = reason


def required_resources(text: str) -> tuple[str, ...]:
    """Return the names in a list such as `docker,image`.

    Raises: UsageError for one that nothing can lack, which would require nothing.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in RESOURCES:
            raise UsageError(f'nothing is called "{name}" that could be required; known: {", ".join(RESOURCES)}')
    return names


class WaitExpired(HarnessError):
    """A wait ran into its limit."""

    def __init__(self, what: str, *, limit_s: float, tries: int, last_seen: str) -> None:
        super().__init__(f"{what}: not seen within {limit_s:g} s ({tries} tries; last seen: {last_seen})")
        self.what = what
        self.limit_s = limit_s
        self.tries = tries
        self.last_seen = last_seen


class CheckpointDefect(HarnessError):
    """A checkpoint is structurally wrong; `reason` is the name of the first rule broken in file order."""

    exit_code = EXIT_BROKEN

    def __init__(
        self,
        reason: str,
        detail: str,
        *,
        path: Path,
        tensor: str | None = None,
        offset_bytes: int | None = None,
    ) -> None:
        where = f'"{path.name}"'
        if tensor is not None:
            where += f', tensor "{tensor}"'
        if offset_bytes is not None:
            where += f", byte {offset_bytes:,}"
        super().__init__(f"{reason}: {where}: {detail}")
        self.reason = reason
        self.detail = detail
        self.path = path
        self.tensor = tensor
        self.offset_bytes = offset_bytes


class EngineNotReady(HarnessError):
    """An engine did not become ready: it refused, died or ran out of time."""

    def __init__(
        self,
        incarnation: str,
        *,
        reason: str,
        limit_s: float,
        waited_s: float,
        last_probe: str,
        exit_code: int | None,
        log_lines: Sequence[str],
        log_path: Path,
    ) -> None:
        state = "still running" if exit_code is None else f"exit code {exit_code}"
        first = f'; first error in log: "{log_lines[0]}"' if log_lines else "; no error line in log"
        super().__init__(
            f'engine "{incarnation}" is not ready: {reason} after {waited_s:.1f} s (limit {limit_s:g} s), {state}, '
            f"last probe: {last_probe}{first}; log: {log_path}"
        )
        self.incarnation = incarnation
        self.reason = reason
        self.limit_s = limit_s
        self.waited_s = waited_s
        self.last_probe = last_probe
        self.engine_exit_code = exit_code
        self.log_lines = tuple(log_lines)
        self.log_path = log_path


class LoadBroken(HarnessError):
    """The load process died, or returned fewer records than it planned."""


class GoldenUnusable(HarnessError):
    """The known-good answers cannot tell right from wrong, so nothing may be judged with them."""


class LeftOver(HarnessError):
    """Something of a run is still there after the run."""

    def __init__(self, things: Mapping[str, Sequence[str]]) -> None:
        listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in things.items() if names)
        super().__init__(f"left over after the run: {listed}")
        self.things = {kind: tuple(names) for kind, names in things.items() if names}


class ClaimsBroken(AssertionError):
    """At least one claim about a run is broken."""


class ClaimsUnknown(AssertionError):
    """No claim is broken, but at least one could not be decided: the harness could not tell."""
