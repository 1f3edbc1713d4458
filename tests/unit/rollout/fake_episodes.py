"""Fakes for the rollout worker's tests: an environment that follows a script and a policy that numbers its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rollforge.types import Completion, FinishReason, IntArray, Metrics, Observation, Sampling

Script = Callable[[int], Any]
"""What the environment of the n-th session does at its reset: an Observation, or an exception to raise."""


def completion(ids: list[int], text: str = "", version: int = 0, reason: FinishReason = "stop") -> Completion:
    size = len(ids)
    return Completion(
        np.asarray(ids, np.int32),
        np.linspace(-0.1, -0.5, size, dtype=np.float32),
        np.full(size, version, np.int32),
        text,
        reason,
    )


class FakePolicy:
    """Answers with one token: the number of the completion within its request. `block` holds requests up."""

    def __init__(self) -> None:
        self.requests: list[tuple[tuple[int, ...], Sampling, int]] = []
        self.cancelled = 0
        self.block: asyncio.Event | None = None
        self.error: Exception | None = None
        self.answer = completion

    async def generate(self, prompt_ids: IntArray, sampling: Sampling, n: int = 1) -> list[Completion]:
        self.requests.append((tuple(prompt_ids.tolist()), sampling, n))
        try:
            if self.block is not None:
                await self.block.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [self.answer([10 + i], text=str(i)) for i in range(n)]

    async def load(self, version: int) -> Metrics:
        return {}

    async def version(self) -> int:
        return 0

    async def metrics(self) -> Metrics:
        return {}


class FakeEnvironment:
    """Ends after one step with reward 1, unless the pool's `after` says otherwise."""

    def __init__(self, pool: FakePool, number: int) -> None:
        self._pool, self._number, self._steps = pool, number, 0

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        found = self._pool.script(self._number)
        if asyncio.iscoroutine(found):
            found = await found
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, Observation) else Observation("go")

    async def step(self, action: str) -> Observation:
        self._steps += 1
        self._pool.actions.append(action)
        answer: Observation = self._pool.after(self._steps)
        return answer

    async def close(self) -> None:
        return None


class FakePool:
    """Counts its sessions; the n-th one behaves by `script(n)`."""

    def __init__(self, script: Script = lambda number: None) -> None:
        self.script = script
        self.after: Callable[[int], Observation] = lambda steps: Observation("end", reward=1.0, done=True)
        self.sessions = self.open = 0
        self.actions: list[str] = []
        self.closed = False

    async def check(self) -> None:
        return None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[FakeEnvironment]:
        number, self.sessions = self.sessions, self.sessions + 1
        self.open += 1
        try:
            yield FakeEnvironment(self, number)
        finally:
            self.open -= 1

    async def close(self) -> None:
        self.closed = True
