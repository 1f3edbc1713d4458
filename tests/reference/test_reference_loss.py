"""Known-right numbers for losses and advantages: reported faults P01, P03, P05, P08 and P18, with their kinds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from rollforge.algo.advantages import compare
from rollforge.algo.config import GRPOConfig, LossNorm
from rollforge.algo.grpo import GRPO
from rollforge.algo.losses import importance_ratio
from rollforge.tensors import LossInputs, TokenOutputs, merge_metrics

EPS, TOLERANCE = 1e-6, 1e-6


def step(n: int, *, seed: int = 0, lengths: tuple[int, ...] | None = None) -> tuple[TokenOutputs, LossInputs]:
    """One random optimizer step of n tokens in float64: stale, with a reference and with some legal actions."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    lengths = lengths or (n,)
    logprobs = -1.5 + 0.5 * normal(n)
    legal_mask = torch.rand(n, 3, generator=draw) < 0.5
    outputs = TokenOutputs(
        logprobs_N=logprobs.requires_grad_(),
        entropy_N=normal(n).abs().requires_grad_(),
        legal_logprobs_NA=(-normal(n, 3).abs()).requires_grad_(),
        legal_mask_NA=legal_mask,
    )
    inputs = LossInputs(
        behaviour_logprobs_N=logprobs.detach() + 0.3 * normal(n),
        advantages_N=normal(n),
        reference_logprobs_N=logprobs.detach() + 0.5 * normal(n),
        sequence_ids_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_tokens=n,
        num_sequences=len(lengths),
        step=3,
        total_steps=10,
    )
    return outputs, inputs


def part(outputs: TokenOutputs, inputs: LossInputs, where: slice) -> tuple[TokenOutputs, LossInputs]:
    """The same step's tokens `where`, as one micro-batch; the counts stay those of the step."""
    reference = inputs.reference_logprobs_N
    return (
        TokenOutputs(
            outputs.logprobs_N[where],
            outputs.entropy_N[where],
            outputs.legal_logprobs_NA[where],
            outputs.legal_mask_NA[where],
        ),
        replace(
            inputs,
            behaviour_logprobs_N=inputs.behaviour_logprobs_N[where],
            advantages_N=inputs.advantages_N[where],
            reference_logprobs_N=None if reference is None else reference[where],
            sequence_ids_N=inputs.sequence_ids_N[where],
        ),
    )


def gradients(outputs: TokenOutputs) -> list[Tensor]:
    leaves = (outputs.logprobs_N, outputs.entropy_N, outputs.legal_logprobs_NA)
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return grads


def plain(values: list[float], *, behaviour: list[float], advantages: list[float], **counts: int) -> tuple[Tensor, ...]:
    """Loss, ratio mean and gradient of given float32 log-probabilities, without regularisers."""
    logprobs = torch.tensor(values, requires_grad=True)
    n = len(values)
    outputs = TokenOutputs(logprobs, torch.zeros(n), torch.zeros(n, 0), torch.zeros(n, 0, dtype=torch.bool))
    inputs = LossInputs(
        torch.tensor(behaviour),
        torch.tensor(advantages),
        None,
        torch.zeros(n, dtype=torch.int64),
        num_tokens=counts.get("num_tokens", n),
        num_sequences=1,
        step=0,
        total_steps=1,
    )
    loss, metrics = GRPO(GRPOConfig()).loss(outputs, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), torch.tensor(merge_metrics([metrics])["ratio/mean"]), logprobs.grad


# P01: a loss may not depend on how its tokens are split.


def test_p01_token_mean_of_two_unequal_parts() -> None:
    """2 tokens of loss 1 and 6 of loss 3 make 20 / 8, not (1 + 3) / 2. A fresh token's loss is minus its advantage."""
    whole, _, whole_grad = plain([-1.0] * 8, behaviour=[-1.0] * 8, advantages=[-1.0] * 2 + [-3.0] * 6)
    first, _, first_grad = plain([-1.0] * 2, behaviour=[-1.0] * 2, advantages=[-1.0] * 2, num_tokens=8)
    second, _, second_grad = plain([-1.0] * 6, behaviour=[-1.0] * 6, advantages=[-3.0] * 6, num_tokens=8)
    assert float(whole) == pytest.approx(2.5, abs=1e-6)
    assert float(first + second) == pytest.approx(2.5, abs=1e-6)
    torch.testing.assert_close(torch.cat([first_grad, second_grad]), whole_grad, atol=1e-6, rtol=0)


