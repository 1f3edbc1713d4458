"""From rewards to advantages, on plain numbers.

Knows: how returns are compared with their peers' and who the peers are. Does not know: torch, tokens' probabilities.

Everything is computed in float64, spreads by deviations from the mean (never mean of squares minus square of the mean,
which leaves rounding noise where the spread is zero). Shape legend: G returns that are compared with each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rollforge.algo.config import Advantage
from rollforge.config import UserError
from rollforge.types import Group

Floats = npt.NDArray[np.float64]
Compare = Callable[[Floats], Floats]

MAX_SPREADS = 10.0
"""Bound of a leave-one-out advantage in standard deviations of the others. The others' spread does not contain the one
return that is judged by it, so without a bound an odd one among nearly equal ones counts thousands of times."""


def has_spread(returns_G: Floats, tolerance: float) -> bool:
    """False when the returns are equal up to rounding: they span at most `tolerance` x max(1, largest magnitude)."""
    return float(np.ptp(returns_G)) > tolerance * max(1.0, float(np.abs(returns_G).max()))


def compare(returns_G: Floats, advantage: Advantage, std_eps: float, tolerance: float) -> Floats:
    """Advantages [G] of returns [G]; the standard deviation is the sample one (n - 1).

    Equal returns (see `has_spread`) give exact zeros. In `leave_one_out_norm`, where only the others are equal, the
    plain difference to them is kept. Sources: GRPO arXiv 2402.03300 (outcome supervision), Dr. GRPO arXiv 2503.20783,
    RLOO arXiv 2402.14740.
    """
    returns_G = np.asarray(returns_G, dtype=np.float64)
    if not has_spread(returns_G, tolerance):
        return np.zeros_like(returns_G)
    if advantage == "leave_one_out_norm":
        return _leave_one_out_norm(returns_G, std_eps, tolerance)
    centred_G: Floats = returns_G - returns_G.mean()
    if advantage == "group_norm":
        centred_G /= centred_G.std(ddof=1) + std_eps
    elif advantage == "leave_one_out":
        centred_G *= len(returns_G) / (len(returns_G) - 1)
    return centred_G


def _leave_one_out_norm(returns_G: Floats, std_eps: float, tolerance: float) -> Floats:
    result_G = np.empty_like(returns_G)
    for i, own in enumerate(returns_G):
        others = np.delete(returns_G, i)
        difference = own - others.mean()
        if has_spread(others, tolerance):
            difference = np.clip(difference / (others.std(ddof=1) + std_eps), -MAX_SPREADS, MAX_SPREADS)
        result_G[i] = difference
    return result_G


def rewards_of(group: Group) -> Floats:
    """The rewards [rollouts] of a group. Raises UserError naming the first rollout whose reward is NaN or infinite."""
    if not group.rollouts:
        raise UserError(f"group {group.index} of prompt {group.prompt.id!r} has no rollouts; nothing can be compared.")
    for rollout in group.rollouts:
        if not math.isfinite(rollout.reward):
            raise UserError(
                f"rollout {rollout.id!r} has reward {rollout.reward}. One such value would spread to the advantages of "
                "its whole group; let the reward function return a finite number, or None to abstain."
            )
    return np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)


def group_advantages(group: Group, how: Compare) -> tuple[tuple[float, ...], ...]:
    """One advantage per rollout, the same for each of its turns; peers are all rollouts of the group."""
    values = how(rewards_of(group))
    return tuple((float(a),) * len(r.turns) for a, r in zip(values, group.rollouts, strict=True))


def turn_advantages(group: Group, how: Compare) -> tuple[tuple[float, ...], ...]:
    """One advantage per turn; peers are the turns of the group that saw exactly the same prompt tokens.

    The return of a turn is its rollout's reward (GiGPO's anchor states, arXiv 2505.10978, without discount). An anchor
    that only one rollout has seen says nothing about the choice made there: its turns get `group_advantages`.
    """
    rewards = rewards_of(group)
    anchors: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for i, rollout in enumerate(group.rollouts):
        for t, turn in enumerate(rollout.turns):
            anchors[np.asarray(turn.prompt_ids, dtype=np.int64).tobytes()].append((i, t))
    result = [list(row) for row in group_advantages(group, how)]
    for places in anchors.values():
        if len({i for i, _ in places}) > 1:
            for (i, t), value in zip(places, how(rewards[[i for i, _ in places]]), strict=True):
                result[i][t] = float(value)
    return tuple(map(tuple, result))
