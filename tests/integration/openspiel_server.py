"""A server that speaks as the public `openspiel_env` does when it plays BlackJack: 189 floats, no text, no seeds.

Its own cards and rules, so that nothing of ours is tested against itself; the layout is the one of OpenSpiel 2.0.2.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from openenv.core.env_server import Action, ConcurrencyConfig, Environment, Observation, State, create_fastapi_app

from rollforge.envs import serve

UP, PLAYER, DEALER = 33, 85, 137


class OpenSpielAction(Action):  # type: ignore[misc]
    action_id: int
    game_name: str


class OpenSpielObservation(Observation):  # type: ignore[misc]
    info_state: list[float]
    legal_actions: list[int]
    game_phase: str
    current_player_id: int = 0
    opponent_last_action: int | None = None


def total(cards: list[int]) -> int:
    value = sum(min(10, 1 + card % 13) for card in cards)
    return value + 10 if value <= 11 and any(card % 13 == 0 for card in cards) else value


class OpenSpielEnvironment(Environment[OpenSpielAction, OpenSpielObservation, State]):  # type: ignore[misc]
    """One deck of 52 cards, dealt at random."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self) -> OpenSpielObservation:
        self.deck = random.sample(range(52), 52)
        self.player = [self.deck.pop(), self.deck.pop()]
        self.dealer = [self.deck.pop()]
        return self.observe(self.dealer, None)

    def step(self, action: OpenSpielAction, timeout_s: float | None = None, **kwargs: Any) -> OpenSpielObservation:
        assert action.game_name == "blackjack"
        if action.action_id == 0:
            self.player.append(self.deck.pop())
            if total(self.player) <= 21:
                return self.observe(self.dealer, None)
            return self.observe(self.dealer, -1.0)
        dealer = [*self.dealer]
        while total(dealer) < 17:
            dealer.append(self.deck.pop())
        mine, theirs = total(self.player), total(dealer)
        return self.observe(dealer, 1.0 if theirs > 21 else float((mine > theirs) - (mine < theirs)))

    def observe(self, dealer: list[int], reward: float | None) -> OpenSpielObservation:
        flags = [0.0] * 189
        for start, cards in ((UP, self.dealer), (PLAYER, self.player), (DEALER, dealer)):
            for card in cards:
                flags[start + card] = 1.0
        done = reward is not None
        return OpenSpielObservation(
            info_state=flags,
            legal_actions=[] if done else [0, 1],
            game_phase="terminal" if done else "playing",
            reward=reward,
            done=done,
        )

    @property
    def state(self) -> State:
        return State()


def make_app(args: argparse.Namespace) -> Any:
    concurrency = ConcurrencyConfig(max_concurrent_envs=args.sessions, session_timeout=args.session_timeout)
    return create_fastapi_app(
        OpenSpielEnvironment, OpenSpielAction, OpenSpielObservation, concurrency_config=concurrency
    )


if __name__ == "__main__":
    serve.main(make_app, serve.parser("BlackJack as openspiel_env speaks it."))
