"""The processes of an engine as a fault meets them: found, signalled, and read from `/proc` of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from harness.clock import poll_until
from harness.engine.engine import Engine, Inspectable
from harness.engine.proc import Proc, find
from harness.errors import FaultNotApplicable, WaitExpired

ACT_LIMIT_S = 10.0


def processes_of(engine: Engine, role: str) -> tuple[Proc, ...]:
    """Return the processes of a role.

    Raises: FaultNotApplicable when this machine cannot see them, or there is none.
    """
    if not isinstance(engine, Inspectable):
        raise FaultNotApplicable(f'the processes of engine "{engine.incarnation}" cannot be looked at')
    found = [proc for pid in engine.processes(role) if (proc := find(pid)) is not None and proc.is_running()]
    if not found:
        raise FaultNotApplicable(f'engine "{engine.incarnation}" has no {role} process that this machine can see')
    return tuple(found)


def send_signal(target: Proc, number: int) -> None:
    """Send a signal to one process.

    Raises: FaultNotApplicable when it has ended, or this user may not.
    """
    try:
        was_there = target.signal(number)
    except PermissionError as error:
        raise FaultNotApplicable(f"process {target.pid} cannot be signalled: {error.strerror}") from error
    if not was_there:
        raise FaultNotApplicable(f"process {target.pid} cannot be signalled: it has ended")


def signal_all(targets: Sequence[Proc], number: int) -> None:
    """Send a signal to every process that this user may signal."""
    for target in targets:
        with suppress(PermissionError):
            target.signal(number)


def give_time(ask: Callable[[], bool], *, what: str, limit_s: float | None = None) -> None:
    """Give what was done time to be seen; the proof says whether it was."""
    limit_s = ACT_LIMIT_S if limit_s is None else limit_s
    with suppress(WaitExpired):
        poll_until(lambda: True if ask() else None, what=what, limit_s=limit_s, every_s=0.01)


def states_of(targets: Sequence[Proc]) -> dict[str, str]:
    """Return the kernel's letter for the state of each, by process id; empty for one that is gone."""
    return {str(target.pid): target.state() for target in targets}


def shown(states: Mapping[str, str]) -> str:
    """Return such states in words."""
    return ", ".join(f'in state "{state}"' if state else "gone" for state in states.values()) or "nowhere"


def listed(targets: Sequence[Proc]) -> str:
    """Return their process ids in words."""
    return ", ".join(str(target.pid) for target in targets)
