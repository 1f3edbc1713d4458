"""Token sequences folded into a forest of shared prefixes, so that every prefix is computed once.

Knows: integer sequences and what their beginnings have in common. Does not know: models, masks of a loss, torch.

Shape legend: M nodes of a trie, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rollforge.types import BoolArray, IntArray


@dataclass(frozen=True, slots=True)
class Trie:
    """A forest of prefixes in depth-first order: parents before children, every subtree one contiguous run of nodes.

    token_ids [M] int32, parents [M] int32 (-1 at a root), depths [M] int32 (the position of the token in its sequence),
    paths: for each input sequence, in input order, the node of each of its tokens, [L] int32.
    """

    token_ids: IntArray
    parents: IntArray
    depths: IntArray
    paths: tuple[IntArray, ...]

    def padded(self, size: int) -> Trie:
        """With leaves of no meaning below the last node, `size` nodes in all; paths stay."""
        more = size - self.token_ids.size
        last, below = self.token_ids.size - 1, self.depths[-1:] + 1
        return Trie(
            np.append(self.token_ids, np.zeros(more, dtype=np.int32)),
            np.append(self.parents, np.full(more, last, dtype=np.int32)),
            np.append(self.depths, below.repeat(more)),
            self.paths,
        )

    def trees(self) -> list[slice]:
        """The nodes of each tree of the forest: no node sees one of another tree."""
        starts = np.append(np.flatnonzero(self.parents < 0), self.parents.size).tolist()
        return [slice(start, end) for start, end in pairwise(starts)]

    def ancestor_mask(self, tree: slice = slice(None)) -> BoolArray:
        """Which nodes each node may attend to: [M, M] bool, True where the column is the row or an ancestor of it.

        In depth-first order a subtree is a contiguous run: column `a` is True exactly on rows [a, end of its subtree).
        `tree` is one of `trees()`, with M its own nodes; without it M are all nodes of the forest.
        """
        ends = _subtree_ends(self.depths[tree])
        nodes = np.arange(ends.size, dtype=np.int32)
        mask: BoolArray = nodes[:, None] < ends[None, :]
        mask &= nodes[:, None] >= nodes[None, :]
        return mask


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The different sequences in lexicographic order; row k begins with the first `shared[k]` tokens of row k-1."""

    rows: list[IntArray]
    lengths: IntArray
    shared: IntArray
    row_of: list[int]


def build(sequences: Sequence[IntArray]) -> Trie:
    """Fold the sequences (each [L] integer ids, L may differ, 0 allowed) into one trie; equal ones share all nodes."""
    ordered = _sort(sequences)
    if not ordered.rows:
        empty = np.zeros(0, dtype=np.int32)
        return Trie(empty, empty, empty, ())
    fresh = ordered.lengths - ordered.shared
    starts = np.cumsum(fresh) - fresh
    paths = _paths(ordered, starts)
    suffixes = [row[shared:] for row, shared in zip(ordered.rows, ordered.shared.tolist(), strict=True)]
    token_ids = np.concatenate(suffixes)
    nodes = np.arange(token_ids.size, dtype=np.int32)
    depths = (nodes - np.repeat(starts - ordered.shared, fresh)).astype(np.int32)
    parents = nodes - 1
    for path, start, shared, new in zip(paths, starts.tolist(), ordered.shared.tolist(), fresh.tolist(), strict=True):
        if new:
            parents[start] = path[shared - 1] if shared else -1
    return Trie(token_ids, parents, depths, tuple(paths[row] for row in ordered.row_of))


def split(sequences: Sequence[IntArray], max_nodes: int) -> list[list[int]]:
    """Partition the sequence indices into micro-batches whose tries have at most `max_nodes` nodes each.

    Neighbours in lexicographic order stay together, equal sequences always do; a sequence longer than `max_nodes`
    stands alone (with its equals). A tree that fits into one micro-batch is not divided: its root would be computed
    twice. Raises ValueError when `max_nodes` is not positive.
    """
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be at least 1, got {max_nodes}")
    ordered = _sort(sequences)
    fresh = ordered.lengths - ordered.shared
    roots = np.flatnonzero(ordered.shared == 0)
    trees = np.zeros_like(fresh)
    if roots.size:
        trees[roots] = np.add.reduceat(fresh, roots)
    part_of_row: list[int] = []
    part, nodes = -1, 0
    for length, new, tree in zip(ordered.lengths.tolist(), fresh.tolist(), trees.tolist(), strict=True):
        # What has to fit: a whole tree where one begins, unless no part could hold it.
        if part < 0 or nodes + max(new, tree if tree <= max_nodes else 0) > max_nodes:
            part, nodes = part + 1, length
        else:
            nodes += new
        part_of_row.append(part)
    parts: list[list[int]] = [[] for _ in range(part + 1)]
    for index, row in sorted(enumerate(ordered.row_of), key=lambda pair: pair[1]):
        parts[part_of_row[row]].append(index)
    return parts


def _sort(sequences: Sequence[IntArray]) -> _Sorted:
    """Deduplicate and sort by bytes; big-endian offset ids make the byte order the numeric order."""
    keys = [(np.asarray(ids).astype(np.int64) + 2**31).astype(">u4").tobytes() for ids in sequences]
    unique = sorted(set(keys))
    position = {key: row for row, key in enumerate(unique)}
    lengths = np.array([len(key) // 4 for key in unique], dtype=np.int32)
    table = np.zeros((len(unique), int(lengths.max(initial=0))), dtype=np.int32)
    filled = np.arange(table.shape[1]) < lengths[:, None]
    flat = np.frombuffer(b"".join(unique), dtype=">u4")
    table[filled] = (flat.astype(np.int64) - 2**31).astype(np.int32)
    same = (table[1:] == table[:-1]) & filled[1:] & filled[:-1]
    shared = np.zeros(len(unique), dtype=np.int32)
    shared[1:] = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    rows = [table[row, :length] for row, length in enumerate(lengths.tolist())]
    return _Sorted(rows, lengths, shared, [position[key] for key in keys])


def _paths(ordered: _Sorted, starts: IntArray) -> list[IntArray]:
    """Each row's path is the shared head of its predecessor's path and then its own new nodes."""
    paths: list[IntArray] = []
    previous = np.zeros(0, dtype=np.int32)
    for length, shared, start in zip(ordered.lengths.tolist(), ordered.shared.tolist(), starts.tolist(), strict=True):
        path = np.empty(length, dtype=np.int32)
        path[:shared] = previous[:shared]
        path[shared:] = np.arange(start, start + length - shared, dtype=np.int32)
        paths.append(path)
        previous = path
    return paths


def _subtree_ends(depths: IntArray) -> IntArray:
    """For each node, the first later node that is not below it: the next one whose depth is not greater."""
    ends = np.full(depths.size, depths.size, dtype=np.int32)
    open_nodes: list[int] = []
    for node, depth in enumerate(depths.tolist()):
        while open_nodes and depths[open_nodes[-1]] >= depth:
            ends[open_nodes.pop()] = node
        open_nodes.append(node)
    return ends
