"""Prompts for BlackJack: what neighbours share, what streams do not, and the saved position."""

from __future__ import annotations

import pytest

from rollforge.config import ConfigError, UserError
from rollforge.envs.blackjack.game import STATES, describe
from rollforge.envs.blackjack.hands import Hands, HandsConfig

CONFIG = HandsConfig(examples=2, deals_per_examples=3, shoes_per_deal=2)


def test_neighbours_share_examples_and_deals_but_never_a_shoe() -> None:
    hands = [Hands(CONFIG, seed=1).at(k) for k in range(12)]
    assert [hand.id for hand in hands] == [f"train-{k}" for k in range(12)]
    assert [hand.text == hands[0].text for hand in hands] == [True] * 6 + [False] * 6
    deals = [hand.task["seed"] for hand in hands]
    assert deals[::2] == deals[1::2]
    assert len(set(deals)) == 6
    assert len({hand.task["shoe"] for hand in hands}) == 12


def test_example_lines_are_real_states_that_offer_both_actions() -> None:
    lines = Hands(HandsConfig(examples=4), seed=3).examples(0).splitlines()
    assert lines[0] == "Blackjack."
    known = {describe(state) for state in STATES}
    assert len(lines) == 5
    for line in lines[1:]:
        state, _, actions = line.partition(": ")
        assert f"{state}:" in known
        assert actions == "hit or stand"


@pytest.mark.parametrize(("seed", "stream"), [(1, "held-out"), (2, "train")])
def test_other_streams_and_seeds_have_nothing_in_common(seed: int, stream: str) -> None:
    ours, theirs = Hands(CONFIG, 1), Hands(CONFIG, seed, stream)
    for what in ("seed", "shoe"):
        assert not {ours.at(k).task[what] for k in range(50)} & {theirs.at(k).task[what] for k in range(50)}
    assert not {ours.examples(k) for k in range(20)} & {theirs.examples(k) for k in range(20)}


async def test_a_restored_source_goes_on_where_it_stopped() -> None:
    whole = Hands(CONFIG, 5)
    expected = [await whole.draw() for _ in range(9)]
    first = Hands(CONFIG, 5)
    for _ in range(4):
        await first.draw()
    second = Hands(CONFIG, 5)
    await second.restore(await first.state())
    assert [await second.draw() for _ in range(5)] == expected[4:]


async def test_a_position_of_another_seed_is_refused() -> None:
    with pytest.raises(UserError, match="seed 5 of train"):
        await Hands(CONFIG, 6).restore(await Hands(CONFIG, 5).state())


@pytest.mark.parametrize("bad", [{"examples": -1}, {"shoes_per_deal": 0}, {"deals_per_examples": 0}])
def test_bad_numbers_are_named(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"hands\.{next(iter(bad))} is"):
        HandsConfig(**bad)
