"""KL estimators: values, gradients against the exact divergence, extremes."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from rollforge.algo.kl import k3, kl_penalty, log_ratio


def exact_kl(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    return (p_logprobs.exp() * (p_logprobs - q_logprobs)).sum()


def policy_and_reference() -> tuple[Tensor, Tensor]:
    """Logits of a policy, and log-probabilities of a reference, over seven tokens."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=draw, dtype=torch.float64, requires_grad=True)
    return logits, torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(-1)


@pytest.mark.parametrize(
    ("estimator", "value"),
    [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)],
)
def test_values(estimator: Literal["k1", "k2", "k3"], value: float) -> None:
    got = kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator)
    assert float(got) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_value_is_the_divergence(estimator: Literal["k1", "k3"]) -> None:
    logits, reference = policy_and_reference()
    policy = logits.detach().log_softmax(-1)
    mean = (policy.exp() * kl_penalty(policy, reference, estimator)).sum()
    torch.testing.assert_close(mean, exact_kl(policy, reference))


@pytest.mark.parametrize(("estimator", "reverse"), [("k1", True), ("k2", True), ("k3", False)])
def test_expected_gradient_is_a_divergences(estimator: Literal["k1", "k2", "k3"], reverse: bool) -> None:
    """k1 and k2 pull along KL(policy || reference), k3 along KL(reference || policy): summed over every token."""
    logits, reference = policy_and_reference()
    policy = logits.log_softmax(-1)
    (got,) = torch.autograd.grad((policy.detach().exp() * kl_penalty(policy, reference, estimator)).sum(), logits)
    policy = logits.log_softmax(-1)
    divergence = exact_kl(policy, reference) if reverse else exact_kl(reference, policy)
    (wanted,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(got, wanted)
    assert wanted.abs().max() > 0.1


def test_plain_k1_would_pull_nowhere() -> None:
    """Why k1 has a gradient of its own here."""
    logits, reference = policy_and_reference()
    policy = logits.log_softmax(-1)
    (naive,) = torch.autograd.grad((policy.detach().exp() * (policy - reference)).sum(), logits)
    assert float(naive.abs().max()) < 1e-12


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    ("policy", "reference"), [(-1000.0, 0.0), (0.0, -1000.0), (-math.inf, -1.0), (-1.0, -math.inf)]
)
def test_extremes_stay_finite(estimator: Literal["k1", "k2", "k3"], policy: float, reference: float) -> None:
    logprobs = torch.tensor([policy], requires_grad=True)
    value = kl_penalty(logprobs, torch.tensor([reference]), estimator)
    value.sum().backward()
    assert bool(value.isfinite())
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite())
    assert bool(log_ratio(logprobs, torch.tensor([reference])).exp().square().isfinite())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reference_gets_no_gradient(estimator: Literal["k1", "k2", "k3"]) -> None:
    logprobs, reference = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    kl_penalty(logprobs, reference, estimator).sum().backward()
    assert reference.grad is None


def test_k3_is_accurate_and_never_negative_for_small_differences_in_float32() -> None:
    d = torch.tensor([1e-3, -1e-3, 1e-4, 0.0])
    values = k3(d, torch.zeros(4))
    assert values.tolist() == pytest.approx((d.double() ** 2 / 2).tolist(), rel=2e-3, abs=1e-10)
    assert bool((values >= 0).all())
