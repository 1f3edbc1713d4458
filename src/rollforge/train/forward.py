"""From token sequences to the log-probabilities of their trained tokens, every shared prefix computed once.

The samples of a micro-batch are folded into a trie (`rollforge.data.trie`): completions of one prompt attend to one
copy of its keys and values, and gradients flow through that copy. Knows: tensors, the model. Does not know: losses,
optimizers.

Shape legend: M nodes of the trie, U nodes that predict a trained token, N trained tokens, V vocabulary, A legal
actions, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollforge.data import trie
from rollforge.data.transformer import Attend, additive_mask, even_size, grouped_attention, hidden_states
from rollforge.tensors import TokenOutputs
from rollforge.train.logprobs import picked_logprobs
from rollforge.types import BoolArray, FloatArray, IntArray, TrainSample


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch: samples, their trie, and for each trained token the node that predicts it and its id.

    `indices` are the places of the samples in the batch. nodes_N and targets_N are in the order of samples, then
    positions.
    """

    indices: Sequence[int]
    samples: Sequence[TrainSample]
    trie: trie.Trie
    nodes_N: IntArray
    targets_N: IntArray

    @property
    def num_tokens(self) -> int:
        return int(self.targets_N.size)

    def gather(self, arrays: Sequence[FloatArray]) -> FloatArray:
        """The trained entries [N] of one array [L] for each sample of the batch."""
        return np.concatenate([arrays[i][s.loss_mask] for i, s in zip(self.indices, self.samples, strict=True)])

    def scatter(self, values_N: FloatArray, arrays: Sequence[FloatArray]) -> None:
        """The way back: writes values [N] to the trained entries of the arrays."""
        counts = [int(s.loss_mask.sum()) for s in self.samples]
        parts = np.split(values_N, np.cumsum(counts)[:-1])
        for i, sample, part in zip(self.indices, self.samples, parts, strict=True):
            arrays[i][sample.loss_mask] = part

    @property
    def sequence_ids_N(self) -> IntArray:
        """Which sample of the micro-batch each trained token belongs to."""
        return np.repeat(np.arange(len(self.samples), dtype=np.int32), [int(s.loss_mask.sum()) for s in self.samples])

    def legal_ids(self) -> tuple[IntArray, BoolArray]:
        """([N, A] token ids padded with 0, [N, A] which of them count)."""
        rows: list[tuple[int, ...]] = []
        for sample in self.samples:
            legal = dict(sample.legal_ids)
            rows += [legal.get(at, ()) for at in np.flatnonzero(sample.loss_mask).tolist()]
        width = max((len(row) for row in rows), default=0)
        ids = np.zeros((len(rows), width), dtype=np.int32)
        mask = np.zeros((len(rows), width), dtype=np.bool_)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = row
            mask[at, : len(row)] = True
        return ids, mask


def micro_batches(samples: Sequence[TrainSample], max_tokens: int) -> list[Micro]:
    """Splits samples into micro-batches of at most `max_tokens` distinct tokens each (a longer sample gets its own).

    Samples without a trained token are left out. The last trained token of a sequence, and what follows it, predicts
    nothing that is asked for and is not computed. Raises ValueError for a trained first token.
    """
    places = [i for i, sample in enumerate(samples) if sample.loss_mask.any()]
    contexts = [_context(samples[i]) for i in places]
    return [
        _micro([places[k] for k in part], samples, [contexts[k] for k in part])
        for part in trie.split(contexts, max_tokens)
    ]


def _context(sample: TrainSample) -> IntArray:
    if sample.loss_mask[0]:
        raise ValueError(f"{sample.rollout_id}: the first token of a sequence has nothing to be predicted from")
    return sample.token_ids[: np.flatnonzero(sample.loss_mask)[-1]]


def _micro(indices: list[int], batch: Sequence[TrainSample], contexts: list[IntArray]) -> Micro:
    folded = trie.build(contexts)
    folded = folded.padded(even_size(folded.token_ids.size))
    samples = [batch[i] for i in indices]
    trained = [np.flatnonzero(sample.loss_mask) for sample in samples]
    nodes = [path[at - 1] for path, at in zip(folded.paths, trained, strict=True)]
    targets = [sample.token_ids[at] for sample, at in zip(samples, trained, strict=True)]
    return Micro(indices, samples, folded, np.concatenate(nodes), np.concatenate(targets))


def token_outputs(
    model: PreTrainedModel, micro: Micro, temperature: float, entropy_gradient: bool, embedded: Tensor | None = None
) -> TokenOutputs:
    """Log-probabilities [N] (with gradient) of the trained tokens under logits / `temperature`, as they were sampled.

    Temperature 0 (greedy) is taken as 1, as the engine does. Entropy [N] is over the whole vocabulary, with gradient
    only if asked. `embedded` [M, E] replaces the embedding lookup.
    """
    device = model.device
    ids = _long(micro.trie.token_ids, device)
    hidden = hidden_states(
        model,
        ids if embedded is None else embedded,
        _long(micro.trie.depths, device),
        tree_attention(micro.trie, model),
    )
    nodes_U, row_N = np.unique(micro.nodes_N, return_inverse=True)
    legal_ids, legal_mask = micro.legal_ids()
    tokens = np.concatenate([micro.targets_N, legal_ids.ravel()])
    rows = np.concatenate([row_N, row_N.repeat(legal_ids.shape[1])])
    padded_U = np.pad(nodes_U, (0, even_size(nodes_U.size) - nodes_U.size))  # rows of node 0 that nobody picks from
    logprobs, entropy_U = picked_logprobs(
        hidden[_long(padded_U, device)],
        cast(Tensor, model.get_output_embeddings().weight),
        temperature or 1.0,
        _long(rows, device),
        _long(tokens, device),
        entropy_gradient,
    )
    return TokenOutputs(
        logprobs_N=logprobs[: micro.num_tokens],
        entropy_N=entropy_U[_long(row_N, device)],
        legal_logprobs_NA=logprobs[micro.num_tokens :].view(legal_ids.shape),
        legal_mask_NA=torch.from_numpy(legal_mask).to(device),
    )


def tree_attention(folded: trie.Trie, model: PreTrainedModel) -> Attend:
    """Attention in which each node sees its ancestors and itself; separate trees are computed separately, each padded
    to an even size.
    """
    visible = [folded.ancestor_mask(tree) for tree in folded.trees()]
    masks = [additive_mask(torch.from_numpy(_padded(v)).to(model.device), model.dtype) for v in visible]
    sizes = [len(v) for v in visible]

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # `split`, for the backward of a slice would fill a tensor of the whole for each tree.
        trees = zip(*(x.split(sizes, 1) for x in (query, key, value)), masks, strict=True)
        return torch.cat([_attention_of_tree(q, k, v, mask, scale) for q, k, v, mask in trees], 1)

    return attend


def _attention_of_tree(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    nodes = query.shape[1]
    q, k, v = (nn.functional.pad(x, (0, 0, 0, len(mask) - nodes)) for x in (query, key, value))
    return grouped_attention(q, k, v, mask, scale)[:, :nodes]


def _padded(visible: BoolArray) -> BoolArray:
    """With rows that see only the root, for a row that sees nothing has no softmax, and columns that nobody sees."""
    nodes = len(visible)
    padded = np.pad(visible, (0, even_size(nodes) - nodes))
    padded[nodes:, 0] = True
    return padded


def _long(array: npt.NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.int64)).to(device)
