"""Plain objects for every role of the loop: they count versions, can be slow in a seeded way, and can fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollforge.buffer.config import BufferConfig
from rollforge.buffer.replay import ReplayBuffer
from rollforge.loop.config import LoopConfig
from rollforge.loop.pipeline import Pipeline, Roles
from rollforge.types import (
    Batch,
    Completion,
    Credit,
    FloatArray,
    Group,
    Metrics,
    Observation,
    Prompt,
    Rollout,
    Scored,
    TrainSample,
    Turn,
)


@dataclass
class World:
    """What all fakes share. `fail` names a role's method that raises `error` at its `fail_at`-th call (from 0)."""

    seed: int = 0
    slow_s: float = 0.0
    fail: str = ""
    fail_at: int = 0
    error: Exception = field(default_factory=lambda: RuntimeError("the cause"))
    served: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    trained: list[Batch] = field(default_factory=list)
    recorded: list[list[Scored]] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    play: Callable[[Prompt, int], Group | Exception] | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def count(self, name: str) -> None:
        at = self.calls.get(name, 0)
        self.calls[name] = at + 1
        if name == self.fail and at == self.fail_at:
            raise self.error

    async def call(self, name: str) -> None:
        """Takes some time, which differs from call to call, and fails when it is its turn."""
        await asyncio.sleep(self._random.random() * self.slow_s)
        self.count(name)


def group_of(prompt: Prompt, index: int, versions: Sequence[int], rewards: Sequence[float] = (0.0, 1.0)) -> Group:
    """A group of rollouts with one token for each of `versions`."""
    size = len(versions)
    sampled = Completion(
        np.arange(size, dtype=np.int32), np.zeros(size, np.float32), np.asarray(versions, np.int32), "x", "stop"
    )
    rollouts = tuple(
        Rollout(f"{prompt.id}/{at}", (Turn(np.zeros(1, np.int32), sampled, Observation("", reward, True)),), reward)
        for at, reward in enumerate(rewards)
    )
    return Group(index, prompt, rollouts)


@dataclass
class Prompts:
    world: World
    drawn: int = 0

    async def draw(self) -> Prompt:
        await self.world.call("prompts.draw")
        self.drawn += 1
        return Prompt(f"prompt-{self.drawn - 1}")

    async def state(self) -> Mapping[str, Any]:
        return {}

    async def restore(self, state: Mapping[str, Any]) -> None:
        return None


@dataclass
class Worker:
    """Two tokens a rollout: the policy may change between them."""

    world: World

    async def run(self, prompt: Prompt, index: int, seed: int) -> Group:
        first = self.world.served
        await self.world.call("worker.run")
        found = self.world.play(prompt, index) if self.world.play else None
        if isinstance(found, Exception):
            raise found
        return found or group_of(prompt, index, (first, self.world.served))

    async def play(self, *_: Any) -> Rollout:
        raise AssertionError

    complete = vocabulary = check = play  # type: ignore[assignment]


@dataclass
class Generator:
    world: World

    async def generate(self, *_: Any) -> list[Completion]:
        raise AssertionError

    async def load(self, version: int) -> Metrics:
        await self.world.call("generator.load")
        self.world.served = version
        return {"time/load_s": 0.0}

    async def version(self) -> int:
        return self.world.served

    async def metrics(self) -> Metrics:
        self.world.count("generator.metrics")
        return {"generate/tokens": 10.0}


@dataclass
class Trainer:
    world: World

    async def forward_backward(self, batch: Batch) -> Metrics:
        await self.world.call("trainer.forward_backward")
        self.world.trained.append(batch)
        return {"loss/policy": 0.0}

    async def optim_step(self) -> Metrics:
        await self.world.call("trainer.optim_step")
        return {}

    async def publish(self, version: int) -> Metrics:
        await self.world.call("trainer.publish")
        return {}

    async def export(self, folder: str) -> None:
        raise AssertionError


@dataclass
class Reference:
    world: World

    async def score(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        await self.world.call("reference.score")
        return tuple(np.full(len(sample.token_ids), -1.0, np.float32) for sample in samples)


@dataclass
class Recorder:
    world: World

    async def log(self, step: int, metrics: Metrics) -> None:
        self.world.count("recorder.log")
        self.world.metrics.append(metrics)

    async def rollouts(self, step: int, scored: Sequence[Scored]) -> None:
        self.world.count("recorder.rollouts")
        self.world.recorded.append(list(scored))

    async def evaluation(self, step: int, metrics: Metrics) -> None:
        return None

    async def close(self) -> None:
        return None


@dataclass
class Centred:
    """An algorithm: reward minus mean; groups without spread are dropped."""

    world: World
    needs_reference: bool = False
    needs_entropy: bool = False

    def credit(self, group: Group) -> Credit:
        self.world.count("algorithm.credit")
        rewards = [rollout.reward for rollout in group.rollouts]
        mean = sum(rewards) / len(rewards)
        advantages = tuple(
            tuple(reward - mean for _ in r.turns) for reward, r in zip(rewards, group.rollouts, strict=True)
        )
        return Credit(advantages, dropped=None if max(rewards) > min(rewards) else "zero variance")

    def loss(self, outputs: Any, inputs: Any) -> Any:
        raise AssertionError


class CountedBuffer(ReplayBuffer):
    def __init__(self, world: World, groups_per_step: int, config: BufferConfig) -> None:
        super().__init__(groups_per_step, config)
        self._world = world

    async def put(self, scored: Scored) -> bool:
        await self._world.call("buffer.put")
        return await super().put(scored)

    async def take(self, version: int, groups: int) -> list[Scored]:
        self._world.count("buffer.take")
        return await super().take(version, groups)


def pipeline(
    world: World,
    *,
    steps: int = 4,
    groups_per_step: int = 3,
    max_staleness: int = 1,
    workers: int = 2,
    reference: bool = False,
    **config: Any,
) -> Pipeline:
    async def evaluate(version: int) -> Metrics:
        world.evaluated.append(version)
        await world.call("evaluate")
        return {}

    def on_step(step: int, metrics: Metrics) -> None:
        world.count("on_step")
        world.steps.append(step)

    buffer = CountedBuffer(world, groups_per_step, BufferConfig(max_staleness=max_staleness, wait_limit_s=20.0))
    roles = Roles(
        Prompts(world),
        [Worker(world) for _ in range(workers)],  # type: ignore[misc]
        buffer,
        Trainer(world),
        [Generator(world) for _ in range(workers)],
        Recorder(world),
        Reference(world) if reference else None,
    )
    loop = LoopConfig(groups_per_step=groups_per_step, **config)
    return Pipeline(roles, Centred(world), loop, steps, max_staleness, 0, evaluate, on_step, world.failures.append)
