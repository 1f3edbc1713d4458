"""The `sums` task: one-digit sums by example, as raw text that the model continues.

Knows: how a prompt is laid out and which sums are held out. Does not know: how an answer is rewarded.

    1+5=6
    7+2=9
    3+4=
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollforge.config import UserError
from rollforge.data.prompts import GeneratedPrompts, Part
from rollforge.types import Prompt

Pair = tuple[int, int]

STOP = "\n"
"""Ends an answer."""

SHOTS = 2
LARGEST_SUM = 9
"""All answers are one digit. In this layout SmolLM2-135M-Instruct begins at 48 % greedy accuracy on held-out sums (38,
59 and 46 % for seeds 0 to 2, 100 prompts each); with spaces (`3 + 4 =`) at 80 %, over all sums, which leaves little to
learn."""

PAIRS: tuple[Pair, ...] = tuple((a, b) for a in range(LARGEST_SUM + 1) for b in range(a, LARGEST_SUM + 1 - a))
"""The 30 different sums, smaller number first; a+b and b+a are the same sum."""


def split_pairs(seed: int, held_out: float = 0.2) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """(training, held-out) pairs of `PAIRS`. Raises UserError where either side would be empty."""
    count = round(held_out * len(PAIRS))
    if not 0 < count < len(PAIRS):
        raise UserError(f"A held-out share of {held_out} leaves one side of the {len(PAIRS)} sums empty; 0.2 is usual.")
    order = np.random.default_rng(seed).permutation(len(PAIRS)).tolist()
    return tuple(PAIRS[i] for i in order[count:]), tuple(PAIRS[i] for i in order[:count])


@dataclass(frozen=True, slots=True)
class SumsMaker:
    """Makes a prompt from a random generator: a question of `questions` after `shots` other, solved sums of `examples`.

    All sums of a prompt are different (3+4 and 4+3 are not), each in either order of its numbers. The task holds
    `answer`, and `question` "" since the prompt's text says it all.
    """

    questions: tuple[Pair, ...]
    examples: tuple[Pair, ...]
    shots: int = SHOTS

    def __call__(self, rng: np.random.Generator) -> Prompt:
        question = self.questions[int(rng.integers(len(self.questions)))]
        others = [pair for pair in self.examples if pair != question]
        chosen = [others[i] for i in rng.choice(len(others), self.shots, replace=False).tolist()]
        left, right = _in_either_order(question, rng)
        lines = [solved_line(*_in_either_order(pair, rng)) for pair in chosen]
        return Prompt(
            id="", text=f"{''.join(lines)}{left}+{right}=", task={"question": "", "answer": str(left + right)}
        )


def solved_line(left: int, right: int) -> str:
    """`3+4=7` and a newline."""
    return f"{left}+{right}={left + right}\n"


def _in_either_order(pair: Pair, rng: np.random.Generator) -> Pair:
    return pair if rng.random() < 0.5 else (pair[1], pair[0])


def sums(seed: int, part: Part = "train", shots: int = SHOTS, held_out: float = 0.2) -> GeneratedPrompts:
    """The prompts of one part. A held-out sum is never a question nor an example of the training part.

    Raises UserError when there are not `shots` training sums to choose examples from.
    """
    training, kept_back = split_pairs(seed, held_out)
    if not 0 <= shots < len(training):
        raise UserError(
            f"{shots} examples are asked for, but a prompt can have 0 to {len(training) - 1} different ones."
        )
    questions = training if part == "train" else kept_back
    return GeneratedPrompts(SumsMaker(questions, training, shots), seed, prefix="" if part == "train" else "held-out-")
