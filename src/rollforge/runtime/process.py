"""Processes of this host, seen from outside: when one started, when it ended and how.

Knows: the kernel's own words (/proc, process file descriptors). Does not know: roles, Monarch.
Monarch notices a death as well, mostly within half a second; but when the process dies while Monarch is just asking
after it, only after 30 s. The kernel tells at once and always.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process (field 22 of its stat); None for one that has ended.

    Together with the process id it names a process for good, while the id alone may be used again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class Watch:
    """Watches one process from any event loop of this host; travels between processes."""

    def __init__(self, pid: int, started: int | None) -> None:
        self.pid = pid
        self._started = started
        self._gone: asyncio.Future[str | None] | None = None
        self._file: int | None = None

    def __reduce__(self) -> tuple[Callable[[int, int | None], Watch], tuple[int, int | None]]:
        return _arrived, (self.pid, self._started)

    def gone(self) -> asyncio.Future[str | None]:
        """Done when the process has ended, with the cause in words, or None where it cannot be told from here."""
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            self._begin(self._gone)
        return self._gone

    def _begin(self, gone: asyncio.Future[str | None]) -> None:
        try:
            self._file = os.pidfd_open(self.pid)
        except ProcessLookupError:
            gone.set_result(None)
            return
        if start_time(self.pid) == self._started:
            gone.get_loop().add_reader(self._file, self._ended, self._file, gone)
        else:
            self._ended(self._file, gone)

    def _ended(self, file: int, gone: asyncio.Future[str | None]) -> None:
        if not gone.done():
            gone.set_result(_cause(file))
        self.close()

    def close(self) -> None:
        """Stop watching."""
        if self._file is not None and self._gone is not None:
            self._gone.get_loop().remove_reader(self._file)
            os.close(self._file)
            self._file = None


@functools.cache
def _arrived(pid: int, started: int | None) -> Watch:
    """One watch per process, however often a handle with it is sent here: each holds a file descriptor."""
    return Watch(pid, started)


def _cause(file: int) -> str | None:
    """How a child of this process ended, unless somebody has asked before; None for processes that are not children."""
    try:
        status = os.waitid(os.P_PIDFD, file, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return exited(status.si_status) if status.si_code == os.CLD_EXITED else killed(status.si_status)


def exited(code: int) -> str:
    return f"its process exited with code {code}"


def killed(number: int) -> str:
    names = {item.value: item.name for item in signal.Signals}
    return f"its process was killed by signal {number} ({names.get(number, 'unknown')})"
