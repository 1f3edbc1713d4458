"""One forward of the native engine: new prompt tokens and one token of every running sequence, in a single pass.

Knows: the transformers model, the caches. Does not know: requests, sampling.

Shape legend: P new prompt tokens, B running rows, S cached tokens that the new ones look at, H query heads, K key
heads, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollforge.data.transformer import additive_mask, even_size, grouped_attention, hidden_states, load_causal_lm
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
        config: Any = self._model.config.get_text_config()
        heads = config.num_attention_heads
        self.shape = Shape(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            width=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
            device=device,
        )
        self._needed = {name: weight.shape for name, weight in self._model.named_parameters()}
        plain: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        embedding: Any = self._model.get_input_embeddings().weight
        self._packed = pack_linears(self._model) if can_pack(dtype, device) else {}
        # A tied head is published as the embedding; its packed copy follows.
        self._tied = [(packed, embedding) for name, packed in self._packed.items() if plain[name] is embedding]
        self._plain = {name: tensor for name, tensor in plain.items() if name not in self._packed}
        if self._packed:  # these few are views of the weight file as loaded, and would keep the whole of it mapped
            for tensor in self._plain.values():
                tensor.data = tensor.data.clone()
        # Within a sliding window its attention is the full attention that is computed here.
        window = getattr(config, "sliding_window", None) or config.max_position_embeddings
        self.context_limit: int = min(config.max_position_embeddings, window)
        self.vocabulary: int = len(embedding)

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes new weights, which have passed `check`."""
        for name, tensor in tensors.items():
            if name in self._packed:
                self._packed[name].pack(tensor.to(self.dtype))
            else:
                self._plain[name].copy_(tensor)
        for packed, embedding in self._tied:
            packed.pack(embedding)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError unless these are this model's weights: by their Hugging Face names, tied ones once or under
        each name, in the right shapes.
        """
        unknown = sorted(set(tensors) - set(self._plain) - set(self._packed))
        missing = sorted(set(self._needed) - set(tensors))
        shapes = [name for name, shape in self._needed.items() if name in tensors and tensors[name].shape != shape]
        if unknown or missing or shapes:
            raise ValueError(
                f"These are not the weights of the engine's model: unknown {unknown}, missing {missing}, of another "
                f"shape {shapes}. Publish a model of the same architecture."
            )

    @torch.inference_mode()
    def forward(self, prefill: Prefill, prefix: PrefixCache, decode: IntArray, rows: Rows) -> Tensor:
        """Last hidden states [P + B, E]; writes the new keys and values to `prefix` and `rows`."""
        new, running = prefill.token_ids.size, decode.size
        if not new + running:
            return torch.empty(0, device=self.device)
        lengths = np.asarray(rows.lengths, dtype=np.int32)
        padding = np.zeros(even_size(new + running) - new - running, dtype=np.int32)
        token_ids = self._tensor(np.concatenate([prefill.token_ids, decode, padding]))
        positions = self._tensor(np.concatenate([prefill.positions, lengths, padding]))
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
                q, k, v = (x[:, new : new + running].transpose(0, 1) for x in (query, key, value))
                keys[row, :, at], values[row, :, at] = k, v
                q = q.unsqueeze(2)
                out = grouped_attention(q, keys[:running, :, :reach], values[:running, :, :reach], row_mask, scale)
                parts.append(out.squeeze(2).transpose(0, 1))
            if padding.size:
                parts.append(query.new_zeros(query.shape[0], padding.size, query.shape[2]))
            return torch.cat(parts, 1)

        hidden = hidden_states(self._model, token_ids, positions, attend)
        rows.lengths = [length + 1 for length in rows.lengths]
        return hidden[: new + running]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, E]."""
        head: Any = self._model.get_output_embeddings()
        rows = len(hidden)
        out: Tensor = head(torch.nn.functional.pad(hidden, (0, 0, 0, even_size(rows) - rows)))
        return out[:rows]

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)
