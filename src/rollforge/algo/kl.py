"""Estimates of a KL divergence from the log-probabilities of sampled tokens.

Knows: the three estimators of Schulman, "Approximating KL Divergence" (2020, joschu.net/blog/kl-approx.html), and what
each one's gradient is. Does not know: who sampled, what the estimate is used for.

Shape legend: N tokens. d = log p(x) - log q(x) for a token x sampled from p. All values are in nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollforge.algo.config import KLEstimator

LOG_RATIO_LIMIT = 20.0
"""|log ratio| is clamped to this: exp(20) = 4.9e8 is far beyond any meaningful ratio, and its square is still finite in
float32. Beyond the limit the gradient is 0."""


def log_ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """log(numerator / denominator) from log-probabilities [N], clamped."""
    return (numerator_N - denominator_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k3(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased for KL(p || q), never negative, of low variance; p = `logprobs_N`, q = `other_N`."""
    minus_d = log_ratio(other_N, logprobs_N)
    return torch.expm1(minus_d) - minus_d


def kl_penalty(logprobs_N: Tensor, reference_N: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate [N] of KL(policy || reference) for use inside a loss; tokens were sampled from the policy.

    * `k1` = d: unbiased. Differentiated as it stands, its gradient is grad log p, whose expectation is zero: a penalty
      that pulls nowhere. So only its value is used, with the gradient d * grad log p, the score-function gradient of
      E[k1], which in expectation is the gradient of KL(policy || reference).
    * `k2` = d^2 / 2: biased, low variance; its own gradient is d * grad log p, as above.
    * `k3` = exp(-d) - 1 + d: unbiased and never negative; its gradient, (1 - exp(-d)) * grad log p, is in expectation
      that of the other direction, KL(reference || policy); both agree to first order near the reference. GRPO's choice.

    The reference is taken as constant. Off policy, the expectations are over the tokens as sampled, uncorrected.
    """
    if estimator == "k3":
        return k3(logprobs_N, reference_N.detach())
    d_N = log_ratio(logprobs_N, reference_N.detach())
    half_square_N = d_N.square() / 2
    if estimator == "k2":
        return half_square_N
    return d_N.detach() + (half_square_N - half_square_N.detach())
