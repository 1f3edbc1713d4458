"""BlackJack on the wire: how two servers' payloads become the same text observations.

Knows: our own server's fields, and the `openspiel_env` layout of BlackJack. Does not know: connections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollforge.config import UserError
from rollforge.envs.blackjack.game import ACTIONS, FORFEIT, PENALTY, Referee, State, conclude, count, describe, remind
from rollforge.types import Observation

OPEN_SPIEL_SIZE = 189
OPEN_SPIEL_UP, OPEN_SPIEL_PLAYER, OPEN_SPIEL_DEALER = 33, 85, 137
"""Where the 52 flags of the dealer's first card, the player's cards and the dealer's visible cards begin. A card's
place is 13 x suit + rank, ranks from ace to king."""


class BlackjackCodec:
    """Our own server: the task is the reset's arguments (seed, shoe, state) and the action is what the model said."""

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        return dict(task)

    def action(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def observation(self, observation: Mapping[str, Any], reward: float | None, done: bool) -> Observation:
        if "text" not in observation:
            raise UserError(
                f"The server at env.url is not Rollforge's BlackJack: it answers {', '.join(observation)} and no text. "
                "For the public openspiel_env server set server to openspiel; else set env.url to another server."
            )
        info = {name: value for name, value in observation.items() if name not in ("text", "legal_actions")}
        return Observation(observation["text"], reward, done, tuple(observation["legal_actions"]), info)


class OpenSpielBlackjackCodec:
    """The public `openspiel_env` server playing OpenSpiel's BlackJack, shown by the same lines as ours.

    That server speaks in numbers (189 floats; action 0 hits, 1 stands), so unreadable actions are told, and the hand
    forfeited for `penalty`, on this side. Its deals cannot be seeded: a task that asks for one is a UserError.
    """

    def __init__(self, penalty: float = PENALTY) -> None:
        self._penalty = penalty
        self._referee = Referee()
        self._line = ""
        self._info: Mapping[str, Any] = {}

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        fixed = sorted({"seed", "shoe", "state"} & set(task))
        if fixed:
            raise UserError(
                f"The task fixes {', '.join(fixed)}, but the public openspiel_env server deals at random and ignores "
                "it. Use Rollforge's own BlackJack server, or tasks without these fields."
            )
        self._referee = Referee()
        return dict(task)

    def action(self, text: str) -> dict[str, Any] | Observation:
        verdict = self._referee.judge(text)
        info = {**self._info, "notice": verdict == "notice", "counts": self._referee.counts}
        if verdict == "notice":
            return Observation(remind(self._line), None, False, ACTIONS, info)
        if verdict == "forfeit":
            return Observation(FORFEIT, self._penalty, True, (), info)
        return {"action_id": ACTIONS.index(verdict), "game_name": "blackjack"}

    def observation(self, observation: Mapping[str, Any], reward: float | None, done: bool) -> Observation:
        flags = observation.get("info_state", ())
        cards, dealer = _cards(flags, OPEN_SPIEL_PLAYER), _cards(flags, OPEN_SPIEL_DEALER)
        state = State(*count(cards), _cards(flags, OPEN_SPIEL_UP)[0])
        self._line = conclude(state.total, count(dealer)[0]) if done else describe(state)
        self._info = {"cards": cards, **state._asdict(), "dealer_total": count(dealer)[0] if done else None}
        legal = () if done else tuple(ACTIONS[action] for action in observation["legal_actions"])
        info = {**self._info, "notice": False, "counts": self._referee.counts}
        return Observation(self._line, reward, done, legal, info)


def _cards(flags: Sequence[float], start: int) -> list[int]:
    """The values of the cards whose flags are set in the 52 places from `start`. Raises UserError for another
    layout."""
    if len(flags) != OPEN_SPIEL_SIZE:
        raise UserError(
            f"The server at env.url answers with {len(flags)} floats, OpenSpiel's BlackJack with {OPEN_SPIEL_SIZE}. "
            "Start openspiel_env with OPENSPIEL_GAME=blackjack, or set server to rollforge if it is Rollforge's own."
        )
    return [min(10, 1 + place % 13) for place in range(52) if flags[start + place]]
