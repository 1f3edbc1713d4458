"""The policy trainer: a transformers model, an algorithm's loss, float32 masters.

Knows: micro-batches, gradients, learning rate, exporting and publishing weights. Does not know: which algorithm it
runs (it is handed one), rollouts, actors.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rollforge.data.models import copy_tokenizer
from rollforge.data.transformer import load_causal_lm
from rollforge.tensors import LossInputs, MetricPairs, merge_metrics
from rollforge.train.config import TrainConfig
from rollforge.train.forward import Micro, micro_batches, token_outputs
from rollforge.train.optimizer import MasterAdamW
from rollforge.types import Algorithm, Batch, Metrics, WeightPublisher


class PolicyTrainer:
    """Implements `rollforge.types.Trainer`.

    `temperature` is the one the rollouts are sampled at: log-probabilities of both sides must be of one distribution.
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
        self._step = 0

    async def forward_backward(self, batch: Batch) -> Metrics:
        """Adds the batch's gradients; returns the loss's metrics, token counts and seconds."""
        return await asyncio.to_thread(self._forward_backward, batch)

    async def optim_step(self) -> Metrics:
        """One clipped AdamW step over the gradients gathered so far."""
        return await asyncio.to_thread(self._optim_step)

    async def publish(self, version: int) -> Metrics:
        """Publishes the current weights by their Hugging Face names; tied weights once."""
        if self._weights is None:
            raise RuntimeError("this trainer has no weight store to publish to")
        started = time.perf_counter()
        await self._weights.publish(version, {name: p.detach() for name, p in self._model.named_parameters()})
        return {"time/publish_s": time.perf_counter() - started}

    async def export(self, folder: str) -> None:
        """Writes a Hugging Face folder (weights, config, tokenizer) that `transformers` loads."""
        await asyncio.to_thread(self._export, Path(folder))

    def _forward_backward(self, batch: Batch) -> Metrics:
        started = time.perf_counter()
        micros = micro_batches(batch.samples, self._config.micro_batch_tokens)
        num_tokens = sum(micro.num_tokens for micro in micros)
        num_sequences = sum(len(micro.samples) for micro in micros)
        reference = dict(zip(map(id, batch.samples), batch.reference_logprobs or (), strict=False))
        parts: list[MetricPairs] = []
        for micro in micros:
            inputs = LossInputs(
                behaviour_logprobs_N=self._tensor(micro.gather([s.logprobs for s in micro.samples])),
                advantages_N=self._tensor(micro.gather([s.advantages for s in micro.samples])),
                reference_logprobs_N=self._tensor(micro.gather([reference[id(s)] for s in micro.samples]))
                if reference
                else None,
                sequence_ids_N=self._tensor(micro.sequence_ids_N).long(),
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                step=self._step,
                total_steps=self._total_steps,
            )
            parts.append(self._micro_step(micro, inputs))
        return merge_metrics(parts) | {
            "train/tokens": float(num_tokens),
            "train/computed_tokens": float(sum(micro.trie.token_ids.size for micro in micros)),
            "train/padded_tokens": float(sum(len(s.token_ids) for micro in micros for s in micro.samples)),
            "train/micro_batches": float(len(micros)),
            "time/forward_backward_s": time.perf_counter() - started,
        }

    def _micro_step(self, micro: Micro, inputs: LossInputs) -> MetricPairs:
        """Forward and backward of one micro-batch.

        The embedding lookup is cut off and its gradient added row by row: autograd would fill and add a dense [V, E]
        for it.
        """
        ids = torch.from_numpy(micro.trie.token_ids).long().to(self._model.device)
        embedded = self._embedding(ids).detach().requires_grad_()
        outputs = token_outputs(self._model, micro, self._temperature, self._algorithm.needs_entropy, embedded)
        loss, metrics = self._algorithm.loss(outputs, inputs)
        loss.backward()
        assert embedded.grad is not None
        rows = self._optimizer.gradient(cast(nn.Parameter, self._embedding.weight))
        rows.index_add_(0, ids, embedded.grad.to(rows.dtype))
        pairs: MetricPairs = metrics
        return pairs

    def _optim_step(self) -> Metrics:
        started = time.perf_counter()
        rate = self._config.rate(self._step, self._total_steps)
        norm = self._optimizer.step(rate)
        self._step += 1
        return {
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/skipped": float(not norm < float("inf")),
            "time/optimizer_s": time.perf_counter() - started,
        }

    def _export(self, folder: Path) -> None:
        self._model.save_pretrained(folder)
        copy_tokenizer(Path(self._folder), folder)

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device)
