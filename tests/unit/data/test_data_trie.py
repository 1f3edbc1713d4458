"""The trie against a naive dictionary trie, on random forests."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rollforge.data.trie import build, split
from rollforge.types import IntArray


def forest(seed: int, count: int = 40, alphabet: int = 3, longest: int = 9) -> list[IntArray]:
    """Random sequences over a small alphabet, so that shared prefixes, equal and nested sequences all occur."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, alphabet, rng.integers(0, longest + 1)).astype(np.int32) for _ in range(count)]


def prefixes(sequences: list[IntArray]) -> set[tuple[int, ...]]:
    return {tuple(ids[:end].tolist()) for ids in sequences for end in range(1, len(ids) + 1)}


@pytest.mark.parametrize("seed", range(30))
def test_one_node_for_each_different_prefix_and_paths_spell_the_inputs(seed: int) -> None:
    sequences = forest(seed)
    trie = build(sequences)
    assert trie.token_ids.size == len(prefixes(sequences))
    for ids, path in zip(sequences, trie.paths, strict=True):
        np.testing.assert_array_equal(trie.token_ids[path], ids)
        np.testing.assert_array_equal(trie.depths[path], np.arange(len(ids)))
        np.testing.assert_array_equal(trie.parents[path], [-1, *path[:-1]][: len(ids)])
    for array in (trie.token_ids, trie.parents, trie.depths, *trie.paths):
        assert array.dtype == np.int32


@pytest.mark.parametrize("seed", range(30))
def test_depth_first_order_and_ancestor_mask(seed: int) -> None:
    trie = build(forest(seed))
    size = trie.token_ids.size
    assert (trie.parents < np.arange(size)).all()
    naive = np.zeros((size, size), dtype=bool)
    for node in range(size):
        above = node
        while above >= 0:
            naive[node, above] = True
            above = int(trie.parents[above])
    mask = trie.ancestor_mask()
    assert mask.dtype == np.bool_
    np.testing.assert_array_equal(mask, naive)
    for column in naive.T:  # a subtree is one run of nodes
        below = np.flatnonzero(column)
        assert below[-1] - below[0] + 1 == below.size


def test_equal_sequences_share_all_nodes_and_extreme_ids_stay_exact() -> None:
    ids = np.array([2**31 - 1, -(2**31), 0, 300], dtype=np.int32)
    trie = build([ids, ids.copy(), ids[:2]])
    np.testing.assert_array_equal(trie.token_ids, ids)
    np.testing.assert_array_equal(trie.paths[0], trie.paths[1])


def test_nothing_in_nothing_out() -> None:
    assert build([]).ancestor_mask().shape == (0, 0)
    trie = build([np.zeros(0, dtype=np.int32)])
    assert trie.token_ids.size == 0
    assert [len(path) for path in trie.paths] == [0]
    assert split([], 5) == []


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("max_nodes", [1, 7, 20, 10_000])
def test_split_is_a_partition_within_the_bound(seed: int, max_nodes: int) -> None:
    sequences = forest(seed)
    parts = split(sequences, max_nodes)
    assert sorted(index for part in parts for index in part) == list(range(len(sequences)))
    for part in parts:
        chosen = [sequences[index] for index in part]
        alone = len({tuple(ids.tolist()) for ids in chosen if ids.size}) == 1
        assert build(chosen).token_ids.size <= max_nodes or alone
    if max_nodes == 10_000:
        assert len(parts) == 1


def test_split_keeps_families_together_and_equals_in_one_part() -> None:
    family_a, family_b = np.full(50, 1, dtype=np.int32), np.full(50, 2, dtype=np.int32)
    tails = [np.array([tail], dtype=np.int32) for tail in (3, 4, 3)]
    sequences = [np.concatenate([head, tail]) for tail in tails for head in (family_a, family_b)]
    assert [sorted(part) for part in split(sequences, 60)] == [[0, 2, 4], [1, 3, 5]]


def test_a_tree_that_fits_into_a_part_of_its_own_is_not_divided() -> None:
    """Three prompts of ten tokens with four completions of five: 30 nodes each. The fourth's 70 fit nowhere."""
    sequences = [
        np.concatenate([np.full(10, 100 + prompt), np.full(5 if prompt < 3 else 15, answer)]).astype(np.int32)
        for answer in range(4)
        for prompt in range(4)
    ]

    def prompts(max_nodes: int) -> list[list[int]]:
        return [sorted({index % 4 for index in part}) for part in split(sequences, max_nodes)]

    assert prompts(50) == [[0], [1], [2], [3], [3]]
    assert prompts(60) == [[0, 1], [2, 3], [3]], "what must be divided in any case takes the rest of a part"
    assert [build([sequences[i] for i in part]).token_ids.size for part in split(sequences, 60)] == [60, 55, 55]


def test_split_refuses_a_bound_below_one() -> None:
    with pytest.raises(ValueError, match="max_nodes"):
        split([np.zeros(1, dtype=np.int32)], 0)


def test_three_thousand_long_sequences_fold_quickly() -> None:
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, 50_000, 70) for _ in range(30)]
    sequences = [np.concatenate([heads[i % 30], rng.integers(0, 50_000, 20)]).astype(np.int32) for i in range(3000)]
    used = []
    for _ in range(3):
        began = time.process_time()
        build(sequences)
        used.append(time.process_time() - began)
    assert min(used) < 0.5  # measured 0.035 s; CPU time, so that a busy machine does not matter
