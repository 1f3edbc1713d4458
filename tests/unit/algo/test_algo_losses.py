"""Parts of the losses, and the tensors handed to them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollforge.algo.config import GRPOConfig
from rollforge.algo.grpo import GRPO
from rollforge.algo.losses import importance_ratio, legal_kl
from rollforge.algo.schedule import Schedule
from rollforge.tensors import LossInputs, TokenOutputs, merge_metrics


def outputs_of(logprobs: Tensor, entropy: Tensor | None = None, legal: Tensor | None = None) -> TokenOutputs:
    n = logprobs.numel()
    legal = torch.zeros(n, 0) if legal is None else legal
    mask = torch.ones(legal.shape, dtype=torch.bool)
    return TokenOutputs(logprobs, torch.zeros(n) if entropy is None else entropy, legal, mask)


def inputs_of(behaviour: Tensor, advantages: Tensor, reference: Tensor | None = None, step: int = 0) -> LossInputs:
    n = behaviour.numel()
    ids = torch.zeros(n, dtype=torch.int64)
    return LossInputs(
        behaviour, advantages, reference, ids, num_tokens=max(1, n), num_sequences=1, step=step, total_steps=5
    )


def test_legal_kl_is_zero_for_a_policy_uniform_over_the_legal_tokens() -> None:
    values = legal_kl(torch.tensor([[0.5, 0.5, 1.0]]).log(), torch.tensor([[True, True, False]]))
    assert values.tolist() == pytest.approx([0.0], abs=1e-6)


def test_legal_kl_splits_into_choice_and_mass() -> None:
    """0.1 and 0.3: KL(uniform || (1/4, 3/4)) - log 0.4."""
    values = legal_kl(torch.tensor([[0.1, 0.3]]).log(), torch.ones(1, 2, dtype=torch.bool))
    assert float(values) == pytest.approx(
        0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75) - math.log(0.4), abs=1e-6
    )


def test_legal_kl_gradient_is_policy_minus_uniform_even_where_the_policy_has_collapsed() -> None:
    logits = torch.tensor([[30.0, 0.0, -5.0]], requires_grad=True)
    legal_kl(logits.log_softmax(-1)[:, :2], torch.ones(1, 2, dtype=torch.bool)).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.5, -0.5, 0.0], abs=1e-5)


@pytest.mark.parametrize("padding", [0.0, -math.inf, math.nan])
def test_padding_of_legal_tokens_reaches_neither_loss_nor_gradient_nor_metrics(padding: float) -> None:
    legal = torch.tensor([[-1.0, padding], [padding, padding]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, False]])
    outputs = TokenOutputs(torch.full((2,), -1.0), torch.zeros(2), legal, mask)
    loss, metrics = GRPO(GRPOConfig(legal_coef=1.0)).loss(outputs, inputs_of(torch.full((2,), -1.0), torch.zeros(2)))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5)
    assert legal.grad is not None
    assert legal.grad.tolist() == [[-0.5, 0.0], [0.0, 0.0]]
    merged = merge_metrics([metrics])
    assert merged["legal/kl"] == pytest.approx(1.0)
    assert merged["legal/mass"] == pytest.approx(math.exp(-1))


@pytest.mark.parametrize(
    ("policy", "behaviour"), [(0.0, -1000.0), (-1000.0, 0.0), (-1.0, -math.inf), (-math.inf, -1.0)]
)
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_extreme_ratios_stay_finite(policy: float, behaviour: float, advantage: float) -> None:
    logprobs = torch.tensor([policy], requires_grad=True)
    inputs = inputs_of(torch.tensor([behaviour]), torch.tensor([advantage]))
    loss, metrics = GRPO(GRPOConfig()).loss(outputs_of(logprobs), inputs)
    loss.backward()
    assert logprobs.grad is not None
    assert bool(loss.isfinite()) and bool(logprobs.grad.isfinite())
    assert all(math.isfinite(value) for value in merge_metrics([metrics]).values())


def test_behaviour_gets_no_gradient() -> None:
    behaviour = torch.tensor([-1.0], requires_grad=True)
    importance_ratio(torch.tensor([-1.5], requires_grad=True), behaviour).sum().backward()
    assert behaviour.grad is None


def test_clip_higher_and_lower_are_separate() -> None:
    """Ratio 1.25 lies inside 1 + 0.28, ratio 0.7 inside 1 - 0.4."""
    logprobs = torch.tensor([1.25, 0.7]).log().requires_grad_()
    inputs = inputs_of(torch.zeros(2), torch.tensor([1.0, -1.0]))
    loss, metrics = GRPO(GRPOConfig(clip_low=0.4, clip_high=0.28)).loss(outputs_of(logprobs), inputs)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.625, 0.35])
    assert merge_metrics([metrics])["clip/high"] == merge_metrics([metrics])["clip/low"] == 0
    clipped = merge_metrics([GRPO(GRPOConfig(clip_low=0.2, clip_high=0.2)).loss(outputs_of(logprobs), inputs)[1]])
    assert clipped["clip/high"] == clipped["clip/low"] == 0.5


def test_clip_shares_count_only_tokens_that_lose_their_gradient() -> None:
    """Ratio 2 with a negative advantage, and 0.5 with a positive one, are not clipped by PPO's minimum."""
    inputs = inputs_of(torch.zeros(2), torch.tensor([-1.0, 1.0]))
    metrics = merge_metrics([GRPO(GRPOConfig()).loss(outputs_of(torch.tensor([2.0, 0.5]).log()), inputs)[1]])
    assert metrics["clip/high"] == metrics["clip/low"] == 0


