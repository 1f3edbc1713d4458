"""The pure game: totals, texts, reading of actions, and hands from seeds."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from rollforge.envs.blackjack.game import (
    ACTIONS,
    STATES,
    Hand,
    Referee,
    State,
    add,
    conclude,
    count,
    describe,
    outcome,
    read_action,
    remind,
    starting_cards,
)


@pytest.mark.parametrize(
    ("cards", "total", "soft"),
    [
        ([10, 6], 16, False),
        ([1, 6], 17, True),
        ([1, 1], 12, True),
        ([1, 10], 21, True),
        ([1, 6, 10], 17, False),
        ([1, 1, 10], 12, False),
        ([1, 1, 9], 21, True),
        ([10, 9, 2], 21, False),
        ([10, 6, 6], 22, False),
        ([1, 5, 10, 10], 26, False),
    ],
)
def test_a_hand_counts_its_ace_as_eleven_only_where_it_fits(cards: list[int], total: int, soft: bool) -> None:
    assert count(cards) == (total, soft)
    running = (0, False)
    for card in cards:
        running = add(*running, card)
    assert running == (total, soft)


def test_the_player_who_busts_loses_whatever_the_dealer_has() -> None:
    assert [outcome(22, 25), outcome(20, 25), outcome(20, 19), outcome(19, 19), outcome(18, 19)] == [-1, 1, 1, 0, -1]


def test_there_are_280_states_and_each_can_be_started_from() -> None:
    assert len(set(STATES)) == len(STATES) == 280
    for state in STATES:
        assert count(starting_cards(state.total, state.soft)) == (state.total, state.soft)
        assert Hand.start(state, 5).state == state


@pytest.mark.parametrize("state", [State(3, False, 5), State(11, True, 5), State(22, False, 5), State(16, False, 11)])
def test_a_hand_does_not_start_from_what_is_no_state(state: State) -> None:
    with pytest.raises(ValueError, match=r"total of|dealer's card"):
        Hand.start(state, 5)


def test_the_lines_name_the_hand_and_the_dealers_card() -> None:
    assert describe(State(16, False, 10)) == "Hand 16 hard, dealer 10:"
    assert describe(State(17, True, 1)) == "Hand 17 soft, dealer A:"
    assert remind(describe(State(16, False, 10))) == "Say hit or stand. Hand 16 hard, dealer 10:"
    assert len({describe(state) for state in STATES}) == len(STATES)
    assert conclude(19, 20) == "Hand 19, dealer 20: lost."
    assert conclude(20, 20) == "Hand 20, dealer 20: push."
    assert conclude(18, 24) == "Hand 18, dealer 24: won."
    assert conclude(24, 20) == "Hand 24: bust, lost."


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("hit", "hit"),
        (" hit\n", "hit"),
        ("Stand.", "stand"),
        ("  **HIT!** because", "hit"),
        ("_stand_", "stand"),
        ("stand, not hit", "stand"),
        ('"hit"', "hit"),
        ("hitting", None),
        ("I hit", None),
        ("1 hit", None),
        ("", None),
        (" \n", None),
        ("...", None),
        ("Hit\u00e9", None),
        ("\u200bhit", "hit"),
    ],
)
def test_the_first_word_decides(text: str, action: str | None) -> None:
    assert read_action(text) == action


def test_the_referee_tells_once_and_then_forfeits() -> None:
    referee = Referee()
    assert [referee.judge(text) for text in ("hit", "what", "Stand", "eh")] == ["hit", "notice", "stand", "forfeit"]
    assert referee.counts == {"illegal": 2, "forfeit": 1}
    assert Referee(1).counts == {"illegal": 1, "forfeit": 0}


def _play(hand: Hand, hits: int) -> Hand:
    for _ in range(hits):
        if hand.reward is None:
            hand.play("hit")
    if hand.reward is None:
        hand.play("stand")
    return hand


def test_the_same_seeds_give_the_same_hand() -> None:
    for seed in range(50):
        first, second = _play(Hand.deal(seed, seed + 1), 2), _play(Hand.deal(seed, seed + 1), 2)
        assert (first.cards, first.dealer_card, first.dealer_total) == (
            second.cards,
            second.dealer_card,
            second.dealer_total,
        )


def test_hands_of_known_seeds_never_change() -> None:
    """A recorded run must replay with any later version: these hands are written down."""
    hands = [_play(Hand.deal(seed, 100 + seed), 3) for seed in range(4)]
    assert [(hand.cards, hand.dealer_card, hand.dealer_total, hand.reward) for hand in hands] == RECORDED


def test_the_deal_does_not_depend_on_the_shoe_nor_the_draws_on_the_deal() -> None:
    for seed in range(30):
        one, two = Hand.deal(seed, 1), Hand.deal(seed, 2)
        assert (one.cards, one.dealer_card) == (two.cards, two.dealer_card)
        here, there = Hand.start(State(4, False, 5), seed), Hand.start(State(12, True, 9), seed)
        here.play("hit")
        there.play("hit")
        assert here.cards[-1] == there.cards[-1]


def test_the_dealer_ends_on_the_same_total_however_many_cards_the_player_takes() -> None:
    for seed in range(200):
        totals = {_play(Hand.deal(seed, 7 * seed), hits).dealer_total for hits in range(5)}
        assert len(totals) == 1


def test_neighbouring_seeds_share_nothing() -> None:
    """Chance of equal first draws is 1 of 13 by rank (here by value: the squares of the values' chances)."""
    n = 6000
    hands = [Hand.deal(seed, 0) for seed in range(n)]
    deals = [(*hand.cards, hand.dealer_card) for hand in hands]
    draws = []
    for seed in range(n):
        hand = Hand.start(State(4, False, 5), seed)
        hand.play("hit")
        draws.append(hand.cards[-1])
    expected = 9 * (1 / 13) ** 2 + (4 / 13) ** 2
    error = math.sqrt(expected * (1 - expected) / n)
    pairs: dict[str, list[tuple[int, ...]]] = {
        "card and next seed's card": [(deals[i][0], deals[i + 1][0]) for i in range(n - 1)],
        "first and second card": [deal[:2] for deal in deals],
        "card and dealer's card": [deal[1:] for deal in deals],
        "first card and first draw of the same seed": [
            (deal[0], draw) for deal, draw in zip(deals, draws, strict=True)
        ],
        "draw and next seed's draw": [(draws[i], draws[i + 1]) for i in range(n - 1)],
    }
    for name, both in pairs.items():
        same = sum(a == b for a, b in both) / len(both)
        assert abs(same - expected) < 4 * error, name
    frequencies = Counter(card for deal in deals for card in deal)
    for card in range(1, 11):
        chance = (4 if card == 10 else 1) / 13
        assert abs(frequencies[card] / (3 * n) - chance) < 4 * math.sqrt(chance * (1 - chance) / (3 * n)), card


def test_a_finished_hand_cannot_be_played_on() -> None:
    hand = _play(Hand.deal(1, 1), 0)
    for action in ACTIONS:
        with pytest.raises(ValueError, match="over"):
            hand.play(action)


RECORDED = [
    ([9, 10, 1, 9], 10, 20, -1),
    ([10, 1, 6, 2, 10], 1, 21, -1),
    ([7, 2, 3, 10], 10, 21, -1),
    ([1, 10, 4, 10], 10, 24, -1),
]
