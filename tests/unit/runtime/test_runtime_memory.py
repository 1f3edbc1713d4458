"""Freed memory goes back to the system, where the C library can."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from rollforge.runtime.memory import give_back

# Blocks too small for a mapping of their own are freed below one that stays: the heap cannot shrink by itself.
HELD_BELOW_THE_TOP = """
import ctypes
from pathlib import Path
from rollforge.runtime.memory import give_back

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

blocks = [libc.malloc(64 << 10) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
stays = libc.malloc(64 << 10)
for block in blocks:
    libc.free(block)
before = resident()
give_back()
print(before - resident())
"""


def test_pages_freed_below_the_top_of_the_heap_go_back() -> None:
    out = subprocess.run([sys.executable, "-c", HELD_BELOW_THE_TOP], capture_output=True, text=True, check=True)
    assert int(out.stdout) > 50 << 20


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name) or object())
    give_back()
    assert asked == [None]
