"""A single exchange as an environment: the task's question, one answer, and a reward for it.

Knows: the Environment and Reward roles. Does not know: which reward.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rollforge.types import Observation, Prompt, Reward


class SingleTurn:
    """types.Environment for tasks with a `question` (a text, may be empty where the prompt says it all) and one
    answer."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._prompt: Prompt | None = None

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """The question. Raises ValueError for a task without one."""
        if "question" not in task:
            raise ValueError(f"the task has no 'question': its fields are {', '.join(sorted(task)) or 'none'}")
        self._prompt = Prompt(id=str(task.get("id", "")), text=str(task["question"]), task=task)
        return Observation(self._prompt.text)

    async def step(self, action: str) -> Observation:
        """The reward of the answer, which ends the episode. Raises ValueError where no question is open."""
        prompt, self._prompt = self._prompt, None
        if prompt is None:
            raise ValueError("no question is open: reset before the next answer")
        return Observation("", reward=await self._reward(prompt, action), done=True)

    async def close(self) -> None:
        """Nothing to let go of."""
        self._prompt = None


class SingleTurns:
    """types.EnvironmentPool: any number of `SingleTurn` beside whoever plays them, all judged by one reward."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    async def check(self) -> None:
        """Always there."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SingleTurn]:
        """An environment of one's own."""
        yield SingleTurn(self._reward)

    async def close(self) -> None:
        """Nothing to let go of."""
