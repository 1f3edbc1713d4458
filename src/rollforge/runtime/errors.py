"""What can go wrong with a call to a role, and how a role's own exception travels to its caller.

Knows: the three faults of the runtime and the wire form of an exception.
Does not know: Monarch, processes, what any role does.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from pathlib import Path

import cloudpickle

from rollforge.config import RunFailed

_TAIL_LINES = 40


class RoleError(Exception):
    """A role's method failed with an exception that cannot be rebuilt in the caller's process. The role lives on."""

    def __init__(self, role: str, method: str, trace: str) -> None:
        super().__init__(role, method, trace)
        self.role, self.method, self.trace = role, method, trace

    def __str__(self) -> str:
        return f"role {self.role!r} failed in {self.method}():\n{self.trace}"


class RoleDied(RunFailed):
    """A role's process is gone, or did not come up; every pending and later call to it raises this.

    `tail` is the end of the role's log, or the traceback of what its constructor raised. `log` is where that log stays;
    set by whoever knows that it does.
    """

    def __init__(self, role: str, cause: str, tail: str = "") -> None:
        super().__init__(role, cause, tail)
        self.role, self.cause, self.tail = role, cause, tail
        self.log = ""

    def __str__(self) -> str:
        memory = " That is also what ends a process when memory runs out." if "SIGKILL" in self.cause else ""
        log = f" Its log is {self.log}." if self.log else ""
        last = f"\nThe last it said:\n{self.tail}" if self.tail else ""
        return (
            f"role {self.role!r} died: {self.cause}.{memory}{log} Nothing takes its place; remove the cause and start "
            f"again.{last}"
        )


class RoleTimeout(RunFailed):
    """A call to a role took longer than its limit; the call was cancelled in the role."""

    def __init__(self, role: str, method: str, seconds: float) -> None:
        super().__init__(role, method, seconds)
        self.role, self.method, self.seconds = role, method, seconds

    def __str__(self) -> str:
        return f"role {self.role!r} did not answer {self.method}() within {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception on its way to the caller, pickled by itself: one that cannot be rebuilt spoils nothing else."""

    role: str
    method: str
    trace: str
    pickled: bytes | None

    def rebuild(self) -> BaseException:
        """The exception with the remote traceback as a note, or a RoleError where it cannot be rebuilt."""
        if self.pickled is not None:
            try:
                error = cloudpickle.loads(self.pickled)
            except Exception as why:
                return RoleError(self.role, self.method, f"{self.trace}\n(cannot be rebuilt here: {why!r})")
            if isinstance(error, Exception):
                return error
        return RoleError(self.role, self.method, self.trace)


def log_tail(log: Path | str) -> str:
    """The last lines of a role's log file; empty when there is none."""
    try:
        text = Path(log).read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


def capture(role: str, method: str, error: BaseException) -> Raised:
    """Make `error` ready to travel. SystemExit and its like stay behind as text: they must not end the caller."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    if not isinstance(error, Exception):
        return Raised(role, method, trace, None)
    error.add_note(f"Raised in role {role!r}, {method}(), process {os.getpid()}:\n{trace}")
    try:
        pickled = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception as why:
        return Raised(role, method, f"{trace}\n(cannot be pickled: {why!r})", None)
    return Raised(role, method, trace, pickled)
