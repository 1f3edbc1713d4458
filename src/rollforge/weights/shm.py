"""One weight version as one file: `publish` writes it, `fetch` maps it.

Knows: the file format (that of safetensors, so that other tools read it too) and that no reader ever sees a torn file.
Does not know: which versions exist or are in use (see `store`).

Format: 8 bytes with the length of the header (little-endian), the header (JSON: dtype, shape and place of each tensor,
version and checksum in `__metadata__`), then the tensors' bytes without gaps, widest elements first.
A file is written under a spare name and renamed when complete. Its writer holds an exclusive lock, and each mapping of
it a shared one, which the kernel drops when the last tensor over it is gone or the process ends: only a file that can
be locked exclusively is written over.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import struct
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollforge.config import UserError
from rollforge.weights.folder import SPARE_SUFFIX, free_bytes

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGN = 64
_CHUNK = 1 << 26


class WeightFileError(Exception):
    """A weight file is missing, torn or not what it should be."""


def publish(tensors: Mapping[str, torch.Tensor], version: int, folder: Path | str) -> str:
    """Write all tensors (any device, any strides) as one file in `folder`; returns its location.

    Raises UserError when there is no room, WeightFileError when the version exists, TypeError for a dtype that has no
    name in the format.
    """
    target = Path(folder) / f"v{version:08d}.safetensors"
    if target.exists():
        raise WeightFileError(f"weight version {version} exists already: {target}")
    header, order = _layout(tensors, version)
    size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    path, file = _take_spare(Path(folder))
    try:
        _make_room(file, size, Path(folder))
        place = _write(file, memoryview(header), 0)
        for name in order:
            place = _write(file, _bytes_of(tensors[name]), place)
        path.rename(target)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise _no_room(size, Path(folder)) from error
        raise
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    return str(target)


def fetch(location: str) -> dict[str, torch.Tensor]:
    """The tensors of a published file, as views of its memory: nothing is copied.

    They stay valid as long as they live, whatever becomes of the file. Meant for reading; what is written to them stays
    in this process. Raises WeightFileError when the file is missing, torn, or being replaced.
    """
    try:
        file = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise WeightFileError(f"no weight file at {location}: its version was dropped or never published") from None
    try:
        _lock(file, fcntl.LOCK_SH, location)
        entries, start, size = _read_header(file, location)
        # The mapping keeps a duplicate of the descriptor, and so the lock, until the last tensor over it is gone.
        memory = mmap.mmap(file, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)
    return {name: _view(memory, start, entry) for name, entry in entries.items()}


def _layout(tensors: Mapping[str, torch.Tensor], version: int) -> tuple[bytes, list[str]]:
    """The file's head (length and header) and the order of the tensors: widest first, so that each is aligned."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"tensor {name!r} has dtype {tensor.dtype}, which a weight file cannot hold")
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    entries: dict[str, Any] = {}
    place = 0
    for name in order:
        tensor = tensors[name]
        end = place + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    metadata = {"version": str(version), "checksum": _checksum(entries, str(version))}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return struct.pack("<Q", len(text)) + text, order


def _checksum(entries: Mapping[str, Any], version: str) -> str:
    return f"{zlib.crc32(json.dumps([version, entries], sort_keys=True).encode()):08x}"


def _take_spare(folder: Path) -> tuple[Path, int]:
    """A file to write into, locked: one that nobody maps any more, or a new one."""
    for path in folder.glob(f"*{SPARE_SUFFIX}"):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        return path, file
    path = folder / f"{uuid.uuid4().hex}{SPARE_SUFFIX}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return path, file


def _make_room(file: int, size: int, folder: Path) -> None:
    """Check that `size` bytes will fit, counting what the file has already, and set its length."""
    present = os.fstat(file).st_blocks * 512
    if size - present > free_bytes(folder):
        raise _no_room(size - present, folder)
    os.ftruncate(file, size)


def _no_room(needed: int, folder: Path) -> UserError:
    return UserError(
        f"A weight version needs {needed:,} bytes in {folder}, where {free_bytes(folder):,} are free. Free some space "
        "there (Docker: --shm-size), or take a smaller model."
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw)


def _write(file: int, data: memoryview, place: int) -> int:
    """Write all of `data` at `place`; returns where it ends."""
    for begin in range(0, len(data), _CHUNK):
        piece = data[begin : begin + _CHUNK]
        while piece:
            written = os.pwrite(file, piece, place)
            piece, place = piece[written:], place + written
    return place


def _lock(file: int, kind: int, location: str) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WeightFileError(f"{location} is being written over: its version was dropped") from None


def _read_header(file: int, location: str) -> tuple[dict[str, Any], int, int]:
    """(tensor entries, where the data begins, size of the file). Raises WeightFileError when anything does not fit."""
    size = os.fstat(file).st_size
    length = struct.unpack("<Q", os.pread(file, 8, 0))[0] if size >= 8 else 0
    start = 8 + length
    if not 8 < start <= size:
        raise WeightFileError(f"{location} is torn: {size} bytes are too few for its header")
    try:
        entries = json.loads(os.pread(file, length, 8))
        metadata = entries.pop("__metadata__")
        expected = _checksum(entries, metadata["version"])
        intact = metadata["checksum"] == expected
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise WeightFileError(f"{location} is torn: its header does not match its checksum")
    if Path(location).stem != f"v{int(metadata['version']):08d}":
        raise WeightFileError(f"{location} holds version {metadata['version']}")
    end = start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if end != size:
        raise WeightFileError(f"{location} is torn: it has {size} bytes, its header says {end}")
    return entries, start, size


def _view(memory: mmap.mmap, start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start + entry["data_offsets"][0])
    return flat.reshape(shape)
