"""The tensors a trainer hands to a loss, and how the metrics that come back are merged.

Knows: which tensors one micro-batch offers, which global counts a loss divides by, how (sum, weight) pairs add up over
micro-batches and ranks. Does not know: any model, any algorithm, who computed the tensors or where.

Shape legend: N trained tokens of one micro-batch, flat and in a fixed order; A the largest number of legal first tokens
at any of these positions (0 when no position has any).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MetricPairs = dict[str, tuple[Tensor, Tensor]]
"""Name -> (sum, weight), scalar tensors without gradient. The metric is sum / weight once both are added up over every
micro-batch and rank. A name that ends in `/max` is not added up: the largest sum of a positive weight wins."""


_WIDE = (torch.float32, torch.float64)


def _check(owner: object, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    tensor: Tensor = getattr(owner, name)
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        raise ValueError(
            f"{type(owner).__name__}.{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected shape {shape} "
            f"and {' or '.join(map(str, dtypes))}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """What the policy being trained says about the tokens of one micro-batch.

    Everything is in nats and of the distribution that was sampled: the logits divided by the sampling temperature (by 1
    for greedy sampling), then a log-softmax over the whole vocabulary. Floating tensors are float32 or float64.
    Raises ValueError on shapes that do not fit (a stray [N, 1] would broadcast to [N, N] and train on nonsense) and on
    narrower dtypes (in bfloat16 a log-ratio of 0.004 at log-probability -1 is lost).
    """

    logprobs_N: Tensor
    """Log-probability of each trained token, with gradient."""
    entropy_N: Tensor
    """Entropy over the whole vocabulary; with gradient only if the algorithm's `needs_entropy` is True."""
    legal_logprobs_NA: Tensor
    """Log-probabilities of the distinct tokens that may begin a legal action, with gradient; padding is ignored."""
    legal_mask_NA: Tensor
    """bool, True where `legal_logprobs_NA` holds a legal token."""

    def __post_init__(self) -> None:
        n = self.logprobs_N.numel()
        a = self.legal_logprobs_NA.shape[-1]
        _check(self, "logprobs_N", (n,), *_WIDE)
        _check(self, "entropy_N", (n,), *_WIDE)
        _check(self, "legal_logprobs_NA", (n, a), *_WIDE)
        _check(self, "legal_mask_NA", (n, a), torch.bool)


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What was known about the same N tokens before this step, and the counts of the whole optimizer step.

    The counts span every micro-batch and rank, so that losses and gradients of the parts add up to those of the whole.
    Raises ValueError on shapes and dtypes that do not fit and on counts below 1.
    """

    behaviour_logprobs_N: Tensor
    """Log-probability of each token under the policy that sampled it, as the engine reported it."""
    advantages_N: Tensor
    reference_logprobs_N: Tensor | None
    """The frozen reference model's, at the same temperature; None when no reference model is in use."""
    sequence_ids_N: Tensor
    """int64, equal for tokens of one sample. All trained tokens of a sample are in the same micro-batch."""
    num_tokens: int
    num_sequences: int
    step: int
    """Optimizer step, from 0."""
    total_steps: int

    def __post_init__(self) -> None:
        n = self.behaviour_logprobs_N.numel()
        _check(self, "behaviour_logprobs_N", (n,), *_WIDE)
        _check(self, "advantages_N", (n,), *_WIDE)
        _check(self, "sequence_ids_N", (n,), torch.int64)
        if self.reference_logprobs_N is not None:
            _check(self, "reference_logprobs_N", (n,), *_WIDE)
        for name in ("num_tokens", "num_sequences", "total_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"LossInputs.{name} is {getattr(self, name)}; a step without tokens has no loss")


def merge_metrics(parts: Iterable[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, float]:
    """One number per metric of one optimizer step, from the pairs of all its micro-batches and ranks.

    A metric whose weights sum to zero has no value and is left out: it is neither 0 nor NaN.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for part in parts:
        # One transfer per part, not one per number: on an accelerator every scalar read waits for the device.
        values = torch.stack([x for pair in part.values() for x in pair]).tolist() if part else []
        for name, value, weight in zip(part, values[::2], values[1::2], strict=True):
            if weight == 0:
                continue
            if name.endswith("/max"):
                sums[name], weights[name] = max(sums.get(name, -math.inf), value), 1.0
            else:
                sums[name], weights[name] = sums.get(name, 0.0) + value, weights.get(name, 0.0) + weight
    return {name: total / weights[name] for name, total in sums.items()}
