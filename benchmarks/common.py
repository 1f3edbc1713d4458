"""What every benchmark shares: its options, the machine, timing, the table, the goals and the file of results.

Knows: how a result looks. Does not know: what is measured, nor Rollforge (so that other interpreters can import it).
torch is imported late: the number of threads must be in the environment before that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUT = HERE / "out"
"""Scratch space for runs; git ignores it."""

REUSE = "--reuse"
"""The option of scripts that can read earlier runs; it is no part of how a result is got anew."""

Cell = str | float


@dataclass(frozen=True)
class Goal:
    """A number that was measured, and the bound it should keep."""

    what: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign, verdict = ("at least" if self.at_least else "at most"), ("reached" if self.met else "MISSED")
        return f"{self.what}: {cell(self.value)} ({sign} {cell(self.bound)}: {verdict})"


@dataclass
class Result:
    """What one benchmark found: a table, goals, remarks, and pictures by their path below the repository's root."""

    benchmark: str
    columns: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)

    def finish(self, args: argparse.Namespace) -> int:
        """Prints everything, writes --json, and returns the exit code: 1 when a goal is missed.

        A quick run shows that the script works; its numbers are no result, and it does not fail for them.
        """
        here = machine(args.threads)
        print(f"\n{self.benchmark}: {describe(here)}\n\n{table(self.columns, self.rows)}\n")
        for line in [*map(str, self.goals), *self.notes]:
            print(line)
        if args.json is not None:
            met = [{**asdict(goal), "met": goal.met} for goal in self.goals]
            about = {"command": command(), "date": datetime.date.today().isoformat(), "quick": args.quick}
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({**asdict(self), "goals": met, **about, "machine": here}, indent=2) + "\n")
        if args.quick:
            print("quick: too short to be a result; goals are shown and not judged")
        return 0 if args.quick or all(goal.met for goal in self.goals) else 1


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark; add your own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="under a minute: shows that the script works, no more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--threads", type=int, default=cores(), help="CPU threads (default: all cores)")
    return parser


def use_threads(threads: int) -> None:
    """Sets the number of compute threads; to be called before anything imports torch."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    import torch

    torch.set_num_threads(threads)


def stop(why: str) -> NoReturn:
    """Ends the benchmark because it cannot be done here: exit code 2, while 1 is a missed goal."""
    print(why, file=sys.stderr)
    raise SystemExit(2)


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def machine(threads: int) -> dict[str, str | int]:
    """CPU model, cores, threads in use, and the versions that matter."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    has_bf16 = any("avx512_bf16" in line or "amx_bf16" in line for line in info if line.startswith("flags"))
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": cores(),
        "threads": threads,
        "bf16 instructions": "yes" if has_bf16 else "no",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def describe(here: dict[str, str | int]) -> str:
    """The machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in here.items())


def command() -> str:
    """How to get this process's result anew, from the repository's root: no path of this machine, no earlier runs."""
    words = [Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(), *map(portable, sys.argv[1:])]
    words = [word for word in words if word != REUSE]
    return " ".join(["python", *(f"'{word}'" if " " in word else word for word in words)])


def portable(word: str) -> str:
    """An absolute path as one below the root, or as its last part; any other word as it is."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def cell(value: Cell) -> str:
    """A number in three or so digits."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Columns aligned; the first to the left, the others to the right."""
    texts = [list(columns), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(columns))]
    lines = ["  ".join(f"{text:{'>' if i else '<'}{widths[i]}}" for i, text in enumerate(row)) for row in texts]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def seconds(work: Callable[[], Any]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def medians(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, after one call to warm up, taken in turns (A B A B) so that a busy spell hits all."""
    for work in works.values():
        work()
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            taken[name].append(seconds(work))
    return {name: statistics.median(times) for name, times in taken.items()}
