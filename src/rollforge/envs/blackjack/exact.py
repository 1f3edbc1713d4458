"""The exact worth of a policy under the rules of `game`: no hand is played, no luck is left.

Knows: the rules as a Markov chain over the 280 decision states. Does not know: models, servers, randomness.

A policy is an array [280, 3] of probabilities in the order of `STATES`: hit, stand, and anything else (unreadable). The
first unreadable action of a hand is told and leaves the state as it is; the second forfeits the hand for a penalty.

Notation: S = 280 decision states; T_SS[i, j] is the chance that a hit in state i leads to state j (rows miss the chance
of going bust); all values are expected rewards in [-1.5, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from rollforge.envs.blackjack.game import DEALER_CARDS, PENALTY, STATES, State, add, outcome

Values = npt.NDArray[np.float64]
HIT, STAND, OTHER = 0, 1, 2
CHANCE = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}
INDEX = {state: i for i, state in enumerate(STATES)}
CLEAR = 0.05
"""A choice is clear where the best action gains at least this much reward over the other."""


def expected_reward(policy: Values, after_notice: Values | None = None, penalty: float = PENALTY) -> float:
    """Expected reward of one hand from a fresh deal.

    policy [280, 3] is what is played before and after a notice is over; after_notice [280, 3] what is played in answer
    to the notice itself (default: the same). Raises ValueError for arrays that are not such probabilities.
    """
    return float(deal_chances() @ state_values(policy, after_notice, penalty))


def state_values(policy: Values, after_notice: Values | None = None, penalty: float = PENALTY) -> Values:
    """Expected reward [280] from each decision state, with no unreadable action said before it.

    Solves, for the hand that has been told once (`told`), that answers the notice (`answer`), and that has not
    (`fresh`):
        told   = hit (T told - bust)   + stand s + other penalty
        answer = hit'(T told - bust)   + stand's + other'penalty     (' : the probabilities after the notice)
        fresh  = hit (T fresh - bust)  + stand s + other answer
    """
    answer = policy if after_notice is None else after_notice
    _check(policy)
    _check(answer)
    told = _solve(policy, np.full(len(STATES), penalty))
    answered = answer[:, HIT] * hit_values(told) + answer[:, STAND] * stand_values() + answer[:, OTHER] * penalty
    return _solve(policy, answered)


def best_values() -> Values:
    """Expected reward [280] of the best hit/stand play from each state."""
    values = stand_values()
    for _ in range(21):  # a hand takes fewer cards than that
        values = np.maximum(stand_values(), hit_values(values))
    return values


def best_actions() -> npt.NDArray[np.bool_]:
    """Whether the best play hits, [280]."""
    return hit_values(best_values()) > stand_values()


def margins() -> Values:
    """What the best action gains over the other one, [280], with best play afterwards: how clear each choice is."""
    return np.abs(hit_values(best_values()) - stand_values())


def clear_choices() -> npt.NDArray[np.bool_]:
    """Whether the best action gains at least `CLEAR` over the other one, [280]."""
    return margins() >= CLEAR


def policy_of(hits: Callable[[State], float]) -> Values:
    """The policy [280, 3] that hits with this probability and stands otherwise."""
    chance = np.array([hits(state) for state in STATES], dtype=np.float64)
    return np.stack([chance, 1 - chance, np.zeros_like(chance)], axis=1)


def greedy(policy: Values) -> Values:
    """The policy that always does what `policy` does most often (of equals, the first)."""
    chosen: Values = np.eye(3)[np.argmax(policy, axis=1)]
    return chosen


def reference_lines() -> dict[str, float]:
    """Expected rewards of the plays that every result is compared with."""
    best = best_actions()
    return {
        "random": expected_reward(policy_of(lambda state: 0.5)),
        "always stand": expected_reward(policy_of(lambda state: 0.0)),
        "hit below 17": expected_reward(policy_of(lambda state: float(state.total < 17))),
        "best": expected_reward(policy_of(lambda state: float(best[INDEX[state]]))),
    }


@cache
def stand_values() -> Values:
    """Expected reward [280] of standing."""
    ends = {card: _dealer_ends(*add(0, False, card)) for card in DEALER_CARDS}
    return np.array(
        [sum(chance * outcome(state.total, total) for total, chance in ends[state.dealer].items()) for state in STATES]
    )


def hit_values(values: Values) -> Values:
    """Expected reward [280] of hitting, when the states after it are worth `values` [280] and going bust -1."""
    transitions_SS = _transitions()
    worth: Values = transitions_SS @ values - (1 - transitions_SS.sum(axis=1))
    return worth


@cache
def deal_chances() -> Values:
    """The chance [280] that a fresh deal begins in each state."""
    chances = np.zeros(len(STATES))
    for first, p in CHANCE.items():
        for second, q in CHANCE.items():
            total, soft = add(*add(0, False, first), second)
            for dealer, r in CHANCE.items():
                chances[INDEX[State(total, soft, dealer)]] += p * q * r
    return chances


@cache
def _transitions() -> Values:
    table_SS = np.zeros((len(STATES), len(STATES)))
    for i, (total, soft, dealer) in enumerate(STATES):
        for card, chance in CHANCE.items():
            after = State(*add(total, soft, card), dealer)
            if after.total <= 21:
                table_SS[i, INDEX[after]] += chance
    return table_SS


@cache
def _dealer_ends(total: int, soft: bool) -> dict[int, float]:
    """The chances of the dealer's final totals (over 21: bust) from a total on."""
    if total >= 17:
        return {total: 1.0}
    ends: dict[int, float] = {}
    for card, chance in CHANCE.items():
        for end, further in _dealer_ends(*add(total, soft, card)).items():
            ends[end] = ends.get(end, 0.0) + chance * further
    return ends


def _solve(policy: Values, other: Values) -> Values:
    """The values v = hit (T v - bust) + stand s + other * `other`."""
    hit, stand, rest = policy.T
    gain = hit * hit_values(np.zeros(len(STATES))) + stand * stand_values() + rest * other
    solution: Values = np.linalg.solve(np.eye(len(STATES)) - hit[:, None] * _transitions(), gain)
    return solution


def _check(policy: Values) -> None:
    if policy.shape != (len(STATES), 3):
        raise ValueError(f"a policy has the shape ({len(STATES)}, 3), not {policy.shape}")
    if not (np.all(policy >= 0) and np.allclose(policy.sum(axis=1), 1, atol=1e-4)):  # also catches NaN
        raise ValueError("the three probabilities of each state must not be negative and must add up to 1")
