"""Runs the `rollforge` command in a process of its own, and finds out what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

import rollforge

SOURCE = Path(rollforge.__file__).parent.parent
LIMIT_S = 100.0

TINY = ("--model", "tiny", "--threads", "1")
SMALL = ("--loop.groups-per-step", "4", "--rollout.group-size", "4")
SMALL_SUMS = (*TINY, *SMALL, "--held-out-prompts", "8")
SMALL_BLACKJACK = (*TINY, *SMALL, "--eval.hands", "8", "--eval.examples", "1", "--env.max-sessions", "8")
SYNCHRONOUS = ("--buffer.max-staleness", "0")

Process = subprocess.Popen[str]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"}


def rollforge_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "rollforge.cli.main", *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@contextmanager
def started(*arguments: str) -> Iterator[Process]:
    """A command that is running, in a session of its own as under a terminal."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rollforge.cli.main", *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def wait_until(condition: Callable[[], bool], limit_s: float, what: str, process: Process | None = None) -> None:
    """Polls a condition; fails when `limit_s` seconds have passed, or the process has ended without it."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended before {what}: {process.communicate()}")
        assert time.monotonic() < deadline, f"after {limit_s:g} s still not: {what}"
        time.sleep(0.02)


def steps_done(folder: Path) -> int:
    return len(lines(folder / "metrics.jsonl"))


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file, which may be growing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def processes(process: Process) -> dict[str, psutil.Process]:
    """The processes of a run by role; the environment server under its module's name."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            arguments = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        role = next((a for a, b in pairwise(arguments) if b.endswith(f"/{a}.log")), None)
        if role is None and "-m" in arguments:
            role = arguments[arguments.index("-m") + 1]
        found[role or " ".join(arguments)] = child
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory(pid: int) -> list[Path]:
    """The weight folders of a run, by the process id of its controller."""
    return list(Path("/dev/shm").glob(f"rollforge-weights-{pid}-*"))


def deterministic(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what a clock measured, and without how the engine happened to batch its requests."""
    timed = ("time", "generate/", "eval/seconds")
    return [{name: value for name, value in one.items() if not name.startswith(timed)} for one in metrics]
