"""The folder in shared memory that holds a run's weight files.

Knows: where it may lie, whose it is, and that it goes away: on exit, or, after a crash, when the next run starts.
Does not know: what a weight file holds (see `shm`), which versions exist (see `store`), torch.

A folder's name tells its owner: process id, start time of that process (so that a reused id is not mistaken for the
owner) and process namespace (in a container that shares /dev/shm, another container's ids mean nothing).
A weight file that is no longer needed becomes a *spare*: writing over memory that is already there is about four times
as fast as getting new memory. Nobody's data is overwritten: `shm` locks each file for as long as it is mapped.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollforge.config import UserError
from rollforge.runtime.process import start_time

SPARE_SUFFIX = ".spare"
_NAME = re.compile(r"rollforge-weights-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


def default_roots() -> tuple[Path, ...]:
    """Where a folder may lie, best first."""
    return Path("/dev/shm"), Path(tempfile.gettempdir())


def free_bytes(root: Path) -> int:
    """Free space for files under `root`; 0 where there is no such folder or it cannot be written."""
    return shutil.disk_usage(root).free if root.is_dir() and os.access(root, os.W_OK) else 0


@contextmanager
def weight_folder(needed_bytes: int, roots: Sequence[Path] | None = None) -> Iterator[Path]:
    """A folder of this process's own, removed at the end, after sweeping those of dead processes.

    `needed_bytes` is what all versions alive at once take. The first root with that much
    room is taken, with a warning when it is not the first. Raises UserError when none has it.
    """
    roots = default_roots() if roots is None else roots
    for root in roots:
        sweep(root)
    folder = _choose(needed_bytes, roots) / _own_name()
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def sweep(root: Path) -> list[Path]:
    """Remove the weight folders of dead processes under `root`; returns them."""
    dead = [path for path in root.glob("rollforge-weights-*") if _is_abandoned(path)]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)  # another run may be sweeping as well
    return dead


def retire(path: Path) -> None:
    """Drop a weight file: it becomes the folder's spare, or is removed where there is one."""
    if any(path.parent.glob(f"*{SPARE_SUFFIX}")):
        path.unlink()
    else:
        path.rename(path.with_suffix(SPARE_SUFFIX))


def _choose(needed: int, roots: Sequence[Path]) -> Path:
    free = {root: free_bytes(root) for root in roots}
    for root, room in free.items():
        if room >= needed:
            if root != roots[0]:
                warnings.warn(
                    f"{roots[0]} has {free[roots[0]]:,} of the {needed:,} bytes that the weights need: "
                    f"using {root}, which is slower.",
                    stacklevel=4,
                )
            return root
    rooms = ", ".join(f"{root} has {room:,}" for root, room in free.items())
    raise UserError(
        f"The weights need {needed:,} bytes of shared memory, but free are fewer: {rooms}. Enlarge /dev/shm "
        "(Docker: --shm-size) or free some space, or take a smaller model."
    )


def _own_name() -> str:
    pid = os.getpid()
    return f"rollforge-weights-{pid}-{start_time(pid)}-{_namespace()}-{uuid.uuid4().hex[:8]}"


def _is_abandoned(path: Path) -> bool:
    """Whether the folder's owner is surely gone; owners that cannot be seen from here count as alive."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return False
    pid, started, namespace = (int(part) for part in match.groups())
    return namespace == _namespace() and start_time(pid) != started


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
