"""One forward of the native engine: new prompt tokens and one token of every running sequence, in a single pass.

Knows: the transformers model, the caches. Does not know: requests, sampling.

Shape legend: P new prompt tokens, B running rows, S cached tokens that the new ones look at, H query heads, K key
heads, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollforge.data.transformer import additive_mask, grouped_attention, hidden_states, load_causal_lm
from rollforge.generate.native.cache import PrefixCache, Rows, Shape
from rollforge.generate.native.packed import can_pack, pack_linears
from rollforge.types import BoolArray, IntArray


@dataclass(frozen=True, slots=True)
class Prefill:
    """New prompt tokens of one pass: token_ids [P], positions [P], their nodes [P] in the prefix cache, the cached
    nodes [S] that they look at, and visible [P, S + P]: which of those (cached first, then new) each new token sees."""

    token_ids: IntArray
    positions: IntArray
    nodes: IntArray
    cached: IntArray
    visible: BoolArray


class EngineModel:
    """The policy's weights and the passes over them. Not thread-safe: the engine calls it from one thread at a time."""

    def __init__(self, folder: str, dtype: torch.dtype, device: str) -> None:
        self.device, self.dtype = device, dtype
        self._model = load_causal_lm(folder, dtype, device).requires_grad_(False)
        config = self._model.config.get_text_config()
        heads = config.num_attention_heads
        self.shape = Shape(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            width=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
            device=device,
        )
        self._plain: dict[str, Tensor] = dict(self._model.state_dict(keep_vars=True))
        self._packed = pack_linears(self._model) if can_pack(dtype, device) else {}
        for name in self._packed:
            tied = self._plain[name].data_ptr() == self._model.get_input_embeddings().weight.data_ptr()
            if not tied:
                del self._plain[name]
        self.context_limit: int = config.max_position_embeddings

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes new weights by their Hugging Face names; raises KeyError for a name that the model lacks."""
        for name, tensor in tensors.items():
            if name not in self._plain and name not in self._packed:
                raise KeyError(f"the engine's model has no weight {name!r}")
            if name in self._plain:
                self._plain[name].copy_(tensor)
            if name in self._packed:
                self._packed[name].pack(tensor.to(self.dtype))
        head, embedding = "lm_head.weight", self._model.get_input_embeddings().weight
        if head in self._packed and head not in tensors:  # tied: the trainer publishes the embedding only
            self._packed[head].pack(embedding)

    @torch.inference_mode()
    def forward(self, prefill: Prefill, prefix: PrefixCache, decode: IntArray, rows: Rows) -> Tensor:
        """Last hidden states [P + B, E]; writes the new keys and values to `prefix` and `rows`."""
        new, running = prefill.token_ids.size, decode.size
        if not new + running:
            return torch.empty(0, device=self.device)
        token_ids = self._tensor(np.concatenate([prefill.token_ids, decode]))
        lengths = np.asarray(rows.lengths, dtype=np.int32)
        positions = self._tensor(np.concatenate([prefill.positions, lengths]))
        rows.reserve(int(lengths.max(initial=0)) + 1)
        cached, nodes, at = (self._tensor(a) for a in (prefill.cached, prefill.nodes, lengths))
        prefill_mask = additive_mask(torch.from_numpy(prefill.visible).to(self.device), self.dtype)
        reach = int(lengths.max(initial=0)) + 1
        row_mask = additive_mask(torch.arange(reach, device=self.device) <= at.unsqueeze(1), self.dtype).unsqueeze(1)
        row = torch.arange(running, device=self.device)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            parts = []
            if new:
                keys, values = prefix.keys_YCKD[layer], prefix.values_YCKD[layer]
                keys[nodes], values[nodes] = key[:, :new].transpose(0, 1), value[:, :new].transpose(0, 1)
                seen = torch.cat([cached, nodes])
                k, v = (x.index_select(0, seen).transpose(0, 1) for x in (keys, values))
                parts.append(grouped_attention(query[:, :new], k, v, prefill_mask, scale))
            if running:
                keys, values = rows.keys_YBKTD[layer], rows.values_YBKTD[layer]
                keys[row, :, at], values[row, :, at] = key[:, new:].transpose(0, 1), value[:, new:].transpose(0, 1)
                q = query[:, new:].transpose(0, 1).unsqueeze(2)
                out = grouped_attention(q, keys[:running, :, :reach], values[:running, :, :reach], row_mask, scale)
                parts.append(out.squeeze(2).transpose(0, 1))
            return torch.cat(parts, 1)

        hidden = hidden_states(self._model, token_ids, positions, attend)
        rows.lengths = [length + 1 for length in rows.lengths]
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, E]."""
        out: Tensor = self._model.get_output_embeddings()(hidden)
        return out

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)
