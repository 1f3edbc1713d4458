"""Watching processes: that they end is always told, how they ended where it can be known."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys

from rollforge.runtime import guard
from rollforge.runtime.process import Watch, start_time

LIMIT_S = 30.0
SLEEP = "import time; time.sleep(600)"


def sleeper(**kwargs: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SLEEP], **kwargs)  # type: ignore[call-overload,no-any-return]


async def test_the_end_of_a_child_is_told_with_its_cause() -> None:
    with sleeper() as child:
        watch = Watch(child.pid, start_time(child.pid))
        gone = watch.gone()
        await asyncio.sleep(0)
        assert not gone.done()
        os.kill(child.pid, signal.SIGTERM)
        assert await asyncio.wait_for(gone, LIMIT_S) == "its process was killed by signal 15 (SIGTERM)"


async def test_the_end_of_a_stranger_is_told_without_a_cause() -> None:
    start = f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    code = f"import subprocess, sys; print({start}.pid)"
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=LIMIT_S).stdout)
    gone = Watch(pid, start_time(pid)).gone()
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(gone, LIMIT_S) is None


async def test_a_watch_that_travelled_does_not_take_a_reused_id_for_its_process() -> None:
    with sleeper() as child:
        started = start_time(child.pid)
        assert started is not None
        same = pickle.loads(pickle.dumps(Watch(child.pid, started)))
        assert not same.gone().done()
        assert pickle.loads(pickle.dumps(same)) is same, "each watch holds a file descriptor"
        same.close()
        assert Watch(child.pid, started - 1).gone().done()
        child.kill()
    assert Watch(child.pid, started).gone().done()


def test_an_ended_process_has_no_start_time() -> None:
    with sleeper() as child:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        assert start_time(child.pid) is None
    assert start_time(child.pid) is None


def test_the_guard_kills_by_mark_and_nothing_else() -> None:
    marks = ["run1/env/", "run1/env2/", "run2/env/"]
    children = [sleeper(env={**os.environ, guard.VARIABLE: mark}, start_new_session=True) for mark in marks]
    try:
        assert guard.kill_marked("run1/env/") == []
        assert children[0].wait(LIMIT_S) == -signal.SIGKILL
        assert children[1].poll() is None
        assert guard.kill_marked("run1") == []
        assert children[1].wait(LIMIT_S) == -signal.SIGKILL
        assert children[2].poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait(LIMIT_S)
