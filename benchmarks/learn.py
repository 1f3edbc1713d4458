"""Does it learn, on every seed: a recipe from its start to its end, through the whole stack (`rollforge run`).

    python benchmarks/learn.py sums --seeds 0 1 2 [--picture FILE.png] [--json FILE]
    python benchmarks/learn.py blackjack --seeds 0 1 2 3 4 [--picture FILE.png] [--chart FILE.png] [--json FILE]

Options it does not know go to `rollforge run` as they are. Runs stay in benchmarks/out/; --reuse reads them again
instead of training.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import OUT, REUSE, Goal, Result, options, portable
from runs import Run, fresh_folder, read, train

LIMIT_S = 3600.0
MEMORY_GOAL_GB = 6.0
SUMS_MINUTES = 10.0
BLACKJACK_MINUTES = 8.0
QUICK = ["--model", "tiny", "--steps", "2", "--loop.groups_per_step", "8"]
CHART = "chart.png"


@dataclass(frozen=True)
class Claim:
    """What a recipe should reach: the metric of its evaluations, a word for it, the time it has, and its goals."""

    metric: str
    what: str
    minutes: float
    goals: Callable[[list[Run]], list[Goal]]


def sums_goals(runs: list[Run]) -> list[Goal]:
    """Every seed, within ten minutes, all told."""
    return [
        Goal("held-out accuracy, worst seed", min(run.last for run in runs), 0.85),
        Goal("minutes of a whole run, slowest seed", max(run.minutes for run in runs), SUMS_MINUTES, at_least=False),
    ]


def blackjack_goals(runs: list[Run]) -> list[Goal]:
    """Four seeds of five within eight minutes of training, and the best a little better."""
    reached = [run.within(BLACKJACK_MINUTES) for run in runs]
    good = sum(value >= -0.08 for value in reached) / len(runs)
    return [
        Goal(f"share of seeds at -0.08 or better within {BLACKJACK_MINUTES:g} minutes of training", good, 0.8),
        Goal(f"expected reward of the best seed within {BLACKJACK_MINUTES:g} minutes of training", max(reached), -0.06),
    ]


CLAIMS = {
    "sums": Claim("eval/accuracy", "held-out greedy accuracy", SUMS_MINUTES, sums_goals),
    "blackjack": Claim("eval/exact", "expected reward per hand, exact, greedy", BLACKJACK_MINUTES, blackjack_goals),
}


def main() -> int:
    args, passed_on = parse()
    claim = CLAIMS[args.recipe]
    seeds = args.seeds[:1] if args.quick else args.seeds
    runs = []
    for seed in seeds:
        name = f"learn-{args.recipe}-{seed}{'-quick' if args.quick else ''}"
        if not args.reuse:
            words = ["--seed", str(seed), "--threads", str(args.threads), *(QUICK if args.quick else []), *passed_on]
            train(args.recipe, fresh_folder(name), words, LIMIT_S)
        runs.append(read(OUT / name, claim.metric))
    result = Result(
        args.recipe,
        [
            "seed",
            f"{claim.what}: start",
            f"within {claim.minutes:g} minutes of training",
            "end",
            "minutes of training",
            "minutes in all",
            "peak memory, GB",
        ],
    )
    result.rows += [
        [str(seed), run.first, run.within(claim.minutes), run.last, run.training_minutes, run.minutes, run.peak_gb]
        for seed, run in zip(seeds, runs, strict=True)
    ]
    result.goals += claim.goals(runs)
    peak = max(run.peak_gb for run in runs)
    result.goals.append(Goal("peak memory of the process tree, GB", peak, MEMORY_GOAL_GB, at_least=False))
    if args.picture is not None:
        draw(args.picture, args.recipe, claim, dict(zip(seeds, runs, strict=True)))
        result.pictures.append(portable(str(args.picture.resolve())))
    if args.chart is not None:
        args.chart.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(max(runs, key=lambda run: run.last).folder / CHART, args.chart)
        result.pictures.append(portable(str(args.chart.resolve())))
    return result.finish(args)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = options(__doc__)
    parser.add_argument("recipe", choices=sorted(CLAIMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the curves of all seeds there")
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="blackjack: copy the best seed's chart there")
    parser.add_argument(REUSE, action="store_true", help="read the runs of an earlier call instead of training")
    args, passed_on = parser.parse_known_args()
    if args.chart is not None and args.recipe != "blackjack":
        parser.error("--chart is for blackjack: no other recipe draws one")
    return args, passed_on


def draw(path: Path, recipe: str, claim: Claim, runs: dict[int, Run]) -> None:
    """All seeds' evaluations over the minutes of training."""
    from rollforge.envs.blackjack.exact import reference_lines
    from rollforge.observe.plot import curve_png

    lines = reference_lines() if recipe == "blackjack" else {"goal": 0.85}
    path.parent.mkdir(parents=True, exist_ok=True)
    series = {f"seed {seed}": run.points for seed, run in runs.items()}
    curve_png(path, series, f"{recipe}: {claim.what}", lines, x_label="minutes of training")


if __name__ == "__main__":
    sys.exit(main())
