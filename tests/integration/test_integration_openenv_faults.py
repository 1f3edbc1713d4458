"""Environment servers that cannot start, die, leak or block: real processes, reported faults P28 and P36."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_command import alive, wait_until

from rollforge.config import UserError
from rollforge.envs.blackjack.codecs import BlackjackCodec
from rollforge.envs.config import OpenEnvConfig
from rollforge.envs.openenv import EnvironmentLost, OpenEnvPool
from rollforge.envs.server import EnvServer
from rollforge.types import Observation

MODULE = "rollforge.envs.blackjack.server"

TOOLS = """
import argparse, sys, time
from pathlib import Path
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action, CallToolAction, ConcurrencyConfig, Environment, Observation, State, create_fastapi_app)
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolObservation
from rollforge.envs import serve

class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        mcp = FastMCP("echo")
        @mcp.tool
        def echo(message: str) -> str:
            return message
        super().__init__(mcp)
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()
    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("tools only")
    @property
    def state(self):
        return State()

class Wait(Action):
    file: str = ""

class Blocking(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()
    def step(self, action, timeout_s=None, **kwargs):
        end = time.monotonic() + 30
        while action.file and not Path(action.file).exists() and time.monotonic() < end:
            time.sleep(0.01)
        return Observation(reward=1.0)
    @property
    def state(self):
        return State()

def make_app(args):
    config = ConcurrencyConfig(max_concurrent_envs=args.sessions, session_timeout=args.session_timeout)
    if args.kind == "echo":
        return create_fastapi_app(Echo, CallToolAction, CallToolObservation, concurrency_config=config)
    print("x" * 300_000)  # what an environment prints must not fill a pipe that nobody reads
    return create_fastapi_app(Blocking, Wait, Observation, concurrency_config=config)

if __name__ == "__main__":
    options = serve.parser("tools")
    options.add_argument("--kind")
    serve.main(make_app, options)
"""


class PayloadCodec:
    """The text is the action payload as JSON; the server's observation is info."""

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        return dict(task)

    def action(self, text: str) -> dict[str, Any]:
        return dict(json.loads(text))

    def observation(self, observation: Mapping[str, Any], reward: float | None, done: bool) -> Observation:
        return Observation("", reward, done, info=dict(observation))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], EnvServer]]:
    """Starts the servers above; a module of a user's own, found on PYTHONPATH."""
    (tmp_path / "tool_server.py").write_text(TOOLS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    started: list[EnvServer] = []

    def start(kind: str) -> EnvServer:
        started.append(EnvServer("tool_server", ["--kind", kind]).start())
        return started[-1]

    yield start
    for server in started:
        server.close()


def test_p28_two_servers_with_default_settings_get_two_ports() -> None:
    with EnvServer(MODULE) as one, EnvServer(MODULE) as two:
        assert one.port != two.port
        pids = [one.pid, two.pid]
    assert not any(map(alive, pids))


def test_p28_a_taken_port_is_named_at_once_and_nothing_is_left() -> None:
    children = set(psutil.Process().children(recursive=True))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(UserError, match=f"port {port}"):
            EnvServer(MODULE, port=port).start()
        assert time.monotonic() - start < 30
    assert set(psutil.Process().children(recursive=True)) <= children


def test_a_server_that_cannot_start_shows_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_server.py").write_text("raise RuntimeError('no deck of cards')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(UserError, match="no deck of cards"):
        EnvServer("broken_server").start()
    with pytest.raises(UserError, match="no_such_module"):
        EnvServer("no_such_module").start()


def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_server.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    server = EnvServer("slow_server", limit_s=1.0)
    with pytest.raises(UserError, match=r"slow_server.*within 1 s"):
        server.start()
    assert not [child for child in psutil.Process().children() if "slow_server" in child.cmdline()]


def test_a_server_ends_when_its_parent_is_killed() -> None:
    source = f"""
        import time
        from rollforge.envs.server import EnvServer
        server = EnvServer({MODULE!r}).start()
        print(server.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    wait_until(lambda: not alive(pid), 20.0, "the end of the server")


def test_the_log_goes_where_it_is_wanted_and_close_can_be_repeated(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    server = EnvServer(MODULE, log=log).start()
    pid = server.pid
    server.close()
    server.close()
    assert log.exists()
    assert not alive(pid)


async def test_a_server_killed_in_an_episode_loses_it_and_a_new_one_is_found_again() -> None:
    server = EnvServer(MODULE).start()
    async with OpenEnvPool(OpenEnvConfig(url=server.url), BlackjackCodec) as pool:
        try:
            with pytest.raises(EnvironmentLost, match="step"):
                async with pool.session() as env:
                    await env.reset({"seed": 1})
                    os.killpg(server.pid, signal.SIGKILL)
                    await env.step("hit")
            with pytest.raises(EnvironmentLost, match="connect"):
                async with pool.session() as env:
                    await env.reset({"seed": 1})
        finally:
            server.close()
        with EnvServer(MODULE, port=server.port):
            async with pool.session() as env:
                assert (await env.reset({"seed": 1})).text.startswith("Hand ")


async def test_an_abandoned_session_is_reaped_and_does_not_hold_its_place() -> None:
    with EnvServer(MODULE, ["--session-timeout", "0.5"], sessions=1) as server:
        async with (
            OpenEnvPool(OpenEnvConfig(url=server.url), BlackjackCodec) as forgetful,
            OpenEnvPool(OpenEnvConfig(url=server.url, queue_timeout_s=30), BlackjackCodec) as other,
        ):
            await forgetful.check()  # holds the only session and never speaks again
            async with other.session() as env:
                assert (await env.reset({"seed": 1})).text.startswith("Hand ")


FAR_BELOW_30_S = 10.0
"""A call that waits for its own event loop ends with the client's limit: 30 s in the reports."""


async def test_p36_a_tool_call_answers_over_http_and_over_the_socket(tools: Callable[[str], EnvServer]) -> None:
    server = tools("echo")
    call = {"type": "call_tool", "tool_name": "echo", "arguments": {"message": "hello"}}

    def over_http() -> dict[str, Any]:
        body = json.dumps({"action": call}).encode()
        request = urllib.request.Request(f"{server.url}/step", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            return dict(json.load(response)["observation"])

    async with OpenEnvPool(OpenEnvConfig(url=server.url), PayloadCodec) as pool, pool.session() as env:
        await env.reset({})
        start = time.monotonic()
        answer = await env.step(json.dumps(call))
        assert time.monotonic() - start < FAR_BELOW_30_S
    assert answer.info["error"] is None
    assert answer.info["result"]["data"] == "hello"
    start = time.monotonic()
    assert (await asyncio.to_thread(over_http))["result"]["data"] == "hello"
    assert time.monotonic() - start < FAR_BELOW_30_S


async def test_p36_a_blocking_step_of_one_session_does_not_hold_up_another(
    tools: Callable[[str], EnvServer], tmp_path: Path
) -> None:
    server, release = tools("blocking"), tmp_path / "release"
    async with (
        OpenEnvPool(OpenEnvConfig(url=server.url), PayloadCodec) as pool,
        pool.session() as blocked,
        pool.session() as free,
    ):
        slow = asyncio.create_task(blocked.step(json.dumps({"file": str(release)})))
        await asyncio.sleep(0.2)
        for _ in range(5):
            start = time.monotonic()
            assert (await free.step("{}")).reward == 1.0
            assert time.monotonic() - start < FAR_BELOW_30_S
        assert not slow.done()
        release.touch()
        assert (await asyncio.wait_for(slow, 10)).reward == 1.0
