"""From rollouts to token sequences to train on.

Knows: turns, masks. Does not know: text, algorithms, tensors. A turn whose prompt goes on from the tokens of the turn before is
appended to the same sequence; one whose context was rewritten opens a sequence of its own. Masks come from who produced a
token: sampled tokens are trained, all others are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollforge.types import Credit, FloatArray, Group, Rollout, TrainSample, Turn


def to_samples(group: Group, credit: Credit) -> tuple[TrainSample, ...]:
    """The training sequences of a group, in the order of rollouts and turns; none when the credit drops the group."""
    if credit.dropped is not None:
        return ()
    return tuple(
        sample
        for rollout, advantages in zip(group.rollouts, credit.advantages, strict=True)
        for sample in _branches(rollout, advantages)
    )


@dataclass(slots=True)
class _Sequence:
    """A sequence under construction: parts of arrays."""

    tokens: list[np.ndarray] = field(default_factory=list)
    sampled: list[tuple[Turn, float] | None] = field(default_factory=list)
    legal: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    length: int = 0

    def append(self, tokens: np.ndarray, sampled: tuple[Turn, float] | None) -> None:
        self.tokens.append(tokens)
        self.sampled.append(sampled)
        self.length += tokens.size


def _branches(rollout: Rollout, advantages: Sequence[float]) -> list[TrainSample]:
    sequences: list[_Sequence] = []
    for turn, advantage in zip(rollout.turns, advantages, strict=True):
        shared = sequences[-1].length if sequences and _goes_on(sequences[-1], turn) else 0
        if not shared:
            sequences.append(_Sequence())
        sequence = sequences[-1]
        sequence.append(turn.prompt_ids[shared:], None)
        if turn.legal_ids:
            sequence.legal.append((sequence.length, turn.legal_ids))
        sequence.append(turn.completion.token_ids, (turn, advantage))
    return [_finish(rollout.id, sequence) for sequence in sequences]


def _goes_on(sequence: _Sequence, turn: Turn) -> bool:
    size = sequence.length
    return turn.prompt_ids.size >= size and np.array_equal(turn.prompt_ids[:size], np.concatenate(sequence.tokens))


def _finish(rollout_id: str, sequence: _Sequence) -> TrainSample:
    def spread(dtype: type, default: float, values: list[object]) -> FloatArray:
        parts = [np.full(t.size, default if v is None else v, dtype) for t, v in zip(sequence.tokens, values, strict=True)]
        return np.concatenate(parts)

    turns = sequence.sampled
    return TrainSample(
        rollout_id=rollout_id,
        token_ids=np.concatenate(sequence.tokens).astype(np.int32),
        loss_mask=spread(np.bool_, False, [None if s is None else True for s in turns]),  # type: ignore[arg-type]
        logprobs=spread(np.float32, 0.0, [None if s is None else s[0].completion.logprobs for s in turns]),
        versions=spread(np.int32, -1, [None if s is None else s[0].completion.versions for s in turns]),  # type: ignore[arg-type]
        advantages=spread(np.float32, 0.0, [None if s is None else s[1] for s in turns]),
        legal_ids=tuple(sequence.legal),
    )
