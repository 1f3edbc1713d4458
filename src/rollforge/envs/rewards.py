"""Rewards that need nothing but the prompt and what was said, and how several make one.

A reward that cannot judge raises, or abstains by returning None; it never returns 0 for that.
"""

from __future__ import annotations

import asyncio
import math

from rollforge.config import UserError
from rollforge.types import Prompt, Reward


class ExactAnswer:
    """1.0 if the first line of the completion is `task["answer"]`, else 0.0; blanks around it do not matter."""

    async def __call__(self, prompt: Prompt, completion: str) -> float:
        """Raises ValueError when the task has no answer to compare with."""
        answer = prompt.task.get("answer")
        if answer is None:
            raise ValueError(f"prompt {prompt.id!r} has no 'answer' in its task")
        lines = completion.strip().splitlines()
        return float(bool(lines) and lines[0].strip() == str(answer).strip())


class WeightedSum:
    """Several rewards as one, `WeightedSum((1.0, ExactAnswer()), (0.2, Brevity()))`: the sum of weight x score.

    A reward that abstains adds nothing; where all abstain, so does the sum.
    """

    def __init__(self, *parts: tuple[float, Reward]) -> None:
        if not parts:
            raise UserError("A weighted sum was given no reward; it needs at least one pair of weight and reward.")
        self._parts = parts

    async def __call__(self, prompt: Prompt, completion: str) -> float | None:
        """Raises UserError when a reward is NaN or infinite, which is not abstaining."""
        scores = await asyncio.gather(*(reward(prompt, completion) for _, reward in self._parts))
        for (_, reward), score in zip(self._parts, scores, strict=True):
            if score is not None and not math.isfinite(score):
                name = getattr(reward, "__name__", type(reward).__name__)
                raise UserError(
                    f"The reward {name} gave {score} for the answer {completion!r}; let it return a finite number, or "
                    "None to abstain."
                )
        spoken = [weight * score for (weight, _), score in zip(self._parts, scores, strict=True) if score is not None]
        return math.fsum(spoken) if spoken else None
