"""The pooled client against a peer in this process that speaks OpenEnv's protocol and misbehaves on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from rollforge.config import ConfigError, UserError
from rollforge.envs.config import OpenEnvConfig
from rollforge.envs.openenv import EnvironmentBusy, EnvironmentFault, EnvironmentLost, OpenEnvPool, OpenEnvSession
from rollforge.types import Observation


class EchoCodec:
    """Hands everything through: the task is the reset's arguments, the text the action, the observation the info."""

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        return dict(task)

    def action(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def observation(self, observation: Mapping[str, Any], reward: float | None, done: bool) -> Observation:
        return Observation(str(observation.get("text", "")), reward, done, info=dict(observation))


class Peer:
    """Counts sessions and answers each step with its text; some texts have it misbehave."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.active = 0
        self.opened = 0
        self.refused = 0
        self.release = asyncio.Event()
        self.url = ""

    async def handle(self, socket: ServerConnection) -> None:
        if self.active >= self.capacity:
            self.refused += 1
            await socket.send(json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}))
            return
        self.active += 1
        self.opened += 1
        try:
            async for raw in socket:
                await self.answer(socket, json.loads(raw))
        finally:
            self.active -= 1

    async def answer(self, socket: ServerConnection, message: dict[str, Any]) -> None:
        said = message.get("data", {}).get("text", "")
        reply: Any = {"type": "observation", "data": {"observation": {"text": said}, "reward": 1.5, "done": False}}
        match message["type"], said:
            case "state", _:
                reply = {"type": "state", "data": {}}
            case "step", "hang":
                await self.release.wait()
            case "step", "drop":
                await socket.close()
                return
            case "step", "fault":
                reply = {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}
            case "step", "garbage":
                await socket.send("not json")
                return
            case "step", "no reward":
                del reply["data"]["reward"]
            case "step", "text reward":
                reply["data"]["reward"] = "1.0"
            case "step", "nan reward":
                reply["data"]["reward"] = float("nan")
            case "step", "no done":
                del reply["data"]["done"]
            case "step", "no data":
                reply = {"type": "observation"}
            case "step", "beside":
                reply["data"]["metadata"] = {"seen": True}
            case _:
                pass
        await socket.send(json.dumps(reply))


@contextlib.asynccontextmanager
async def running(capacity: int = 100) -> AsyncIterator[Peer]:
    peer = Peer(capacity)
    async with serve(peer.handle, "127.0.0.1", 0) as server:
        peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield peer
        finally:
            peer.release.set()


@contextlib.asynccontextmanager
async def pool_of(peer: Peer, **settings: Any) -> AsyncIterator[OpenEnvPool]:
    async with OpenEnvPool(OpenEnvConfig(url=peer.url, **settings), EchoCodec) as pool:
        yield pool


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_session_is_reused_and_never_shared() -> None:
    async with running() as peer, pool_of(peer) as pool:
        sessions: set[OpenEnvSession] = set()
        for i in range(5):
            async with pool.session() as env:
                sessions.add(env)
                assert (await env.reset({"text": str(i)})).text == str(i)
        assert (len(sessions), peer.opened) == (1, 1)
        async with pool.session() as one, pool.session() as two:
            assert one is not two
        assert peer.opened == 2


async def test_no_more_sessions_than_allowed_and_callers_are_served_in_order() -> None:
    async with running() as peer, pool_of(peer, max_sessions=2) as pool:
        served: list[int] = []
        most = 0

        async def caller(i: int) -> None:
            nonlocal most
            async with pool.session() as env:
                served.append(i)
                most = max(most, peer.active)
                await env.step("x")

        await asyncio.gather(*(caller(i) for i in range(20)))
        assert served == sorted(served)
        assert (most, peer.opened) == (2, 2)


async def test_callers_queue_while_the_server_is_at_capacity() -> None:
    async with running(capacity=1) as peer, pool_of(peer) as mine, pool_of(peer) as theirs:
        async with theirs.session() as held:
            await held.step("x")
            waiting = asyncio.create_task(_one_step(mine))
            await until(lambda: peer.refused >= 2)
            assert not waiting.done()
        await theirs.close()
        assert await asyncio.wait_for(waiting, 10) == "mine"


async def test_a_full_server_hands_our_own_freed_session_to_the_caller_who_waits() -> None:
    async with running(capacity=1) as peer, pool_of(peer) as pool:
        async with pool.session():
            waiting = asyncio.create_task(_one_step(pool))
            await until(lambda: peer.refused > 0)
        assert await asyncio.wait_for(waiting, 10) == "mine"
        assert peer.opened == 1


async def _one_step(pool: OpenEnvPool) -> str:
    async with pool.session() as env:
        return (await env.step("mine")).text


async def test_the_queue_has_a_limit_in_time_and_in_length() -> None:
    async with running() as peer, pool_of(peer, max_sessions=1, queue_timeout_s=0.2, queue_limit=1) as pool:
        async with pool.session():
            waiting = asyncio.create_task(_one_step(pool))
            await asyncio.sleep(0)
            with pytest.raises(EnvironmentBusy, match="queue_limit"):
                await _one_step(pool)
            with pytest.raises(EnvironmentBusy, match="queue_timeout_s"):
                await waiting
        assert await _one_step(pool) == "mine"


async def test_a_dropped_connection_fails_the_episode_and_the_next_one_reconnects() -> None:
    async with running() as peer, pool_of(peer) as pool:
        with pytest.raises(EnvironmentLost, match="step"):
            async with pool.session() as env:
                await env.reset({})
                await env.step("drop")
        assert await _one_step(pool) == "mine"
        assert peer.opened == 2


async def test_a_connection_that_died_while_idle_is_replaced() -> None:
    async with running() as peer, pool_of(peer) as pool:
        async with pool.session() as env:
            await env.step("x")
        await env.close()
        assert await _one_step(pool) == "mine"
        assert peer.opened == 2


async def test_a_session_idle_for_too_long_is_not_reused() -> None:
    async with running() as peer, pool_of(peer, idle_limit_s=0.0) as pool:
        assert [await _one_step(pool), await _one_step(pool)] == ["mine", "mine"]
        assert peer.opened == 2
        await until(lambda: peer.active == 1)


async def test_sessions_that_nobody_wants_are_closed_while_another_is_used_again_and_again() -> None:
    """The one used last is used first: those below it would be held for ever, and another pool might need them."""
    async with running() as peer, pool_of(peer, idle_limit_s=0.3) as pool:
        async with pool.session(), pool.session(), pool.session():
            assert peer.active == 3
        async with asyncio.timeout(20):
            while peer.active > 1:
                assert await _one_step(pool) == "mine"
                await asyncio.sleep(0.01)
        assert peer.opened == 3


async def test_no_answer_in_time_loses_the_episode() -> None:
    async with running() as peer, pool_of(peer, message_timeout_s=0.2) as pool:
        with pytest.raises(EnvironmentLost, match=r"step in 0.2 s"):
            async with pool.session() as env:
                await env.step("hang")
        assert await _one_step(pool) == "mine"
        assert peer.opened == 2


async def test_the_answer_to_a_cancelled_step_never_reaches_the_next_episode() -> None:
    async with running() as peer, pool_of(peer) as pool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), pool.session() as env:
                await env.step("hang")
        peer.release.set()
        assert await _one_step(pool) == "mine"
        assert peer.opened == 2


async def test_a_server_error_is_a_fault_with_its_code_and_the_session_lives_on() -> None:
    async with running() as peer, pool_of(peer) as pool, pool.session() as env:
        with pytest.raises(EnvironmentFault, match="it broke") as caught:
            await env.step("fault")
        assert caught.value.code == "EXECUTION_ERROR"
        assert str(pickle.loads(pickle.dumps(caught.value))) == "EXECUTION_ERROR: it broke"
        assert (await env.step("x")).text == "x"


@pytest.mark.parametrize("said", ["text reward", "nan reward", "no done", "no data"])
async def test_an_answer_that_breaks_the_protocol_is_a_fault_and_not_a_guess(said: str) -> None:
    async with running() as peer, pool_of(peer) as pool, pool.session() as env:
        with pytest.raises(EnvironmentFault, match="PROTOCOL"):
            await env.step(said)


async def test_an_answer_that_is_not_json_loses_the_session() -> None:
    async with running() as peer, pool_of(peer) as pool, pool.session() as env:
        with pytest.raises(EnvironmentLost, match="not JSON"):
            await env.step("garbage")


async def test_a_missing_reward_is_none_and_metadata_is_kept() -> None:
    async with running() as peer, pool_of(peer) as pool, pool.session() as env:
        assert (await env.step("x")).reward == 1.5
        assert (await env.step("no reward")).reward is None
        assert (await env.step("beside")).info == {"text": "beside", "metadata": {"seen": True}}


async def test_a_check_keeps_its_session_for_later() -> None:
    async with running() as peer, pool_of(peer) as pool:
        await pool.check()
        assert await _one_step(pool) == "mine"
        assert peer.opened == 1


async def test_a_server_at_capacity_passes_the_check() -> None:
    async with running(capacity=0) as peer, pool_of(peer) as pool:
        await pool.check()
        assert peer.refused == 1


async def test_a_server_that_is_not_there_is_named() -> None:
    async with running() as peer:
        gone = peer.url
    async with OpenEnvPool(OpenEnvConfig(url=gone), EchoCodec) as pool:
        with pytest.raises(UserError, match=gone):
            await pool.check()
        with pytest.raises(EnvironmentLost, match=gone.removeprefix("http")):
            await _one_step(pool)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        OpenEnvPool(OpenEnvConfig(url=url), EchoCodec)


async def test_closing_the_pool_ends_every_session() -> None:
    async with running() as peer:
        async with pool_of(peer) as pool, pool.session() as env:
            await _one_step(pool)
            await env.step("x")
            await pool.close()
            assert (await env.step("still mine")).text == "still mine"
        await until(lambda: peer.active == 0)
