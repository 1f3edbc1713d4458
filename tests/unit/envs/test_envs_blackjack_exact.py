"""The linear solution against a plain recursion over the same rules, and its checks."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from rollforge.envs.blackjack import exact
from rollforge.envs.blackjack.game import STATES, State, add


def random_policy(seed: int) -> exact.Values:
    return np.random.default_rng(seed).dirichlet((2.0, 2.0, 0.7), size=len(STATES))


def recursive(policy: exact.Values, after: exact.Values, penalty: float) -> float:
    """The same worth, hand by hand. `told`: the notice was used up; `asked`: it was the last answer."""
    stand = exact.stand_values()

    @cache
    def value(state: State, told: bool, asked: bool) -> float:
        i = exact.INDEX[state]
        hit, keep, other = (after if asked else policy)[i]
        drawn = 0.0
        for card, chance in exact.CHANCE.items():
            total, soft = add(state.total, state.soft, card)
            drawn += chance * (-1.0 if total > 21 else value(State(total, soft, state.dealer), told, False))
        unread = penalty if told else value(state, True, True)
        return float(hit * drawn + keep * stand[i] + other * unread)

    worth: float = sum(
        chance * value(state, False, False) for state, chance in zip(STATES, exact.deal_chances(), strict=True)
    )
    return worth


@pytest.mark.parametrize("seed", range(3))
def test_the_worth_equals_a_plain_recursion(seed: int) -> None:
    policy, after = random_policy(seed), random_policy(100 + seed)
    assert exact.expected_reward(policy, after, -1.7) == pytest.approx(recursive(policy, after, -1.7), abs=1e-10)
    assert exact.expected_reward(policy) == pytest.approx(recursive(policy, policy, -1.5), abs=1e-10)


def test_the_notice_matters_only_to_those_who_get_it() -> None:
    clean = exact.policy_of(lambda state: 0.3)
    assert exact.expected_reward(clean, random_policy(1)) == pytest.approx(exact.expected_reward(clean), abs=1e-12)
    silent = np.tile([0.0, 0.0, 1.0], (len(STATES), 1))
    assert exact.expected_reward(silent) == pytest.approx(-1.5)
    assert exact.expected_reward(silent, clean) == pytest.approx(
        float(exact.deal_chances() @ (0.3 * exact.hit_values(np.full(280, -1.5)) + 0.7 * exact.stand_values()))
    )


def test_no_policy_beats_the_best_and_one_change_costs_its_margin() -> None:
    best = exact.policy_of(lambda state: float(exact.best_actions()[exact.INDEX[state]]))
    top = exact.expected_reward(best)
    assert top == pytest.approx(float(exact.deal_chances() @ exact.best_values()), abs=1e-12)
    values = exact.state_values(best)
    for i in range(0, len(STATES), 13):
        changed = best.copy()
        changed[i, :2] = changed[i, 1::-1]
        assert exact.expected_reward(changed) <= top + 1e-12
        assert values[i] - exact.state_values(changed)[i] == pytest.approx(exact.margins()[i], abs=1e-12)


def test_greedy_takes_the_likeliest_action() -> None:
    policy = np.tile([0.2, 0.3, 0.5], (len(STATES), 1))
    policy[0] = [0.4, 0.4, 0.2]
    greedy = exact.greedy(policy)
    assert greedy[0].tolist() == [1.0, 0.0, 0.0]
    assert greedy[1].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "policy",
    [
        np.ones((280, 2)) / 2,
        np.ones((280, 3)),
        np.full((280, 3), np.nan),
        np.tile([1.5, -0.5, 0.0], (280, 1)),
    ],
)
def test_what_is_no_policy_is_refused(policy: exact.Values) -> None:
    with pytest.raises(ValueError, match=r"shape|probabilities"):
        exact.expected_reward(policy)
    with pytest.raises(ValueError, match=r"shape|probabilities"):
        exact.expected_reward(random_policy(0), policy)
