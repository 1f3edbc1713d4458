"""Files that are whole or absent, lines that are whole or ignored, and JSON that every reader accepts.

Knows: bytes, paths, JSON. Does not know: what a run is.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rollforge.config import UserError

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file size limit is reached",
}
_BLOCK = 1 << 16


@contextmanager
def disk_guard(path: Path | str, what: str) -> Iterator[None]:
    """Turns a full disk (also quota, file size limit) into a UserError that names the path and what was being written.

    Any other OSError passes through unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise UserError(
            f"Could not write {what} to {path}: {_FULL[error.errno]} ({error.strerror}). Everything written before is "
            "intact; free some space there, or give another folder with --out, and start again."
        ) from error


def require_space(path: Path, needed: int) -> None:
    """Raises UserError when the disk that `path` is on, or will be made on, has fewer than `needed` bytes free."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        raise UserError(
            f"The disk of {there} has {free / 1e9:.1f} GB free and a run needs {needed / 1e9:.1f} GB; free some space "
            "there, or put the run on another disk with --out DIR."
        )


def write_atomic(path: Path, data: bytes | str) -> None:
    """Writes a file so that a reader, or a crash, sees the old content or the new and nothing between.

    Raises UserError if the disk is full; the old content is then still there.
    """
    content = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_guard(path.parent, path.name):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                _write_all(descriptor, content)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.rename(path)
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


class AppendFile:
    """Appends whole records; each call reaches the operating system before it returns. One writer per file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_guard(path.parent, path.name):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def drop_half_line(self) -> None:
        """Cuts off what a killed process left of a line, since the next line would be glued to it."""
        os.ftruncate(self._descriptor, _whole_lines_end(self._descriptor))

    def append(self, data: bytes) -> None:
        """Appends all of `data`; on a full disk (UserError) none of it stays behind."""
        start = os.fstat(self._descriptor).st_size
        with disk_guard(self._path.parent, self._path.name):
            try:
                _write_all(self._descriptor, data)
            except OSError:
                os.ftruncate(self._descriptor, start)
                raise

    def close(self) -> None:
        """Brings everything to the disk and closes; closing twice is fine."""
        if self._descriptor >= 0:
            with disk_guard(self._path.parent, self._path.name):
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


class LineFile:
    """Appends whole lines of text, beginning on a line of its own whatever a killed process left behind."""

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)
        self._file.drop_half_line()

    def append(self, lines: Iterable[str]) -> None:
        """Appends lines, given without line ends, in one go. On a full disk (UserError) none of them stays behind."""
        self._file.append("".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        """Brings everything to the disk and closes; closing twice is fine."""
        self._file.close()


def read_lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, without line ends, up to one still being written; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return  # reading on would give the rest of this line as a line of its own
            yield line[:-1]


def last_line(path: Path) -> bytes | None:
    """The last whole line of a file, read from its end; None if there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        end = _whole_lines_end(file.fileno())
        if not end:
            return None
        start = _line_end_before(file.fileno(), end - 1)
        return os.pread(file.fileno(), end - 1 - start, start)


def to_json(value: Any, indent: int | None = None) -> str:
    """One JSON value in ASCII. NaN and infinities become null; numpy scalars and arrays become numbers and lists.

    Raises TypeError for anything else JSON has no word for.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_plain, indent=indent)
    except ValueError:  # holds a NaN or an infinity; rare, so that only then the value is walked
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str | int | None):
        return value
    return _finite(_plain(value))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _whole_lines_end(descriptor: int) -> int:
    """The offset behind the last line end of a file; 0 if it has none."""
    return _line_end_before(descriptor, os.fstat(descriptor).st_size)


def _line_end_before(descriptor: int, end: int) -> int:
    """The offset behind the last line end in the first `end` bytes; 0 if there is none."""
    while end > 0:
        start = max(0, end - _BLOCK)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
