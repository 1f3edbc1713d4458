"""The native policy server: the engine behind the Generator role.

Knows: asyncio, the engine, how a weight version is read. Does not know: actors, rollouts, algorithms.
One task drives the engine in a worker thread while there is work; requests and new weights are taken between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import torch

from rollforge.data.renderer import Renderer
from rollforge.generate.config import NativeConfig
from rollforge.generate.native.engine import Engine, Request
from rollforge.generate.native.model import EngineModel
from rollforge.types import Completion, IntArray, Metrics, Sampling, WeightReader


class NativePolicy:
    """Implements `rollforge.types.Generator` over a Hugging Face folder.

    `weights` reads published versions; without it `load` is refused. Loading is in flight: running sequences go on
    under the new weights, their earlier tokens keep their version.
    """

    def __init__(
        self, folder: str, dtype: str, device: str, config: NativeConfig, weights: WeightReader | None = None
    ) -> None:
        renderer = Renderer(folder)
        self._model = EngineModel(folder, getattr(torch, dtype), device)
        self._engine = Engine(self._model, renderer.decode, frozenset(renderer.stop_ids), config)
        self._weights = weights
        self._commands: deque[Callable[[], object]] = deque()
        self._driver: asyncio.Task[None] | None = None
        self._expected: set[asyncio.Future[Any]] = set()
        self._busy_s = 0.0

    async def generate(self, prompt_ids: IntArray, sampling: Sampling, n: int = 1) -> list[Completion]:
        """Samples `n` completions of `prompt_ids` [L]. Cancelling the call aborts them."""
        request, completions = self._begin(prompt_ids, sampling, n)
        try:
            return await completions
        except asyncio.CancelledError:
            self._do(lambda: self._engine.abort(request))
            raise

    async def stream(self, prompt_ids: IntArray, sampling: Sampling) -> AsyncIterator[tuple[int, float]]:
        """Yields (token id, log-probability) of one completion as they are drawn; leaving the loop aborts it."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, float] | None] = asyncio.Queue()
        request, completions = self._begin(
            prompt_ids,
            sampling,
            1,
            lambda _, token, logprob: loop.call_soon_threadsafe(queue.put_nowait, (token, logprob)),
        )
        completions.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (drawn := await queue.get()) is not None:
                yield drawn
            completions.result()
        finally:
            self._do(lambda: self._engine.abort(request))

    async def load(self, version: int) -> Metrics:
        """Fetches a published version and serves it from the next step on. Returns seconds by part.

        Raises ValueError, and goes on serving the version it has, when the weights are not this model's.
        """
        if self._weights is None:
            raise RuntimeError("this policy server has no weight store to load from")
        started = time.perf_counter()
        async with self._weights.read(version) as tensors:
            fetched = time.perf_counter()
            loop = asyncio.get_running_loop()
            done: asyncio.Future[Exception | None] = self._expect()

            def apply() -> None:
                if not done.cancelled():
                    loop.call_soon_threadsafe(_resolve, done, self._loaded(tensors, version))

            self._do(apply)
            if (error := await done) is not None:
                raise error
        return {"time/fetch_s": fetched - started, "time/load_s": time.perf_counter() - fetched}

    async def version(self) -> int:
        """The version being served."""
        return self._engine.version

    async def metrics(self) -> Metrics:
        """Totals since the start: tokens, prefill_tokens, cached_tokens, steps, sequences, busy seconds."""
        return {f"generate/{name}": float(value) for name, value in self._engine.counts.items()} | {
            "generate/busy_s": self._busy_s
        }

    def _begin(
        self,
        prompt_ids: IntArray,
        sampling: Sampling,
        n: int,
        on_token: Callable[[int, int, float], object] | None = None,
    ) -> tuple[Request, asyncio.Future[list[Completion]]]:
        loop = asyncio.get_running_loop()

        def on_done(completions: list[Completion]) -> None:
            loop.call_soon_threadsafe(_resolve, future, completions)

        request = self._engine.prepare(prompt_ids, sampling, n, on_done, on_token)
        future: asyncio.Future[list[Completion]] = self._expect()
        self._do(lambda: self._engine.submit(request))
        return request, future

    def _loaded(self, tensors: Mapping[str, torch.Tensor], version: int) -> Exception | None:
        """Loads, or says what is wrong with the weights: that is the caller's error, not the engine's."""
        try:
            self._engine.load(tensors, version)
        except ValueError as error:
            return error
        return None

    def _expect(self) -> asyncio.Future[Any]:
        """A future that fails with the engine: whoever waits for an engine that broke hears of it."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._expected.add(future)
        future.add_done_callback(self._expected.discard)
        return future

    def _do(self, command: Callable[[], object]) -> None:
        """Has `command` run between two steps, and the engine driven as long as it has work."""
        self._commands.append(command)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.ensure_future(self._drive())

    async def _drive(self) -> None:
        try:
            while self._commands or self._engine.busy:
                await asyncio.to_thread(self._advance)
        except Exception as error:
            self._commands.clear()
            self._engine.reset()
            for future in list(self._expected):
                if not future.done():
                    future.set_exception(error)

    def _advance(self) -> None:
        """Runs in a worker thread, never twice at once."""
        started = time.perf_counter()
        while self._commands:
            self._commands.popleft()()
        if self._engine.busy:
            self._engine.step()
        self._busy_s += time.perf_counter() - started


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
