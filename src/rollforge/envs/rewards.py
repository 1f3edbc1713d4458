"""Rewards that need nothing but the prompt and what was said. A reward that cannot judge raises; it never returns 0."""

from __future__ import annotations

from rollforge.types import Prompt


class ExactAnswer:
    """1.0 if the first line of the completion is `task["answer"]`, else 0.0; blanks around it do not matter."""

    async def __call__(self, prompt: Prompt, completion: str) -> float:
        """Raises ValueError when the task has no answer to compare with."""
        answer = prompt.task.get("answer")
        if answer is None:
            raise ValueError(f"prompt {prompt.id!r} has no 'answer' in its task")
        lines = completion.strip().splitlines()
        return float(bool(lines) and lines[0].strip() == str(answer).strip())
