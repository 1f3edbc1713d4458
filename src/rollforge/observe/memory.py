"""Peak memory of this process and all its descendants.

Knows: /proc and psutil. Does not know: who the processes are.

Resident sizes (RSS) must not be summed over processes: a page of torch's libraries or of a weight file mapped by eight
processes would be counted eight times. Linux gives each process its proportional share (PSS) in smaps_rollup, and the
sum of shares is the memory really held. Where shares cannot be read, RSS is summed and `method` says so. A file in
/dev/shm that no process maps belongs to no process and is not counted.

Reading the shares walks the page tables of a process (100 ms for some GB) and holds up its own page faults meanwhile.
So they are read rarely: now and then, and whenever the private pages, which the kernel counts, hint at a new peak.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Self

import psutil

_KIB = 1024
_FULL_SHARE = 0.005
"""The share of the time that goes into reading shares without a hint."""
_RISE = 1.005
"""How far above the peak the sum must seem to be read anew."""


class MemoryWatch:
    """Samples the process tree in a thread; use as a context manager, or `start` and `stop`.

    `peak_bytes` is the largest sum seen so far, `method` is "PSS", "RSS", or "PSS, RSS where not readable".
    """

    def __init__(self, interval: float = 0.5) -> None:
        """`interval` is in seconds."""
        self.peak_bytes = 0
        self._interval = interval
        self._methods: set[str] = set()
        self._shared: dict[int, int] = {}
        self._full_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    @property
    def method(self) -> str:
        """How the sizes were read; empty before the first sample."""
        return "PSS, RSS where not readable" if len(self._methods) > 1 else "".join(self._methods)

    def start(self) -> Self:
        """Samples once at once, then in the background."""
        self.sample()
        self._thread.start()
        return self

    def stop(self) -> int:
        """Ends sampling after a last sample; returns the peak in bytes."""
        self._stop.set()
        self._thread.join(timeout=10)
        self.sample()
        return self.peak_bytes

    def sample(self) -> int:
        """Bytes held by the tree now, all shares read anew; raises the peak where it is higher."""
        started = time.monotonic()
        self._shared.clear()
        total = self._add_up()
        self.peak_bytes = max(self.peak_bytes, total)
        ended = time.monotonic()
        self._full_at = ended + (ended - started) / _FULL_SHARE
        return total

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            if time.monotonic() > self._full_at or self._add_up() > _RISE * self.peak_bytes:
                self.sample()

    def _add_up(self) -> int:
        """The sum, with the shares as last read."""
        me = psutil.Process()
        total = 0
        for process in (me, *me.children(recursive=True)):
            size, method = self._size(process)
            if size:
                self._methods.add(method)
                total += size
        return total

    def _size(self, process: psutil.Process) -> tuple[int, str]:
        """Bytes of one process and how they were read; 0 bytes if it has ended meanwhile."""
        try:
            private = _private(process.pid)
            if process.pid not in self._shared:
                self._shared[process.pid] = max(0, _proportional(process.pid) - private)
            return private + self._shared[process.pid], "PSS"
        except ProcessLookupError:
            return 0, "PSS"
        except OSError:  # no such file (not Linux, or ended) or not ours to read
            try:
                return process.memory_info().rss, "RSS"
            except psutil.Error:
                return 0, "RSS"


def _private(pid: int) -> int:
    return _field(Path(f"/proc/{pid}/status"), "RssAnon:")


def _proportional(pid: int) -> int:
    return _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")


def _field(file: Path, name: str) -> int:
    """Bytes of a field given in kB; 0 where it is missing, for a zombie maps nothing."""
    for line in file.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * _KIB
    return 0
