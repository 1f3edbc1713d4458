"""How a run ends: the controller is killed, interrupted, or reports a dead role. In no case does a process stay."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from run_command import alive

import rollforge

ROLES = Path(__file__).parent.parent / "unit" / "runtime"
SOURCE = Path(rollforge.__file__).parent.parent
LIMIT_S = 60.0
SOON_S = 5.0

CONTROLLER = """
import asyncio, json, os, sys
from rollforge.runtime import RoleDied, RoleSpec, Runtime

async def main():
    async with Runtime() as runtime:
        first, second, _ = await asyncio.gather(
            runtime.spawn(RoleSpec("first", "runtime_roles:Counter")),
            runtime.spawn(RoleSpec("second", "runtime_roles:Counter")),
            runtime.spawn(RoleSpec("closing", "runtime_roles:Closing", {"path": "closed"})),
        )
        child = await first.start_child()
        with open("pids.part", "w") as out:
            json.dump({**runtime.pids(), "child": child}, out)
        os.rename("pids.part", "pids.json")
        BODY

try:
    asyncio.run(main())
except RoleDied as died:
    print(died, flush=True)
    sys.exit(5)
"""


@contextmanager
def controller(
    folder: Path, body: str = "await runtime.supervise()"
) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A controller in a process (and a process group) of its own, working in `folder`."""
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER.replace("BODY", body)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROLES)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, pids_of(process, folder / "pids.json")
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def pids_of(process: subprocess.Popen[str], path: Path) -> dict[str, int]:
    """What the controller writes once all roles are up."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the roles do not come up"
        time.sleep(0.02)
    pids: dict[str, int] = json.loads(path.read_text())
    assert all(alive(pid) for pid in pids.values())
    return pids


def scratch_of(pid: int) -> Path:
    """The temporary folder in which a role's log lies when no folder was given."""
    folder = Path(os.readlink(f"/proc/{pid}/fd/2")).parent
    assert folder.name.startswith("rollforge-logs-")
    return folder


def assert_tree_gone(tree: list[psutil.Process], pids: dict[str, int]) -> None:
    everyone = {process.pid for process in tree} | set(pids.values())
    deadline = time.monotonic() + SOON_S
    while left := [pid for pid in everyone if alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {left} of {pids}"
        time.sleep(0.02)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_controller_takes_all_processes_with_it(tmp_path: Path, frozen: bool) -> None:
    with controller(tmp_path) as (process, pids):
        tree = psutil.Process(process.pid).children(recursive=True)
        if frozen:
            for pid in (pids["first"], pids["child"]):
                os.kill(pid, signal.SIGSTOP)
        scratch = scratch_of(pids["second"])
        os.killpg(process.pid, signal.SIGKILL)
        assert_tree_gone(tree, pids)
        assert not scratch.exists()


@pytest.mark.parametrize("victim", ["first", "second", "closing"])
def test_a_killed_role_ends_the_run_with_its_name_and_a_code(tmp_path: Path, victim: str) -> None:
    with controller(tmp_path) as (process, pids):
        tree = psutil.Process(process.pid).children(recursive=True)
        os.kill(pids[victim], signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT_S)
        assert re.match(rf"role '{victim}' died: its process (was killed by signal 9|{pids[victim]} is gone)", out)
        assert (process.returncode, err) == (5, "")
        assert_tree_gone(tree, pids)


def test_ctrl_c_reaches_the_controller_only_and_roles_are_closed(tmp_path: Path) -> None:
    with controller(tmp_path) as (process, pids):
        tree = psutil.Process(process.pid).children(recursive=True)
        for pid in pids.values():
            if pid != pids["child"]:
                os.kill(pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == -signal.SIGINT
        assert (tmp_path / "closed").read_text() == "closed\n"
        assert_tree_gone(tree, pids)


def test_a_clean_run_prints_nothing_of_its_own_and_never_loads_torch(tmp_path: Path) -> None:
    with controller(tmp_path, "print(await second.read(), 'torch' in sys.modules)") as (process, pids):
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out, err) == (0, "0 False\n", "")
        assert_tree_gone([], pids)


def test_p28_the_roles_of_two_runs_work_at_once(tmp_path: Path) -> None:
    """Nothing is fixed in code that a second run would find in use."""
    with controller(tmp_path / "one", "await asyncio.to_thread(input); print(await second.add(7))") as (one, first):
        with controller(tmp_path / "two", "print(await second.add(9))") as (two, second):
            out, _ = two.communicate(timeout=LIMIT_S)
            assert (two.returncode, out) == (0, "9\n")
            assert_tree_gone([], second)
        assert all(alive(pid) for pid in first.values())
        out, _ = one.communicate("\n", timeout=LIMIT_S)
        assert (one.returncode, out) == (0, "7\n")
        assert_tree_gone([], first)
