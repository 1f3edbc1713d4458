"""Advantages of whole groups: peers, filtering, and rewards that are no numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollforge.algo.advantages import compare
from rollforge.algo.config import GRPOConfig
from rollforge.algo.grpo import GRPO
from rollforge.config import UserError
from rollforge.types import Algorithm, Completion, Group, Observation, Prompt, Rollout, Turn


def rollout(name: str, reward: float, *prompts: tuple[int, ...], dtype: type = np.int32) -> Rollout:
    """A rollout whose turns saw these prompt tokens."""
    completion = Completion(
        np.array([5], np.int32), np.array([-1.0], np.float32), np.array([0], np.int32), "x", finish_reason="stop"
    )
    turns = tuple(Turn(np.array(ids, dtype), completion, Observation("")) for ids in prompts)
    return Rollout(name, turns, reward)


def group(*rollouts: Rollout) -> Group:
    return Group(0, Prompt("p0"), rollouts)


def test_group_norm_gives_every_turn_of_a_rollout_the_same() -> None:
    credit = GRPO(GRPOConfig()).credit(group(rollout("a", 1.0, (1,), (1, 2)), rollout("b", 0.0, (1,))))
    assert [list(row) for row in credit.advantages] == [
        pytest.approx([0.7071] * 2, abs=1e-4),
        pytest.approx([-0.7071], abs=1e-4),
    ]
    assert credit.dropped is None


@pytest.mark.parametrize(
    ("advantage", "wanted"),
    [("group_center", [0.75, -0.25]), ("leave_one_out", [1.0, -1 / 3]), ("group_norm", [1.5, -0.5])],
)
def test_each_comparison(advantage: str, wanted: list[float]) -> None:
    values = compare(np.array([1.0, 0.0, 0.0, 0.0]), advantage, 0.0, 1e-6)  # type: ignore[arg-type]
    assert values.tolist() == pytest.approx([wanted[0]] + [wanted[1]] * 3)


def test_comparing_leaves_its_input_alone() -> None:
    rewards = np.array([1.0, 0.0])
    compare(rewards, "group_norm", 1e-6, 1e-6)
    assert rewards.tolist() == [1.0, 0.0]


def test_turn_baseline_compares_turns_that_saw_the_same_tokens() -> None:
    """All share anchor (1,); a and b share (1, 2); c alone saw (1, 3) and keeps its group advantage there."""
    members = group(rollout("a", 1.0, (1,), (1, 2)), rollout("b", -1.0, (1,), (1, 2)), rollout("c", 0.6, (1,), (1, 3)))
    credit = GRPO(GRPOConfig(advantage="group_center", baseline="turn")).credit(members)
    assert [list(row) for row in credit.advantages] == [
        pytest.approx([0.8, 1.0]),
        pytest.approx([-1.2, -1.0]),
        pytest.approx([0.4, 0.4]),
    ]


def test_an_anchor_that_one_rollout_saw_twice_is_not_compared_with_itself() -> None:
    members = group(rollout("a", 1.0, (1,), (9,), (9,)), rollout("b", 0.0, (1,)))
    credit = GRPO(GRPOConfig(advantage="group_center", baseline="turn")).credit(members)
    assert credit.advantages == ((0.5, 0.5, 0.5), (-0.5,))


def test_an_anchor_whose_returns_are_equal_teaches_nothing() -> None:
    members = group(rollout("a", 1.0, (1,), (2,)), rollout("b", 1.0, (1,), (2,)), rollout("c", -2.0, (1,)))
    credit = GRPO(GRPOConfig(baseline="turn")).credit(members)
    assert credit.advantages[0][1] == credit.advantages[1][1] == 0.0
    assert credit.dropped is None


def test_anchors_are_whole_token_sequences_whatever_their_dtype() -> None:
    members = group(
        rollout("a", 1.0, (1,), (2, 0)), rollout("b", 0.0, (1,), (2, 0), dtype=np.int64), rollout("c", 0.5, (1,), (2,))
    )
    credit = GRPO(GRPOConfig(advantage="group_center", baseline="turn")).credit(members)
    assert [row[1] for row in credit.advantages] == pytest.approx([0.5, -0.5, 0.0])


@pytest.mark.parametrize("baseline", ["group", "turn"])
@pytest.mark.parametrize("rewards", [[1.0, 1.0], [0.1 + 0.2, 0.3], [0.5]])
def test_groups_without_variance_are_dropped_with_their_reason(baseline: str, rewards: list[float]) -> None:
    members = group(*(rollout(str(i), r, (1,), (i,)) for i, r in enumerate(rewards)))
    credit = GRPO(GRPOConfig(baseline=baseline)).credit(members)  # type: ignore[arg-type]
    assert credit.dropped == "zero variance"
    assert credit.advantages == ((0.0, 0.0),) * len(rewards)
    kept = GRPO(GRPOConfig(baseline=baseline, filter_zero_variance=False)).credit(members)  # type: ignore[arg-type]
    assert kept.dropped is None


def test_tolerance_decides_what_counts_as_equal() -> None:
    members = group(rollout("a", 1.0, (1,)), rollout("b", 1.001, (1,)))
    assert GRPO(GRPOConfig()).credit(members).dropped is None
    assert GRPO(GRPOConfig(zero_variance_tolerance=0.01)).credit(members).dropped == "zero variance"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("baseline", ["group", "turn"])
def test_a_reward_that_is_no_number_names_its_rollout(bad: float, baseline: str) -> None:
    members = group(rollout("g7/r0", 1.0, (1,)), rollout("g7/r1", bad, (1,)))
    with pytest.raises(UserError, match="'g7/r1'"):
        GRPO(GRPOConfig(baseline=baseline)).credit(members)  # type: ignore[arg-type]


def test_an_empty_group_is_an_error() -> None:
    with pytest.raises(UserError, match="'p0' has no rollouts"):
        GRPO(GRPOConfig()).credit(group())


def test_grpo_is_an_algorithm_and_asks_only_for_what_it_uses() -> None:
    plain: Algorithm = GRPO(GRPOConfig())
    assert (plain.needs_reference, plain.needs_entropy) == (False, False)
    full = GRPO(GRPOConfig(kl_coef=0.1, entropy_coef=0.1))
    assert (full.needs_reference, full.needs_entropy) == (True, True)
