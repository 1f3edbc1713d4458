"""Log-probabilities of chosen tokens, without ever holding the logits of all rows.

Knows: the head's matrix product and the softmax, by hand in both directions. Does not know: models, samples, losses.
The logits are computed a few rows at a time and once more in the backward pass: the memory is that of `ROWS` rows, and
no gradient of the size of all logits is filled for each selection.

Shape legend: U rows (nodes that predict), P picked (row, token) pairs, V vocabulary, E model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

ROWS = 256
"""Rows of logits held at a time: 50 MB in float32 at a vocabulary of 49,152."""


def picked_logprobs(
    hidden_UE: Tensor, head_VE: Tensor, temperature: float, row_P: Tensor, token_P: Tensor, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """(log-probabilities [P] float32, entropies [U] float32) under softmax(hidden @ head^T / temperature).

    Pair p picks token `token_P[p]` in row `row_P[p]` (int64). The entropies, over the whole vocabulary, carry a
    gradient only if asked.
    """
    inputs = (hidden_UE, head_VE, temperature, row_P, token_P, entropy_gradient)
    outputs: tuple[Tensor, Tensor] = _Picked.apply(*inputs)  # type: ignore[no-untyped-call]
    return outputs


class _Picked(torch.autograd.Function):
    """d logprob / d logits = one-hot - softmax;  d entropy / d logits = -softmax * (log softmax + entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UE: Tensor,
        head_VE: Tensor,
        temperature: float,
        row_P: Tensor,
        token_P: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs_P = hidden_UE.new_empty(row_P.shape, dtype=torch.float32)
        entropy_U = hidden_UE.new_empty(hidden_UE.shape[0], dtype=torch.float32)
        for rows in _chunks(hidden_UE.shape[0]):
            logp = _log_softmax(hidden_UE[rows], head_VE, temperature)
            here = _inside(row_P, rows)
            logprobs_P[here] = logp[row_P[here] - rows.start, token_P[here]]
            entropy_U[rows] = -(logp.exp().mul_(logp)).sum(-1)
        ctx.save_for_backward(hidden_UE, head_VE, row_P, token_P, entropy_U)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_U)
        return logprobs_P, entropy_U

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_P, grad_entropy_U = gradients
        hidden_UE, head_VE, row_P, token_P, entropy_U = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        grad_hidden_UE = torch.empty_like(hidden_UE)
        chunks = _chunks(hidden_UE.shape[0])
        # Sums rounded to the head's dtype again and again would drift.
        grad_head_VE = torch.zeros_like(head_VE, dtype=head_VE.dtype if len(chunks) == 1 else torch.float32)
        for rows in chunks:
            logp = _log_softmax(hidden_UE[rows], head_VE, temperature)
            here = _inside(row_P, rows)
            row, token, grad = row_P[here] - rows.start, token_P[here], grad_P[here]
            taken = grad.new_zeros(logp.shape[0]).index_add_(0, row, grad)
            if ctx.entropy_gradient:  # type: ignore[attr-defined]
                factor = logp.add(entropy_U[rows].unsqueeze(1)).mul_(grad_entropy_U[rows].unsqueeze(1))
                grad_logits = logp.exp_().mul_(factor.add_(taken.unsqueeze(1)).neg_())
            else:
                grad_logits = logp.exp_().mul_(taken.neg().unsqueeze(1))
            grad_logits.index_put_((row, token), grad, accumulate=True)
            narrow = grad_logits.div_(temperature).to(head_VE.dtype)
            grad_hidden_UE[rows] = narrow @ head_VE
            grad_head_VE += narrow.t() @ hidden_UE[rows]
        return grad_hidden_UE, grad_head_VE.to(head_VE.dtype), None, None, None, None


def _log_softmax(hidden: Tensor, head_VE: Tensor, temperature: float) -> Tensor:
    logits: Tensor = (hidden @ head_VE.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _chunks(rows: int) -> list[slice]:
    return [slice(at, min(at + ROWS, rows)) for at in range(0, rows, ROWS)]


def _inside(row_P: Tensor, rows: slice) -> Tensor:
    return torch.nonzero((row_P >= rows.start) & (row_P < rows.stop)).squeeze(1)
