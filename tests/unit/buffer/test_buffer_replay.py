"""The replay buffer: order, back-pressure, the staleness bound, and what it says when it has waited too long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scored_groups import scored

from rollforge.buffer.config import BufferConfig
from rollforge.buffer.replay import ReplayBuffer, StalenessError
from rollforge.config import ConfigError

SOON_S = 0.02


def buffer(groups_per_step: int = 2, max_staleness: int = 1, wait_limit_s: float = 5.0) -> ReplayBuffer:
    return ReplayBuffer(groups_per_step, BufferConfig(max_staleness=max_staleness, wait_limit_s=wait_limit_s))


async def blocked(task: asyncio.Task[Any]) -> bool:
    await asyncio.sleep(SOON_S)
    return not task.done()


async def test_batches_come_in_the_order_of_admission_not_of_arrival() -> None:
    held = buffer()
    for index in (2, 0, 3, 1):
        assert await held.put(scored(index, 0))
    assert [one.group.index for one in await held.take(0, 2)] == [0, 1]
    assert [one.group.index for one in await held.take(1, 2)] == [2, 3]


async def test_take_waits_for_a_slow_group_and_keeps_it() -> None:
    held = buffer()
    await held.put(scored(1, 0))
    await held.put(scored(2, 0))
    taking = asyncio.create_task(held.take(0, 2))
    assert await blocked(taking), "group 0 is missing, however many others are there"
    await held.put(scored(0, 0))
    assert [one.group.index for one in await taking] == [0, 1]
    assert (await held.metrics())["buffer/held"] == 1.0


async def test_put_waits_while_its_group_is_too_far_ahead() -> None:
    held = buffer(groups_per_step=2, max_staleness=1)
    for index in range(4):
        assert await held.put(scored(index, 0))
    putting = asyncio.create_task(held.put(scored(4, 1)))
    assert await blocked(putting)
    await held.take(0, 2)
    assert await putting


async def test_put_that_never_finds_room_says_so() -> None:
    held = buffer(groups_per_step=1, max_staleness=0, wait_limit_s=SOON_S)
    with pytest.raises(StalenessError, match=r"group 1 found no room within buffer.wait_limit_s = 0.02 s"):
        await held.put(scored(1, 0))


async def test_a_group_that_would_be_trained_too_old_is_sent_back_and_counted() -> None:
    held = buffer(groups_per_step=1, max_staleness=1)
    for version in range(2):
        await held.put(scored(version, 0))
        await held.take(version, 1)
    assert not await held.put(scored(2, 0)), "version 0 at step 2 is 2 old"
    assert (await held.metrics())["buffer/evicted"] == 1.0
    assert await held.put(scored(2, 1)), "the same group, generated again"


async def test_a_group_is_judged_by_the_step_that_will_train_it() -> None:
    held = buffer(groups_per_step=1, max_staleness=1)
    assert await held.put(scored(1, 0))
    held = buffer(groups_per_step=1, max_staleness=2)
    assert await held.put(scored(2, 0))


@pytest.mark.parametrize("taken", [False, True])
async def test_no_group_is_taken_in_twice(taken: bool) -> None:
    held = buffer(groups_per_step=1)
    await held.put(scored(0, 0))
    if taken:
        await held.take(0, 1)
    with pytest.raises(ValueError, match="group 0 was given twice"):
        await held.put(scored(0, 0))


async def test_what_is_handed_out_is_checked_once_more() -> None:
    held = buffer(groups_per_step=1, max_staleness=0)
    await held.put(scored(0, 0))
    with pytest.raises(StalenessError, match="group 0 holds a token of version 0, trained at version 1"):
        await held.take(1, 1)


async def test_a_cancelled_take_loses_nothing() -> None:
    held = buffer()
    await held.put(scored(0, 0))
    taking = asyncio.create_task(held.take(0, 2))
    assert await blocked(taking)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await held.put(scored(1, 0))
    assert len(await held.take(0, 2)) == 2


@pytest.mark.parametrize("key, value", [("max_staleness", -1), ("wait_limit_s", 0.0)])
def test_limits_that_mean_nothing_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"buffer.{key} is"):
        BufferConfig(**{key: value})  # type: ignore[arg-type]
