"""The policy trainer: a transformers model, an algorithm's loss, float32 masters.

Knows: micro-batches, gradients, learning rate, exporting and publishing weights. Does not know: which algorithm it
runs (it is handed one), rollouts, actors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from rollforge.config import RunFailed
from rollforge.data.models import copy_tokenizer
from rollforge.data.transformer import load_causal_lm
from rollforge.tensors import LossInputs, MetricPairs, merge_metrics
from rollforge.train.config import TrainConfig
from rollforge.train.forward import Micro, micro_batches, token_outputs
from rollforge.train.optimizer import MasterAdamW
from rollforge.types import Algorithm, Batch, Metrics, WeightPublisher

T = TypeVar("T")

MOST_SKIPPED = 5
"""Optimizer steps without a finite gradient, one after the other, that a run bears."""


class NotFinite(RunFailed):
    """Gradients stay infinite or not a number."""


class PolicyTrainer:
    """Implements `rollforge.types.Trainer`.

    `temperature` is the one the rollouts are sampled at: log-probabilities of both sides must be of one distribution.
    Calls are served one after the other, so that nobody reads the weights halfway through an optimizer step.
    """

    def __init__(
        self,
        folder: str,
        dtype: str,
        device: str,
        config: TrainConfig,
        algorithm: Algorithm,
        total_steps: int,
        temperature: float,
        weights: WeightPublisher | None = None,
    ) -> None:
        self._folder, self._config, self._algorithm = folder, config, algorithm
        self._total_steps, self._temperature, self._weights = total_steps, temperature, weights
        self._model = load_causal_lm(folder, getattr(torch, dtype), device)
        self._embedding = self._model.get_input_embeddings()
        self._optimizer = MasterAdamW(self._model.parameters(), config)
        self._step = self._skipped_in_a_row = 0
        self._turn = asyncio.Lock()

    async def forward_backward(self, batch: Batch) -> Metrics:
        """Adds the batch's gradients; returns the loss's metrics, token counts and seconds.

        A batch is everything one optimizer step trains on: the loss is normalised over its tokens, and a second call
        before `optim_step` adds the gradient of a second, separately normalised loss. Raises ValueError for a batch
        without a trained token. A call that raises leaves no gradient behind, not even an earlier call's.
        """
        return await self._alone(lambda: asyncio.to_thread(self._forward_backward, batch))

    async def optim_step(self) -> Metrics:
        """One clipped AdamW step over the gradients gathered so far. A norm that is not finite changes no weight.

        Raises NotFinite after `MOST_SKIPPED` of these in a row: nothing is being learned.
        """
        return await self._alone(lambda: asyncio.to_thread(self._optim_step))

    async def publish(self, version: int) -> Metrics:
        """Publishes the current weights by their Hugging Face names; tied weights once."""
        if self._weights is None:
            raise RuntimeError("this trainer has no weight store to publish to")
        started = time.perf_counter()
        tensors = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        await self._alone(partial(self._weights.publish, version, tensors))
        return {"time/publish_s": time.perf_counter() - started}

    async def export(self, folder: str) -> None:
        """Writes a Hugging Face folder (weights, config, tokenizer) that `transformers` loads."""
        await self._alone(lambda: asyncio.to_thread(self._export, Path(folder)))

    async def _alone(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` in its turn, and to its end even if the caller is cancelled: a thread cannot be stopped halfway,
        and the next call must not meet it.
        """
        async with self._turn:
            task = asyncio.ensure_future(work())
            try:
                return await asyncio.shield(task)
            finally:
                await asyncio.wait([task])

    def _forward_backward(self, batch: Batch) -> Metrics:
        started = time.perf_counter()
        micros = micro_batches(batch.samples, self._config.micro_batch_tokens)
        if not micros:
            raise ValueError(f"the batch of step {batch.step} has no token to train on")
        counts = (sum(micro.num_tokens for micro in micros), sum(len(micro.samples) for micro in micros))
        try:
            parts = [self._micro_step(micro, self._inputs(micro, batch, *counts)) for micro in micros]
        except BaseException:
            self._optimizer.clear()
            raise
        return merge_metrics(parts) | {
            "train/tokens": float(counts[0]),
            "train/computed_tokens": float(sum(micro.trie.token_ids.size for micro in micros)),
            "train/padded_tokens": float(sum(len(s.token_ids) for micro in micros for s in micro.samples)),
            "train/micro_batches": float(len(micros)),
            "time/forward_backward_s": time.perf_counter() - started,
        }

    def _inputs(self, micro: Micro, batch: Batch, num_tokens: int, num_sequences: int) -> LossInputs:
        reference = batch.reference_logprobs
        return LossInputs(
            behaviour_logprobs_N=self._tensor(micro.gather([s.logprobs for s in batch.samples])),
            advantages_N=self._tensor(micro.gather([s.advantages for s in batch.samples])),
            reference_logprobs_N=None if reference is None else self._tensor(micro.gather(reference)),
            sequence_ids_N=self._tensor(micro.sequence_ids_N).long(),
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            step=self._step,
            total_steps=self._total_steps,
        )

    def _micro_step(self, micro: Micro, inputs: LossInputs) -> MetricPairs:
        """Forward and backward of one micro-batch.

        A plain embedding lookup is cut off and its gradient added row by row: autograd would fill and add a dense
        [V, E] for it.
        """
        ids = self._tensor(micro.trie.token_ids).long()
        embedded = self._embedding(ids).detach().requires_grad_() if type(self._embedding) is nn.Embedding else None
        outputs = token_outputs(self._model, micro, self._temperature, self._algorithm.needs_entropy, embedded)
        loss, metrics = self._algorithm.loss(outputs, inputs)
        loss.backward()
        if embedded is not None:
            self._add_embedding_gradient(ids, embedded)
        pairs: MetricPairs = metrics
        return pairs

    def _add_embedding_gradient(self, ids_M: torch.Tensor, embedded_ME: torch.Tensor) -> None:
        assert isinstance(self._embedding, nn.Embedding) and embedded_ME.grad is not None
        rows_VE = self._optimizer.gradient(cast(nn.Parameter, self._embedding.weight))
        gradient_ME = embedded_ME.grad.to(rows_VE.dtype)
        if self._embedding.padding_idx is not None:  # the token that torch never trains through a lookup
            gradient_ME = gradient_ME.masked_fill((ids_M == self._embedding.padding_idx).unsqueeze(1), 0.0)
        rows_VE.index_add_(0, ids_M, gradient_ME)

    def _optim_step(self) -> Metrics:
        started = time.perf_counter()
        rate = self._config.rate(self._step, self._total_steps)
        norm = self._optimizer.step(rate)
        self._step += 1
        skipped = not norm < float("inf")
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == MOST_SKIPPED:
            raise NotFinite(
                f"The gradient was not finite in {MOST_SKIPPED} optimizer steps in a row: no weight was changed. "
                "Look for a reward or a log-probability that is not finite, lower train.learning_rate, or set dtype to "
                "float32."
            )
        return {
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/skipped": float(skipped),
            "time/optimizer_s": time.perf_counter() - started,
        }

    def _export(self, folder: Path) -> None:
        self._model.save_pretrained(folder)
        copy_tokenizer(Path(self._folder), folder)

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device)
