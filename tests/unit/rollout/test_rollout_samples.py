"""From rollouts to training sequences: merging, branching, masks, versions, legal positions."""

from __future__ import annotations

import numpy as np
import pytest
from fake_episodes import completion

from rollforge.rollout.samples import to_samples
from rollforge.types import Completion, Credit, Group, Observation, Prompt, Rollout, TrainSample, Turn


def turn(prompt: list[int], sampled: Completion, legal: tuple[int, ...] = ()) -> Turn:
    return Turn(np.asarray(prompt, np.int32), sampled, Observation("", 1.0, True), legal)


def samples(*rollouts: tuple[Turn, ...], advantages: tuple[tuple[float, ...], ...]) -> tuple[TrainSample, ...]:
    built = tuple(Rollout(f"p/{at}", turns, 1.0) for at, turns in enumerate(rollouts))
    return to_samples(Group(0, Prompt("p"), built), Credit(advantages))


def test_one_turn_trains_the_sampled_tokens_only() -> None:
    (sample,) = samples((turn([1, 2, 3], completion([4, 5], version=6)),), advantages=((0.5,),))
    assert sample.rollout_id == "p/0"
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.versions.tolist() == [-1, -1, -1, 6, 6]
    np.testing.assert_allclose(sample.logprobs, [0, 0, 0, -0.1, -0.5])
    assert sample.advantages.tolist() == [0, 0, 0, 0.5, 0.5]
    kinds = (sample.token_ids, sample.loss_mask, sample.logprobs, sample.versions, sample.advantages)
    assert [str(array.dtype) for array in kinds] == ["int32", "bool", "float32", "int32", "float32"]


def test_turns_that_go_on_are_one_sequence_with_an_advantage_each() -> None:
    turns = (turn([1], completion([2], version=3)), turn([1, 2, 9, 9], completion([4, 5], version=4)))
    (sample,) = samples(turns, advantages=((0.5, -1.0),))
    assert sample.token_ids.tolist() == [1, 2, 9, 9, 4, 5]
    assert sample.loss_mask.tolist() == [False, True, False, False, True, True]
    assert sample.versions.tolist() == [-1, 3, -1, -1, 4, 4]
    assert sample.advantages.tolist() == [0, 0.5, 0, 0, -1.0, -1.0]


@pytest.mark.parametrize("rewritten", [[1, 7], [1], [8, 2, 9]])
def test_a_rewritten_context_opens_a_sequence_of_its_own(rewritten: list[int]) -> None:
    """Also when it is as long, shorter, or differs in its first token only."""
    turns = (turn([1], completion([2])), turn(rewritten, completion([4])), turn([*rewritten, 4, 5], completion([6])))
    first, second = samples(turns, advantages=((1.0, 2.0, 3.0),))
    assert first.token_ids.tolist() == [1, 2]
    assert second.token_ids.tolist() == [*rewritten, 4, 5, 6]
    assert second.advantages[second.loss_mask].tolist() == [2.0, 3.0]
    assert int(first.loss_mask.sum() + second.loss_mask.sum()) == 3, "no sampled token is lost or trained twice"


def test_rollouts_and_turns_keep_their_order() -> None:
    both = samples(
        (turn([1], completion([2])), turn([3], completion([4]))),
        (turn([1], completion([5])),),
        advantages=((1.0, 2.0), (3.0,)),
    )
    assert [(sample.rollout_id, float(sample.advantages[-1])) for sample in both] == [
        ("p/0", 1.0),
        ("p/0", 2.0),
        ("p/1", 3.0),
    ]


def test_legal_ids_stand_at_the_position_of_the_token_they_judge() -> None:
    turns = (turn([1, 1], completion([2]), legal=(7, 8)), turn([1, 1, 2, 3], completion([4, 5]), legal=(9,)))
    (sample,) = samples(turns, advantages=((1.0, 1.0),))
    assert sample.legal_ids == ((2, (7, 8)), (4, (9,)))
    assert all(sample.loss_mask[position] for position, _ in sample.legal_ids)


def test_an_empty_completion_trains_nothing_and_judges_nothing() -> None:
    turns = (turn([1, 2], completion([]), legal=(7,)), turn([1, 2, 3], completion([4])))
    (sample,) = samples(turns, advantages=((1.0, 2.0),))
    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert sample.loss_mask.tolist() == [False, False, False, True]
    assert sample.legal_ids == ()


def test_a_dropped_group_gives_nothing() -> None:
    group = Group(0, Prompt("p"), (Rollout("p/0", (turn([1], completion([2])),), 1.0),))
    assert to_samples(group, Credit(((0.0,),), dropped="zero variance")) == ()
    assert to_samples(group, Credit((), dropped="zero variance")) == ()


def test_credit_must_fit_the_group() -> None:
    rollout = (turn([1], completion([2])),)
    with pytest.raises(ValueError, match="zip"):
        samples(rollout, rollout, advantages=((1.0,),))
    with pytest.raises(ValueError, match="zip"):
        samples(rollout, advantages=((1.0, 2.0),))
