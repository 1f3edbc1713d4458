"""Keys and values of the native engine: a trie of prompt prefixes, and one row per running sequence.

Knows: where the key and value of each token lie. Does not know: models, sampling, requests. Both parts belong to one
weight version: `PrefixCache.clear` and a fresh `Rows` are the only way into the next.

Shape legend: Y layers, C cached nodes, B rows, T tokens of a row, K key/value heads, D head width, P tokens of one
prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """What one token's keys and values look like."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype
    device: str


class PrefixCache:
    """A trie over token ids; node c keeps its key and value in row c of `keys_YCKD` and `values_YCKD`."""

    def __init__(self, shape: Shape, capacity: int) -> None:
        self._shape = shape
        self._capacity = capacity
        self.keys_YCKD, self.values_YCKD = self._allocate(0), self._allocate(0)
        self.clear()

    def clear(self) -> None:
        """Forgets everything: called for new weights and when the cache is full."""
        if self.keys_YCKD.shape[1] != self._capacity:  # new, or grown beyond it by a long prompt
            # All of it at once: growing would hold the old and the new, and a CPU gives pages only as they are written.
            self.keys_YCKD, self.values_YCKD = self._allocate(self._capacity), self._allocate(self._capacity)
        self._children: dict[tuple[int, int], int] = {}
        self._ends: dict[int, Tensor] = {}
        self.size = 0

    def _allocate(self, nodes: int) -> Tensor:
        s = self._shape
        return torch.empty(s.layers, nodes, s.heads, s.width, dtype=s.dtype, device=s.device)

    @property
    def full(self) -> bool:
        return self.size >= self._capacity

    def match(self, token_ids: list[int]) -> list[int]:
        """The nodes of the longest cached prefix of `token_ids`."""
        path: list[int] = []
        node = -1
        for token in token_ids:
            child = self._children.get((node, token))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def extend(self, path: list[int], token_ids: list[int]) -> list[int]:
        """New nodes for `token_ids` below the last node of `path`; their keys and values are the caller's to fill."""
        node = path[-1] if path else -1
        nodes = list(range(self.size, self.size + len(token_ids)))
        for token, child in zip(token_ids, nodes, strict=True):
            self._children[node, token] = child
            node = child
        self.size += len(token_ids)
        self._grow()
        return nodes

    def _grow(self) -> None:
        """The step that fills the cache may go beyond its capacity."""
        more = self.size - self.keys_YCKD.shape[1]
        if more > 0:
            self.keys_YCKD = torch.cat([self.keys_YCKD, self._allocate(more)], 1)
            self.values_YCKD = torch.cat([self.values_YCKD, self._allocate(more)], 1)

    def end(self, node: int) -> Tensor | None:
        """The last hidden state [E] at `node`, where a prompt seen before ended; or None."""
        return self._ends.get(node)

    def set_end(self, node: int, hidden_E: Tensor) -> None:
        """Remembers the last hidden state of the prompt that ends at `node`: drawing from it again costs no forward."""
        self._ends[node] = hidden_E


class Rows:
    """Keys and values of the running sequences, dense, row b for sequence b; rows [0, count) are in use."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.lengths: list[int] = []
        self.keys_YBKTD = self._allocate(0, 0)
        self.values_YBKTD = self._allocate(0, 0)

    def _allocate(self, rows: int, tokens: int) -> Tensor:
        # Zeros, not garbage: masked scores are minus infinity, but 0 x NaN of an unused value would still be NaN.
        s = self._shape
        return torch.zeros(s.layers, rows, s.heads, tokens, s.width, dtype=s.dtype, device=s.device)

    @property
    def count(self) -> int:
        return len(self.lengths)

    def add(self, prefix: PrefixCache, path: list[int], copies: int) -> None:
        """Appends `copies` rows, each holding the keys and values of the prefix `path`."""
        first, tokens = self.count, len(path)
        self.lengths += [tokens] * copies
        self.reserve(tokens + 1)
        nodes = torch.from_numpy(np.asarray(path, dtype=np.int64)).to(self._shape.device)
        for rows, cached in ((self.keys_YBKTD, prefix.keys_YCKD), (self.values_YBKTD, prefix.values_YCKD)):
            found_YKPD = cached.index_select(1, nodes).transpose(1, 2)
            rows[:, first : self.count, :, :tokens] = found_YKPD.unsqueeze(1)

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` tokens in every row in use (doubling, so that growth is rare)."""
        _, have_rows, _, have_tokens, _ = self.keys_YBKTD.shape
        if self.count <= have_rows and tokens <= have_tokens:
            return
        rows = have_rows if self.count <= have_rows else max(self.count, 2 * have_rows)
        room = have_tokens if tokens <= have_tokens else max(tokens, 2 * have_tokens, 64)
        for name in ("keys_YBKTD", "values_YBKTD"):
            larger = self._allocate(rows, room)
            larger[:, :have_rows, :, :have_tokens] = getattr(self, name)
            setattr(self, name, larger)

    def remove(self, row: int) -> None:
        """Frees `row` by moving the last row into its place."""
        last, tokens = self.count - 1, self.lengths[-1]
        if row != last:
            for rows in (self.keys_YBKTD, self.values_YBKTD):
                rows[:, row, :, :tokens] = rows[:, last, :, :tokens]
            self.lengths[row] = tokens
        self.lengths.pop()
