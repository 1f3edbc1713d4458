"""The metrics role: writes what the other roles measured to the run folder.

Knows: the values of `types` and the run folder. Does not know: actors, algorithms, what a metric means.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollforge.runs.files import LineFile, to_json
from rollforge.runs.folder import RunFolder
from rollforge.runs.tensorboard import EventFile
from rollforge.types import FloatArray, Metrics, Prompt, Scored, Turn

_RESERVED = {"step", "time"}
_DIGITS = 5


class RunRecorder:
    """Implements `types.Recorder`; every call has reached the operating system when it returns.

    All methods raise UserError if the disk is full.
    """

    def __init__(self, folder: str) -> None:
        """`folder` is an existing run folder, as text so that it travels to the recorder's process."""
        self._folder = RunFolder.open(folder)
        self._metrics = LineFile(self._folder.metrics)
        self._rollouts = LineFile(self._folder.rollouts)
        self._evaluations = LineFile(self._folder.evaluations)
        self._events = EventFile(self._folder.tensorboard)

    async def log(self, step: int, metrics: Metrics) -> None:
        """Appends the metrics of an optimizer step to metrics.jsonl and TensorBoard."""
        self._metrics.append([_metrics_line(step, metrics)])
        self._events.scalars(step, metrics)

    async def evaluation(self, step: int, metrics: Metrics) -> None:
        """Appends an evaluation to evaluations.jsonl and, under `evaluation/`, to TensorBoard."""
        self._evaluations.append([_metrics_line(step, metrics)])
        self._events.scalars(step, {f"evaluation/{name}": value for name, value in metrics.items()})

    async def rollouts(self, step: int, scored: Sequence[Scored]) -> None:
        """Appends every rollout of the groups, trained on or dropped, to rollouts.jsonl."""
        self._rollouts.append(to_json(record) for item in scored for record in rollout_records(step, item))

    async def close(self) -> None:
        """Brings everything to the disk; closing twice is fine."""
        for file in (self._metrics, self._rollouts, self._evaluations, self._events):
            file.close()


def rollout_records(step: int, scored: Scored) -> list[dict[str, Any]]:
    """One JSON object per rollout of a group.

    `step` and `id` stand first, so that a reader finds lines by them without parsing. Raises ValueError if the credit
    does not have one advantage per rollout and turn; a dropped group may have none at all.
    """
    group, credit = scored.group, scored.credit
    none_given = credit.dropped is not None and not credit.advantages
    advantages = ((),) * len(group.rollouts) if none_given else credit.advantages
    prompt = _prompt(group.prompt)
    return [
        {
            "step": step,
            "id": rollout.id,
            "group": group.index,
            "prompt_id": group.prompt.id,
            "prompt": prompt,
            "reward": rollout.reward,
            "advantages": _per_turn(credits, len(rollout.turns), none_given),
            "dropped": credit.dropped,
            "counts": dict(rollout.counts),
            "turns": [_turn(turn) for turn in rollout.turns],
        }
        for rollout, credits in zip(group.rollouts, advantages, strict=True)
    ]


def _metrics_line(step: int, metrics: Metrics) -> str:
    if taken := _RESERVED & metrics.keys():
        raise ValueError(f"a metric may not be called {' or '.join(sorted(taken))}: the line has a field of that name")
    return to_json({"step": step, "time": round(time.time(), 3), **metrics})


def _prompt(prompt: Prompt) -> str | list[dict[str, str]]:
    """The text, or the messages, as the model's context was opened."""
    if not prompt.messages:
        return prompt.text
    return [{"role": message.role, "content": message.content} for message in prompt.messages]


def _per_turn(advantages: Sequence[float], turns: int, none_given: bool) -> list[float]:
    if len(advantages) != turns and not none_given:
        raise ValueError(f"a rollout of {turns} turns was given {len(advantages)} advantages")
    return _rounded(np.asarray(advantages, dtype=np.float32))


def _turn(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    return {
        "prompt_ids": turn.prompt_ids.tolist(),
        "completion": completion.text,
        "token_ids": completion.token_ids.tolist(),
        "logprobs": _rounded(completion.logprobs),
        "versions": completion.versions.tolist(),
        "finish_reason": completion.finish_reason,
        "observation": turn.observation.text,
        "reward": turn.observation.reward,
    }


def _rounded(values: FloatArray) -> list[float]:
    """In float64, since a rounded float32 would be written with all the digits of its nearest double."""
    rounded: list[float] = np.round(values.astype(np.float64), _DIGITS).tolist()
    return rounded
