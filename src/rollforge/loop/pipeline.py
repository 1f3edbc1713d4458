"""The loop: two coroutines, one page.

    prompts ──draw──▶ rollouts ◀──generate── generators          continuous rollouts
                         │    ◀──reset/step─ environments          (admitted while staleness allows)
                      credit (algorithm)
                         ▼
                      buffer ──take──▶ (reference) ──▶ trainer      continuous training
                         ▲                                │           (one optimizer step per batch)
                         └─── version + 1 ◀── load ◀── publish

Knows: roles by their verbs, versions, when to evaluate. Does not know: which algorithm it runs (it is handed one), or
whether a role is an object beside it or an actor elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollforge.buffer.replay import may_admit
from rollforge.config import RunFailed
from rollforge.loop.config import LoopConfig
from rollforge.loop.measure import Throughput, batch_metrics
from rollforge.rollout.samples import to_samples
from rollforge.rollout.worker import RolloutFailed
from rollforge.types import (
    Algorithm,
    Batch,
    Buffer,
    Evaluate,
    Generator,
    Metrics,
    Prompt,
    PromptSource,
    Recorder,
    RolloutWorker,
    Scored,
    Scorer,
    Trainer,
)

WARM_UP_EPISODES = 32
"""Episodes before the share of failed ones means anything."""
RECENT_EPISODES = 256
"""Episodes that the share of failed ones is taken over: a breakdown late in a run must show as soon as an early one."""


class TooManyFailures(RunFailed):
    """More episodes failed than `loop.max_failed_share` allows."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Everyone who takes part. `reference` is None when the algorithm needs none."""

    prompts: PromptSource
    workers: Sequence[RolloutWorker]
    buffer: Buffer
    trainer: Trainer
    generators: Sequence[Generator]
    recorder: Recorder
    reference: Scorer | None = None


class Pipeline:
    """Runs `steps` optimizer steps; `evaluate` is called before the first and between steps.

    `on_step(step, metrics)` is told of each step, `on_failure(text)` of each failed episode.
    """

    def __init__(
        self,
        roles: Roles,
        algorithm: Algorithm,
        config: LoopConfig,
        steps: int,
        max_staleness: int,
        seed: int,
        evaluate: Evaluate,
        on_step: Callable[[int, Metrics], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._roles, self._algorithm, self._config = roles, algorithm, config
        self._steps, self._max_staleness, self._seed = steps, max_staleness, seed
        self._evaluate, self._on_step, self._on_failure = evaluate, on_step, on_failure
        self._version = 0
        self._moved = asyncio.Condition()
        self._throughput = Throughput()
        self._episodes = Counter(played=0, failed=0, evicted=0)
        self._recently_failed: deque[bool] = deque(maxlen=RECENT_EPISODES)

    async def run(self) -> None:
        """Runs to the last step; the first exception of either coroutine ends both and is raised."""
        await self._evaluate(0)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._continuous_rollouts(), name="continuous rollouts")
                tasks.create_task(self._continuous_training(), name="continuous training")
        except BaseExceptionGroup as failures:
            raise _first_cause(failures) from None

    async def _continuous_rollouts(self) -> None:
        """Starts the generation of one group after another, as early as the staleness bound allows."""
        per_step = self._config.groups_per_step
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._steps * per_step):
                async with self._moved:
                    while not may_admit(index, self._version, per_step, self._max_staleness):
                        await self._moved.wait()
                tasks.create_task(self._one_group(index, await self._roles.prompts.draw()), name=f"group {index}")

    async def _one_group(self, index: int, prompt: Prompt) -> None:
        """Plays, scores and buffers the group with this index; a prompt that fails makes way for the next one."""
        worker = self._roles.workers[index % len(self._roles.workers)]
        while True:
            try:
                group = await worker.run(prompt, index, self._seed)
            except RolloutFailed as failure:
                self._count(failure.played, failure.failures)
                prompt = await self._roles.prompts.draw()
                continue
            self._count(len(group.rollouts), group.failures)
            credit = self._algorithm.credit(group)
            if await self._roles.buffer.put(Scored(group, credit, to_samples(group, credit))):
                return
            self._episodes["evicted"] += len(group.rollouts)

    async def _continuous_training(self) -> None:
        """One optimizer step per batch, then the new weights go to the generators and the version moves on."""
        for step in range(self._steps):
            started = time.perf_counter()
            scored = await self._roles.buffer.take(step, self._config.groups_per_step)
            waited = time.perf_counter() - started
            await self._roles.recorder.rollouts(step, scored)
            metrics = {
                "time/wait_for_rollouts_s": waited,
                **batch_metrics(scored, step),
                **await self._train(Batch(step, tuple(s for one in scored for s in one.samples))),
                **await self._update_generators(step + 1),
                **{f"episodes/{name}": float(count) for name, count in self._episodes.items()},
                **await self._throughput.measure(self._roles.generators),
                "time/step_s": time.perf_counter() - started,
            }
            await self._roles.recorder.log(step, metrics)
            self._on_step(step, metrics)
            every = self._config.evaluate_every
            if step + 1 == self._steps or (every and (step + 1) % every == 0):
                await self._evaluate(step + 1)
            async with self._moved:
                self._version = step + 1
                self._moved.notify_all()

    async def _train(self, batch: Batch) -> Metrics:
        """Reference log-probabilities, gradients, optimizer; a batch in which every group was filtered trains
        nothing.
        """
        if not batch.samples:
            return {}
        if self._roles.reference is not None:
            batch = Batch(batch.step, batch.samples, await self._roles.reference.score(batch.samples))
        metrics = await self._roles.trainer.forward_backward(batch)
        return {**metrics, **await self._roles.trainer.optim_step()}

    async def _update_generators(self, version: int) -> Metrics:
        published = await self._roles.trainer.publish(version)
        async with asyncio.TaskGroup() as tasks:  # unlike gather, it leaves no load behind when one fails
            loading = [tasks.create_task(generator.load(version)) for generator in self._roles.generators]
        loaded = [task.result() for task in loading]
        return {**published, **{name: max(one[name] for one in loaded) for name in loaded[0]}}

    def _count(self, played: int, failures: Sequence[str]) -> None:
        self._episodes["played"] += played
        self._episodes["failed"] += len(failures)
        self._recently_failed.extend([False] * played + [True] * len(failures))
        for text in failures:
            self._on_failure(text)
        failed, total = sum(self._recently_failed), len(self._recently_failed)
        if failures and total >= WARM_UP_EPISODES and failed > self._config.max_failed_share * total:
            raise TooManyFailures(
                f"{failed} of the last {total} episodes failed, more than loop.max_failed_share = "
                f"{self._config.max_failed_share:g} allows. The logs of the environment workers hold each in full; "
                f"remove the cause, or raise the share. The last one: {failures[-1]}"
            )


def _first_cause(failures: BaseExceptionGroup) -> BaseException:
    """The first exception that is not a group: what a user wants to read."""
    first = failures.exceptions[0]
    return _first_cause(first) if isinstance(first, BaseExceptionGroup) else first
