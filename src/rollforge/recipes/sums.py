"""Sums: one-digit sums by example; the quickest proof that a model learns here.

Held-out sums never appear in training, neither as a question nor as an example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollforge.config import option, require_at_least
from rollforge.data.sums import STOP, sums
from rollforge.envs.rewards import ExactAnswer
from rollforge.envs.single_turn import SingleTurns
from rollforge.loop.config import LoopConfig
from rollforge.recipes.base import RunConfig, SamplingConfig
from rollforge.rollout.config import RolloutConfig
from rollforge.train.config import TrainConfig
from rollforge.types import EnvironmentPool, Metrics, Sampling

if TYPE_CHECKING:
    from rollforge.recipes.run import Report, Served
    from rollforge.runtime import RoleSpec

SUMMARY = "one-digit sums by example: a quick proof of learning"


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The keys and defaults of `sums`."""

    steps: int = option(24, help="optimizer steps")
    sampling: SamplingConfig = option(SamplingConfig(max_tokens=4, stop=(STOP,)), help="how answers are sampled")
    rollout: RolloutConfig = option(RolloutConfig(group_size=8), help="how answers are gathered")
    train: TrainConfig = option(TrainConfig(learning_rate=3e-5, final_share=0.1), help="the trainer")
    loop: LoopConfig = option(LoopConfig(groups_per_step=16, evaluate_every=8), help="batches and evaluation")
    held_out_prompts: int = option(200, help="prompts of held-out sums that an evaluation asks")

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        require_at_least(self, "", held_out_prompts=1)


class Sums:
    """The task: questions, an exact reward, greedy accuracy on held-out sums."""

    name = "sums"
    chat = False
    server_pid: int | None = None

    def __init__(self, config: Config) -> None:
        self.config = config

    def prompts(self) -> RoleSpec:
        from rollforge.runtime import RoleSpec

        return RoleSpec(name="prompts", target="rollforge.data.sums:sums", kwargs={"seed": self.config.seed})

    async def environments(self, stack: AsyncExitStack, log: Path) -> EnvironmentPool:
        return SingleTurns(ExactAnswer())

    async def evaluate(self, served: Served, version: int) -> Metrics:
        """Greedy accuracy on held-out sums."""
        questions = sums(self.config.seed, "held_out").first(self.config.held_out_prompts)
        greedy = Sampling(temperature=0, max_tokens=self.config.sampling.max_tokens, stop=self.config.sampling.stop)
        played, failed = await served.play(questions, greedy)
        return {"eval/accuracy": float(np.mean([rollout.reward for rollout in played])), **failed}

    def report(self, folder: Path, evaluations: Sequence[Metrics]) -> Report:
        from rollforge.recipes.run import Report

        first, last = evaluations[0]["eval/accuracy"], evaluations[-1]["eval/accuracy"]
        return Report(rows=[("held-out greedy accuracy", first, last)])


def run(config: Config, folder: Path) -> int:
    """Trains; returns the exit code."""
    from rollforge.recipes import run as shared

    return shared.run(Sums(config), folder)


def evaluate(config: Config, model: str) -> Mapping[str, float]:
    """Judges a model without training it."""
    from rollforge.recipes import run as shared

    return shared.evaluate(Sums(config), model)
