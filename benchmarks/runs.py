"""Runs of the `rollforge` command as benchmarks start and read them.

Knows: the command and the run folder. Does not know: what is claimed about a run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common import OUT, stop

ROLLFORGE = [sys.executable, "-m", "rollforge.cli.main"]


def fresh_folder(name: str) -> Path:
    """An empty place for a run; what an earlier benchmark left there is removed."""
    folder = OUT / name
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class Run:
    """A finished run: its evaluations as (minutes of training, value), and what it took.

    Minutes of training are those of the steps alone; `minutes` are all of the run's: start, evaluations, the export.
    """

    folder: Path
    points: list[tuple[float, float]]
    training_minutes: float
    minutes: float
    peak_gb: float

    @property
    def first(self) -> float:
        return self.points[0][1]

    @property
    def last(self) -> float:
        return self.points[-1][1]

    def within(self, minutes: float) -> float:
        """The last evaluation before so many minutes of training were over."""
        return [value for at, value in self.points if at <= minutes][-1]


def train(recipe: str, folder: Path, words: list[str], limit_s: float) -> None:
    """Runs a recipe in a process of its own, its progress on this terminal. Ends the benchmark if that fails."""
    try:
        done = subprocess.run([*ROLLFORGE, "run", recipe, "--out", str(folder), *words], timeout=limit_s)
    except subprocess.TimeoutExpired:
        stop(f"rollforge run {recipe} did not end within {limit_s:.0f} s")
    if done.returncode:
        stop(f"rollforge run {recipe} {' '.join(words)} failed with exit code {done.returncode}")


def read(folder: Path, metric: str) -> Run:
    """What a finished run measured; `metric` is a name in evaluations.jsonl."""
    from rollforge.runs.reader import RunReader

    if not folder.exists():
        stop(f"there is no run in {folder}: nothing to use again")
    reader = RunReader(folder)
    summary = reader.summary()
    if summary is None:
        stop(f"{folder} is not the folder of a run that ended")
    steps = reader.series("time/step_s")
    points = [
        (sum(duration for at, duration in steps if at < record["step"]) / 60, record[metric])
        for record in reader.evaluations()
    ]
    total = sum(duration for _, duration in steps) / 60
    return Run(folder, points, total, summary["seconds"] / 60, summary["peak_memory_gb"])
