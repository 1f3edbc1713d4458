"""The reference model: a frozen copy of the starting policy that says how likely it finds what the policy sampled.

Knows: the trainer's forward, without gradients. Does not know: losses, actors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from rollforge.data.transformer import load_causal_lm
from rollforge.train.forward import micro_batches, token_outputs
from rollforge.types import FloatArray, TrainSample


class ModelScorer:
    """Implements `rollforge.types.Scorer` over a Hugging Face folder; `temperature` as in the trainer."""

    def __init__(self, folder: str, dtype: str, device: str, micro_batch_tokens: int, temperature: float) -> None:
        self._model = load_causal_lm(folder, getattr(torch, dtype), device).requires_grad_(False)
        self._micro_batch_tokens, self._temperature = micro_batch_tokens, temperature

    async def score(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        """Log-probabilities float32 [L] of each sample's trained tokens; 0 elsewhere."""
        return await asyncio.to_thread(self._score, samples)

    @torch.inference_mode()
    def _score(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        scores = tuple(np.zeros(len(sample.token_ids), dtype=np.float32) for sample in samples)
        for micro in micro_batches(samples, self._micro_batch_tokens):
            outputs = token_outputs(self._model, micro, self._temperature, entropy_gradient=False)
            micro.scatter(outputs.logprobs_N.cpu().numpy(), scores)
        return scores
