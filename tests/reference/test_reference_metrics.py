"""Known-right numbers for merged metrics and abstaining rewards: reported faults P42 and P44, with their kinds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rollforge.algo.advantages import compare
from rollforge.algo.config import GRPOConfig
from rollforge.algo.grpo import GRPO
from rollforge.config import UserError
from rollforge.envs.rewards import WeightedSum
from rollforge.envs.single_turn import SingleTurns
from rollforge.tensors import LossInputs, TokenOutputs, merge_metrics
from rollforge.types import Prompt, Reward


def pair(total: float, weight: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(total), torch.tensor(weight)


def metrics_of(ratios: list[float], *, num_tokens: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Metrics of one rank whose tokens have these importance ratios and advantage +1."""
    logprobs, n = torch.tensor(ratios).log() - 2.0, len(ratios)
    outputs = TokenOutputs(logprobs, torch.zeros(n), torch.zeros(n, 0), torch.zeros(n, 0, dtype=torch.bool))
    inputs = LossInputs(
        torch.full((n,), -2.0),
        torch.ones(n),
        None,
        torch.zeros(n, dtype=torch.int64),
        num_tokens=num_tokens,
        num_sequences=2,
        step=0,
        total_steps=1,
    )
    return GRPO(GRPOConfig()).loss(outputs, inputs)[1]


def test_p42_clipped_share_over_ranks_of_unequal_size() -> None:
    """2 of 20 tokens clipped on one rank and 3 of 5 on the other are 5 of 25, not (0.1 + 0.6) / 2."""
    ranks = [
        metrics_of([1.5] * 2 + [1.0] * 18, num_tokens=25),
        metrics_of([1.5] * 3 + [1.0] * 2, num_tokens=25),
    ]
    merged = merge_metrics(ranks)
    assert merged["clip/high"] == pytest.approx(0.2, abs=1e-6)
    assert merged["clip/low"] == 0.0
    assert merged["tokens"] == pytest.approx(25, abs=1e-4)
    assert merged["ratio/mean"] == pytest.approx((5 * 1.5 + 20) / 25, abs=1e-6)
    assert merged["ratio/max"] == pytest.approx(1.5, abs=1e-6)


def test_p42_each_optimizer_step_counts_once_whatever_its_number_of_micro_batches() -> None:
    windows = [[pair(1.0, 1.0)] * 3, [pair(5.0, 1.0)]]
    steps = [merge_metrics({"loss": p} for p in window)["loss"] for window in windows]
    assert sum(steps) / len(steps) == pytest.approx(3.0)


@pytest.mark.parametrize("cut", range(26))
def test_p42_merged_metrics_do_not_depend_on_the_split(cut: int) -> None:
    ratios = np.random.default_rng(1).uniform(0.4, 2.0, 25).tolist()
    whole = merge_metrics([metrics_of(ratios, num_tokens=25)])
    split = merge_metrics([metrics_of(part, num_tokens=25) for part in (ratios[:cut], ratios[cut:])])
    assert split == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_p42_largest_ratio_is_not_averaged() -> None:
    ranks = [metrics_of([1.0, 1.1], num_tokens=4), metrics_of([7.0, 1.0], num_tokens=4)]
    assert merge_metrics(ranks)["ratio/max"] == pytest.approx(7.0, rel=1e-5)
    assert merge_metrics(ranks[::-1])["ratio/max"] == pytest.approx(7.0, rel=1e-5)


def test_p44_a_step_without_a_value_logs_none() -> None:
    """Steps 2 and 4 abstain: the mean is over the three values that exist."""
    logged = [merge_metrics([{"reward": pair(v, w)}]) for v, w in [(0.25, 1), (0, 0), (0.75, 1), (0, 0), (1.0, 1)]]
    values = [step["reward"] for step in logged if "reward" in step]
    assert len(values) == 3
    assert sum(values) / len(values) == pytest.approx(0.666667, abs=1e-6)


def test_p44_a_part_without_a_value_does_not_spoil_the_others() -> None:
    nothing = {"legal/mass": pair(math.nan, 0.0)}
    assert merge_metrics([nothing, {"legal/mass": pair(1.5, 2.0)}, nothing]) == {"legal/mass": 0.75}
    assert merge_metrics([nothing]) == {}
    assert merge_metrics([]) == {}


def test_p44_tokens_without_legal_actions_have_no_legal_mass() -> None:
    assert "legal/mass" not in merge_metrics([metrics_of([1.0, 1.0], num_tokens=2)])


class Scores:
    """A reward by table; it abstains from what the table lacks."""

    def __init__(self, **scores: float) -> None:
        self._scores = scores

    async def __call__(self, prompt: Prompt, completion: str) -> float | None:
        return self._scores.get(completion)


async def judged(said: str, *parts: tuple[float, Reward]) -> float | None:
    """What an episode of one answer earns."""
    async with SingleTurns(WeightedSum(*parts)).session() as env:
        await env.reset({"question": "?"})
        answered = await env.step(said)
    assert answered.done
    return answered.reward


async def test_p44_abstaining_functions_add_nothing() -> None:
    parts = (1.0, Scores(first=1.0, second=0.0)), (1.0, Scores(second=1.0))
    sums = [await judged(said, *parts) for said in ("first", "second")]
    assert sums == [1.0, 1.0]
    assert compare(np.array(sums, dtype=np.float64), "group_norm", 1e-6, 1e-6).tolist() == [0.0, 0.0]


async def test_p44_each_function_counts_by_its_weight() -> None:
    assert await judged("x", (0.5, Scores(x=3.0)), (-2.0, Scores(x=1.0)), (7.0, Scores())) == -0.5


async def test_p44_where_all_abstain_there_is_no_reward() -> None:
    assert await judged("x", (1.0, Scores()), (1.0, Scores(y=1.0))) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
async def test_p44_nan_is_not_abstaining(bad: float) -> None:
    with pytest.raises(UserError, match=rf"Scores gave {bad} for the answer 'x'"):
        await judged("x", (1.0, Scores()), (0.0, Scores(x=bad)))


def test_p44_a_sum_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="no reward"):
        WeightedSum()
