"""Distributions after temperature and filters, exactly; and draws from them, by inversion and by frequency."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rollforge.generate.native.sampling import BLOCK, draw, log_distribution, sample_seed, uniforms
from rollforge.types import Sampling

PROBS = [0.4, 0.05, 0.25, 0.1, 0.2]


def distribution(sampling: Sampling, probs: list[float] = PROBS) -> list[float]:
    (row,) = log_distribution(torch.tensor([probs]).log(), [sampling]).exp().tolist()
    return list(row)


def draws(probs_V: Tensor, uniform: list[float], greedy: bool = False) -> list[int]:
    row = torch.zeros(len(uniform), dtype=torch.long)
    drawn = draw(
        probs_V.log()[None],
        row,
        torch.tensor(uniform, dtype=torch.float64),
        torch.full((len(uniform),), greedy),
    )
    chosen = probs_V.log()[drawn.token_ids_S]
    torch.testing.assert_close(drawn.logprobs_S, chosen, rtol=0, atol=0)
    return list(drawn.token_ids_S.tolist())


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), PROBS),
        (Sampling(temperature=0), PROBS),
        (Sampling(temperature=0, top_k=1, top_p=0.5, min_p=0.5), PROBS),
        (Sampling(temperature=0.5), [p * p / 0.275 for p in PROBS]),
        (Sampling(top_k=2), [0.4 / 0.65, 0, 0.25 / 0.65, 0, 0]),
        (Sampling(top_k=1), [1, 0, 0, 0, 0]),
        (Sampling(top_k=99), PROBS),
        (Sampling(top_p=0.5), [0.4 / 0.65, 0, 0.25 / 0.65, 0, 0]),
        (Sampling(top_p=0.65), [0.4 / 0.65, 0, 0.25 / 0.65, 0, 0]),
        (Sampling(top_p=0.66), [0.4 / 0.85, 0, 0.25 / 0.85, 0, 0.2 / 0.85]),
        (Sampling(top_p=1e-9), [1, 0, 0, 0, 0]),
        (Sampling(min_p=0.5), [0.4 / 0.85, 0, 0.25 / 0.85, 0, 0.2 / 0.85]),
        (Sampling(min_p=1.0), [1, 0, 0, 0, 0]),
        (Sampling(min_p=0.25), [p / 0.95 if p > 0.05 else 0 for p in PROBS]),
        # Each filter sees what the one before left: 0.65 of the mass is 0.4 alone of 0.4 + 0.25.
        (Sampling(top_k=2, top_p=0.6), [1, 0, 0, 0, 0]),
        (Sampling(temperature=0.5, top_p=0.58), [1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_the_distribution_is_exact(sampling: Sampling, expected: list[float]) -> None:
    assert distribution(sampling) == pytest.approx(expected, abs=1e-6)


def test_rows_keep_their_own_settings_and_the_logits_are_left_alone() -> None:
    logits = torch.tensor([PROBS, PROBS, PROBS]).log()
    before = logits.clone()
    rows = log_distribution(logits, [Sampling(top_k=1), Sampling(), Sampling(temperature=0.5)]).exp()
    assert rows[0].tolist() == [1, 0, 0, 0, 0]
    assert rows[1].tolist() == pytest.approx(PROBS)
    assert rows[2, 0].item() == pytest.approx(0.16 / 0.275)
    assert torch.equal(logits, before)


def test_bf16_logits_are_widened_first() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = logits.double().log_softmax(-1).float()
    torch.testing.assert_close(log_distribution(logits, [Sampling()] * 2), expected)


def test_inversion_at_the_borders_of_each_token() -> None:
    # Sixteenths are exact in binary, so the borders are.
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0])
    uniform = [0.0, 0.2499, 0.25, 0.7499, 0.75, 0.8749, 0.875, 1 - 2.0**-53]
    assert draws(probs, uniform) == [1, 1, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_every_token_comes_in_its_share_and_impossible_ones_never(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(size, generator=generator) * (torch.rand(size, generator=generator) < 0.3)
    weights[size // 2] = 1.0
    probs = weights / weights.sum()
    count = 40_000
    drawn = np.bincount(draws(probs, ((np.arange(count) + 0.5) / count).tolist()), minlength=size)
    assert not drawn[probs.numpy() == 0].any()
    np.testing.assert_allclose(drawn / count, probs.numpy(), atol=2 / count + 1e-6)


def test_masses_that_float32_rounds_never_draw_an_impossible_token() -> None:
    """Borders of a long, uneven distribution, hit to the last bit from both sides."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(4 * BLOCK, generator=generator) ** 8
    weights[torch.rand(4 * BLOCK, generator=generator) < 0.5] = 0.0
    probs = weights / weights.sum()
    borders = probs.double().cumsum(0) / probs.double().sum()
    uniform = torch.cat([borders, torch.nextafter(borders, torch.zeros(())), torch.nextafter(borders, torch.ones(()))])
    tokens = torch.tensor(draws(probs, uniform.clamp(0, 1 - 2.0**-53).tolist()))
    assert (probs[tokens] > 0).all()


