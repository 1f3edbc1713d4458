"""Drawing tokens from logits, with the log-probabilities of the distribution that was actually drawn from.

Knows: temperature, top-k, top-p, min-p, greedy, and how to draw one token from one uniform number. Does not know:
requests.

Shape legend: R rows of logits, S samples (several may share a row), V vocabulary, A asked-for ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollforge.types import Sampling

BLOCK = 256
"""Width of the blocks in which the cumulative distribution is searched: one pass over V, then one over a block."""

ROUNDING = 1e-6
"""What float32 logits may be off by: a token exactly at the border of top-p or min-p falls on the right side."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """token_ids_S int64, logprobs_S float32."""

    token_ids_S: Tensor
    logprobs_S: Tensor


def log_distribution(logits_RV: Tensor, sampling_R: Sequence[Sampling]) -> Tensor:
    """Log-probabilities float32 [R, V] of each row after its temperature and filters; removed tokens are minus
    infinity.

    Filters apply in the order temperature, top-k, top-p, min-p, each on what the one before left, renormalised at the
    end. Temperature 0 stands for greedy, which needs no filter: the whole distribution at temperature 1.
    """
    logits_RV = logits_RV.to(torch.float32, copy=True)
    temperatures = [s.temperature or 1.0 for s in sampling_R]
    if any(t != 1.0 for t in temperatures):
        logits_RV /= torch.tensor(temperatures, device=logits_RV.device).unsqueeze(1)
    for row, sampling in enumerate(sampling_R):
        if sampling.temperature and (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p):
            logits_RV[row] = _filtered(logits_RV[row], sampling)
    return logits_RV.log_softmax(-1)


def _filtered(logits_V: Tensor, sampling: Sampling) -> Tensor:
    if sampling.top_k:
        kth = logits_V.topk(min(sampling.top_k, logits_V.numel())).values[-1]
        logits_V = logits_V.masked_fill(logits_V < kth, -torch.inf)
    if sampling.top_p < 1.0:
        probs, order = logits_V.double().softmax(-1).sort(descending=True)
        # A token stays while the mass before it is below top_p; the first always does.
        removed = order[1:][probs.cumsum(-1)[:-1] >= sampling.top_p - ROUNDING]
        logits_V = logits_V.index_fill(0, removed, -torch.inf)
    if sampling.min_p:
        floor = logits_V.max() + float(np.log(sampling.min_p)) - ROUNDING
        logits_V = logits_V.masked_fill(logits_V < floor, -torch.inf)
    return logits_V


def draw(logprobs_RV: Tensor, row_S: Tensor, uniform_S: Tensor, greedy_S: Tensor) -> Drawn:
    """Draws sample s from row `row_S[s]` by inverting its cumulative distribution at `uniform_S[s]` (float64 in [0,
    1)).

    A token of zero probability is never drawn. Where `greedy_S`, the most likely token is taken instead.
    """
    probs_RV = logprobs_RV.exp()
    if pad := -probs_RV.shape[1] % BLOCK:
        probs_RV = torch.nn.functional.pad(probs_RV, (0, pad))
    blocks = probs_RV.view(probs_RV.shape[0], -1, BLOCK)
    mass = blocks.sum(-1).double()  # float32 is exact enough for 256 of them, and fifteen times as fast
    reach = mass.cumsum(-1)
    target_S = uniform_S * reach[row_S, -1]
    block_S = _first_beyond(reach[row_S], target_S, mass[row_S] > 0)
    inner = blocks[row_S, block_S].double()
    before_S = reach[row_S, block_S] - mass[row_S, block_S]
    # Clamped, for a rounding below 0 would draw the block's first token even if its probability is 0.
    offset_S = _first_beyond(inner.cumsum(-1), (target_S - before_S).clamp(min=0), inner > 0)
    token_S = block_S * BLOCK + offset_S
    if greedy_S.any():
        token_S = torch.where(greedy_S, logprobs_RV.argmax(-1)[row_S], token_S)
    return Drawn(token_S, logprobs_RV[row_S, token_S])


def _first_beyond(cumulative: Tensor, target_S: Tensor, possible: Tensor) -> Tensor:
    """First index whose cumulative mass exceeds the target; rounding can push that past the end: then the last
    possible.
    """
    index_S = torch.searchsorted(cumulative, target_S.unsqueeze(1), right=True).squeeze(1)
    width = cumulative.shape[1]
    last_S = width - 1 - possible.flip(1).int().argmax(1)
    return torch.minimum(index_S, last_S)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), by the SplitMix64 finaliser (Steele et al., 2014): a counter-based
    draw that does not depend on what else is in the batch, nor on the order of requests."""
    with np.errstate(over="ignore"):
        # One step ahead: the finaliser leaves 0 as it is, and seed 0 would draw 0.0 at position 0.
        mixed = _mix(_mix(seeds) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_seed(seed: int, index: int) -> np.uint64:
    """The seed of sample `index` of a request with `seed`."""
    with np.errstate(over="ignore"):
        return np.uint64(_mix(np.array([seed % 2**64], np.uint64) ^ np.uint64(index * 0xD1B54A32D192ED03 % 2**64))[0])


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
