"""Known-right numbers of BlackJack, and reported faults of environment clients (P33, P36) with their kind."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import pytest
import uvicorn

from rollforge.envs import serve
from rollforge.envs.blackjack import exact
from rollforge.envs.blackjack.game import STATES, Hand, Referee, State
from rollforge.envs.config import OpenEnvConfig
from rollforge.envs.openenv import EnvironmentLost, OpenEnvPool
from rollforge.types import Observation

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

BEST_HARD = {  # total: dealer 2 3 4 5 6 7 8 9 10 A; the published hit/stand strategy for a dealer who stands on all 17
    17: "SSSSSSSSSS",
    16: "SSSSSHHHHH",
    15: "SSSSSHHHHH",
    14: "SSSSSHHHHH",
    13: "SSSSSHHHHH",
    12: "HHSSSHHHHH",
    11: "HHHHHHHHHH",
}
BEST_SOFT = {19: "SSSSSSSSSS", 18: "SSSSSSSHHH", 17: "HHHHHHHHHH", 12: "HHHHHHHHHH"}


@pytest.mark.parametrize(
    ("name", "value"), [("random", -0.396), ("always stand", -0.186), ("hit below 17", -0.079), ("best", -0.047)]
)
def test_the_lines_every_result_is_compared_with(name: str, value: float) -> None:
    assert round(exact.reference_lines()[name], 3) == value


def test_the_best_play_is_the_published_strategy() -> None:
    hits = exact.best_actions()
    for soft, rows in ((False, BEST_HARD), (True, BEST_SOFT)):
        for total, row in rows.items():
            states = [state for state in STATES if (state.total, state.soft) == (total, soft)]
            assert "".join("H" if hits[exact.INDEX[state]] else "S" for state in states) == row, (total, soft)


def test_chances_of_deals_and_of_the_dealer_add_up() -> None:
    assert exact.deal_chances().sum() == pytest.approx(1)
    # Standing on 20 against a 10 and on 16 against a 6, from published tables for an infinite deck without peeking.
    assert exact.stand_values()[exact.INDEX[State(16, False, 6)]] == pytest.approx(-0.1537, abs=2e-4)
    assert exact.stand_values()[exact.INDEX[State(20, False, 6)]] == pytest.approx(0.7040, abs=2e-4)


def test_playing_the_game_gives_what_the_exact_evaluation_says() -> None:
    """Fixed seeds, so the result never changes; the policy says something unreadable often, also after the notice."""
    rng = np.random.default_rng(1)
    policy, after = rng.dirichlet((3, 3, 1), 280), rng.dirichlet((3, 3, 2), 280)
    rewards = np.array([_play(seed, policy, after, rng) for seed in range(20_000)])
    error = rewards.std() / np.sqrt(len(rewards))
    assert abs(rewards.mean() - exact.expected_reward(policy, after)) < 3 * error


def _play(seed: int, policy: exact.Values, after: exact.Values, rng: np.random.Generator) -> float:
    hand, referee, asked = Hand.deal(seed, seed), Referee(), False
    while hand.reward is None:
        chances = (after if asked else policy)[exact.INDEX[hand.state]]
        said = ("hit", "stand", "banana")[int(np.searchsorted(np.cumsum(chances), rng.random() * chances.sum()))]
        verdict = referee.judge(said)
        if verdict == "forfeit":
            return -1.5
        asked = verdict == "notice"
        if not asked:
            hand.play(verdict)
    return float(hand.reward)


class PassCodec:
    """Hands the server's observation through as info."""

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        return dict(task)

    def action(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def observation(self, observation: Mapping[str, Any], reward: float | None, done: bool) -> Observation:
        return Observation("", reward, done, info=dict(observation))


@contextlib.asynccontextmanager
async def deaf_peer(answer: Mapping[str, Any]) -> AsyncIterator[str]:
    """A WebSocket server that answers every text with `answer` and no ping, ever; yields its URL."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            key = next(line.split(b":")[1].strip() for line in head.splitlines() if b"websocket-key" in line.lower())
            accept = base64.b64encode(hashlib.sha1(key + GUID).digest())
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n")
            writer.write(b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
            payload = json.dumps({"type": "observation", "data": answer}).encode()
            while (opcode := await _read_frame(reader)) != 8:
                if opcode == 1:
                    writer.write(b"\x81\x7e" + struct.pack(">H", len(payload)) + payload)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _read_frame(reader: asyncio.StreamReader) -> int:
    first, second = await reader.readexactly(2)
    length = second & 0x7F
    if length == 126:
        (length,) = struct.unpack(">H", await reader.readexactly(2))
    await reader.readexactly(4 + length)
    return first & 0x0F


P33 = [
    ({"observation": {"board": "x"}, "reward": 1.0, "done": True}, 1.0, True),
    ({"observation": {"board": "x"}, "reward": 0, "done": False}, 0.0, False),
    ({"observation": {"board": "x"}, "reward": True, "done": True}, 1.0, True),
    ({"observation": {"board": "x"}, "reward": None, "done": False}, None, False),
    ({"observation": {"board": "x"}, "done": True}, None, True),
    ({"observation": {"board": "x", "reward": 0.0, "done": False}, "reward": 1.0, "done": True}, 1.0, True),
    ({"observation": {"board": "x", "reward": 9.0}, "done": True}, None, True),
]


@pytest.mark.parametrize(("wire", "reward", "done"), P33)
async def test_p33_reward_and_done_are_read_beside_the_observation(
    wire: Mapping[str, Any], reward: float | None, done: bool
) -> None:
    async with deaf_peer(wire) as url, OpenEnvPool(OpenEnvConfig(url=url), PassCodec) as pool, pool.session() as env:
        for observation in (await env.reset({}), await env.step("x")):
            assert observation.reward == reward
            assert (observation.reward is None) == (reward is None)
            assert observation.done is done
            assert observation.info["board"] == "x"


async def test_p33_metadata_is_kept_wherever_the_server_puts_it() -> None:
    wire = {"observation": {"board": "x", "metadata": {"in": 1}}, "reward": 1.0, "done": True, "beside": {"out": 2}}
    async with deaf_peer(wire) as url, OpenEnvPool(OpenEnvConfig(url=url), PassCodec) as pool, pool.session() as env:
        assert (await env.step("x")).info == {"board": "x", "metadata": {"in": 1}, "beside": {"out": 2}}


WIRE = {"observation": {"board": "x"}, "reward": 1.0, "done": False}


async def test_p36_a_peer_that_never_answers_pings_keeps_its_session_with_keepalive_off() -> None:
    config = OpenEnvConfig(url="", keepalive_s=0.0)
    assert config == OpenEnvConfig()  # off is the default
    async with deaf_peer(WIRE) as url, OpenEnvPool(OpenEnvConfig(url=url), PassCodec) as pool, pool.session() as env:
        await env.reset({})
        # Idle for 45 s in the report. What would end the session by then is the client's timer: there must be none.
        assert (env._socket.ping_interval, env._socket.ping_timeout) == (None, None)
        assert env._socket.keepalive_task is None
        assert (await env.step("x")).reward == 1.0


def test_p36_our_servers_send_no_pings_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that trains for longer than uvicorn's 20 s + 20 s answers none in that time, and is healthy."""
    served: list[uvicorn.Server] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: served.append(server))
    with socket.socket() as listener:
        serve._run(None, listener)
    assert served[0].config.ws_ping_interval is None


async def test_p36_with_keepalive_on_the_same_peer_is_lost_loudly() -> None:
    async with (
        deaf_peer(WIRE) as url,
        OpenEnvPool(OpenEnvConfig(url=url, keepalive_s=0.1), PassCodec) as pool,
        pool.session() as env,
    ):
        await env.reset({})
        async with asyncio.timeout(10):
            while env.reusable:
                await asyncio.sleep(0.02)
        with pytest.raises(EnvironmentLost, match="lost the session"):
            await env.step("x")
