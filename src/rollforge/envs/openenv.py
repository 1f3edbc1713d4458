"""The pooled client of OpenEnv servers.

Knows: OpenEnv's WebSocket protocol (JSON messages `reset`, `step`, `state`, `close`; answers `observation`, `state`,
`error`), sessions, queues and limits. Does not know: any environment; a `Codec` maps its payloads.

One WebSocket is one server session. Sessions are kept open and reused, as `reset` starts a new episode in an old
session. OpenEnv's own client is not used: importing it imports the server side (seconds), and it neither pools nor
queues.

On the wire `reward` and `done` stand beside the observation. A missing reward is None.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.protocol import State as WebSocketState

from rollforge.config import ConfigError, RunFailed, UserError
from rollforge.envs.config import OpenEnvConfig
from rollforge.types import Observation

MAX_MESSAGE_BYTES = 100 * 2**20
CLOSE_TIMEOUT_S = 1.0
RETRY_FIRST_S, RETRY_LAST_S = 0.05, 2.0
"""Pause before a server at capacity is asked again: from the first to the last, doubling."""
SCHEMES = {"http": "ws", "ws": "ws", "https": "wss", "wss": "wss"}
SESSION_REFUSED = ("FACTORY_ERROR", "SESSION_ERROR")


class EnvironmentLost(RunFailed):
    """The session ended under a running episode (dropped connection, no answer in time): play the episode again."""


class EnvironmentFault(Exception):
    """The server answered with an error; `code` is OpenEnv's. The session itself lives on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)  # both, so that it can be pickled
        self.code = code

    def __str__(self) -> str:
        return ": ".join(self.args)


class EnvironmentBusy(RunFailed):
    """No session came free within the limits of the queue."""


class _CapacityReached(Exception):
    """The server has no session left for us now."""


class Codec(Protocol):
    """Maps one environment's payloads; one object per session, told of every reset, so it may keep an episode's
    state."""

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The server's reset arguments for a task."""
        ...

    def action(self, text: str) -> dict[str, Any] | Observation:
        """The action payload for what the model said, or an answer that needs no server."""
        ...

    def observation(self, observation: Mapping[str, Any], reward: float | None, done: bool) -> Observation:
        """What the model and the logs get of a server's observation."""
        ...


class OpenEnvSession:
    """One server session: a types.Environment. `close` ends it; sessions of a pool are handed back instead."""

    def __init__(self, socket: ClientConnection, codec: Codec, config: OpenEnvConfig) -> None:
        self._socket = socket
        self._codec = codec
        self._url = config.url
        self._timeout_s = config.message_timeout_s
        self._exchanging = False

    @property
    def reusable(self) -> bool:
        """Whether the connection is open and no answer is outstanding."""
        return not self._exchanging and self._socket.state is WebSocketState.OPEN

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """Start an episode. Raises EnvironmentLost or EnvironmentFault, as `step` does."""
        return self._decode(await self._ask({"type": "reset", "data": self._codec.reset(task)}))

    async def step(self, action: str) -> Observation:
        """Answer the model's text."""
        payload = self._codec.action(action)
        if isinstance(payload, Observation):
            return payload
        return self._decode(await self._ask({"type": "step", "data": payload}))

    async def probe(self) -> None:
        """Learn whether the server gave us a session: it greets nobody, but refuses by an error instead of an
        answer."""
        try:
            await self._ask({"type": "state"})
        except EnvironmentFault as fault:
            if fault.code == "CAPACITY_REACHED":
                raise _CapacityReached(str(fault)) from fault
            if fault.code in SESSION_REFUSED:
                raise

    async def close(self) -> None:
        """End the session; the server is told by the closing of the connection."""
        await self._socket.close()

    async def _ask(self, message: dict[str, Any]) -> Mapping[str, Any]:
        self._exchanging = True  # stays so if we are cancelled: the late answer must not meet the next question
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(ConnectionClosed):  # a refusal may lie unread on a connection that is closed
                    await self._socket.send(json.dumps(message))
                answer = json.loads(await self._socket.recv())
        except TimeoutError as error:
            raise EnvironmentLost(f"{self._url} did not answer {message['type']} in {self._timeout_s:g} s") from error
        except (WebSocketException, OSError) as error:
            raise EnvironmentLost(
                f"lost the session with {self._url} during {message['type']}: {error}; is the server still running?"
            ) from error
        except ValueError as error:
            raise EnvironmentLost(f"{self._url} answered {message['type']} with what is not JSON: {error}") from error
        self._exchanging = False
        return self._open_envelope(answer)

    def _open_envelope(self, answer: Any) -> Mapping[str, Any]:
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict):
            raise EnvironmentFault("PROTOCOL", f"{self._url} answered {answer!r}")
        if answer.get("type") == "error":
            raise EnvironmentFault(str(data.get("code", "UNKNOWN")), str(data.get("message", data)))
        return data

    def _decode(self, data: Mapping[str, Any]) -> Observation:
        observation, reward, done = data.get("observation"), data.get("reward"), data.get("done")
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise EnvironmentFault("PROTOCOL", f"{self._url} answered without an observation or done: {data!r}")
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise EnvironmentFault("PROTOCOL", f"{self._url} gave the reward {reward!r}, which is no finite number")
        decoded = self._codec.observation(observation, None if reward is None else float(reward), done)
        beside = {name: value for name, value in data.items() if name not in ("observation", "reward", "done")}
        return dataclasses.replace(decoded, info={**beside, **decoded.info}) if beside else decoded


