"""AdamW on float32 masters: small steps are not rounded away, gradients add up, clip, and never poison a weight."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from rollforge.config import ConfigError
from rollforge.train.config import TrainConfig
from rollforge.train.optimizer import MasterAdamW

CONFIG = TrainConfig(learning_rate=1e-5, max_grad_norm=1e9)


def vector(values: list[float], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def push(parameter: nn.Parameter, gradient: list[float]) -> None:
    (parameter * torch.tensor(gradient, dtype=parameter.dtype)).sum().backward()


def walk(parameter: nn.Parameter, steps: int) -> None:
    optimizer = MasterAdamW([parameter], CONFIG)
    for _ in range(steps):
        push(parameter, [1.0, -1.0])
        optimizer.step(CONFIG.learning_rate)


def test_many_tiny_bf16_steps_move_the_weights_as_float32_does() -> None:
    steps = 1000
    narrow, wide, naive = (vector([1.0, 0.5], dtype) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16))
    walk(narrow, steps)
    walk(wide, steps)
    adam = torch.optim.AdamW([naive], lr=CONFIG.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        adam.zero_grad()
        push(naive, [1.0, -1.0])
        adam.step()
    assert wide.tolist() == pytest.approx([0.99, 0.51], abs=1e-4)
    assert torch.equal(narrow.float(), wide.bfloat16().float())
    assert naive.tolist() == [1.0, 0.5]


def test_gradients_of_bf16_add_up_in_float32() -> None:
    parameter = vector([1.0], torch.bfloat16)
    optimizer = MasterAdamW([parameter], CONFIG)
    for _ in range(1000):
        push(parameter, [1.0])
    push(parameter, [0.5])
    assert parameter.grad is None
    assert optimizer.gradient(parameter).tolist() == [1000.5]  # in bf16 the sum would stop at 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clipping_scales_all_gradients_by_their_common_norm(dtype: torch.dtype) -> None:
    left, right = vector([1.0], dtype), vector([1.0, 1.0], dtype)
    optimizer = MasterAdamW([left, right], TrainConfig(max_grad_norm=0.5))
    push(left, [3.0])
    push(right, [0.0, 4.0])
    assert optimizer.step(0.1) == pytest.approx(5.0)
    first = [optimizer._adam.state[optimizer._masters[p]]["exp_avg"] / 0.1 for p in (left, right)]
    assert first[0].tolist() == pytest.approx([0.3], rel=1e-4)
    assert first[1].tolist() == pytest.approx([0.0, 0.4], rel=1e-4)
    assert not optimizer.gradient(left).any() and not optimizer.gradient(right).any()


def test_a_small_gradient_is_not_scaled_up() -> None:
    parameter = vector([1.0])
    optimizer = MasterAdamW([parameter], TrainConfig(max_grad_norm=1.0))
    push(parameter, [0.25])
    assert optimizer.step(0.1) == pytest.approx(0.25)
    assert optimizer._adam.state[parameter]["exp_avg"].tolist() == pytest.approx([0.025])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_leaves_no_trace(dtype: torch.dtype, poison: float) -> None:
    parameter, clean = vector([1.0, 2.0], dtype), vector([1.0, 2.0], dtype)
    optimizer, other = MasterAdamW([parameter], CONFIG), MasterAdamW([clean], CONFIG)
    for each, its in ((parameter, optimizer), (clean, other)):
        push(each, [1.0, 1.0])
        its.step(0.01)
    before = parameter.detach().clone()
    push(parameter, [1.0, poison])
    assert not math.isfinite(optimizer.step(0.01))
    assert torch.equal(parameter, before)
    for each, its in ((parameter, optimizer), (clean, other)):
        push(each, [2.0, -1.0])
        its.step(0.01)
    assert torch.equal(parameter, clean)
    assert not torch.equal(parameter, before)


def test_weight_decay_is_for_matrices_only() -> None:
    matrix, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    MasterAdamW([matrix, bias], TrainConfig(weight_decay=0.5)).step(0.1)
    assert matrix.flatten().tolist() == pytest.approx([0.95] * 4)
    assert bias.tolist() == [1.0, 1.0]


def test_updates_equal_torchs_own_adamw() -> None:
    ours, theirs = vector([1.0, -2.0, 3.0]), vector([1.0, -2.0, 3.0])
    optimizer = MasterAdamW([ours], CONFIG)
    adam = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        gradient: Tensor = torch.randn(3, generator=generator)
        for parameter in (ours, theirs):
            parameter.grad = gradient.clone()
        optimizer.step(0.01)
        adam.step()
    torch.testing.assert_close(ours, theirs)


def test_the_rate_warms_up_then_follows_a_cosine() -> None:
    config = TrainConfig(learning_rate=1.0, warmup_steps=4, final_share=0.2)
    rates = [config.rate(step, 25) for step in range(25)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4] == 1.0
    assert rates[14] == pytest.approx(0.6)  # halfway down, halfway between 1 and 0.2
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[24] == config.rate(1000, 25) == pytest.approx(0.2), "the last step is the lowest"


def test_by_default_the_rate_stays_at_its_peak() -> None:
    config = TrainConfig(learning_rate=3e-6)
    assert config.rate(0, 100) == pytest.approx(0.5e-6)
    assert {config.rate(step, 100) for step in range(5, 100)} == {3e-6}
    assert TrainConfig(learning_rate=3e-6, warmup_steps=0).rate(0, 1) == 3e-6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("warmup_steps", -1),
        ("final_share", 1.5),
        ("max_grad_norm", 0.0),
        ("micro_batch_tokens", 0),
    ],
)
def test_impossible_settings_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"train\.{name} is"):
        TrainConfig(**{name: value})  # type: ignore[arg-type]
