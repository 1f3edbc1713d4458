"""The OpenEnv environment, called directly."""

from __future__ import annotations

from typing import Any

import pytest

from rollforge.envs.blackjack.env import BlackjackAction, BlackjackEnvironment, BlackjackObservation
from rollforge.envs.blackjack.game import STATES, describe

HARD_16 = {"total": 16, "soft": False, "dealer": 10}


def say(env: BlackjackEnvironment, text: str) -> BlackjackObservation:
    return env.step(BlackjackAction(text=text))


def test_an_observation_carries_the_hand_as_text_and_fields() -> None:
    observation = BlackjackEnvironment().reset(state=HARD_16, shoe=3)
    assert observation.text == "Hand 16 hard, dealer 10:"
    assert (observation.total, observation.soft, observation.dealer) == (16, False, 10)
    assert sum(observation.cards) == 16
    assert observation.legal_actions == ["hit", "stand"]
    assert observation.reward is None
    assert not observation.done
    assert observation.counts == {"illegal": 0, "forfeit": 0}


def test_the_seed_is_honoured_and_alone_fixes_the_whole_hand() -> None:
    env = BlackjackEnvironment()

    def hand(**seeds: Any) -> list[str]:
        lines = [env.reset(**seeds).text]
        while lines[-1].endswith(":"):
            lines.append(say(env, "hit").text)
        return lines

    assert hand(seed=7) == hand(seed=7) == hand(seed=7, shoe=7) == hand(shoe=7)
    assert hand(seed=7, shoe=1)[0] == hand(seed=7, shoe=2)[0]
    assert len({tuple(hand(seed=seed)) for seed in range(30)}) > 20


def test_without_a_seed_the_hands_differ_and_can_be_replayed_from_the_state() -> None:
    env = BlackjackEnvironment()
    first = env.reset()
    seeds = {"seed": env.state.seed, "shoe": env.state.shoe}
    assert env.reset(**seeds).cards == first.cards
    assert len({env.reset().text for _ in range(40)}) > 10


@pytest.mark.parametrize("state", STATES[::7])
def test_any_decision_state_can_be_started_from(state: Any) -> None:
    assert BlackjackEnvironment().reset(state=state._asdict(), shoe=1).text == describe(state)


def test_standing_ends_the_hand_with_its_outcome() -> None:
    env = BlackjackEnvironment()
    rewards = set()
    for shoe in range(60):
        env.reset(state={"total": 19, "soft": False, "dealer": 10}, shoe=shoe)
        end = say(env, "stand")
        assert end.done
        assert end.dealer_total is not None
        assert end.dealer_total >= 17
        right = 1 if end.dealer_total > 21 or end.dealer_total < 19 else 0 if end.dealer_total == 19 else -1
        assert end.reward == right
        assert end.legal_actions == []
        rewards.add(end.reward)
    assert rewards == {-1, 0, 1}


def test_an_unreadable_action_is_told_once_and_changes_nothing() -> None:
    env = BlackjackEnvironment()
    env.reset(state=HARD_16, shoe=3)
    told = say(env, "banana")
    assert told.text == "Say hit or stand. Hand 16 hard, dealer 10:"
    assert told.notice
    assert (told.reward, told.done, told.counts) == (None, False, {"illegal": 1, "forfeit": 0})
    env_without = BlackjackEnvironment()
    env_without.reset(state=HARD_16, shoe=3)
    after, straight = say(env, "hit"), say(env_without, "hit")
    assert (after.cards, after.reward) == (straight.cards, straight.reward)
    assert not after.notice
    assert after.counts == {"illegal": 1, "forfeit": 0}


@pytest.mark.parametrize("between", [[], ["hit"]])
def test_a_second_unreadable_action_forfeits_the_hand(between: list[str]) -> None:
    env = BlackjackEnvironment(penalty=-1.25)
    env.reset(state={"total": 4, "soft": False, "dealer": 10}, shoe=3)
    for text in ["banana", *between]:
        say(env, text)
    end = say(env, "split")
    assert (end.reward, end.done, end.counts) == (-1.25, True, {"illegal": 2, "forfeit": 1})
    with pytest.raises(ValueError, match="reset"):
        say(env, "stand")
    assert env.reset(seed=1).counts == {"illegal": 0, "forfeit": 0}


def test_a_step_without_a_hand_is_refused() -> None:
    env = BlackjackEnvironment()
    with pytest.raises(ValueError, match="reset"):
        say(env, "hit")
    env.reset(state=HARD_16, shoe=1)
    say(env, "stand")
    with pytest.raises(ValueError, match="reset"):
        say(env, "stand")


@pytest.mark.parametrize(
    "arguments",
    [
        {"sed": 3},
        {"seed": "3"},
        {"seed": 1.5},
        {"seed": True},
        {"state": {"total": 16}},
        {"state": {"total": 16, "soft": 0, "dealer": 10}},
        {"state": {"total": "16", "soft": False, "dealer": 10}},
        {"state": {"total": 33, "soft": False, "dealer": 10}},
    ],
)
def test_a_wrong_reset_is_refused_and_not_ignored(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"seed|state|total"):
        BlackjackEnvironment().reset(**arguments)


async def test_the_async_verbs_play_the_same_hand() -> None:
    plain, concurrent = BlackjackEnvironment(), BlackjackEnvironment()
    assert (await concurrent.reset_async(seed=5)).model_dump() == plain.reset(seed=5).model_dump()
    step = await concurrent.step_async(BlackjackAction(text="hit"))
    assert step.model_dump() == say(plain, "hit").model_dump()
    assert concurrent.state.step_count == 1
