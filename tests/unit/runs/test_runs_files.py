"""Whole files, whole lines, valid JSON: also on a full disk and after SIGKILL."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollforge.config import UserError
from rollforge.runs import files
from rollforge.runs.files import LineFile, disk_guard, last_line, read_lines, to_json, write_atomic


def full_after(monkeypatch: pytest.MonkeyPatch, room: int, code: int = errno.ENOSPC) -> None:
    """From now on only `room` bytes can be written, in small pieces, as a nearly full disk takes them."""
    left = [room]
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(code, os.strerror(code))
        written = real(descriptor, bytes(data[: min(left[0], 7)]))
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)


def test_a_full_disk_leaves_the_lines_whole_and_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path)
    file.append(["first", "second"])
    full_after(monkeypatch, room=10)
    with pytest.raises(UserError) as caught:
        file.append(["a line that is much longer than what is left"])
    assert str(tmp_path) in str(caught.value) and "metrics.jsonl" in str(caught.value)
    assert "disk is full" in str(caught.value)
    assert path.read_bytes() == b"first\nsecond\n"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    full_after(monkeypatch, room=3, code=code)
    with pytest.raises(UserError, match=r"summary\.json"):
        write_atomic(path, "new and longer")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "no temporary file stays behind"


LIMITED = """
import resource, sys
from pathlib import Path
from rollforge.config import UserError
from rollforge.runs.files import LineFile
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
file = LineFile(Path(sys.argv[1]))
try:
    for number in range(100):
        file.append(["%03d" % number * 30])
except UserError as error:
    print(number, error)
"""


def test_a_real_limit_of_the_file_size(tmp_path: Path) -> None:
    """The kernel itself cuts a write short: 91 bytes a line, 10 of them below 1000 bytes."""
    path = tmp_path / "rollouts.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("10 Could not write rollouts.jsonl")
    assert [line[:3] for line in read_lines(path)] == [b"%03d" % number for number in range(10)]
    assert path.stat().st_size == 910


def test_other_faults_of_the_system_pass_through(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), disk_guard(tmp_path, "x"):
        raise PermissionError(errno.EACCES, "no")
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "absent" / "x", "x")


@pytest.mark.parametrize("content", ["", "text ü\n", b"\x00\xff", "x" * 300_000])
def test_atomic_files_come_out_as_given(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "file"
    write_atomic(path, "before")
    write_atomic(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_a_half_line_is_not_read_and_not_glued_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthr")
    assert list(read_lines(path)) == [b"one", b"two"]
    assert last_line(path) == b"two"
    file = LineFile(path)
    file.append(["three"])
    file.close()
    file.close()
    assert list(read_lines(path)) == [b"one", b"two", b"three"]


def test_a_line_finished_while_it_is_being_read_is_not_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a growing file a line comes in two pieces; the second must not pass for a line of its own."""
    pieces = [b"one\n", b"tw", b"o\n", b"three\n"]
    monkeypatch.setattr(Path, "open", lambda *_: contextlib.nullcontext(pieces))
    assert list(read_lines(tmp_path)) == [b"one"]


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "absent")) == []
    assert last_line(tmp_path / "absent") is None


def test_the_last_line_of_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Property: reading from the end in blocks agrees with reading all lines, wherever block borders fall."""
    monkeypatch.setattr(files, "_BLOCK", 4)
    chance = random.Random(5)
    path = tmp_path / "lines"
    for _ in range(500):
        path.write_bytes(bytes(chance.choices(b"ab\n", k=chance.randrange(20))))
        whole = list(read_lines(path))
        assert last_line(path) == (whole[-1] if whole else None)
        LineFile(path).close()
        assert path.read_bytes() == b"".join(line + b"\n" for line in whole)


APPENDER = """
import sys
from pathlib import Path
from rollforge.runs.files import LineFile, to_json
file = LineFile(Path(sys.argv[1]))
first = int(sys.argv[2])
for number in range(first, first + 10**9):
    file.append(to_json({"number": number, "text": "x" * (number * 7919 % 200_000)}) for number in (number,))
    print(number, flush=True)
"""


def test_lines_survive_sigkill(tmp_path: Path) -> None:
    """Killed in the middle of appending, again and again: all that was acknowledged is there, whole and in order."""
    path = tmp_path / "rollouts.jsonl"
    chance = random.Random(11)
    expected = 0
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(path), str(expected)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        reads = chance.randrange(20, 200)
        for _ in range(reads):
            assert child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate(timeout=30)
        acknowledged = expected + reads + len(rest.splitlines())
        numbers = [json.loads(line)["number"] for line in read_lines(path)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= acknowledged
        expected = len(numbers)


def random_value(chance: random.Random, depth: int = 3) -> Any:
    leaves = [
        None, True, 3, -2.5, math.nan, math.inf, "text \u2028 \ud800 \n", np.float32("nan"), np.float64("-inf"),
        np.float32(0.5), np.int64(7), np.bool_(True), np.array([1.0, math.nan]), np.arange(3, dtype=np.int32),
    ]  # fmt: skip
    kind = chance.randrange(4) if depth else 0
    if kind == 1:
        return [random_value(chance, depth - 1) for _ in range(3)]
    if kind == 2:
        return {name: random_value(chance, depth - 1) for name in "abc"}
    if kind == 3:
        return tuple(random_value(chance, depth - 1) for _ in range(2))
    return chance.choice(leaves)


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def plain(value: Any) -> Any:
    """What the value should read as."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def test_any_value_is_one_line_of_strict_json() -> None:
    chance = random.Random(2)
    for _ in range(500):
        value = random_value(chance)
        text = to_json(value)
        assert "\n" not in text and text.isascii()
        assert json.loads(text, parse_constant=refuse) == plain(value)


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), [math.nan, object()]])
def test_what_json_has_no_word_for_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        to_json(value)
