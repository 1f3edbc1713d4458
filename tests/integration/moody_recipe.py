"""A user's recipe: sums whose reward raises for some questions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rollforge.config import option
from rollforge.envs.rewards import ExactAnswer
from rollforge.envs.single_turn import SingleTurns
from rollforge.recipes import run as shared
from rollforge.recipes import sums
from rollforge.types import EnvironmentPool, Prompt

SUMMARY = "sums with a reward that raises"


@dataclass(frozen=True, kw_only=True)
class Config(sums.Config):
    answers_that_raise: tuple[str, ...] = option((), help="the reward raises for questions with these answers")
    chat: bool = option(False, help="say that prompts are messages")


class MoodyReward:
    def __init__(self, raising: tuple[str, ...]) -> None:
        self._raising = raising

    async def __call__(self, prompt: Prompt, completion: str) -> float:
        if prompt.task["answer"] in self._raising:
            raise LookupError(f"no judge for {prompt.task['answer']}")
        return await ExactAnswer()(prompt, completion)


class Moody(sums.Sums):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._raising, self.chat = config.answers_that_raise, config.chat

    async def environments(self, stack: AsyncExitStack, log: Path) -> EnvironmentPool:
        return SingleTurns(MoodyReward(self._raising))

    async def evaluate(self, served: shared.Served, version: int) -> Mapping[str, float]:
        return {"eval/accuracy": 0.0}


def run(config: Config, folder: Path) -> int:
    return shared.run(Moody(config), folder)


def evaluate(config: Config, model: str) -> Mapping[str, float]:
    return shared.evaluate(Moody(config), model)
