"""Peak memory of this process and all its descendants.

Knows: /proc and psutil. Does not know: who the processes are.

Resident sizes (RSS) must not be summed over processes: a page of torch's libraries or of a weight file mapped by eight
processes would be counted eight times. Linux gives each process its proportional share (PSS) in smaps_rollup, and the
sum of shares is the memory really held. Where shares cannot be read, RSS is summed and `method` says so. A file in
/dev/shm that no process maps belongs to no process and is not counted.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

import psutil

_KIB = 1024


class MemoryWatch:
    """Samples the process tree in a thread; use as a context manager, or `start` and `stop`.

    `peak_bytes` is the largest sum seen so far, `method` is "PSS", "RSS", or "PSS, RSS where not readable".
    """

    def __init__(self, interval: float = 0.5) -> None:
        """`interval` is in seconds."""
        self.peak_bytes = 0
        self._interval = interval
        self._methods: set[str] = set()
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
        """Bytes held by the tree now; raises the peak where it is higher."""
        me = psutil.Process()
        total = 0
        for process in (me, *me.children(recursive=True)):
            size, method = _size(process)
            if size:
                self._methods.add(method)
                total += size
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self.sample()


def _size(process: psutil.Process) -> tuple[int, str]:
    """Bytes of one process and how they were read; 0 bytes if it has ended meanwhile."""
    try:
        return _proportional(process.pid), "PSS"
    except ProcessLookupError:
        return 0, "PSS"
    except OSError:  # no such file (not Linux, or ended) or not ours to read
        try:
            return process.memory_info().rss, "RSS"
        except psutil.Error:
            return 0, "RSS"


def _proportional(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * _KIB
    return 0  # a zombie maps nothing
