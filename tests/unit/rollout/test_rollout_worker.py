"""The rollout worker: one request for a group's first turn, in every order of joining and leaving; retries; prompts."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
from fake_episodes import FakePolicy, FakePool, completion

from rollforge.config import UserError
from rollforge.rollout.config import RolloutConfig
from rollforge.rollout.worker import EpisodeWorker, RolloutFailed
from rollforge.types import Group, Message, Observation, Prompt, Sampling

LIMIT_S = 5.0
PROMPT = Prompt("p", text="Q:")


def make(tiny_model: Path, policy: FakePolicy, pool: FakePool, **config: Any) -> EpisodeWorker:
    settings = {"group_size": 3, **config}
    return EpisodeWorker(str(tiny_model), policy, pool, Sampling(max_tokens=4), RolloutConfig(**settings))


async def run(worker: EpisodeWorker, prompt: Prompt = PROMPT, seed: int = 0) -> Group:
    async with asyncio.timeout(LIMIT_S):
        return await worker.run(prompt, 7, seed)


async def test_the_first_turn_is_one_request_for_the_whole_group(tiny_model: Path) -> None:
    policy, pool = FakePolicy(), FakePool()
    group = await run(make(tiny_model, policy, pool))
    assert [n for _, _, n in policy.requests] == [3]
    assert group.index == 7
    assert [rollout.id for rollout in group.rollouts] == ["p/0", "p/1", "p/2"]
    assert [int(rollout.turns[0].completion.token_ids[0]) for rollout in group.rollouts] == [10, 11, 12]
    assert pool.open == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_completions_go_by_member_whatever_the_order_of_the_resets(
    tiny_model: Path, order: tuple[int, ...]
) -> None:
    gates = [asyncio.Event() for _ in order]

    async def reset(number: int) -> Observation:
        await gates[number].wait()
        return Observation("go")

    policy = FakePolicy()
    running = asyncio.create_task(run(make(tiny_model, policy, FakePool(reset))))
    for member in order:
        await asyncio.sleep(0)
        gates[member].set()
    group = await running
    assert [n for _, _, n in policy.requests] == [3]
    assert [int(rollout.turns[0].completion.token_ids[0]) for rollout in group.rollouts] == [10, 11, 12]


async def test_later_turns_are_requests_of_their_own_with_their_own_seeds(tiny_model: Path) -> None:
    policy, pool = FakePolicy(), FakePool()
    pool.after = lambda steps: Observation("more", reward=0.5, done=steps == 2)
    group = await run(make(tiny_model, policy, pool))
    assert [n for _, _, n in policy.requests] == [3, 1, 1, 1]
    assert len({sampling.seed for _, sampling, _ in policy.requests}) == 4
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0, 1.0]
    assert len(group.rollouts[0].turns) == 2


async def test_seeds_hang_on_run_seed_prompt_member_and_turn_only(tiny_model: Path) -> None:
    async def seeds(seed: int, prompt: Prompt) -> list[int]:
        policy, pool = FakePolicy(), FakePool()
        pool.after = lambda steps: Observation("more", reward=0.5, done=steps == 2)
        await run(make(tiny_model, policy, pool), prompt, seed)
        return [policy.requests[0][1].seed, *sorted(s.seed for _, s, _ in policy.requests[1:])]

    first = await seeds(0, PROMPT)
    assert first == await seeds(0, PROMPT)
    assert not set(first) & set(await seeds(1, PROMPT))
    assert not set(first) & set(await seeds(0, Prompt("other", text="Q:")))


@pytest.mark.parametrize("broken", range(3))
async def test_a_member_whose_reset_keeps_failing_is_left_out_and_told(tiny_model: Path, broken: int) -> None:
    """It fails twice before the others are ready: they must neither begin without one another nor wait for it."""
    failures = 0
    ready = asyncio.Event()

    async def reset(number: int) -> Observation:
        nonlocal failures
        await asyncio.sleep(0.01)  # all three have a session by then: number 3 is the second try
        if number == broken or number >= 3:
            failures += 1
            if failures == 2:
                ready.set()
            raise OSError(f"no {number}")
        await ready.wait()
        await asyncio.sleep(0.01 * number)  # not all at once
        return Observation("go")

    policy, pool = FakePolicy(), FakePool(reset)
    group = await run(make(tiny_model, policy, pool, retries=1))
    assert [n for _, _, n in policy.requests] == [2]
    assert len(group.rollouts) == 2
    assert group.failures == ("OSError: no 3",)
    assert pool.open == 0


async def test_a_member_that_fails_once_is_played_again_and_counted(tiny_model: Path) -> None:
    pool = FakePool(lambda number: OSError("once") if number == 1 else None)
    group = await run(make(tiny_model, FakePolicy(), pool, retries=1))
    assert group.failures == ()
    assert [rollout.counts["retried"] for rollout in group.rollouts] == [0.0, 1.0, 0.0]


async def test_failures_are_logged_with_their_traceback(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool(lambda number: OSError("the cause") if number == 1 else None)
    await run(make(tiny_model, FakePolicy(), pool, retries=1))
    assert "the cause" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_member_past_its_time_limit_leaves_the_others_alone(tiny_model: Path) -> None:
    async def reset(number: int) -> Observation:
        if number == 0:
            await asyncio.sleep(60)
        return Observation("go")

    policy = FakePolicy()
    group = await run(make(tiny_model, policy, FakePool(reset), retries=1, time_limit_s=1.0))
    assert len(group.rollouts) == 3, "all timed out waiting for one another, and the second try goes alone"
    assert [n for _, _, n in policy.requests] == [1, 1, 1]


async def test_the_time_limit_is_named(tiny_model: Path) -> None:
    async def reset(number: int) -> Observation:
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(RolloutFailed, match=r"TimeoutError: an episode took longer than rollout.time_limit_s = 0.05"):
        await run(make(tiny_model, FakePolicy(), FakePool(reset), retries=0, time_limit_s=0.05))


async def test_waiting_for_a_session_does_not_count_as_playing(tiny_model: Path) -> None:
    pool = FakePool()
    free = asyncio.Semaphore(1)
    lend = pool.session

    class Queue:
        async def __aenter__(self) -> Any:
            await free.acquire()
            await asyncio.sleep(0.4)
            self.session = lend()
            return await self.session.__aenter__()

        async def __aexit__(self, *error: Any) -> None:
            await self.session.__aexit__(*error)
            free.release()

    pool.session = Queue  # type: ignore[method-assign,assignment]
    worker = make(tiny_model, FakePolicy(), pool, time_limit_s=1.5)
    played = await asyncio.gather(*(worker.play(PROMPT, Sampling()) for _ in range(5)))
    assert len(played) == 5


async def test_a_request_that_fails_fails_each_member_and_they_try_again(tiny_model: Path) -> None:
    policy = FakePolicy()
    policy.error = RuntimeError("engine broke")
    with pytest.raises(RolloutFailed, match="3 episodes of prompt p failed, most often: RuntimeError: engine broke"):
        await run(make(tiny_model, policy, FakePool(), retries=1))
    assert [n for _, _, n in policy.requests] == [3, 1, 1, 1]


async def test_a_policy_that_gives_too_few_completions_is_an_error_not_a_hang(tiny_model: Path) -> None:
    policy = FakePolicy()

    async def too_few(*_: Any) -> list[Any]:
        return [completion([1])]

    policy.generate = too_few  # type: ignore[method-assign]
    with pytest.raises(RolloutFailed, match="ValueError"):
        await run(make(tiny_model, policy, FakePool(), retries=0))


async def test_a_cancelled_group_aborts_its_request_and_returns_its_sessions(tiny_model: Path) -> None:
    policy, pool = FakePolicy(), FakePool()
    policy.block = asyncio.Event()
    running = asyncio.create_task(make(tiny_model, policy, pool).run(PROMPT, 0, 0))
    while not policy.requests:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.01)
    assert policy.cancelled == 1
    assert pool.open == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_different_beginnings_cannot_be_compared(tiny_model: Path) -> None:
    pool = FakePool(lambda number: Observation(f"go {number}"))
    with pytest.raises(RolloutFailed, match="began with different observations"):
        await run(make(tiny_model, FakePolicy(), pool, retries=1))


async def test_where_they_are_expected_different_beginnings_are_sampled_each_by_itself(tiny_model: Path) -> None:
    policy, pool = FakePolicy(), FakePool(lambda number: Observation(f"go {number}"))
    group = await run(make(tiny_model, policy, pool, same_start=False))
    assert group.failures == ()
    assert len({prompt for prompt, _, _ in policy.requests}) == 3
    assert len({sampling.seed for _, sampling, _ in policy.requests}) == 3


async def test_an_episode_that_is_over_at_its_reset_is_a_failure(tiny_model: Path) -> None:
    pool = FakePool(lambda number: Observation("over", reward=1.0, done=True))
    with pytest.raises(RolloutFailed, match="before the model could say anything"):
        await run(make(tiny_model, FakePolicy(), pool))


async def test_an_end_without_a_reward_is_a_failure_never_a_zero(tiny_model: Path) -> None:
    pool = FakePool()
    pool.after = lambda steps: Observation("end", reward=None, done=True)
    with pytest.raises(RolloutFailed, match="without a reward"):
        await run(make(tiny_model, FakePolicy(), pool))


async def test_an_unfinished_episode_is_counted(tiny_model: Path) -> None:
    pool = FakePool()
    pool.after = lambda steps: Observation("more", reward=0.25)
    group = await run(make(tiny_model, FakePolicy(), pool, max_turns=2))
    assert [rollout.counts["unfinished"] for rollout in group.rollouts] == [1.0, 1.0, 1.0]
    assert group.rollouts[0].reward == 0.5


@pytest.mark.parametrize("ids, reason", [([], "stop"), ([5], "abort")])
async def test_an_answer_without_tokens_or_end_is_a_failure(tiny_model: Path, ids: list[int], reason: Any) -> None:
    policy = FakePolicy()
    policy.answer = lambda *_, **__: completion(ids, reason=reason)  # type: ignore[assignment]
    with pytest.raises(RolloutFailed, match=f"ended a turn of {len(ids)} tokens by '{reason}'"):
        await run(make(tiny_model, policy, FakePool()))


async def test_a_user_error_is_raised_at_once_and_not_retried(tiny_model: Path) -> None:
    pool = FakePool(lambda number: UserError("set the url"))
    with pytest.raises(UserError, match="set the url"):
        await run(make(tiny_model, FakePolicy(), pool, retries=3))
    assert pool.sessions == 3


async def test_evaluation_play_is_retried_too(tiny_model: Path) -> None:
    pool = FakePool(lambda number: OSError("once") if number == 0 else None)
    rollout = await make(tiny_model, FakePolicy(), pool, retries=1).play(PROMPT, Sampling(temperature=0))
    assert rollout.counts["retried"] == 1.0
    with pytest.raises(OSError, match="always"):
        await make(tiny_model, FakePolicy(), FakePool(lambda _: OSError("always")), retries=1).play(PROMPT, Sampling())


@pytest.mark.parametrize("history, second", [("last", "Q:more"), ("full", "Q:go0more")])
async def test_raw_history(tiny_model: Path, history: str, second: str) -> None:
    policy, pool = FakePolicy(), FakePool()
    worker = make(tiny_model, policy, pool, history=history)
    zero = int(worker._renderer.prompt_ids(Prompt("x", text="0"))[0])
    policy.answer = lambda *_, **__: completion([zero], "0")  # type: ignore[assignment]
    pool.after = lambda steps: Observation("more", reward=0.0, done=steps == 2)
    group = await run(worker)
    first, then = (worker._renderer.decode(turn.prompt_ids) for turn in group.rollouts[1].turns)
    assert (first, then) == ("Q:go", second)


@pytest.mark.parametrize("observed, messages", [("go", ("rules", "go")), ("", ("rules",))])
async def test_a_chat_opens_with_the_observation_as_a_message_unless_it_is_empty(
    tiny_model: Path, observed: str, messages: tuple[str, ...]
) -> None:
    worker = make(tiny_model, FakePolicy(), FakePool(lambda _: Observation(observed)))
    group = await run(worker, Prompt("p", messages=(Message("user", "rules"),)))
    expected = worker._renderer.prompt_ids(Prompt("p", messages=tuple(Message("user", text) for text in messages)))
    assert group.rollouts[0].turns[0].prompt_ids.tolist() == expected.tolist()


async def test_a_chats_history_grows_at_its_end(tiny_model: Path) -> None:
    policy, pool = FakePolicy(), FakePool()
    pool.after = lambda steps: Observation("more", reward=0.0, done=steps == 2)
    worker = make(tiny_model, policy, pool)
    group = await run(worker, Prompt("p", messages=(Message("user", "rules"),)))
    first, second = group.rollouts[0].turns
    seen = [*first.prompt_ids.tolist(), *first.completion.token_ids.tolist()]
    assert second.prompt_ids[: len(seen)].tolist() == seen
    assert "more" in worker._renderer.decode(second.prompt_ids[len(seen) :])


async def test_legal_actions_become_the_ids_they_may_begin_with(tiny_model: Path) -> None:
    pool = FakePool(lambda _: Observation("go", legal_actions=("hit", "stand")))
    group = await run(make(tiny_model, FakePolicy(), pool), Prompt("p", messages=(Message("user", "rules"),)))
    assert len(group.rollouts[0].turns[0].legal_ids) == 2


async def test_closing_the_worker_closes_the_pool_even_one_that_hangs(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = FakePool()
    await make(tiny_model, FakePolicy(), pool).close()
    assert pool.closed
    monkeypatch.setattr("rollforge.rollout.worker.CLOSE_LIMIT_S", 0.05)

    async def hang() -> None:
        await asyncio.sleep(60)

    pool.close = hang  # type: ignore[method-assign]
    async with asyncio.timeout(LIMIT_S):
        await make(tiny_model, FakePolicy(), pool).close()


def test_a_failed_rollout_travels_between_processes() -> None:
    failed = pickle.loads(pickle.dumps(RolloutFailed("p", ("A: 1", "B: 2", "B: 2"))))
    assert failed.failures == ("A: 1", "B: 2", "B: 2")
    assert str(failed) == "3 episodes of prompt p failed, most often: B: 2"
