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
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollforge.data import trie
from rollforge.data.transformer import Attend, additive_mask, grouped_attention, hidden_states
from rollforge.tensors import TokenOutputs
from rollforge.types import BoolArray, FloatArray, IntArray, TrainSample


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch: samples, their trie, and for each trained token the node that predicts it and its id.

    nodes_N and targets_N are in the order of samples, then positions.
    """

    samples: Sequence[TrainSample]
    trie: trie.Trie
    nodes_N: IntArray
    targets_N: IntArray

    @property
    def num_tokens(self) -> int:
        return int(self.targets_N.size)

    def gather(self, arrays: Sequence[FloatArray]) -> FloatArray:
        """The trained entries of per-sample arrays [L] -> [N]."""
        return np.concatenate([a[s.loss_mask] for a, s in zip(arrays, self.samples, strict=True)])

    @property
    def sequence_ids_N(self) -> IntArray:
        """Which sample of the micro-batch each trained token belongs to."""
        return np.repeat(np.arange(len(self.samples), dtype=np.int32), [int(s.loss_mask.sum()) for s in self.samples])

    def legal_ids(self) -> tuple[IntArray, BoolArray]:
        """([N, A] token ids padded with 0, [N, A] which of them count)."""
        rows = [dict(s.legal_ids).get(int(at), ()) for s in self.samples for at in np.flatnonzero(s.loss_mask)]
        width = max((len(row) for row in rows), default=0)
        ids = np.zeros((len(rows), width), dtype=np.int32)
        mask = np.zeros((len(rows), width), dtype=np.bool_)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = row
            mask[at, : len(row)] = True
        return ids, mask


def micro_batches(samples: Sequence[TrainSample], max_tokens: int) -> list[Micro]:
    """Splits samples into micro-batches of at most `max_tokens` distinct tokens each (a longer sample gets its own).

    Samples without a trained token are left out. The last token of a sequence predicts nothing and is not computed.
    """
    trained = [s for s in samples if s.loss_mask.any()]
    contexts = [s.token_ids[:-1] for s in trained]
    return [
        _micro([trained[i] for i in part], [contexts[i] for i in part]) for part in trie.split(contexts, max_tokens)
    ]


def _micro(samples: list[TrainSample], contexts: list[IntArray]) -> Micro:
    folded = trie.build(contexts)
    nodes, targets = [], []
    for sample, path in zip(samples, folded.paths, strict=True):
        at = np.flatnonzero(sample.loss_mask)
        if at[0] == 0:
            raise ValueError(f"{sample.rollout_id}: the first token of a sequence has nothing to be predicted from")
        nodes.append(path[at - 1])
        targets.append(sample.token_ids[at])
    return Micro(samples, folded, np.concatenate(nodes), np.concatenate(targets))


def token_outputs(
    model: PreTrainedModel, micro: Micro, temperature: float, entropy_gradient: bool, embedded: Tensor | None = None
) -> TokenOutputs:
    """Log-probabilities [N] (with gradient) of the trained tokens under logits / `temperature`, as they were sampled.

    Entropy [N] is over the whole vocabulary, with gradient only if asked. `embedded` [M, E] replaces the embedding
    lookup.
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
    logits_UV = model.get_output_embeddings()(hidden[_long(nodes_U, device)]).float() / temperature
    at_N, targets_N = _long(row_N, device), _long(micro.targets_N, device)
    total_U = logits_UV.logsumexp(-1)
    legal_ids, legal_mask = micro.legal_ids()
    legal_NA = logits_UV[at_N.unsqueeze(1), _long(legal_ids, device)] - total_U[at_N].unsqueeze(1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_U = total_U - ((logits_UV - total_U.unsqueeze(1)).exp() * logits_UV).sum(-1)
    return TokenOutputs(
        logprobs_N=logits_UV[at_N, targets_N] - total_U[at_N],
        entropy_N=entropy_U[at_N],
        legal_logprobs_NA=legal_NA,
        legal_mask_NA=torch.from_numpy(legal_mask).to(device),
    )


def tree_attention(folded: trie.Trie, model: PreTrainedModel) -> Attend:
    """Attention in which each node sees its ancestors and itself; separate trees are computed separately."""
    starts = np.append(np.flatnonzero(folded.parents < 0), folded.parents.size)
    spans = [slice(int(a), int(b)) for a, b in pairwise(starts)]
    visible = folded.ancestor_mask()
    masks = [additive_mask(torch.from_numpy(visible[s, s]).to(model.device), model.dtype) for s in spans]

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        parts = [
            grouped_attention(query[:, s], key[:, s], value[:, s], mask, scale)
            for s, mask in zip(spans, masks, strict=True)
        ]
        return torch.cat(parts, 1)

    return attend


def _long(array: npt.NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.int64)).to(device)
