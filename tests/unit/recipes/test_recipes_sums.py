"""The sums recipe's evaluation: a policy that knows a known share of the answers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from rollforge.data.sums import sums
from rollforge.recipes.run import Served
from rollforge.recipes.sums import Config, Sums
from rollforge.types import EnvironmentPool, Metrics, Prompt, Rollout, Sampling


class KnowsSmallSums:
    """A served worker that is right where the sum is below `limit`, judged by the recipe's own environment."""

    def __init__(self, environments: EnvironmentPool, limit: int) -> None:
        self.environments, self.limit = environments, limit
        self.asked: list[tuple[Prompt, Sampling]] = []

    async def play(self, prompt: Prompt, sampling: Sampling) -> Rollout:
        self.asked.append((prompt, sampling))
        answer = int(prompt.task["answer"])
        async with self.environments.session() as environment:
            await environment.reset(prompt.task)
            observation = await environment.step(str(answer if answer < self.limit else answer + 1))
        assert observation.reward is not None
        return Rollout(prompt.id, (), observation.reward)


async def judge(config: Config, limit: int) -> tuple[Metrics, KnowsSmallSums]:
    task = Sums(config)
    async with AsyncExitStack() as stack:
        worker = KnowsSmallSums(await task.environments(stack, Path("log")), limit)
    return await task.evaluate(Served(cast(Any, None), cast(Any, worker), 0.2), 0), worker


@pytest.mark.parametrize("limit", [0, 7, 100])
async def test_accuracy_is_the_share_of_held_out_sums_answered_right(limit: int) -> None:
    config = Config(seed=3, held_out_prompts=50)
    metrics, worker = await judge(config, limit)
    answers = [int(prompt.task["answer"]) for prompt, _ in worker.asked]
    assert len(answers) == 50
    assert metrics == {"eval/accuracy": pytest.approx(sum(answer < limit for answer in answers) / 50)}
    trained = {prompt.text.splitlines()[-1] for prompt in sums(config.seed).first(2000)}
    assert not {prompt.text.splitlines()[-1] for prompt, _ in worker.asked} & trained
    assert {sampling for _, sampling in worker.asked} == {Sampling(temperature=0, max_tokens=4, stop=("\n",))}


async def test_the_report_sets_the_first_accuracy_beside_the_last() -> None:
    evaluations = [(await judge(Config(held_out_prompts=20), limit))[0] for limit in (0, 7, 100)]
    assert list(Sums(Config()).report(Path(), evaluations).rows) == [("held-out greedy accuracy", 0.0, 1.0)]
