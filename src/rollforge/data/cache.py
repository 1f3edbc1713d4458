"""Things made once per user and kept: the cache folder.

Knows: where the cache is and how a folder appears in it whole or not at all. Does not know: what is kept there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rollforge.config import UserError

_ABANDONED_S = 3600.0


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/rollforge, or ~/.cache/rollforge; a relative XDG_CACHE_HOME is ignored, as its standard says."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "rollforge"


def make_once(name: str, create: Callable[[Path], None], size: int) -> Path:
    """The cached folder `name`, filled by `create(folder)` on first use; about `size` bytes.

    It is filled under a temporary name and then renamed, so no one ever sees half of it. Of two processes that make it
    at once, the later one's work is thrown away. Raises UserError when the disk is full or the cache cannot be written.
    """
    target = cache_folder() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(target.parent).free) < size:
            raise _unusable(target, f"{size / 1e6:.0f} MB are needed there and {free / 1e6:.0f} MB are free")
        _sweep(target)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=target.parent) as scratch:
            made = Path(scratch) / name
            made.mkdir()
            create(made)
            _rename(made, target)
    except OSError as error:
        raise _unusable(target, str(error)) from error
    return target


def _sweep(target: Path) -> None:
    """Removes what a killed process had begun to make, once it is so old that none can still be at it."""
    for left in target.parent.glob(f".{target.name}.*"):
        if time.time() - left.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)


def _rename(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():  # if it is one, another process was faster and its folder is as good as ours
            raise


def _unusable(target: Path, reason: str) -> UserError:
    return UserError(
        f"The model folder {target} could not be made: {reason}. Free some space, or set XDG_CACHE_HOME to a folder on "
        "a disk that has it and that you may write to."
    )
