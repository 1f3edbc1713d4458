"""The real loop and buffer between fakes: order, staleness, failures, and how the first exception ends a run."""

from __future__ import annotations

import asyncio
import time

import pytest
from loop_fakes import World, group_of, pipeline

from rollforge.loop.pipeline import RECENT_EPISODES, WARM_UP_EPISODES, Pipeline, TooManyFailures
from rollforge.recipes import sums
from rollforge.rollout.worker import RolloutFailed
from rollforge.types import Batch, Group, Metrics, Prompt

LIMIT_S = 30.0
SOON_S = 1.0


async def finish(run: Pipeline) -> None:
    async with asyncio.timeout(LIMIT_S):
        await run.run()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
async def test_any_timing_keeps_the_bound_and_the_order_and_loses_no_group(max_staleness: int, seed: int) -> None:
    world = World(seed=seed, slow_s=0.004)
    steps, per_step = 6, 3
    await finish(pipeline(world, steps=steps, groups_per_step=per_step, max_staleness=max_staleness))
    indices = [[one.group.index for one in batch] for batch in world.recorded]
    assert indices == [list(range(step * per_step, (step + 1) * per_step)) for step in range(steps)]
    prompts = [one.group.prompt.id for batch in world.recorded for one in batch]
    assert prompts == [f"prompt-{index}" for index in range(steps * per_step)]
    for step, batch in enumerate(world.recorded):
        versions = {int(v) for one in batch for r in one.group.rollouts for v in r.turns[0].completion.versions}
        assert all(0 <= step - version <= max_staleness for version in versions), (step, versions)
        assert world.metrics[step]["staleness/max"] == step - min(versions)
    assert world.metrics[-1]["episodes/evicted"] == 0
    assert world.metrics[-1]["episodes/played"] >= 2 * steps * per_step
    assert world.steps == list(range(steps))


async def test_generation_runs_ahead_as_far_as_allowed_and_no_further() -> None:
    """While the first batch trains, the groups of the next are drawn, and not one more."""
    world = World()
    release = asyncio.Event()
    run = pipeline(world, steps=5, groups_per_step=3, max_staleness=1)
    train = run._roles.trainer.forward_backward

    async def held(batch: object) -> object:
        await release.wait()
        return await train(batch)  # type: ignore[arg-type]

    run._roles.trainer.forward_backward = held  # type: ignore[method-assign,assignment]
    running = asyncio.create_task(finish_alone(run))
    for _ in range(200):
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    assert world.calls["worker.run"] == 6
    release.set()
    await running
    assert world.calls["worker.run"] == 15


async def test_by_default_the_next_groups_are_generated_while_a_batch_trains() -> None:
    """A step is held until generation has gone beyond its batch: taking turns, both would wait for ever."""
    defaults, world = sums.Config(), World()
    steps, per_step = 4, defaults.loop.groups_per_step
    run = pipeline(world, steps=steps, groups_per_step=per_step, max_staleness=defaults.buffer.max_staleness)
    train = run._roles.trainer.forward_backward

    async def while_generating(batch: Batch) -> Metrics:
        async with asyncio.timeout(LIMIT_S / 3):
            while world.calls["worker.run"] < min(steps, batch.step + 2) * per_step:
                await asyncio.sleep(0.001)
        return await train(batch)

    run._roles.trainer.forward_backward = while_generating  # type: ignore[method-assign]
    await finish(run)
    assert [one["staleness/max"] for one in world.metrics] == [0, 1, 1, 1]


async def finish_alone(run: Pipeline) -> None:
    async with asyncio.timeout(LIMIT_S):
        await run.run()


EVERY_CALL = [
    "prompts.draw",
    "worker.run",
    "algorithm.credit",
    "buffer.put",
    "buffer.take",
    "reference.score",
    "trainer.forward_backward",
    "trainer.optim_step",
    "trainer.publish",
    "generator.load",
    "generator.metrics",
    "recorder.rollouts",
    "recorder.log",
    "on_step",
    "evaluate",
]


@pytest.mark.parametrize("fail_at", [0, 2])
@pytest.mark.parametrize("call", EVERY_CALL)
async def test_an_exception_anywhere_ends_the_run_with_itself(call: str, fail_at: int) -> None:
    world = World(fail=call, fail_at=fail_at, slow_s=0.001)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as failure:
        await finish(pipeline(world, steps=6, reference=True, evaluate_every=1))
    assert failure.value is world.error
    assert time.monotonic() - started < SOON_S + LIMIT_S / 10
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_failure_does_not_wait_for_what_hangs_elsewhere() -> None:
    """The trainer fails while every rollout hangs for good."""
    world = World(fail="trainer.optim_step")
    run = pipeline(world, steps=3, groups_per_step=1, max_staleness=1)
    play, hung = run._roles.workers[1].run, asyncio.Event()

    async def hang(prompt: Prompt, index: int, seed: int) -> Group:
        hung.set()
        await asyncio.sleep(3600)
        return await play(prompt, index, seed)

    run._roles.workers[1].run = hang  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the cause"):
        await finish(run)
    assert hung.is_set()


