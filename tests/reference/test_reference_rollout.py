"""Known-right numbers for what a rollout becomes: reported faults P06 and P08, through worker and samples."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollforge.data.renderer import Renderer
from rollforge.rollout.config import RolloutConfig
from rollforge.rollout.samples import to_samples
from rollforge.rollout.worker import EpisodeWorker
from rollforge.types import Completion, Credit, FinishReason, IntArray, Message, Observation, Prompt, Sampling

END_LOGPROB = -4.60517  # a rarely chosen end: probability 0.01


class Policy:
    """Says given texts, one a turn, and ends each with the end of turn unless `cut`."""

    def __init__(self, renderer: Renderer, texts: tuple[str, ...], end: int | None) -> None:
        self._renderer, self._texts, self._end = renderer, texts, end
        self._said = 0

    async def generate(self, prompt_ids: IntArray, sampling: Sampling, n: int = 1) -> list[Completion]:
        text = self._texts[min(self._said // 2, len(self._texts) - 1)]
        self._said += n
        ids = self._renderer.prompt_ids(Prompt("", text=text)).tolist()
        logprobs = [-0.1 * (at + 1) for at in range(len(ids))]
        if self._end is not None:
            ids, logprobs = [*ids, self._end], [*logprobs, END_LOGPROB]
        reason: FinishReason = "length" if self._end is None else "stop"
        arrays = np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), np.zeros(len(ids), np.int32)
        return [Completion(*arrays, text, reason) for _ in range(n)]


class Tool:
    """Answers `ok` once, then ends the episode."""

    def __init__(self) -> None:
        self._steps = 0

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return Observation("")

    async def step(self, action: str) -> Observation:
        self._steps += 1
        return Observation("ok", reward=1.0, done=self._steps == 2)


class Tools:
    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        yield Tool()


async def row(tiny_model: Path, ends: bool) -> tuple[Renderer, Any]:
    """The training row of a chat of two turns: the user says hi, the model `call`, the tool ok, the model `yes`."""
    renderer = Renderer(tiny_model)
    policy = Policy(renderer, ("call", "yes"), renderer.stop_ids[0] if ends else None)
    worker = EpisodeWorker(str(tiny_model), policy, Tools(), Sampling(), RolloutConfig(group_size=2))  # type: ignore[arg-type]
    group = await worker.run(Prompt("p", messages=(Message("user", "hi"),)), 0, 0)
    first, _ = to_samples(group, Credit(((1.0, 1.0), (1.0, 1.0))))
    return renderer, first


async def test_p06_a_row_of_many_turns_is_what_the_template_makes_of_the_conversation(tiny_model: Path) -> None:
    """The newline after a sampled end of turn and the next header are there, and not trained."""
    renderer, sample = await row(tiny_model, ends=True)
    conversation = (Message("user", "hi"), Message("assistant", "call"), Message("user", "ok"))
    whole = renderer.prompt_ids(Prompt("p", messages=conversation)).tolist()
    last = [*renderer.prompt_ids(Prompt("", text="yes")).tolist(), renderer.stop_ids[0]]
    assert sample.token_ids.tolist() == [*whole, *last]
    assert int(sample.loss_mask.sum()) == 9, "call, yes and both ends"
    assert renderer.decode(sample.token_ids[sample.loss_mask]) == "callyes"
    assert (sample.versions == -1).tolist() == (~sample.loss_mask).tolist()


async def test_p08_a_sampled_end_keeps_its_own_logprob_and_is_trained(tiny_model: Path) -> None:
    """With the trainer's equal numbers the ratio is 1; at log-probability 0 it would be 0.01 a turn."""
    renderer, sample = await row(tiny_model, ends=True)
    ends = sample.loss_mask & (sample.token_ids == renderer.stop_ids[0])
    assert sample.logprobs[ends].tolist() == pytest.approx([END_LOGPROB, END_LOGPROB])
    assert np.exp(sample.logprobs[sample.loss_mask].sum() - 2 * END_LOGPROB) == pytest.approx(np.exp(-1.6), rel=1e-4)


async def test_p08_an_end_that_nobody_sampled_is_context(tiny_model: Path) -> None:
    """The end of turn that the framework puts after a cut-off completion is not trained."""
    renderer, sample = await row(tiny_model, ends=False)
    assert int(sample.loss_mask.sum()) == 7
    assert renderer.stop_ids[0] not in sample.token_ids[sample.loss_mask].tolist()
    at = int(np.flatnonzero(sample.loss_mask)[3]) + 1
    assert sample.token_ids[at] == renderer.stop_ids[0], "it follows `call`"