LENGTHS = (1, 7, 2, 11, 3)
TOKEN_CUTS = [(), (1,), tuple(range(1, 24)), (5, 6, 20), (0, 12, 12)]  # (0, ...) and (12, 12) are empty parts
SAMPLE_CUTS = [(), (1,), (8, 10), (1, 8, 10, 21)]


@pytest.mark.parametrize(
    ("norm", "cuts"),
    [("token", cuts) for cuts in TOKEN_CUTS]
    + [("constant", cuts) for cuts in TOKEN_CUTS]
    + [("sequence", cuts) for cuts in SAMPLE_CUTS],
)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_p01_any_split_gives_the_same_loss_gradient_and_metrics(
    norm: LossNorm, cuts: tuple[int, ...], estimator: str
) -> None:
    config = GRPOConfig(
        loss_norm=norm,
        constant_tokens=16 if norm == "constant" else None,
        kl_coef=0.1,
        kl_estimator=estimator,  # type: ignore[arg-type]
        entropy_coef=0.02,
        legal_coef=0.05,
    )
    outputs, inputs = step(24, lengths=LENGTHS)
    whole, whole_metrics = GRPO(config).loss(outputs, inputs)
    whole.backward()
    expected = gradients(outputs)
    assert all(bool(g.abs().max() > 0) for g in expected)

    total, parts = 0.0, []
    for start, end in pairwise((0, *cuts, 24)):
        loss, metrics = GRPO(config).loss(*part(outputs, inputs, slice(start, end)))
        loss.backward()
        total += float(loss.detach())
        parts.append(metrics)
    assert total == pytest.approx(float(whole.detach()), abs=1e-9)
    for got, wanted in zip(gradients(outputs), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-9)
    assert merge_metrics(parts) == pytest.approx(merge_metrics([whole_metrics]), abs=1e-9)


@pytest.mark.parametrize("order_seed", range(3))
def test_p01_order_of_tokens_does_not_matter(order_seed: int) -> None:
    outputs, inputs = step(24, lengths=LENGTHS)
    config = GRPOConfig(loss_norm="sequence", kl_coef=0.1)
    whole, _ = GRPO(config).loss(outputs, inputs)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(order_seed))
    shuffled, _ = GRPO(config).loss(*part(outputs, inputs, order))  # type: ignore[arg-type]
    assert float(shuffled.detach()) == pytest.approx(float(whole.detach()), abs=1e-12)


def test_p01_each_normalisation_is_the_papers_formula() -> None:
    """Fresh tokens, so a token's loss is minus its advantage: 1 for the sample of 2 tokens, 3 for that of 6."""
    logprobs = torch.full((8,), -1.0)
    outputs = TokenOutputs(logprobs, torch.zeros(8), torch.zeros(8, 0), torch.zeros(8, 0, dtype=torch.bool))
    advantages, ids = torch.tensor([-1.0] * 2 + [-3.0] * 6), torch.tensor([40] * 2 + [7] * 6)
    inputs = LossInputs(logprobs, advantages, None, ids, num_tokens=8, num_sequences=2, step=0, total_steps=1)
    wanted = {"token": 20 / 8, "sequence": (1 + 3) / 2, "constant": 20 / (2 * 10)}
    for norm, value in wanted.items():
        config = GRPOConfig(loss_norm=norm, constant_tokens=10 if norm == "constant" else None)  # type: ignore[arg-type]
        assert float(GRPO(config).loss(outputs, inputs)[0]) == pytest.approx(value, abs=1e-6), norm


