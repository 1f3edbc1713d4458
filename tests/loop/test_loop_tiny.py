"""The real loop with the real roles in this process, on the tiny model and one-digit sums: it learns, as promised."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollforge.envs.rewards import ExactAnswer, WeightedSum
from rollforge.envs.single_turn import SingleTurns
from rollforge.recipes import run as shared
from rollforge.recipes import sums
from rollforge.runs.folder import RunFolder
from rollforge.runs.reader import RunReader
from rollforge.types import EnvironmentPool, Prompt

GROUPS, SIZE, STEPS = 8, 8, 30
CONFIG = sums.Config(
    model="tiny",
    in_process=True,
    threads=1,
    seed=1,
    steps=STEPS,
    held_out_prompts=4,
    train=replace(sums.Config().train, learning_rate=1e-3),
    algo=replace(sums.Config().algo, kl_coef=0.01),
    rollout=replace(sums.Config().rollout, group_size=SIZE),
    loop=replace(sums.Config().loop, groups_per_step=GROUPS, evaluate_every=0),
)


def trained(task: sums.Sums, folder: Path) -> RunReader:
    RunFolder.create(folder).save_config("sums", "")
    assert shared.run(task, folder) == 0
    return RunReader(folder)


@pytest.fixture(scope="module", params=[0, 1, 3])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, RunReader]:
    """A bound on staleness, and a run under it with two generators and the reference model."""
    bound = int(request.param)
    config = replace(CONFIG, generators=2, buffer=replace(CONFIG.buffer, max_staleness=bound))
    return bound, trained(sums.Sums(config), tmp_path_factory.mktemp("loop") / "run")


def test_the_reward_rises(run: tuple[int, RunReader]) -> None:
    rewards = [value for _, value in run[1].series("reward/mean")]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.1, rewards


def test_no_token_is_staler_than_allowed_and_generation_runs_ahead_as_far(run: tuple[int, RunReader]) -> None:
    bound, reader = run
    rollouts = list(reader.rollouts())
    assert [one["step"] for one in rollouts] == [step for step in range(STEPS) for _ in range(GROUPS * SIZE)]
    ages = [one["step"] - version for one in rollouts for turn in one["turns"] for version in turn["versions"]]
    assert set(ages) <= set(range(bound + 1))
    assert max(ages) == bound


def test_every_group_is_trained_once_in_its_order(run: tuple[int, RunReader]) -> None:
    rollouts = list(run[1].rollouts())
    assert [one["group"] for one in rollouts] == [group for group in range(STEPS * GROUPS) for _ in range(SIZE)]
    assert len({one["id"] for one in rollouts}) == len(rollouts)


def test_the_policy_leaves_the_reference_and_the_ratio_tells_the_staleness(run: tuple[int, RunReader]) -> None:
    bound, reader = run
    distance = [value for _, value in reader.series("kl/reference")]
    assert distance[0] == pytest.approx(0, abs=1e-3)
    assert min(distance[STEPS // 2 :]) > 0.01
    off_policy = [value for _, value in reader.series("kl/behaviour")]
    assert (max(off_policy) < 1e-4) == (bound == 0), off_policy


class Unsure:
    """Half a point for any answer but those with a 1 in them, for which it abstains."""

    async def __call__(self, prompt: Prompt, completion: str) -> float | None:
        return None if "1" in completion else 0.5


class NotOne(ExactAnswer):
    """ExactAnswer, which abstains for the same answers and for all to sums that make 3."""

    async def __call__(self, prompt: Prompt, completion: str) -> float | None:  # type: ignore[override]
        silent = "1" in completion or prompt.task["answer"] == "3"
        return None if silent else await super().__call__(prompt, completion)


class Judged(sums.Sums):
    async def environments(self, stack: AsyncExitStack, log: Path) -> EnvironmentPool:
        return SingleTurns(WeightedSum((1.0, NotOne()), (1.0, Unsure())))


def test_p44_rewards_that_abstain_spoil_neither_a_step_nor_a_group(tmp_path: Path) -> None:
    config = replace(
        CONFIG,
        steps=6,
        rollout=replace(CONFIG.rollout, retries=0),
        loop=replace(CONFIG.loop, max_failed_share=1.0),
        buffer=replace(CONFIG.buffer, max_staleness=0),
    )
    reader = trained(Judged(config), tmp_path / "run")
    rollouts, metrics = list(reader.rollouts()), list(reader.metrics())
    said = [one["turns"][0]["completion"] for one in rollouts]
    assert not any("1" in text for text in said), "where all abstain there is no reward, not 0"
    assert {one["reward"] for one in rollouts} == {0.5, 1.5}
    assert metrics[-1]["episodes/failed"] > 0
    assert all(0 < one["eval/failed"] < config.held_out_prompts for one in reader.evaluations())
    assert all(math.isfinite(value) for one in metrics for value in one.values())
    assert all(math.isfinite(value) for one in rollouts for value in one["advantages"])
