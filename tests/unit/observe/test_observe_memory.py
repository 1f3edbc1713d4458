"""Peak memory counts descendants, counts shared pages once, and says how it was read."""

from __future__ import annotations

import mmap
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollforge.observe import memory
from rollforge.observe.memory import MemoryWatch

MIB = 1 << 20
HOLDER = """
import mmap, sys
size, path = int(sys.argv[1]), sys.argv[2]
if path:
    file = open(path, "r+b")
    held = mmap.mmap(file.fileno(), size)
    held.read()
else:
    held = bytearray(b"x") * size
print("ready", flush=True)
sys.stdin.read()
"""


def holder(size: int, path: str = "", behind_a_shell: bool = False) -> subprocess.Popen[bytes]:
    """A child that holds `size` bytes, of its own or mapped from a file; it has them when this returns."""
    command = [sys.executable, "-c", HOLDER, str(size), path]
    if behind_a_shell:
        command = ["sh", "-c", f"{shlex.join(command)}; true"]  # `; true` keeps the shell as a parent in between
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    return child


def release(child: subprocess.Popen[bytes]) -> None:
    child.communicate(timeout=30)


@pytest.mark.parametrize("behind_a_shell", [False, True], ids=["child", "grandchild"])
def test_a_descendants_memory_counts_and_the_peak_stays(behind_a_shell: bool) -> None:
    watch = MemoryWatch()
    before = watch.sample()
    child = holder(100 * MIB, behind_a_shell=behind_a_shell)
    try:
        during = watch.sample()
    finally:
        release(child)
    assert during - before > 90 * MIB
    assert watch.sample() < during - 90 * MIB
    assert watch.peak_bytes == during


def test_pages_shared_by_processes_count_once(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"w" * (64 * MIB))
    watch = MemoryWatch()
    before = watch.sample()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 64 * MIB) as mapped:
        mapped.read()
        children = [holder(64 * MIB, str(path)) for _ in range(3)]
        try:
            grown = watch.sample() - before
        finally:
            for child in children:
                release(child)
    assert 60 * MIB < grown < 160 * MIB, "four mappings of 64 MiB, and three interpreters"
    assert watch.method == "PSS"


def test_without_shares_resident_sizes_are_used_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(pid: int) -> int:
        raise PermissionError(pid)

    monkeypatch.setattr(memory, "_proportional", unreadable)
    watch = MemoryWatch()
    assert watch.sample() > 5 * MIB
    assert watch.method == "RSS"


def test_a_mixture_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_mine(pid: int) -> int:
        if pid != os.getpid():
            raise PermissionError(pid)
        return 7 * MIB

    monkeypatch.setattr(memory, "_proportional", only_mine)
    watch = MemoryWatch()
    child = holder(1)
    try:
        assert watch.sample() > 7 * MIB
    finally:
        release(child)
    assert watch.method == "PSS, RSS where not readable"


def test_a_process_that_ended_meanwhile_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int) -> int:
        raise ProcessLookupError(pid)

    monkeypatch.setattr(memory, "_proportional", gone)
    assert MemoryWatch().sample() == 0


def test_shares_are_read_rarely_but_for_a_new_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def slow(pid: int) -> int:
        read.append(pid)
        time.sleep(0.05)  # as reading the shares of some GB takes
        return 0

    monkeypatch.setattr(memory, "_proportional", slow)
    child = holder(200 * MIB)
    try:
        with MemoryWatch(interval=0.01) as watch:
            before, shares_read = watch.peak_bytes, len(read)
            watch._stop.wait(0.3)
            assert len(read) == shares_read, "nothing grew, and twenty seconds are not over"
            # Pages of its own: a bytearray may lie in what earlier tests freed and the process still holds.
            held = mmap.mmap(-1, 100 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for page in range(0, len(held), mmap.PAGESIZE):
                held[page] = 1
            for _ in range(300):
                if watch.peak_bytes - before > 90 * MIB:
                    break
                watch._stop.wait(0.01)
            assert watch.peak_bytes - before > 90 * MIB
            assert len(held) == 100 * MIB
            assert len(read) > shares_read
    finally:
        release(child)


def test_the_thread_samples_and_ends() -> None:
    with MemoryWatch(interval=0.005) as watch:
        assert watch.peak_bytes > 0
        watch.peak_bytes = 0
        for _ in range(2000):
            if watch.peak_bytes:
                break
            watch._stop.wait(0.005)
        assert watch.peak_bytes > 0, "sampled in the background within ten seconds"
    assert not watch._thread.is_alive()