@pytest.mark.parametrize("norm", ["token", "sequence", "constant"])
def test_p01_gradient_agrees_with_finite_differences(norm: LossNorm) -> None:
    """k2 and k3 are differentiated as they stand; k1 is not, and is checked in the unit tests of `kl`."""
    config = GRPOConfig(
        loss_norm=norm,
        constant_tokens=16 if norm == "constant" else None,
        kl_coef=0.1,
        entropy_coef=0.02,
        legal_coef=0.05,
    )
    outputs, inputs = step(24, seed=5, lengths=LENGTHS)

    def loss(logprobs: Tensor, entropy: Tensor, legal: Tensor) -> Tensor:
        return GRPO(config).loss(TokenOutputs(logprobs, entropy, legal, outputs.legal_mask_NA), inputs)[0]

    assert torch.autograd.gradcheck(loss, (outputs.logprobs_N, outputs.entropy_N, outputs.legal_logprobs_NA))


# P03: a spread that is zero or rounding noise.


@pytest.mark.parametrize(
    ("rewards", "odd", "others"),
    [([0.0] + [0.35] * 7, -0.35, 0.378), ([1.0, 0.0, 0.0, 0.0], 1.0, -0.5774)],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_p03_leave_one_out_normalised(rewards: list[float], odd: float, others: float, dtype: type) -> None:
    values = compare(np.array(rewards, dtype=dtype), "leave_one_out_norm", EPS, TOLERANCE)
    assert values[0] == pytest.approx(odd, abs=1e-3)
    assert values[1:] == pytest.approx([others] * (len(rewards) - 1), abs=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_p03_small_but_real_spread_keeps_its_size(dtype: type) -> None:
    values = compare(np.array([3.0, 3.00002], dtype=dtype), "group_norm", EPS, TOLERANCE)
    assert values == pytest.approx([-0.66, 0.66], abs=0.01)


def test_p03_group_norm_of_one_odd_reward() -> None:
    values = compare(np.array([0.0] + [0.35] * 7, dtype=np.float32), "group_norm", EPS, TOLERANCE)
    assert values == pytest.approx([-2.4749] + [0.3536] * 7, abs=1e-3)


@pytest.mark.parametrize("advantage", ["group_norm", "group_center", "leave_one_out", "leave_one_out_norm"])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.3] * 3,
        [0.1 + 0.2, 0.3, 0.3],
        [float(np.float32(0.1) + np.float32(0.2)), 0.3, 0.3],
        [0.1 + 0.2 - 0.3, 0.0, 0.0, 0.0],
        [-1e6, -1e6 + 1e-3, -1e6],
        [0.5],
        [1 / 3] * 1000,
    ],
)
def test_p03_rounding_noise_gives_exact_zeros(advantage: str, rewards: list[float]) -> None:
    values = compare(np.array(rewards), advantage, EPS, TOLERANCE)  # type: ignore[arg-type]
    assert values.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("advantage", ["group_norm", "leave_one_out_norm"])
def test_p03_normalised_advantages_stay_within_bounds(advantage: str) -> None:
    """Any group of rewards in [0, 1], with peers that differ by anything from nothing to everything."""
    draw = np.random.default_rng(0)
    for exponent in range(-18, 1):
        for n in (2, 3, 8, 64):
            rewards = 0.35 + 10.0**exponent * draw.uniform(-0.5, 0.5, n)
            rewards[0] = draw.uniform()
            for dtype in (np.float32, np.float64):
                values = compare(rewards.astype(dtype), advantage, EPS, TOLERANCE)  # type: ignore[arg-type]
                assert np.isfinite(values).all()
                assert np.abs(values).max() <= 10


# P05: the ratio is against the policy that sampled.


@pytest.mark.parametrize(("advantage", "loss", "gradient"), [(1.0, -1.2, 0.0), (-1.0, 1.648721, 1.648721)])
def test_p05_ratio_and_clip_of_a_stale_token(advantage: float, loss: float, gradient: float) -> None:
    got, ratio, grad = plain([-1.0], behaviour=[-1.5], advantages=[advantage])
    assert float(ratio) == pytest.approx(1.648721, abs=1e-6)
    assert float(got) == pytest.approx(loss, abs=1e-6)
    assert float(grad) == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(("advantage", "loss", "gradient"), [(1.0, -0.606531, -0.606531), (-1.0, 0.8, 0.0)])
