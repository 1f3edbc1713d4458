"""The parts policy-gradient losses are made of: ratio, clip, legal actions, normalisation, metrics.

Knows: tensors of one micro-batch and the global counts. Does not know: models, schedules, where advantages come from.

Shape legend: N trained tokens of a micro-batch, A legal first tokens. Floating tensors are float32 or float64, which
`rollforge.tensors` checks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollforge.algo.config import LossNorm
from rollforge.algo.kl import k3, log_ratio
from rollforge.tensors import LossInputs, MetricPairs, TokenOutputs


def importance_ratio(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """p(token | policy) / p(token | policy that sampled it), [N], with the policy's gradient."""
    return log_ratio(logprobs_N, behaviour_N.detach()).exp()


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO's pessimistic loss per token, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347, eq. 7)."""
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)


def legal_kl(legal_logprobs_NA: Tensor, legal_mask_NA: Tensor) -> Tensor:
    """KL(uniform over the legal first tokens || policy) per token, [N], in nats; 0 where a token has none.

    It is the sum of two terms: the divergence among the legal tokens, and -log of the mass they have together. Its
    gradient in the logits, policy - uniform, does not fade as a legal token's probability goes to 0 (entropy's does).
    """
    count_N = legal_mask_NA.sum(-1).clamp(min=1)
    sum_N = legal_logprobs_NA.masked_fill(~legal_mask_NA, 0.0).sum(-1)
    return torch.where(legal_mask_NA.any(-1), -sum_N / count_N - count_N.to(sum_N.dtype).log(), 0.0)


def token_weights(inputs: LossInputs, norm: LossNorm, constant_tokens: int | None) -> Tensor:
    """What each token's loss [N] is multiplied by, so that the sum over micro-batches and ranks is the step's loss."""
    ones_N = torch.ones_like(inputs.behaviour_logprobs_N)
    if norm == "token":
        return ones_N / inputs.num_tokens
    if norm == "constant":
        if constant_tokens is None:
            raise ValueError("loss_norm 'constant' needs constant_tokens")
        return ones_N / (inputs.num_sequences * constant_tokens)
    ids, places_N = torch.unique(inputs.sequence_ids_N, return_inverse=True)
    lengths = ones_N.new_zeros(ids.shape).index_add_(0, places_N, ones_N)
    return ones_N / (inputs.num_sequences * lengths[places_N])


def mean_pair(values_N: Tensor, mask_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum, weight) of the mean of values [N], over the tokens where the mask is True."""
    values_N = values_N.detach()
    if mask_N is None:
        return values_N.sum(), torch.full_like(values_N, 1.0).sum()
    return values_N.masked_fill(~mask_N, 0.0).sum(), mask_N.sum().to(values_N.dtype)


def step_pair(total: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """(sum, weight) of a quantity whose parts add up over the step: the weight is this part's share of all tokens."""
    share = inputs.behaviour_logprobs_N.shape[0] / inputs.num_tokens
    return total.detach(), torch.full_like(total.detach(), share)


def policy_metrics(
    ratio_N: Tensor, outputs: TokenOutputs, inputs: LossInputs, clip: tuple[float, float]
) -> MetricPairs:
    """What every policy-gradient step should show, whatever its regularisers.

    `clip/low` and `clip/high` are shares of tokens on which the clip takes the gradient away; `kl/behaviour` is the
    divergence of the policy from the one that sampled (staleness and any mismatch between engine and trainer).
    """
    ratio_N, advantages_N, n = ratio_N.detach(), inputs.advantages_N, ratio_N.shape[0]
    low_N = (ratio_N < 1 - clip[0]) & (advantages_N < 0)
    high_N = (ratio_N > 1 + clip[1]) & (advantages_N > 0)
    largest = ratio_N.max() if n else ratio_N.new_zeros(())
    has_legal_N = outputs.legal_mask_NA.any(-1)
    mass_N = outputs.legal_logprobs_NA.detach().exp().masked_fill(~outputs.legal_mask_NA, 0.0).sum(-1)
    return {
        "ratio/mean": mean_pair(ratio_N),
        "ratio/max": (largest, ratio_N.new_tensor(float(n))),
        "clip/low": mean_pair(low_N.to(ratio_N.dtype)),
        "clip/high": mean_pair(high_N.to(ratio_N.dtype)),
        "kl/behaviour": mean_pair(k3(inputs.behaviour_logprobs_N, outputs.logprobs_N.detach())),
        "entropy": mean_pair(outputs.entropy_N),
        "legal/mass": mean_pair(mass_N, has_legal_N),
        "tokens": step_pair(torch.ones_like(ratio_N).sum(), inputs),
    }