async def test_cancelling_a_run_leaves_nothing_pending() -> None:
    world = World(slow_s=0.01)
    running = asyncio.create_task(finish_alone(pipeline(world, steps=1000)))
    while len(world.steps) < 2:
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("every, expected", [(0, [0, 5]), (2, [0, 2, 4, 5]), (5, [0, 5]), (1, [0, 1, 2, 3, 4, 5])])
async def test_evaluation_comes_before_between_and_after(every: int, expected: list[int]) -> None:
    world = World()
    await finish(pipeline(world, steps=5, evaluate_every=every))
    assert world.evaluated == expected


async def test_the_reference_scores_what_is_trained() -> None:
    world = World()
    await finish(pipeline(world, steps=2, reference=True))
    for batch in world.trained:
        assert batch.reference_logprobs is not None
        assert [len(one) for one in batch.reference_logprobs] == [len(s.token_ids) for s in batch.samples]


async def test_filtered_groups_are_counted_and_a_step_of_them_trains_nothing_and_goes_on() -> None:
    world = World()

    def play(prompt: Prompt, index: int) -> Group:
        equal = index < 3 or index == 4
        return group_of(prompt, index, (world.served,), (1.0, 1.0) if equal else (0.0, 1.0))

    world.play = play
    await finish(pipeline(world, steps=3))
    assert [one["groups/trained"] for one in world.metrics] == [0, 2, 3]
    assert [one.get("groups/zero_variance") for one in world.metrics] == [3, 1, None]
    assert [batch.step for batch in world.trained] == [1, 2]
    assert [len(batch.samples) for batch in world.trained] == [4, 6]
    assert world.calls["trainer.optim_step"] == 2
    assert world.calls["generator.load"] == 6, "versions move on all the same: two generators, three steps"
    assert len(world.recorded) == 3


async def test_a_group_turned_away_by_the_buffer_is_generated_again() -> None:
    world = World()
    tries: list[int] = []

    def play(prompt: Prompt, index: int) -> Group:
        tries.append(index)
        stale = index == 6 and tries.count(6) < 3
        return group_of(prompt, index, (0 if stale else world.served,))

    world.play = play
    await finish(pipeline(world, steps=3, max_staleness=1))
    assert tries.count(6) == 3
    assert world.metrics[-1]["episodes/evicted"] == 4
    assert [one.group.prompt.id for one in world.recorded[2]] == ["prompt-6", "prompt-7", "prompt-8"]


async def test_a_prompt_that_fails_makes_way_for_the_next_and_every_episode_is_counted() -> None:
    world = World()
    failed: list[str] = []

    def play(prompt: Prompt, index: int) -> Group | Exception:
        if index == 1 and not failed:
            failed.append(prompt.id)
            return RolloutFailed(prompt.id, ("OSError: a", "OSError: b"), played=1)
        group = group_of(prompt, index, (world.served,))
        return Group(index, prompt, group.rollouts, ("KeyError: c",)) if index == 4 else group

    world.play = play
    await finish(pipeline(world, steps=2))
    assert world.failures == ["OSError: a", "OSError: b", "KeyError: c"]
    assert world.metrics[-1]["episodes/failed"] == 3
    assert world.metrics[-1]["episodes/played"] == 13
    trained = {one.group.prompt.id for batch in world.recorded for one in batch}
    assert failed[0] not in trained
    assert len(trained) == 6


async def test_when_everything_fails_the_run_ends_with_the_cause() -> None:
    world = World()
    world.play = lambda prompt, index: RolloutFailed(prompt.id, ("OSError: no server",) * 4)
    with pytest.raises(TooManyFailures, match=r"of the last \d+ episodes failed.*OSError: no server"):
        await finish(pipeline(world))
    assert WARM_UP_EPISODES <= len(world.failures) < 2 * WARM_UP_EPISODES


async def test_a_breakdown_late_in_a_long_run_shows_soon() -> None:
    world = World()
    broken_from = 200

    def play(prompt: Prompt, index: int) -> Group | Exception:
        if index >= broken_from:
            return RolloutFailed(prompt.id, ("OSError: gone",) * 2)
        return group_of(prompt, index, (world.served,))

    world.play = play
    with pytest.raises(TooManyFailures):
        await finish(pipeline(world, steps=100, max_failed_share=0.2))
    assert 0.2 * RECENT_EPISODES < len(world.failures) < 0.3 * RECENT_EPISODES


@pytest.mark.parametrize("share, ends", [(0.5, False), (0.49, True)])
async def test_the_share_is_a_bound_that_may_be_reached(share: float, ends: bool) -> None:
    world = World()

    def play(prompt: Prompt, index: int) -> Group:
        return Group(index, prompt, group_of(prompt, index, (world.served,)).rollouts, ("OSError: x",) * 2)

    world.play = play
    run = pipeline(world, steps=10, max_failed_share=share)
    if ends:
        with pytest.raises(TooManyFailures):
            await finish(run)
    else:
        await finish(run)
