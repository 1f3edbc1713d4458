"""The one-answer environment and the exact-answer reward."""

from __future__ import annotations

import pytest

from rollforge.envs.rewards import ExactAnswer
from rollforge.envs.single_turn import SingleTurn
from rollforge.types import Prompt


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("7", "7", 1.0),
        ("7", " 7\n3+3=6", 1.0),
        (12, "12\n", 1.0),
        ("7", "\n7", 1.0),
        ("7", "77", 0.0),
        ("7", "7.", 0.0),
        ("7", "8", 0.0),
        ("7", "", 0.0),
        ("7", "  \n", 0.0),
    ],
)
async def test_the_first_line_is_the_answer_or_not(answer: object, completion: str, reward: float) -> None:
    assert await ExactAnswer()(Prompt("p", task={"answer": answer}), completion) == reward


async def test_a_task_without_an_answer_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match=r"p1.*answer"):
        await ExactAnswer()(Prompt("p1", task={"question": "1+1="}), "2")


async def test_one_question_one_answer_one_reward() -> None:
    env = SingleTurn(ExactAnswer())
    asked = await env.reset({"question": "3+4=", "answer": "7"})
    assert (asked.text, asked.reward, asked.done) == ("3+4=", None, False)
    answered = await env.step("7\n")
    assert (answered.reward, answered.done) == (1.0, True)
    with pytest.raises(ValueError, match="reset"):
        await env.step("7")
    await env.reset({"question": "1+1=", "answer": "2"})
    assert (await env.step("3")).reward == 0.0


async def test_the_reward_is_given_the_question_and_the_task() -> None:
    seen = []

    async def reward(prompt: Prompt, completion: str) -> float:
        seen.append((prompt.id, prompt.text, dict(prompt.task), completion))
        return 0.5

    env = SingleTurn(reward)
    task = {"id": "p9", "question": "q?", "answer": "a"}
    await env.reset(task)
    assert (await env.step("x")).reward == 0.5
    assert seen == [("p9", "q?", task, "x")]


async def test_a_reward_that_raises_is_not_swallowed() -> None:
    async def broken(prompt: Prompt, completion: str) -> float:
        raise RuntimeError("no judge")

    env = SingleTurn(broken)
    await env.reset({"question": "q?"})
    with pytest.raises(RuntimeError, match="no judge"):
        await env.step("x")


async def test_a_task_without_a_question_is_refused() -> None:
    with pytest.raises(ValueError, match=r"question.*answer"):
        await SingleTurn(ExactAnswer()).reset({"answer": "7"})
