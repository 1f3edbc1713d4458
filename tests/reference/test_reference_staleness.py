"""Known-right numbers for staleness: reported faults P22 and P25, with their kinds.

P22: after a recovery, only as many rollouts may start as the bound on age allows, not a burst of them.
P25: groups older than allowed are turned away; when no others ever come, the run ends with a reason.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollforge.buffer.config import BufferConfig
from rollforge.buffer.replay import ReplayBuffer, StalenessError, may_admit
from rollforge.types import Completion, Credit, Group, Observation, Prompt, Rollout, Scored, Turn


def scored(index: int, version: int) -> Scored:
    sampled = Completion(np.ones(1, np.int32), np.zeros(1, np.float32), np.full(1, version, np.int32), "x", "stop")
    turn = Turn(np.zeros(1, np.int32), sampled, Observation("", 1.0, True))
    return Scored(Group(index, Prompt("p"), (Rollout("p/0", (turn,), 1.0),)), Credit(((0.0,),)), ())


@pytest.mark.parametrize(
    ("version", "batch", "max_staleness", "started", "allowed"),
    [(100, 4, 2, 400, 12), (100, 4, 2, 412, 0), (0, 4, 2, 0, 12), (0, 8, 0, 0, 8), (8, 8, 0, 64, 8), (8, 8, 0, 72, 0)],
)
def test_p22_new_groups_allowed_at_a_version(
    version: int, batch: int, max_staleness: int, started: int, allowed: int
) -> None:
    """(max_staleness + version + 1) x batch - accepted - running; 412 would be the burst of P22."""
    admitted = 0
    while may_admit(started + admitted, version, batch, max_staleness):
        admitted += 1
    assert admitted == allowed


STEP, BEHIND, GROUPS = 8, 7, 2


async def fill(buffer: ReplayBuffer, version: int) -> list[bool]:
    """The groups of step 8, sampled at a version."""
    return [await buffer.put(scored(STEP * GROUPS + at, version)) for at in range(GROUPS)]


async def at_step_8(wait_limit_s: float) -> ReplayBuffer:
    buffer = ReplayBuffer(GROUPS, BufferConfig(max_staleness=0, wait_limit_s=wait_limit_s))
    for step in range(STEP):
        for at in range(GROUPS):
            assert await buffer.put(scored(step * GROUPS + at, step))
        await buffer.take(step, GROUPS)
    return buffer


async def test_p25_the_generators_catch_up_and_the_batch_is_of_the_trainers_version() -> None:
    buffer = await at_step_8(wait_limit_s=10.0)
    taking = asyncio.create_task(buffer.take(STEP, GROUPS))
    await asyncio.sleep(0)
    assert await fill(buffer, BEHIND) == [False, False]
    assert not taking.done()
    assert await fill(buffer, STEP) == [True, True]
    batch = await taking
    assert [one.group.oldest_version for one in batch] == [STEP, STEP]


async def test_p25_the_generators_never_catch_up_and_the_error_names_versions_and_evictions() -> None:
    buffer = await at_step_8(wait_limit_s=0.2)
    taking = asyncio.create_task(buffer.take(STEP, GROUPS))
    await asyncio.sleep(0)
    assert await fill(buffer, BEHIND) == [False, False]
    with pytest.raises(StalenessError) as failure:
        await taking
    text = str(failure.value)
    assert "the trainer is at version 8" in text
    assert "the newest group came from version 7" in text
    assert "2 groups were evicted" in text
    assert "buffer.wait_limit_s = 0.2 s" in text
