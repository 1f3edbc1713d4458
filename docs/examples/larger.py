"""A recipe of your own: which of two digits is larger? `rollforge run docs/examples/larger.py --model tiny`"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollforge.config import option
from rollforge.data.prompts import GeneratedPrompts, Part
from rollforge.envs.single_turn import SingleTurns
from rollforge.recipes.base import RunConfig, SamplingConfig
from rollforge.runtime import RoleSpec
from rollforge.types import Metrics, Prompt, Sampling

if TYPE_CHECKING:
    from rollforge.recipes.run import Report, Served

SUMMARY = "which of two digits is larger: an example of a recipe of one's own"


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int = option(40, help="optimizer steps")
    sampling: SamplingConfig = option(SamplingConfig(max_tokens=2, stop=("\n",)), help="how answers are sampled")
    questions: int = option(100, help="held-out questions that an evaluation asks")


def make(rng: np.random.Generator) -> Prompt:  # the data: two solved questions and an open one
    pairs = [rng.choice(10, size=2, replace=False).tolist() for _ in range(3)]
    *solved, (a, b) = pairs
    text = "".join(f"{x},{y}>{max(x, y)}\n" for x, y in solved) + f"{a},{b}>"
    return Prompt(id="", text=text, task={"question": "", "answer": str(max(a, b)), "other": str(min(a, b))})


def prompts(seed: int, part: Part = "train") -> GeneratedPrompts:
    return GeneratedPrompts(make, seed, prefix=f"{part}-", held_out=0.2, part=part)


class Larger:  # the reward: right 1, one of the two 0.2, else 0; raise where it cannot be judged
    async def __call__(self, prompt: Prompt, completion: str) -> float:
        return {prompt.task["answer"]: 1.0, prompt.task["other"]: 0.2}.get(completion.strip(), 0.0)


class Task:
    name = "larger"
    chat = False  # prompts are raw text, not messages
    server_pid: int | None = None  # no environment server to watch

    def __init__(self, config: Config) -> None:
        self.config = config

    def prompts(self) -> RoleSpec:
        return RoleSpec(name="prompts", target="larger:prompts", kwargs={"seed": self.config.seed})

    async def environments(self, stack: AsyncExitStack, log: Path) -> SingleTurns:
        return SingleTurns(Larger())  # one question, one answer, in the worker's own process

    async def evaluate(self, served: Served, version: int) -> Metrics:
        greedy = Sampling(temperature=0, max_tokens=self.config.sampling.max_tokens, stop=self.config.sampling.stop)
        asked = prompts(self.config.seed, "held_out").first(self.config.questions)
        played, failed = await served.play(asked, greedy)
        return {"eval/reward": float(np.mean([rollout.reward for rollout in played])), **failed}

    def report(self, folder: Path, evaluations: Sequence[Metrics]) -> Report:
        from rollforge.recipes.run import Report

        return Report([("held-out reward, greedy", evaluations[0]["eval/reward"], evaluations[-1]["eval/reward"])])


def run(config: Config, folder: Path) -> int:
    from rollforge.recipes import run as shared

    return shared.run(Task(config), folder)


def evaluate(config: Config, model: str) -> Mapping[str, float]:
    from rollforge.recipes import run as shared

    return shared.evaluate(Task(config), model)
