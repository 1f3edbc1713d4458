"""Both servers' payloads become the same observations. The OpenSpiel hands were recorded from open_spiel 2.0.2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollforge.config import UserError
from rollforge.envs.blackjack.codecs import BlackjackCodec, OpenSpielBlackjackCodec
from rollforge.envs.blackjack.game import State, count, describe
from rollforge.types import Observation

HANDS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "open_spiel_blackjack.json").read_text(encoding="utf-8")
)


def wire(state: dict[str, Any]) -> dict[str, Any]:
    hot = set(state["hot"])
    return {
        "info_state": [float(i in hot) for i in range(189)],
        "legal_actions": state["legal"],
        "game_phase": "playing",
        "current_player_id": 0,
        "opponent_last_action": None,
    }


def values(names: list[str]) -> list[int]:
    """Card names such as `HT` (suit, rank) as values."""
    return [min(10, 1 + "A23456789TJQK".index(name[1])) for name in names]


@pytest.mark.parametrize("hand", HANDS)
def test_recorded_open_spiel_hands_read_as_their_printed_cards(hand: dict[str, Any]) -> None:
    codec = OpenSpielBlackjackCodec()
    assert codec.reset({}) == {}
    *decisions, end = hand["states"]
    for state in decisions:
        total, soft = count(values(state["player"]))
        observation = codec.observation(wire(state), None, False)
        assert observation.text == describe(State(total, soft, values(state["dealer"])[1]))
        assert observation.legal_actions == ("hit", "stand")
        assert sorted(observation.info["cards"]) == sorted(values(state["player"]))
    last = codec.observation(wire(end), hand["reward"], True)
    assert last.reward == hand["reward"]
    assert last.done
    assert last.legal_actions == ()
    assert last.info["dealer_total"] == count(values(end["dealer"]))[0]
    assert last.text.endswith({-1.0: "lost.", 0.0: "push.", 1.0: "won."}[hand["reward"]])


def test_the_recorded_hands_hold_every_outcome_and_soft_hands() -> None:
    assert {hand["reward"] for hand in HANDS} == {-1.0, 0.0, 1.0}
    assert any(count(values(state["player"]))[1] for hand in HANDS for state in hand["states"])


def test_actions_become_open_spiels_numbers() -> None:
    codec = OpenSpielBlackjackCodec()
    codec.reset({})
    assert codec.action(" Hit\n") == {"action_id": 0, "game_name": "blackjack"}
    assert codec.action("stand") == {"action_id": 1, "game_name": "blackjack"}


def test_what_open_spiel_cannot_be_told_is_answered_on_this_side() -> None:
    codec = OpenSpielBlackjackCodec(penalty=-2.0)
    for _ in range(2):  # a reset clears the count
        codec.reset({})
        line = codec.observation(wire(HANDS[0]["states"][0]), None, False).text
        told = codec.action("banana")
        assert isinstance(told, Observation)
        assert (told.text, told.reward, told.done) == (f"Say hit or stand. {line}", None, False)
        assert told.legal_actions == ("hit", "stand")
        assert told.info["notice"]
        assert told.info["counts"] == {"illegal": 1, "forfeit": 0}
        lost = codec.action("split")
        assert isinstance(lost, Observation)
        assert (lost.reward, lost.done, lost.info["counts"]) == (-2.0, True, {"illegal": 2, "forfeit": 1})


def test_a_seed_that_the_public_server_would_ignore_is_refused() -> None:
    with pytest.raises(UserError, match="seed"):
        OpenSpielBlackjackCodec().reset({"seed": 7})


def test_another_servers_layout_is_refused_with_what_to_set() -> None:
    payload = {"info_state": [0.0] * 188, "legal_actions": [0, 1]}
    with pytest.raises(UserError, match=r"188 floats.*189.*OPENSPIEL_GAME"):
        OpenSpielBlackjackCodec().observation(payload, None, False)
    with pytest.raises(UserError, match=r"0 floats.*server to rollforge"):
        OpenSpielBlackjackCodec().observation({"text": "Hand 4 hard, dealer 2:"}, None, False)
    with pytest.raises(UserError, match=r"info_state, legal_actions and no text.*server to openspiel"):
        BlackjackCodec().observation(payload, None, False)


def test_our_own_fields_become_text_actions_and_info() -> None:
    codec = BlackjackCodec()
    assert codec.reset({"seed": 3, "shoe": 4}) == {"seed": 3, "shoe": 4}
    assert codec.action(" hit\n") == {"text": " hit\n"}
    fields = {"text": "Hand 4 hard, dealer 2:", "legal_actions": ["hit", "stand"], "total": 4, "counts": {"illegal": 0}}
    observation = codec.observation(fields, None, False)
    assert (observation.text, observation.legal_actions) == ("Hand 4 hard, dealer 2:", ("hit", "stand"))
    assert observation.info == {"total": 4, "counts": {"illegal": 0}}
