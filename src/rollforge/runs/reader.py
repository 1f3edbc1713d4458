"""Reads a run folder, also while the run is going.

Knows: the run folder's files. Does not know: the values of `types` (it gives plain JSON), nor how anything is shown.
Every method reads what is there at that moment; a line still being written is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollforge.config import UserError
from rollforge.runs.files import last_line, read_lines, to_json
from rollforge.runs.folder import RunFolder

Record = dict[str, Any]


class RunReader:
    """A run, going on or finished. Raises UserError if the folder is no run, or a file in it is damaged."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = RunFolder.open(folder)

    def config(self) -> str:
        """The text of config.yaml."""
        return self.folder.config.read_text()

    def metrics(self) -> Iterator[Record]:
        """One record per optimizer step: `step`, `time` (seconds since 1970) and metrics (None where not finite)."""
        return _records(self.folder.metrics)

    def evaluations(self) -> Iterator[Record]:
        """One record per evaluation, as for `metrics`."""
        return _records(self.folder.evaluations)

    def rollouts(self, step: int | None = None) -> Iterator[Record]:
        """The rollouts of all steps, or of one."""
        return _records(self.folder.rollouts, b"" if step is None else b'{"step": %d,' % step)

    def rollout(self, rollout_id: str) -> Record | None:
        """The rollout of that id; None if it is not there (yet)."""
        mark = f'"id": {to_json(rollout_id)},'.encode()
        found = _records(self.folder.rollouts, b'{"step": ', mark)
        return next((record for record in found if record["id"] == rollout_id), None)

    def last_rollout(self) -> Record | None:
        """The newest rollout; None before the first."""
        return _last(self.folder.rollouts)

    def summary(self) -> Record | None:
        """What the run ended with; None while it is going (or if it was killed)."""
        if not self.folder.summary.exists():
            return None
        return _parsed(self.folder.summary.read_bytes(), f"{self.folder.summary}")

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of one metric, where it has a value."""
        return [(record["step"], record[name]) for record in self.metrics() if record.get(name) is not None]


def _records(path: Path, start: bytes = b"", mark: bytes = b"") -> Iterator[Record]:
    """The records of lines that begin with `start` and hold `mark`; other lines are not parsed (slow)."""
    for number, line in enumerate(read_lines(path), 1):
        if line.startswith(start) and mark in line:
            yield _parsed(line, f"line {number} of {path}")


def _last(path: Path) -> Record | None:
    line = last_line(path)
    return None if line is None else _parsed(line, f"the last line of {path}")


def _parsed(data: bytes, where: str) -> Record:
    try:
        record = json.loads(data)
    except ValueError as error:
        raise _damaged(where, f"it is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise _damaged(where, "it is not a JSON object")
    return record


def _damaged(where: str, how: str) -> UserError:
    return UserError(
        f"Cannot read {where}: {how}. Rollforge only writes whole records, so the disk or another program changed it; "
        "remove it to read the rest."
    )
