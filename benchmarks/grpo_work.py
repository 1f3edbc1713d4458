"""The work that both sides of `against_trl.py` do: prompts, reward, sizes.

Knows: plain texts. Does not know: Rollforge or TRL; both interpreters import it.
"""

from __future__ import annotations

import random

PROMPTS_PER_STEP, COMPLETIONS, TOKENS = 8, 8, 32
"""Prompts of a step, completions of each, and the tokens of a completion: always exactly so many."""
TEMPERATURE, LEARNING_RATE = 1.0, 1e-5


def questions(count: int) -> list[str]:
    """So many questions, the same ones in every process."""
    rng = random.Random(0)
    return [
        f"What is {rng.randint(2, 99)} + {rng.randint(2, 99)}? Think step by step and give the answer."
        for _ in range(count)
    ]


def reward(completion: str) -> float:
    """The share of digits among the characters: any reward would do, it only has to differ between completions."""
    return sum(char.isdigit() for char in completion) / max(1, len(completion))
