"""BlackJack as a pure game: an infinite deck, hit or stand, the dealer stands on every 17.

Knows: cards, totals, decision states, the one-line text of a state, how a text is read as an action, and a hand dealt
from seeds. Does not know: OpenEnv, servers, models or policies.

A win pays +1, a push 0, a loss -1; a natural pays nothing extra. Cards are their values: 1 is an ace, 10 a ten or a
picture.

Two seeds make a hand. `deal` fixes the player's two cards and the dealer's card; `shoe` fixes everything later: the
player's draws in order and, from a stream of its own, the dealer's. So the dealer ends on the same total however many
cards the player takes, and HIT and STAND are compared on equal luck.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

ACTIONS = ("hit", "stand")
PENALTY = -1.5
"""The reward of a hand that a second unreadable action ended, unless set otherwise: worse than losing it."""
FORFEIT = "Hand forfeited."
DEALER_CARDS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 1)
"""The dealer's card as charts order it: the ace last."""

_FIRST_WORD = re.compile(r"[\W_]*([^\W_]+)")


class State(NamedTuple):
    """What a decision rests on. `soft`: an ace counts 11. `dealer` is 1 (ace) to 10."""

    total: int
    soft: bool
    dealer: int


STATES: tuple[State, ...] = tuple(
    State(total, soft, dealer)
    for soft, lowest in ((False, 4), (True, 12))
    for total in range(lowest, 22)
    for dealer in DEALER_CARDS
)
"""All 280 decision states: hard totals 4 to 21, then soft totals 12 to 21, each against the ten dealer cards."""


def count(cards: Iterable[int]) -> tuple[int, bool]:
    """Total of some cards, and whether it is soft (an ace counts 11 without going over 21)."""
    cards = list(cards)
    total = sum(cards)
    soft = 1 in cards and total + 10 <= 21
    return (total + 10 if soft else total), soft


def add(total: int, soft: bool, card: int) -> tuple[int, bool]:
    """Total and softness after one more card."""
    total += card
    if card == 1 and not soft and total + 10 <= 21:
        return total + 10, True
    if soft and total > 21:
        return total - 10, False
    return total, soft


def outcome(player: int, dealer: int) -> int:
    """+1, 0 or -1 for the player's and the dealer's final totals; the player's bust comes first."""
    if player > 21:
        return -1
    if dealer > 21:
        return 1
    return (player > dealer) - (player < dealer)


def card_name(card: int) -> str:
    """`A` for an ace, else the number: one unambiguous sign even where a tokenizer splits digits."""
    return "A" if card == 1 else str(card)


def describe(state: State) -> str:
    """The line that asks for an action, such as `Hand 16 hard, dealer 10:`."""
    return f"Hand {state.total} {'soft' if state.soft else 'hard'}, dealer {card_name(state.dealer)}:"


def conclude(player: int, dealer: int) -> str:
    """The line that closes a hand, such as `Hand 19, dealer 20: lost.`"""
    if player > 21:
        return f"Hand {player}: bust, lost."
    return f"Hand {player}, dealer {dealer}: {('lost', 'push', 'won')[outcome(player, dealer) + 1]}."


def remind(line: str) -> str:
    """The line shown after an action that could not be read."""
    return f"Say hit or stand. {line}"


def read_action(text: str) -> str | None:
    """The action that the first word of `text` names, or None. Case, blanks and punctuation around it do not matter."""
    word = _FIRST_WORD.match(text)
    name = word.group(1).lower() if word else ""
    return name if name in ACTIONS else None


def starting_cards(total: int, soft: bool) -> tuple[int, ...]:
    """Some cards that make a given total: how a hand starts from a state instead of a deal.

    Raises ValueError for a total that no decision state has.
    """
    if not (12 <= total <= 21 if soft else 4 <= total <= 21):
        raise ValueError(f"no decision state has a {'soft' if soft else 'hard'} total of {total}")
    if soft:
        return (1, total - 11)
    if total == 21:
        return (10, 9, 2)
    return (2, total - 2) if total < 12 else (10, total - 10)


@dataclass
class Referee:
    """Reads what was said during one hand: an unreadable action is told once (`notice`), a second one is a
    `forfeit`."""

    illegal: int = 0

    def judge(self, text: str) -> str:
        """`hit`, `stand`, `notice` or `forfeit`."""
        name = read_action(text)
        if name is not None:
            return name
        self.illegal += 1
        return "notice" if self.illegal == 1 else "forfeit"

    @property
    def forfeit(self) -> bool:
        """Whether the hand was ended by a second unreadable action."""
        return self.illegal > 1

    @property
    def counts(self) -> dict[str, int]:
        """Events of the hand so far."""
        return {"illegal": self.illegal, "forfeit": int(self.forfeit)}


class Shoe:
    """An endless stream of cards, fixed by its name.

    `random.Random` hashes a text seed with SHA-512, so neighbouring seeds share nothing; only `random()` is drawn from
    it, which Python promises to keep the same in every later version.
    """

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)

    def draw(self) -> int:
        """The next card's value; tens and pictures are four ranks of thirteen."""
        return min(10, 1 + int(13 * self._random.random()))


@dataclass
class Hand:
    """One hand in play. `reward` is None until it is over."""

    cards: list[int]
    dealer_card: int
    player_shoe: Shoe
    dealer_shoe: Shoe
    reward: int | None = None
    dealer_total: int | None = None

    @classmethod
    def deal(cls, deal: int, shoe: int) -> Hand:
        """The hand of these two seeds."""
        cards = Shoe(f"deal {deal}")
        return cls([cards.draw(), cards.draw()], cards.draw(), *_shoes(shoe))

    @classmethod
    def start(cls, state: State, shoe: int) -> Hand:
        """A hand that begins in a given decision state. Raises ValueError where there is no such state."""
        if state.dealer not in DEALER_CARDS:
            raise ValueError(f"the dealer's card is 1 (ace) to 10, not {state.dealer}")
        return cls(list(starting_cards(state.total, state.soft)), state.dealer, *_shoes(shoe))

    @property
    def state(self) -> State:
        """Where the hand stands; a total over 21 once it is bust."""
        return State(*count(self.cards), self.dealer_card)

    def play(self, action: str) -> int | None:
        """Hit or stand; the reward if that ended the hand, else None. Raises ValueError on a finished hand."""
        if self.reward is not None:
            raise ValueError("the hand is over: reset before the next action")
        if action == "hit":
            self.cards.append(self.player_shoe.draw())
        total, _ = count(self.cards)
        if action == "stand" or total > 21:
            self.dealer_total = _dealer_total(self.dealer_card, self.dealer_shoe)
            self.reward = outcome(total, self.dealer_total)
        return self.reward


def _shoes(shoe: int) -> tuple[Shoe, Shoe]:
    return Shoe(f"player {shoe}"), Shoe(f"dealer {shoe}")


def _dealer_total(card: int, shoe: Shoe) -> int:
    total, soft = add(0, False, card)
    while total < 17:
        total, soft = add(total, soft, shoe.draw())
    return total
