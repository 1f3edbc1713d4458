"""The BlackJack server as a process of its own, spoken to through the pool."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from rollforge.envs.blackjack.codecs import BlackjackCodec
from rollforge.envs.blackjack.game import STATES, describe, read_action
from rollforge.envs.config import OpenEnvConfig
from rollforge.envs.openenv import EnvironmentFault, OpenEnvPool
from rollforge.envs.server import EnvServer
from rollforge.types import Observation

MODULE = "rollforge.envs.blackjack.server"
SESSIONS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServer]:
    with EnvServer(MODULE, ["--penalty", "-1.25"], sessions=SESSIONS) as running:
        yield running


def pool_of(server: EnvServer, **settings: Any) -> OpenEnvPool:
    return OpenEnvPool(OpenEnvConfig(url=server.url, **settings), BlackjackCodec)


async def play(pool: OpenEnvPool, task: dict[str, Any], words: list[str]) -> list[Observation]:
    """The observations of one hand in which `words` are said, and then stand."""
    async with pool.session() as env:
        seen = [await env.reset(task)]
        for word in [*words, "stand"]:
            if not seen[-1].done:
                seen.append(await env.step(word))
        return seen


async def test_a_group_of_rollouts_plays_the_same_hand_on_the_same_shoe(server: EnvServer) -> None:
    async with pool_of(server) as pool:
        group = await asyncio.gather(*(play(pool, {"seed": 7, "shoe": 9}, ["hit"] * hits) for hits in range(6)))
        deals = {(rollout[0].text, tuple(rollout[0].info["cards"])) for rollout in group}
        assert len(deals) == 1
        assert len({rollout[-1].info["dealer_total"] for rollout in group}) == 1
        longest = max((rollout[-1].info["cards"] for rollout in group), key=len)
        for rollout in group:
            assert rollout[-1].done
            assert rollout[-1].reward in (-1.0, 0.0, 1.0)
            cards = rollout[-1].info["cards"]
            assert cards == longest[: len(cards)]
        other = await play(pool, {"seed": 7, "shoe": 10}, [])
        assert other[0].text == group[0][0].text


async def test_every_decision_state_can_be_shown(server: EnvServer) -> None:
    async with pool_of(server) as pool:
        shown = [(await play(pool, {"state": state._asdict(), "shoe": 1}, []))[0] for state in STATES]
        assert [observation.text for observation in shown] == [describe(state) for state in STATES]
        assert all(observation.legal_actions == ("hit", "stand") for observation in shown)
        assert all(read_action(action) == action for observation in shown for action in observation.legal_actions)


async def test_illegal_actions_are_told_once_and_counted(server: EnvServer) -> None:
    async with pool_of(server) as pool:
        first, told, lost = await play(pool, {"seed": 3}, ["double", "split"])
        assert told.text == f"Say hit or stand. {first.text}"
        assert (told.reward, told.done, told.info["counts"]) == (None, False, {"illegal": 1, "forfeit": 0})
        assert (lost.reward, lost.done, lost.info["counts"]) == (-1.25, True, {"illegal": 2, "forfeit": 1})


async def test_more_callers_than_the_server_has_sessions_all_play(server: EnvServer) -> None:
    async with pool_of(server, max_sessions=4 * SESSIONS) as pool:
        hands = await asyncio.wait_for(asyncio.gather(*(play(pool, {"seed": i}, ["hit"]) for i in range(80))), 60)
        assert all(hand[-1].done for hand in hands)


async def test_a_task_the_environment_does_not_know_is_a_fault_with_its_reason(server: EnvServer) -> None:
    async with pool_of(server) as pool:
        with pytest.raises(EnvironmentFault, match=r"EXECUTION_ERROR.*sed"):
            await play(pool, {"sed": 3}, [])
        with pytest.raises(EnvironmentFault, match="33"):
            await play(pool, {"state": {"total": 33, "soft": False, "dealer": 1}}, [])
        assert (await play(pool, {"seed": 3}, []))[-1].done


def test_plain_http_deals_the_same_hand(server: EnvServer) -> None:
    request = urllib.request.Request(
        f"{server.url}/reset", json.dumps({"seed": 7, "shoe": 9}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        answer = json.load(response)

    async def over_the_socket() -> Observation:
        async with pool_of(server) as pool:
            return (await play(pool, {"seed": 7, "shoe": 9}, []))[0]

    assert answer["observation"]["text"] == asyncio.run(over_the_socket()).text
    assert answer["reward"] is None
    assert answer["done"] is False
