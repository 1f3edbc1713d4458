"""The policy server: callers at once, streaming, cancelling, new weights, and an engine that breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_kit import GREEDY, Bench, Oracle, ids, random_ids
from torch import Tensor

from rollforge.config import UserError
from rollforge.generate.config import NativeConfig
from rollforge.generate.native.policy import NativePolicy
from rollforge.types import Sampling

LIMIT = 20.0
ENDLESS = Sampling(max_tokens=450, seed=1)


class Shelf:
    """A weight reader over a dictionary; counts who reads."""

    def __init__(self, versions: dict[int, Mapping[str, Tensor]]) -> None:
        self._versions, self.reading = versions, 0

    @asynccontextmanager
    async def read(self, version: int) -> AsyncIterator[Mapping[str, Any]]:
        self.reading += 1
        try:
            yield self._versions[version]
        finally:
            self.reading -= 1


def policy(folder: Path, weights: Shelf | None = None) -> NativePolicy:
    made = NativePolicy(str(folder), "float32", "cpu", NativeConfig(), weights)
    made._engine._stop_ids = frozenset()  # so that lengths are known
    return made


async def steps(served: NativePolicy, count: float) -> None:
    async with asyncio.timeout(LIMIT):
        while (await served.metrics())["generate/steps"] < count:
            await asyncio.sleep(0.001)


async def idle(served: NativePolicy) -> None:
    async with asyncio.timeout(LIMIT):
        while served._engine.busy or served._commands:
            await asyncio.sleep(0.001)


async def test_many_callers_at_once_each_get_their_own(tiny_model: Path, oracle: Oracle) -> None:
    served = policy(tiny_model)
    prompts = [random_ids(5 + 3 * seed, seed) for seed in range(12)]
    answers = await asyncio.wait_for(asyncio.gather(*(served.generate(p, GREEDY, n=2) for p in prompts)), LIMIT)
    for prompt, completions in zip(prompts, answers, strict=True):
        assert len(completions) == 2
        for completion in completions:
            oracle.agrees(prompt, completion, greedy=True)
    metrics = await served.metrics()
    assert metrics["generate/tokens"] == 12 * 2 * 12
    assert metrics["generate/sequences"] == 24
    assert metrics["generate/steps"] < 12 * 12, "callers are batched"
    assert metrics["generate/busy_s"] > 0


async def test_stream_yields_each_token_of_the_same_completion(tiny_model: Path) -> None:
    served = policy(tiny_model)
    sampling = Sampling(max_tokens=10, seed=4)
    (completion,) = await served.generate(random_ids(10), sampling)
    streamed = [drawn async for drawn in served.stream(random_ids(10), sampling)]
    assert [token for token, _ in streamed] == completion.token_ids.tolist()
    np.testing.assert_allclose([logprob for _, logprob in streamed], completion.logprobs, atol=1e-6)


async def test_leaving_a_stream_aborts_it(tiny_model: Path) -> None:
    served = policy(tiny_model)
    stream = served.stream(random_ids(10), ENDLESS)
    assert isinstance((await anext(stream))[0], int)
    await stream.aclose()  # type: ignore[attr-defined]
    await idle(served)
    assert (await served.metrics())["generate/tokens"] < 450


async def test_cancelling_aborts_and_the_others_go_on(tiny_model: Path, oracle: Oracle) -> None:
    served = policy(tiny_model)
    endless = asyncio.ensure_future(served.generate(random_ids(10), ENDLESS, n=3))
    await steps(served, 5)
    other = asyncio.ensure_future(served.generate(random_ids(8, 1), GREEDY))
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    oracle.agrees(random_ids(8, 1), (await asyncio.wait_for(other, LIMIT))[0], greedy=True)
    await idle(served)
    assert (await served.metrics())["generate/tokens"] < 3 * 450
    assert not served._expected


async def test_weights_change_in_flight(tiny_model: Path) -> None:
    bench = Bench(tiny_model)
    shelf = Shelf({1: bench.state(1.2)})
    served = policy(tiny_model, shelf)
    running = asyncio.ensure_future(served.generate(random_ids(10), Sampling(max_tokens=300, seed=2)))
    await steps(served, 3)
    metrics = await asyncio.wait_for(served.load(1), LIMIT)
    assert metrics.keys() == {"time/fetch_s", "time/load_s"}
    assert await served.version() == 1 and shelf.reading == 0
    (completion,) = await asyncio.wait_for(running, LIMIT)
    versions = completion.versions.tolist()
    assert versions == sorted(versions) and set(versions) == {0, 1}
    bench.engine.load(bench.state(1.2), 1)
    (fresh,) = bench.run(random_ids(9, 9), GREEDY)
    (after,) = await served.generate(random_ids(9, 9), GREEDY)
    np.testing.assert_allclose(after.logprobs, fresh.logprobs, atol=1e-6)


async def test_wrong_weights_are_the_loaders_error_alone(tiny_model: Path) -> None:
    shelf = Shelf({1: Bench(tiny_model).state() | {"model.strange": random_ids(2)}})  # type: ignore[dict-item]
    served = policy(tiny_model, shelf)
    running = asyncio.ensure_future(served.generate(random_ids(10), Sampling(max_tokens=300)))
    await steps(served, 3)
    with pytest.raises(ValueError, match=r"unknown \['model.strange'\]"):
        await asyncio.wait_for(served.load(1), LIMIT)
    with pytest.raises(KeyError):
        await served.load(2)
    (completion,) = await asyncio.wait_for(running, LIMIT)
    assert set(completion.versions.tolist()) == {0} and await served.version() == 0


async def test_without_a_store_there_is_nothing_to_load(tiny_model: Path) -> None:
    with pytest.raises(RuntimeError, match="no weight store"):
        await policy(tiny_model).load(1)


async def test_an_engine_that_breaks_tells_every_waiting_caller_and_serves_the_next(
    tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = policy(tiny_model)
    draw, breaks = served._engine._draw, False
    breaking, go = threading.Event(), threading.Event()

    def broken(*args: Any) -> None:
        if breaks:
            breaking.set()
            assert go.wait(LIMIT)
            raise OSError("the disk of the matrix is full")
        draw(*args)

    monkeypatch.setattr(served._engine, "_draw", broken)
    callers = [asyncio.ensure_future(served.generate(random_ids(5 + i), ENDLESS)) for i in range(3)]
    stream = served.stream(random_ids(30), ENDLESS)
    assert await anext(stream)
    await steps(served, 5)
    breaks = True
    assert await asyncio.to_thread(breaking.wait, LIMIT)
    callers.append(asyncio.ensure_future(served.generate(random_ids(40), ENDLESS)))  # queued while it breaks
    await asyncio.sleep(0)
    assert served._commands
    go.set()
    for caller in callers:
        with pytest.raises(OSError, match="the disk of the matrix"):
            await asyncio.wait_for(caller, LIMIT)
    assert not served._commands and not served._engine.busy
    with pytest.raises(OSError, match="the disk of the matrix"):
        async with asyncio.timeout(LIMIT):
            async for _ in stream:
                pass
    breaks = False
    (completion,) = await asyncio.wait_for(served.generate(random_ids(6), GREEDY), LIMIT)
    oracle.agrees(random_ids(6), completion, greedy=True)
    assert not served._engine.busy and not served._expected


async def test_a_bad_request_is_refused_without_troubling_the_others(tiny_model: Path) -> None:
    served = policy(tiny_model)
    running = asyncio.ensure_future(served.generate(random_ids(10), Sampling(max_tokens=50)))
    with pytest.raises(UserError, match="no tokens"):
        await served.generate(ids(), GREEDY)
    with pytest.raises(UserError, match="top_p"):
        await anext(served.stream(random_ids(3), Sampling(top_p=2.0)))
    assert len((await asyncio.wait_for(running, LIMIT))[0].token_ids) == 50
    assert not served._expected
