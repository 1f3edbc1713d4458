"""Picked log-probabilities: values and gradients equal those of the whole softmax by autograd, in any chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollforge.train import logprobs
from rollforge.train.logprobs import picked_logprobs

U, V, E = 7, 300, 5
ROW = torch.tensor([0, 0, 0, 2, 6, 6, 5, 3])
TOKEN = torch.tensor([1, 1, 299, 0, 17, 4, 250, 33])


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(U, E, generator=generator, requires_grad=True)
    return hidden, torch.randn(V, E, generator=generator, requires_grad=True)


def by_autograd(hidden: Tensor, head: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (hidden @ head.t() / temperature).log_softmax(-1)
    return logp[ROW, TOKEN], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("rows", [1, 3, 256])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, rows: int, temperature: float, entropy: bool) -> None:
    monkeypatch.setattr(logprobs, "ROWS", rows)
    weights = torch.linspace(-1, 2, len(ROW))
    results = []
    for ours in (True, False):
        hidden, head = inputs()
        if ours:
            picked, entropies = picked_logprobs(hidden, head, temperature, ROW, TOKEN, entropy)
        else:
            picked, entropies = by_autograd(hidden, head, temperature)
        loss = (weights * picked).sum()
        if entropy:
            loss = loss + (torch.linspace(0.5, 1.5, U) * entropies).sum()
        loss.backward()
        results.append((picked, entropies, hidden.grad, head.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_an_entropy_not_asked_for_carries_no_gradient() -> None:
    hidden, head = inputs()
    picked, entropies = picked_logprobs(hidden, head, 1.0, ROW, TOKEN, False)
    assert picked.requires_grad
    assert not entropies.requires_grad


def test_the_heads_gradient_is_rounded_once_however_many_rows_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty bfloat16 sums, each of them rounded, drift several times as far from the exact gradient as one."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(80, E, generator=generator).bfloat16()
    head = torch.randn(V, E, generator=generator).bfloat16().requires_grad_()
    rows, tokens = torch.arange(80), torch.arange(80)
    exact = head.detach().double().requires_grad_()
    (hidden.double() @ exact.t()).log_softmax(-1)[rows, tokens].sum().backward()
    assert exact.grad is not None
    errors = []
    for held in (80, 2):
        monkeypatch.setattr(logprobs, "ROWS", held)
        head.grad = None
        picked_logprobs(hidden, head, 1.0, rows, tokens, False)[0].sum().backward()
        assert head.grad is not None and head.grad.dtype == torch.bfloat16
        errors.append(float((head.grad.double() - exact.grad).norm()))
    assert errors[1] < 1.3 * errors[0]
