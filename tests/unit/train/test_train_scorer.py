"""The frozen scorer says what the trainer's forward says, sample by sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from train_kit import logprobs, random_ids, sample, shapes, trainer

from rollforge.train.forward import micro_batches, token_outputs
from rollforge.train.scorer import ModelScorer

SAMPLES = shapes()["everything"]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("micro_batch_tokens", [30, 10_000])
async def test_scores_are_the_models_in_the_order_given(
    tiny_model: Path, temperature: float, micro_batch_tokens: int
) -> None:
    scorer = ModelScorer(str(tiny_model), "float32", "cpu", micro_batch_tokens, temperature)
    scores = await scorer.score(SAMPLES)
    assert len(scores) == len(SAMPLES)
    for one, score, expected in zip(SAMPLES, scores, logprobs(tiny_model, SAMPLES, temperature), strict=True):
        assert score.shape == one.token_ids.shape and score.dtype == np.float32
        assert not score[~one.loss_mask].any()
        np.testing.assert_allclose(score, expected, atol=1e-5)


async def test_scores_equal_the_trainers_own_bit_for_bit(tiny_model: Path) -> None:
    scores = await ModelScorer(str(tiny_model), "bfloat16", "cpu", 50, 0.8).score(SAMPLES)
    model = trainer(tiny_model, dtype="bfloat16")._model
    for micro in micro_batches(SAMPLES, 50):
        outputs = token_outputs(model, micro, 0.8, entropy_gradient=True)
        np.testing.assert_array_equal(outputs.logprobs_N.detach().numpy(), micro.gather(scores))


async def test_untrained_samples_score_zero_and_none_at_all_is_no_score(tiny_model: Path) -> None:
    scorer = ModelScorer(str(tiny_model), "float32", "cpu", 100, 1.0)
    one = sample((random_ids(4, 0), False), (random_ids(3, 1), True))
    silent = replace(one, loss_mask=one.loss_mask & False)
    scores = await scorer.score([silent, one, silent])
    assert not scores[0].any() and scores[1].any() and not scores[2].any()
    assert await scorer.score([]) == ()


async def test_greedy_temperature_scores_as_one(tiny_model: Path) -> None:
    zero, one = [await ModelScorer(str(tiny_model), "float32", "cpu", 100, t).score(SAMPLES[:2]) for t in (0.0, 1.0)]
    for left, right in zip(zero, one, strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_scorers_weights_have_no_gradient(tiny_model: Path) -> None:
    model = ModelScorer(str(tiny_model), "float32", "cpu", 100, 1.0)._model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not torch.is_inference(next(model.parameters()))
