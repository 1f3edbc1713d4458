"""From rollouts to token sequences to train on.

Knows: turns, masks. Does not know: text, algorithms, tensors. A turn whose prompt goes on from the tokens of the turn
before is appended to the same sequence; one whose context was rewritten opens a sequence of its own. Masks come from
who produced a token: sampled tokens are trained, all others are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollforge.types import BoolArray, Credit, FloatArray, Group, IntArray, Rollout, TrainSample, Turn


def to_samples(group: Group, credit: Credit) -> tuple[TrainSample, ...]:
    """The training sequences of a group, in the order of rollouts and turns; none when the credit drops the group."""
    if credit.dropped is not None:
        return ()
    return tuple(
        sample
        for rollout, advantages in zip(group.rollouts, credit.advantages, strict=True)
        for sample in _branches(rollout, advantages)
    )


class _Sequence:
    """A sequence under construction, as parts of its arrays."""

    def __init__(self, rollout_id: str) -> None:
        self._rollout_id = rollout_id
        self._tokens: list[IntArray] = []
        self._mask: list[BoolArray] = []
        self._logprobs: list[FloatArray] = []
        self._versions: list[IntArray] = []
        self._advantages: list[FloatArray] = []
        self._legal: list[tuple[int, tuple[int, ...]]] = []
        self.length = 0

    def goes_on(self, turn: Turn) -> bool:
        """Whether the turn's prompt begins with all tokens so far."""
        return turn.prompt_ids.size >= self.length and np.array_equal(
            turn.prompt_ids[: self.length], np.concatenate(self._tokens)
        )

    def add_turn(self, turn: Turn, advantage: float) -> None:
        """What is new of the turn's prompt, untrained, then what was sampled."""
        context = turn.prompt_ids[self.length :]
        size = context.size
        self._add(context, False, np.zeros(size, np.float32), np.full(size, -1, np.int32), 0.0)
        if turn.legal_ids and turn.completion.token_ids.size:
            self._legal.append((self.length, turn.legal_ids))
        sampled = turn.completion
        self._add(sampled.token_ids, True, sampled.logprobs, sampled.versions, advantage)

    def _add(self, tokens: IntArray, trained: bool, logprobs: FloatArray, versions: IntArray, advantage: float) -> None:
        self._tokens.append(tokens)
        self._mask.append(np.full(tokens.size, trained))
        self._logprobs.append(logprobs)
        self._versions.append(versions)
        self._advantages.append(np.full(tokens.size, advantage, np.float32))
        self.length += tokens.size

    def finish(self) -> TrainSample:
        return TrainSample(
            rollout_id=self._rollout_id,
            token_ids=np.concatenate(self._tokens).astype(np.int32),
            loss_mask=np.concatenate(self._mask),
            logprobs=np.concatenate(self._logprobs),
            versions=np.concatenate(self._versions),
            advantages=np.concatenate(self._advantages),
            legal_ids=tuple(self._legal),
        )


def _branches(rollout: Rollout, advantages: Sequence[float]) -> list[TrainSample]:
    sequences: list[_Sequence] = []
    for turn, advantage in zip(rollout.turns, advantages, strict=True):
        if not sequences or not sequences[-1].goes_on(turn):
            sequences.append(_Sequence(rollout.id))
        sequences[-1].add_turn(turn, advantage)
    return [sequence.finish() for sequence in sequences]
