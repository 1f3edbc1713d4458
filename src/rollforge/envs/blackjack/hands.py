"""Prompts for BlackJack: some example lines, and the seeds of a hand.

Knows: how the lines look, which hands share what. Does not know: models, environments, how a prompt is used.

    Blackjack.
    Hand 12 hard, dealer 4: stand
    Hand 19 soft, dealer A: hit
    Hand 16 hard, dealer 10:

The examples are random states, each with an action drawn at random, both equally often: they show what may be said and
nothing about good play. Neighbouring prompts share their examples, and neighbours among those share the deal and
differ in the shoe: what they have in common is computed once, in the engine and in the trainer.

A policy that meets new examples in every step first learns which of them to copy, and for long nothing about the
hand. So training begins under one set of examples (`first_deals`), where it soon plays by the hand, and then meets
others, to which this carries over.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollforge.config import UserError, option, require_at_least
from rollforge.envs.blackjack.game import ACTIONS, STATES, describe
from rollforge.types import Prompt

TITLE = "Blackjack.\n"


@dataclass(frozen=True, kw_only=True)
class HandsConfig:
    """Which hands are dealt."""

    examples: int = option(6, help="example lines before a hand")
    first_deals: int = option(2560, help="deals under the first examples, before others come")
    deals_per_examples: int = option(32, help="deals that share their examples afterwards")
    shoes_per_deal: int = option(2, help="groups that share a deal and differ in the cards that follow")

    def __post_init__(self) -> None:
        require_at_least(self, "hands", examples=0, first_deals=0, deals_per_examples=1, shoes_per_deal=1)


class Hands:
    """types.PromptSource: endless hands, the k-th a pure function of (`stream`, seed, k). Different streams, such as
    `train` and `held-out`, have neither examples nor hands in common. Not `seeded`, they leave the cards to the
    server."""

    def __init__(self, config: HandsConfig, seed: int, stream: str = "train", seeded: bool = True) -> None:
        self._config, self._seed, self._stream, self._seeded = config, seed, stream, seeded
        self._position = 0

    async def draw(self) -> Prompt:
        """The next hand."""
        prompt = self.at(self._position)
        self._position += 1
        return prompt

    async def state(self) -> Mapping[str, Any]:
        """The number of hands drawn, and whose they are."""
        return {"position": self._position, "seed": self._seed, "stream": self._stream}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises UserError when it belongs to another seed or stream."""
        if (state["seed"], state["stream"]) != (self._seed, self._stream):
            raise UserError(
                f"The saved position belongs to seed {state['seed']} of {state['stream']}, this run has seed "
                f"{self._seed} "
                f"of {self._stream}; resume with the seed the run was started with."
            )
        self._position = state["position"]

    def at(self, position: int) -> Prompt:
        """The hand with this number."""
        deal = position // self._config.shoes_per_deal
        cards = {
            "seed": self._random("deal", deal).getrandbits(48),
            "shoe": self._random("shoe", position).getrandbits(48),
        }
        text = self.examples(self._examples_of(deal))
        return Prompt(id=f"{self._stream}-{position}", text=text, task=cards if self._seeded else {})

    def examples(self, number: int) -> str:
        """The example lines with this number."""
        rng = self._random("examples", number)
        count = self._config.examples
        by_total = sorted(STATES, key=lambda state: state.total)
        states = [rng.choice(by_total[k * len(STATES) // count : (k + 1) * len(STATES) // count]) for k in range(count)]
        rng.shuffle(states)
        actions = [ACTIONS[k % len(ACTIONS)] for k in range(len(states))]
        rng.shuffle(actions)
        return TITLE + "".join(f"{describe(s)} {a}\n" for s, a in zip(states, actions, strict=True))

    def _examples_of(self, deal: int) -> int:
        later = deal - self._config.first_deals
        return 0 if later < 0 else 1 + later // self._config.deals_per_examples

    def _random(self, what: str, number: int) -> random.Random:
        return random.Random(f"{self._stream} {self._seed} {what} {number}")