def test_a_target_that_rounds_to_below_its_block_draws_no_impossible_token() -> None:
    """The mass before a block, taken as cumulative minus own mass, may exceed the cumulative mass of its predecessor.

    Every block begins with an impossible token, and the numbers point exactly between two blocks.
    """
    found = 0
    for seed in range(300):
        weights = (-60 * torch.rand(20, BLOCK, generator=torch.Generator().manual_seed(seed))).exp()
        weights[:, 0] = 0.0
        probs = (weights / weights.sum()).log().exp()
        mass = probs.sum(-1, dtype=torch.float64)
        reach = mass.cumsum(0)
        for block in (((reach - mass)[1:] > reach[:-1]).nonzero()[:, 0] + 1).tolist():
            uniform = reach[block - 1] / reach[-1]
            found += int((uniform * reach[-1] < (reach - mass)[block]).item())
            (token,) = draws(probs.flatten(), [float(uniform)])
            assert probs.flatten()[token] > 0
    assert found > 20, "the case must occur for the test to mean anything"


def test_greedy_takes_the_most_likely_whatever_the_number() -> None:
    assert draws(torch.tensor(PROBS), [0.0, 0.5, 0.99], greedy=True) == [0, 0, 0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6), Sampling(top_p=0.7), Sampling(min_p=0.3)])
def test_frequencies_with_the_engines_own_numbers(sampling: Sampling) -> None:
    """Chi-square over 20,000 draws of fixed seeds, one per sample index."""
    expected = np.asarray(distribution(sampling))
    seeds = np.asarray([sample_seed(11, index) for index in range(20_000)], dtype=np.uint64)
    numbers = uniforms(seeds, np.zeros(len(seeds), dtype=np.uint64))
    drawn = np.bincount(draws(torch.tensor(expected, dtype=torch.float32), numbers.tolist()), minlength=5)
    kept = expected > 0
    assert not drawn[~kept].any()
    chi_square = ((drawn - 20_000 * expected)[kept] ** 2 / (20_000 * expected[kept])).sum()
    assert chi_square < 18.5  # 4 degrees of freedom at most: exceeded by chance once in a thousand


def test_numbers_are_uniform_in_range_and_do_not_repeat() -> None:
    seeds = np.repeat(np.asarray([sample_seed(s, i) for s in (-1, 0, 1, 2**40) for i in range(8)], np.uint64), 1000)
    positions = np.tile(np.arange(1000, dtype=np.uint64), 32)
    numbers = uniforms(seeds, positions)
    assert len(np.unique(numbers)) == len(numbers)
    assert numbers.min() > 0 and numbers.max() < 1  # 0.0 would be seed 0, left as it is by a finaliser
    assert abs(numbers.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(numbers))
    by_position = numbers.reshape(32, 1000)
    assert np.abs(np.corrcoef(by_position)[~np.eye(32, dtype=bool)]).max() < 0.15
    assert sample_seed(3 + 2**64, 5) == sample_seed(3, 5)
    np.testing.assert_array_equal(uniforms(seeds[::-1], positions[::-1])[::-1], numbers)
