"""What the trainer's tests share: samples of every shape, and the same computation without any sharing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollforge.algo.config import GRPOConfig
from rollforge.algo.grpo import GRPO
from rollforge.algo.losses import step_pair
from rollforge.tensors import LossInputs, MetricPairs, TokenOutputs
from rollforge.train.config import TrainConfig
from rollforge.train.trainer import PolicyTrainer
from rollforge.types import Batch, BoolArray, FloatArray, IntArray, TrainSample


class Total(GRPO):
    """GRPO that also reports its whole loss."""

    def loss(self, outputs: TokenOutputs, inputs: LossInputs) -> tuple[Tensor, MetricPairs]:
        total, metrics = super().loss(outputs, inputs)
        return total, metrics | {"loss/total": step_pair(total, inputs)}


PLAIN = Total(GRPOConfig())
FULL = Total(GRPOConfig(kl_coef=0.1, entropy_coef=0.05, legal_coef=0.2, clip_low=0.9, clip_high=9.0))
"""Every term is on, and the clip out of the way, so that each token has a gradient."""


def random_ids(count: int, seed: int) -> IntArray:
    return np.random.default_rng(seed).integers(3, 99, count).astype(np.int32)


def sample(*parts: tuple[IntArray, bool], seed: int = 0, legal: bool = False) -> TrainSample:
    """Parts of a sequence, each trained or not; the numbers beside it are drawn from the seed."""
    rng = np.random.default_rng(seed)
    token_ids = np.concatenate([tokens for tokens, _ in parts]).astype(np.int32)
    mask = np.concatenate([np.full(len(tokens), trained) for tokens, trained in parts])
    size = len(token_ids)
    at = np.flatnonzero(mask).tolist()
    return TrainSample(
        rollout_id=f"r{seed}",
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=np.zeros(size, dtype=np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        legal_ids=tuple({at[-1]: (8, 5), at[0]: (5, 6, 7)}.items()) if legal else (),
    )


def group(prompt: IntArray, size: int, seed: int) -> list[TrainSample]:
    """Completions of 1 to 9 tokens of one prompt, every other with legal actions."""
    return [
        sample((prompt, False), (random_ids(1 + (seed + i) % 9, 100 * seed + i), True), seed=seed + i, legal=i % 2 == 0)
        for i in range(size)
    ]


def conversations() -> list[TrainSample]:
    """Two turns each, some sharing the first completion, some ending in an observation that nobody sampled."""
    prompt, first, answer = random_ids(12, 1), random_ids(4, 2), random_ids(6, 3)
    return [
        sample((prompt, False), (first, True), (answer, False), (random_ids(3, 4), True), seed=1, legal=True),
        sample((prompt, False), (first, True), (answer, False), (random_ids(5, 5), True), seed=2),
        sample((prompt, False), (first, True), (random_ids(2, 6), False), (random_ids(5, 7), True), seed=3),
        sample((prompt, False), (first[:2], True), (random_ids(9, 8), False), seed=4, legal=True),
    ]


def shapes() -> dict[str, list[TrainSample]]:
    one = group(random_ids(20, 0), 6, 0)
    return {
        "one prompt": one,
        "several prompts": one + group(random_ids(9, 1), 4, 10) + group(random_ids(1, 2), 3, 20),
        "conversations": conversations(),
        "identical": [one[1], one[1], replace(one[1], rollout_id="other", advantages=-2 * one[1].advantages), one[2]],
        "everything": conversations()[::-1] + one + group(random_ids(30, 3), 5, 30) + one[:1],
    }


def batch(samples: Sequence[TrainSample], folder: Path, temperature: float = 1.0) -> Batch:
    """Behaviour and reference policies that are near the model's own, as they are in training."""
    rng = np.random.default_rng(9)

    def near(own: FloatArray, mask: BoolArray) -> FloatArray:
        return np.where(mask, own + 0.3 * rng.normal(size=own.shape), 0).astype(np.float32)

    own = logprobs(folder, samples, temperature)
    behaved = [replace(s, logprobs=near(o, s.loss_mask)) for s, o in zip(samples, own, strict=True)]
    return Batch(0, tuple(behaved), tuple(near(o, s.loss_mask) for s, o in zip(samples, own, strict=True)))


def trainer(folder: Path, algorithm: Any = PLAIN, dtype: str = "float32", **settings: Any) -> PolicyTrainer:
    temperature, total_steps = settings.pop("temperature", 1.0), settings.pop("total_steps", 10)
    weights, device = settings.pop("weights", None), settings.pop("device", "cpu")
    config = TrainConfig(**settings)
    return PolicyTrainer(str(folder), dtype, device, config, algorithm, total_steps, temperature, weights)


def parameters(trained: PolicyTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trained._model.named_parameters()}


def gradients(trained: PolicyTrainer) -> dict[str, Tensor]:
    return {name: trained._optimizer.gradient(p).clone() for name, p in trained._model.named_parameters()}


def own_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def full_logprobs(model: Any, one: TrainSample, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Trained positions [N], their distributions [N, V] and log-probabilities [N]."""
    at, tokens = torch.from_numpy(np.flatnonzero(one.loss_mask)), torch.from_numpy(one.token_ids).long()
    full = (model(input_ids=tokens[None]).logits[0, at - 1] / temperature).log_softmax(-1)
    return at, full, full.gather(1, tokens[at][:, None])[:, 0]


def logprobs(folder: Path, samples: Sequence[TrainSample], temperature: float = 1.0) -> list[FloatArray]:
    """Log-probabilities [L] of the trained tokens, 0 elsewhere, each sample alone."""
    model, scores = own_model(folder), []
    for one in samples:
        scores.append(np.zeros(len(one.token_ids), dtype=np.float32))
        scores[-1][one.loss_mask] = full_logprobs(model, one, temperature)[2].detach().numpy()
    return scores


def unshared(folder: Path, algorithm: GRPO, given: Batch, temperature: float = 1.0) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, every sample alone through transformers' own attention."""
    model, total = own_model(folder), 0.0
    assert given.reference_logprobs is not None
    for one, reference in zip(given.samples, given.reference_logprobs, strict=True):
        at, full, chosen = full_logprobs(model, one, temperature)
        legal, legal_mask = torch.zeros(len(at), 3), torch.zeros(len(at), 3, dtype=torch.bool)
        for place, actions in one.legal_ids:
            row = at.tolist().index(place)
            legal = legal.index_put((torch.tensor(row), torch.arange(len(actions))), full[row, list(actions)])
            legal_mask[row, : len(actions)] = True
        inputs = LossInputs(
            behaviour_logprobs_N=torch.from_numpy(one.logprobs)[at],
            advantages_N=torch.from_numpy(one.advantages)[at],
            reference_logprobs_N=torch.from_numpy(reference)[at],
            sequence_ids_N=torch.zeros(len(at), dtype=torch.int64),
            num_tokens=sum(int(s.loss_mask.sum()) for s in given.samples),
            num_sequences=len(given.samples),
            step=0,
            total_steps=10,
        )
        loss, _ = algorithm.loss(TokenOutputs(chosen, -(full.exp() * full).sum(-1), legal, legal_mask), inputs)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
