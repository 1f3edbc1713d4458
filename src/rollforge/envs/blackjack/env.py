"""BlackJack as an OpenEnv environment: one episode is one hand, actions and observations are text.

Knows: OpenEnv's `Environment` (0.3) and what an observation carries. Does not know: servers, clients, models.
Importing it imports OpenEnv's server side, which takes seconds: only the server process should.
"""

from __future__ import annotations

import secrets
from typing import Any

from openenv.core.env_server import Action, Environment, Observation
from openenv.core.env_server import State as EpisodeState
from pydantic import Field

from rollforge.envs.blackjack.game import ACTIONS, FORFEIT, PENALTY, Hand, Referee, State, conclude, describe, remind


class BlackjackAction(Action):  # type: ignore[misc]  # OpenEnv ships no types
    """What the model said; its first word decides."""

    text: str


class BlackjackObservation(Observation):  # type: ignore[misc]
    """A hand as text and as fields; `reward` and `done` travel beside these on the wire.

    `counts` are totals of the hand so far: `illegal` actions said, and `forfeit` 1 if they ended it. `dealer` is the
    card that shows, `dealer_total` what the dealer ended on (None while the hand is in play).
    """

    text: str
    cards: list[int]
    total: int
    soft: bool
    dealer: int
    dealer_total: int | None = None
    legal_actions: list[str] = Field(default_factory=list)
    notice: bool = False
    counts: dict[str, int] = Field(default_factory=dict)


class BlackjackEnvironment(Environment[BlackjackAction, BlackjackObservation, EpisodeState]):  # type: ignore[misc]
    """One hand at a time. An unreadable action is told to the model once per hand; a second one ends it with `penalty`.

    The work is microseconds of arithmetic, so the async verbs run it on the server's own loop: OpenEnv sends
    environments that only have the sync verbs through a thread, which costs more than the game.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, penalty: float = PENALTY) -> None:
        super().__init__()
        self._penalty = penalty
        self._hand: Hand | None = None
        self._referee = Referee()
        self._episode: dict[str, Any] = {}

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **others: Any
    ) -> BlackjackObservation:
        """As `reset`."""
        return self.reset(seed, episode_id, **others)

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        shoe: int | None = None,
        state: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> BlackjackObservation:
        """Deal a hand.

        `seed` fixes the deal and `shoe` all later cards; one given alone stands for both, none is a fresh random hand.
        `state` ({"total", "soft", "dealer"}) starts there instead of from a deal. Raises ValueError for anything else.
        """
        if unknown:
            raise ValueError(f"reset knows seed, shoe, state and episode_id, not {', '.join(sorted(unknown))}")
        deal, shoe = _seeds(seed, shoe)
        self._hand = Hand.deal(deal, shoe) if state is None else Hand.start(_state(state), shoe)
        self._referee = Referee()
        self._episode = {"episode_id": episode_id, "step_count": 0, "seed": deal, "shoe": shoe}
        return self._observe(describe(self._hand.state))

    async def step_async(
        self, action: BlackjackAction, timeout_s: float | None = None, **unknown: Any
    ) -> BlackjackObservation:
        """Play what the text says. Raises ValueError before the first reset and after the end of a hand."""
        return self.step(action, timeout_s)

    def step(self, action: BlackjackAction, timeout_s: float | None = None, **unknown: Any) -> BlackjackObservation:
        """As `step_async`; `timeout_s` is OpenEnv's and nothing here could take that long."""
        hand = self._hand
        if hand is None or hand.reward is not None or self._referee.forfeit:
            raise ValueError("no hand is in play: reset before the next action")
        self._episode["step_count"] += 1
        verdict = self._referee.judge(action.text)
        if verdict == "notice":
            return self._observe(remind(describe(hand.state)), notice=True)
        if verdict == "forfeit":
            return self._observe(FORFEIT, reward=self._penalty)
        reward = hand.play(verdict)
        if hand.dealer_total is None:
            return self._observe(describe(hand.state))
        return self._observe(conclude(hand.state.total, hand.dealer_total), reward=reward)

    @property
    def state(self) -> EpisodeState:
        """The seeds and the number of steps of the current hand."""
        return EpisodeState(**self._episode)

    def _observe(self, text: str, reward: float | None = None, notice: bool = False) -> BlackjackObservation:
        assert self._hand is not None
        total, soft, dealer = self._hand.state
        return BlackjackObservation(
            text=text,
            reward=reward,
            done=reward is not None,
            cards=list(self._hand.cards),
            total=total,
            soft=soft,
            dealer=dealer,
            dealer_total=self._hand.dealer_total,
            legal_actions=list(ACTIONS) if reward is None else [],
            notice=notice,
            counts=self._referee.counts,
        )


def _seeds(seed: int | None, shoe: int | None) -> tuple[int, int]:
    for name, value in (("seed", seed), ("shoe", shoe)):
        if value is not None and type(value) is not int:
            raise ValueError(f"{name} is a whole number, not {value!r}")
    if seed is None:
        seed = secrets.randbits(53) if shoe is None else shoe
    return seed, seed if shoe is None else shoe


def _state(fields: dict[str, Any]) -> State:
    if set(fields) != set(State._fields):
        raise ValueError(f"state has the fields {', '.join(State._fields)}, not {', '.join(sorted(map(str, fields)))}")
    if type(fields["total"]) is not int or type(fields["dealer"]) is not int or type(fields["soft"]) is not bool:
        raise ValueError(f"in state, total and dealer are whole numbers and soft is true or false: {fields}")
    return State(**fields)
