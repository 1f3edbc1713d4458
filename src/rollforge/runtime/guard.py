"""Ends what a run leaves behind.

Knows: every role's process, and whatever a role starts, carries the run's mark in its environment; one small process
(this file, run by itself) outlives the controller, however that ended, and kills what still carries the mark.
Does not know: roles, Monarch. Needs nothing but the standard library, since it runs with no package in reach.
The kernel already ends the roles themselves with the controller (Monarch asks it to); their children need the guard.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "ROLLFORGE_PROCESS"
_SWEEP_S = 1.0


def marked(prefix: str) -> list[int]:
    """The ids of all living processes whose mark starts with `prefix`, without this one."""
    wanted = f"\0{VARIABLE}={prefix}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue  # ended meanwhile, or another user's: not ours
        if wanted in b"\0" + environment:  # a zombie's environment reads as empty
            found.append(int(entry.name))
    return found


def kill_marked(prefix: str) -> list[int]:
    """SIGKILL every process whose mark starts with `prefix`, until none is left (at most 1 s). Returns those left."""
    deadline = time.monotonic() + _SWEEP_S
    while (left := marked(prefix)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended meanwhile
        time.sleep(0.01)
    return left


def start(prefix: str, scratch: Path) -> subprocess.Popen[bytes]:
    """Start this process's guard, unmarked and in a session of its own: what ends the controller must not reach it.

    When the controller has ended, `scratch` is removed, too.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), prefix, str(scratch)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
    )


def main() -> None:
    """Wait for the controller to end, then sweep: for a full second, as a role may be just starting."""
    controller, prefix, scratch = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        watched = os.pidfd_open(controller)
    except ProcessLookupError:
        watched = None
    if watched is not None and os.getppid() == controller:
        select.select([watched], [], [])
    end = time.monotonic() + _SWEEP_S
    while time.monotonic() < end:
        kill_marked(prefix)
        time.sleep(0.05)
    if scratch.is_dir():
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