def test_coefficients_follow_their_schedules_and_are_logged() -> None:
    algorithm = GRPO(GRPOConfig(kl_coef=Schedule(start=1.0, end=0.0), entropy_coef=0.5))
    for step, kl in enumerate([1.0, 0.75, 0.5, 0.25, 0.0]):
        inputs = inputs_of(torch.tensor([-1.0]), torch.zeros(1), torch.tensor([-1.5]), step=step)
        outputs = outputs_of(torch.tensor([-1.0]), entropy=torch.tensor([2.0]))
        loss, metrics = algorithm.loss(outputs, inputs)
        k3 = math.exp(-0.5) - 1 + 0.5
        assert float(loss) == pytest.approx(kl * k3 - 0.5 * 2.0, abs=1e-6)
        merged = merge_metrics([metrics])
        assert (merged["coef/kl"], merged["coef/entropy"], merged["coef/legal"]) == pytest.approx((kl, 0.5, 0.0))
        assert merged["kl/reference"] == pytest.approx(k3, abs=1e-6)


def test_a_coefficient_annealed_to_zero_multiplies_nothing() -> None:
    outputs = outputs_of(torch.tensor([-1.0]), legal=torch.tensor([[-math.inf]]))
    loss, _ = GRPO(GRPOConfig()).loss(outputs, inputs_of(torch.tensor([-1.0]), torch.ones(1)))
    assert float(loss) == -1.0


def test_missing_reference_and_missing_entropy_gradient_are_errors() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    inputs = inputs_of(torch.tensor([-1.0]), torch.ones(1))
    with pytest.raises(ValueError, match="reference_logprobs_N is None"):
        GRPO(GRPOConfig(kl_coef=0.1)).loss(outputs_of(logprobs), inputs)
    with pytest.raises(ValueError, match="entropy_N carries no gradient"):
        GRPO(GRPOConfig(entropy_coef=0.1)).loss(outputs_of(logprobs), inputs)
    with pytest.raises(ValueError, match="1 outputs for 2 inputs"):
        GRPO(GRPOConfig()).loss(outputs_of(logprobs), inputs_of(torch.zeros(2), torch.ones(2)))


@pytest.mark.parametrize("norm", ["token", "sequence", "constant"])
def test_an_empty_micro_batch_adds_nothing_and_can_be_differentiated(norm: str) -> None:
    logprobs = torch.zeros(0, requires_grad=True)
    config = GRPOConfig(loss_norm=norm, constant_tokens=8 if norm == "constant" else None)  # type: ignore[arg-type]
    loss, metrics = GRPO(config).loss(outputs_of(logprobs), inputs_of(torch.zeros(0), torch.zeros(0)))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert merge_metrics([metrics]) == {}


def test_loss_stays_float32_and_metrics_carry_no_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    reference, legal = torch.tensor([-1.0, -1.0]), torch.full((2, 2), -1.0, requires_grad=True)
    algorithm = GRPO(GRPOConfig(kl_coef=0.1, legal_coef=0.1, loss_norm="sequence"))
    inputs = inputs_of(torch.tensor([-1.0, -1.5]), torch.ones(2), reference)
    loss, metrics = algorithm.loss(outputs_of(logprobs, legal=legal), inputs)
    assert loss.dtype == torch.float32
    for value, weight in metrics.values():
        assert value.dtype == weight.dtype == torch.float32
        assert value.shape == weight.shape == ()
        assert not value.requires_grad and not weight.requires_grad


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs_N": torch.zeros(3, 1)},
        {"entropy_N": torch.zeros(2)},
        {"logprobs_N": torch.zeros(3, dtype=torch.bfloat16)},
        {"legal_mask_NA": torch.ones(3, 2)},
        {"legal_logprobs_NA": torch.zeros(3, 1)},
    ],
)
def test_outputs_of_wrong_shape_or_dtype_are_errors(wrong: dict[str, Tensor]) -> None:
    right = {
        "logprobs_N": torch.zeros(3),
        "entropy_N": torch.zeros(3),
        "legal_logprobs_NA": torch.zeros(3, 2),
        "legal_mask_NA": torch.ones(3, 2, dtype=torch.bool),
    }
    TokenOutputs(**right)
    with pytest.raises(ValueError, match=r"TokenOutputs\."):
        TokenOutputs(**(right | wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"advantages_N": torch.zeros(3, 1)},
        {"advantages_N": torch.zeros(3, dtype=torch.float16)},
        {"reference_logprobs_N": torch.zeros(2)},
        {"sequence_ids_N": torch.zeros(3)},
        {"num_tokens": 0},
        {"num_sequences": 0},
    ],
)
def test_inputs_of_wrong_shape_dtype_or_count_are_errors(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {
        "behaviour_logprobs_N": torch.zeros(3),
        "advantages_N": torch.zeros(3),
        "reference_logprobs_N": torch.zeros(3),
        "sequence_ids_N": torch.zeros(3, dtype=torch.int64),
        "num_tokens": 3,
        "num_sequences": 1,
        "step": 0,
        "total_steps": 1,
    }
    LossInputs(**right)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"LossInputs\."):
        LossInputs(**(right | wrong))  # type: ignore[arg-type]
