"""What an evaluation does with episodes that fail: left out and counted, up to the share that ends a run."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rollforge.config import UserError
from rollforge.loop.pipeline import TooManyFailures
from rollforge.recipes.run import Served
from rollforge.runtime import RoleDied
from rollforge.types import Prompt, Rollout, Sampling

PROMPTS = [Prompt(id=str(number), text="?") for number in range(10)]


class Worker:
    """Plays an episode, or raises the error there is for its prompt."""

    def __init__(self, errors: dict[str, Exception]) -> None:
        self.errors = errors

    async def play(self, prompt: Prompt, sampling: Sampling) -> Rollout:
        if prompt.id in self.errors:
            raise self.errors[prompt.id]
        return Rollout(prompt.id, (), 1.0)


async def play(errors: dict[str, Exception], share: float = 0.2) -> tuple[list[str], dict[str, float]]:
    served = Served(cast(Any, None), cast(Any, Worker(errors)), share)
    rollouts, metrics = await served.play(PROMPTS, Sampling())
    return [rollout.id for rollout in rollouts], dict(metrics)


async def test_failed_episodes_are_left_out_and_counted() -> None:
    assert await play({}) == ([str(number) for number in range(10)], {})
    errors: dict[str, Exception] = {"3": OSError("gone"), "7": ValueError("no reward")}
    assert await play(errors) == (list("01245689"), {"eval/failed": 2.0})


async def test_more_than_the_share_ends_the_run_with_the_last_cause() -> None:
    errors: dict[str, Exception] = {"1": OSError("first"), "2": OSError("second"), "3": OSError("gone")}
    with pytest.raises(TooManyFailures, match=r"3 of the 10 .*max_failed_share = 0\.2 .*OSError: gone"):
        await play(errors)
    with pytest.raises(TooManyFailures, match="10 of the 10"):
        await play({prompt.id: OSError("gone") for prompt in PROMPTS}, share=1.0)


@pytest.mark.parametrize("error", [UserError("bad input"), RoleDied("generator", "killed")])
async def test_what_is_no_failure_of_an_episode_is_raised_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)):
        await play({"4": error})