class OpenEnvPool:
    """Sessions of one OpenEnv server, shared by many coroutines of one event loop.

    `async with pool.session() as env:` waits for a session, first come first served, and hands it back at the end. A
    session whose connection broke is never handed out again; the next caller gets a new connection. `codec` makes one
    codec per session. Raises ConfigError for a url that is none.
    """

    def __init__(self, config: OpenEnvConfig, codec: Callable[[], Codec]) -> None:
        self._config = config
        self._codec = codec
        self._ws_url = _websocket_url(config.url)
        self._idle: list[tuple[float, OpenEnvSession]] = []
        self._open = 0
        self._waiting = 0
        self._closed = False
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def check(self) -> None:
        """Open one session and keep it for later. Raises UserError, naming the url, if no such server can be used."""
        try:
            await self._give_back(await self._connect())
        except _CapacityReached:
            return
        except (EnvironmentLost, EnvironmentFault) as error:
            raise UserError(
                f"No OpenEnv server can be used at url {self._config.url!r}: {error}. Start the server, or set the "
                "url to where it runs."
            ) from error

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[OpenEnvSession]:
        """A session of one's own. Raises EnvironmentBusy at the limits of the queue, EnvironmentLost without a
        server."""
        session = await self._acquire()
        try:
            yield session
        finally:
            if session.reusable and not self._closed:
                await self._give_back(session)
            else:
                await self._discard(session)

    async def close(self) -> None:
        """Close the idle sessions now, and those in use when they are handed back."""
        self._closed = True
        while self._idle:
            await self._discard(self._idle.pop()[1])

    async def __aenter__(self) -> OpenEnvPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _acquire(self) -> OpenEnvSession:
        config = self._config
        if self._waiting >= config.queue_limit:
            raise EnvironmentBusy(f"{self._waiting} callers wait for a session of {config.url} (queue_limit)")
        self._waiting += 1
        try:
            async with asyncio.timeout(config.queue_timeout_s), self._turn:  # asyncio's lock is first come first served
                return await self._next()
        except TimeoutError as error:
            raise EnvironmentBusy(
                f"no session of {config.url} came free in {config.queue_timeout_s:g} s (queue_timeout_s); "
                f"{self._open} of at most {config.max_sessions} are ours"
            ) from error
        finally:
            self._waiting -= 1

    async def _next(self) -> OpenEnvSession:
        """The next session to come free, in this pool or, asking again and again, on a server at capacity."""
        pause = RETRY_FIRST_S
        while True:
            self._freed.clear()
            session = await self._pop_idle()
            if session:
                return session
            if self._open >= self._config.max_sessions:
                await self._freed.wait()
                continue
            try:
                return await self._connect()
            except _CapacityReached:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), pause)
                pause = min(2 * pause, RETRY_LAST_S)

    async def _pop_idle(self) -> OpenEnvSession | None:
        """The session used last; those that grew too old or lost their connection are closed on the way."""
        while self._idle:
            since, session = self._idle.pop()
            if session.reusable and time.monotonic() - since < self._config.idle_limit_s:
                return session
            await self._discard(session)
        return None

    async def _connect(self) -> OpenEnvSession:
        self._open += 1
        session = None
        try:
            session = OpenEnvSession(await self._open_socket(), self._codec(), self._config)
            await session.probe()
        except BaseException:
            self._open -= 1
            if session:
                await session.close()
            raise
        return session

    async def _open_socket(self) -> ClientConnection:
        config = self._config
        try:
            return await connect(
                self._ws_url,
                open_timeout=config.connect_timeout_s,
                close_timeout=CLOSE_TIMEOUT_S,
                ping_interval=config.keepalive_s or None,
                ping_timeout=config.keepalive_s or None,
                max_size=MAX_MESSAGE_BYTES,
                compression=None,
                proxy=None if _is_loopback(self._ws_url) else True,
            )
        except (WebSocketException, OSError) as error:
            raise EnvironmentLost(
                f"cannot connect to {self._ws_url}: {error or type(error).__name__}; is a server running there?"
            ) from error

    async def _give_back(self, session: OpenEnvSession) -> None:
        """Keeps a session for the next caller, and closes those that nobody has wanted for long: another pool may."""
        now = time.monotonic()
        self._idle.append((now, session))
        self._freed.set()
        while self._idle and now - self._idle[0][0] > self._config.idle_limit_s:
            await self._discard(self._idle.pop(0)[1])

    async def _discard(self, session: OpenEnvSession) -> None:
        self._open -= 1
        self._freed.set()
        await session.close()


def _websocket_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ConfigError(
            f"url is {url!r}, but an OpenEnv server is reached at an address such as http://127.0.0.1:8000 "
            "(http, https, ws or wss)."
        )
    return f"{SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}/ws"


def _is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
