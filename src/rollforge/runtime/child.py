"""The first lines of a role's process, before Monarch starts in it.

Knows: where the process's output goes, and that the terminal's Ctrl-C is not for it.
Does not know: which role it will host.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys

# Run by `python -c` with the role's name, its log file and the controller's import path: what the controller can
# import, its roles can, while the environment (PYTHONPATH) stays as it was for any program that a role starts.
CODE = "import sys; sys.path[:] = sys.argv.pop().split(':'); from rollforge.runtime.child import main; main()"


def arguments(role: str, log: str) -> list[str]:
    """The interpreter's arguments for a role's process."""
    return ["-c", CODE, role, log, ":".join(sys.path)]


def main() -> None:
    """Set the process up, then hand it to Monarch until the role ends."""
    log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(all_threads=False)
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
