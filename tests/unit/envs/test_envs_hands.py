"""Prompts for BlackJack: what neighbours share, what streams do not, and the saved position."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from rollforge.config import ConfigError, UserError
from rollforge.envs.blackjack.game import STATES, describe
from rollforge.envs.blackjack.hands import Hands, HandsConfig

CONFIG = HandsConfig(examples=2, first_deals=0, deals_per_examples=3, shoes_per_deal=2)


def test_neighbours_share_examples_and_deals_but_never_a_shoe() -> None:
    hands = [Hands(CONFIG, seed=1).at(k) for k in range(12)]
    assert [hand.id for hand in hands] == [f"train-{k}" for k in range(12)]
    assert [hand.text == hands[0].text for hand in hands] == [True] * 6 + [False] * 6
    deals = [hand.task["seed"] for hand in hands]
    assert deals[::2] == deals[1::2]
    assert len(set(deals)) == 6
    assert len({hand.task["shoe"] for hand in hands}) == 12


def test_a_first_phase_keeps_its_examples_and_then_they_change() -> None:
    first = Hands(dataclasses.replace(CONFIG, first_deals=4), seed=1)
    texts = [first.at(k).text for k in range(20)]
    assert [text == texts[0] for text in texts] == [True] * 8 + [False] * 12
    assert len(set(texts[8:14])) == 1
    assert len(set(texts[14:])) == 1
    assert len(set(texts)) == 3


def _lines(examples: str) -> list[tuple[str, str]]:
    title, *lines = examples.splitlines()
    assert title == "Blackjack."
    pairs = [line.split(": ") for line in lines]
    return [(f"{state}:", action) for state, action in pairs]


def test_example_lines_are_real_states_spread_over_the_totals() -> None:
    totals = {describe(state): state.total for state in STATES}
    ordered = sorted(totals.values())
    for number in range(50):
        drawn = sorted(totals[state] for state, _ in _lines(Hands(HandsConfig(examples=4), seed=3).examples(number)))
        bands = [ordered[k * 70 : (k + 1) * 70] for k in range(4)]
        assert all(total in band for total, band in zip(drawn, bands, strict=True))


def test_example_actions_are_balanced_and_say_nothing_about_the_hand() -> None:
    hits: Counter[int] = Counter()
    hands = Hands(HandsConfig(examples=6), seed=3)
    for number in range(400):
        lines = _lines(hands.examples(number))
        assert sorted(action for _, action in lines) == ["hit"] * 3 + ["stand"] * 3
        by_total = sorted(lines, key=lambda line: int(line[0].split()[1]))
        hits.update(rank for rank, (_, action) in enumerate(by_total) if action == "hit")
    # 400 draws at even odds: 200 each, and four standard deviations are 40
    assert all(160 <= hits[rank] <= 240 for rank in range(6))


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


@pytest.mark.parametrize(
    "bad", [{"examples": -1}, {"first_deals": -1}, {"shoes_per_deal": 0}, {"deals_per_examples": 0}]
)
def test_bad_numbers_are_named(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"hands\.{next(iter(bad))} is"):
        HandsConfig(**bad)