def test_p05_ratio_below_one(advantage: float, loss: float, gradient: float) -> None:
    """The other side: log-ratio -0.5; a bad token that has already become rarer is left alone."""
    got, ratio, grad = plain([-1.5], behaviour=[-1.0], advantages=[advantage])
    assert float(ratio) == pytest.approx(0.606531, abs=1e-6)
    assert float(got) == pytest.approx(loss, abs=1e-6)
    assert float(grad) == pytest.approx(gradient, abs=1e-6)


def test_p05_gradient_depends_on_the_behaviour_policy() -> None:
    fresh = plain([-1.0, -2.0], behaviour=[-1.0, -2.0], advantages=[1.0, -1.0])[2]
    stale = plain([-1.0, -2.0], behaviour=[-0.9, -2.3], advantages=[1.0, -1.0])[2]
    assert fresh.tolist() == pytest.approx([-0.5, 0.5])
    assert stale.tolist() == pytest.approx([-0.5 * math.exp(-0.1), 0.5 * math.exp(0.3)], rel=1e-5)


# P08: the sampled end token keeps its own log-probability.


def test_p08_unchanged_policy_has_ratio_one_with_its_end_token() -> None:
    engine = [-0.1, -0.2, -4.60517]
    _, ratio, grad = plain(engine, behaviour=engine, advantages=[1.0] * 3)
    assert float(ratio) == 1.0
    assert grad.tolist() == pytest.approx([-1 / 3] * 3)
    sequence_ratio = importance_ratio(torch.tensor(engine), torch.tensor(engine)).prod()
    assert float(sequence_ratio) == 1.0


def test_p08_end_token_put_back_with_logprob_zero_is_visible() -> None:
    trainer, engine = torch.tensor([-0.1, -0.2, -4.60517]), torch.tensor([-0.1, -0.2, 0.0])
    assert float(importance_ratio(trainer, engine).prod()) == pytest.approx(0.01, abs=1e-6)
    _, ratio, _ = plain(trainer.tolist(), behaviour=engine.tolist(), advantages=[1.0] * 3)
    assert float(ratio) == pytest.approx((1 + 1 + 0.01) / 3, abs=1e-6)


# P18: both log-probabilities are of the distribution that was sampled.


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.7])
def test_p18_same_temperature_on_both_sides_is_ratio_one(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    logprob = float((logits / temperature).log_softmax(-1)[1])
    if temperature == 0.5:
        assert logprob == pytest.approx(-2.142932, abs=1e-6)
    assert float(plain([logprob], behaviour=[logprob], advantages=[1.0])[1]) == 1.0


@pytest.mark.parametrize(
    ("trainer", "engine", "ratio"),
    [
        (-2.142932, -1.407606, 0.479349),  # scaled against raw
        (-2.142932, -2.815212, 1.958699),  # scaled against raw, divided by the temperature afterwards
        (math.log(0.3), math.log(0.3 / 0.8), 0.8),  # whole vocabulary against the survivors of top-p
        (math.log(0.3 / 0.8), math.log(0.3 / 0.8), 1.0),  # one support on both sides
    ],
)
def test_p18_mixed_distributions_show_in_ratio_and_mismatch(trainer: float, engine: float, ratio: float) -> None:
    outputs = TokenOutputs(
        torch.tensor([trainer]), torch.zeros(1), torch.zeros(1, 0), torch.zeros(1, 0, dtype=torch.bool)
    )
    ids = torch.zeros(1, dtype=torch.int64)
    inputs = LossInputs(
        torch.tensor([engine]), torch.ones(1), None, ids, num_tokens=1, num_sequences=1, step=0, total_steps=1
    )
    metrics = merge_metrics([GRPO(GRPOConfig()).loss(outputs, inputs)[1]])
    assert metrics["ratio/mean"] == pytest.approx(ratio, abs=1e-5)
    assert metrics["kl/behaviour"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-5)
