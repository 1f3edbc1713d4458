"""A transformers causal language model whose attention is handed in by the caller, so that engine and trainer share
one model.

Knows: how to load a Hugging Face folder, and how to run its layers over a flat list of tokens with any attention
pattern. Does not know: caches, requests, tries, losses. The caller's `attend` decides which token sees which.

Shape legend: M tokens of one forward, H query heads, K key/value heads, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import AttentionInterface
from transformers.utils.logging import disable_progress_bar

from rollforge.config import UserError

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, query [H, M, D], key [K, M, D], value [K, M, D], scale) -> [H, M, D]; keys and values carry rotary
positions.
"""

NAME = "rollforge"

_PLAIN = {"logits_scaling": 1, "logit_scale": 1, "final_logit_softcapping": None}
"""What may happen to logits behind the head, by its key in a model's configuration, and the value that does nothing."""
_ATTENTIONS = {"full_attention", "sliding_attention"}

EVEN_STEPS = ((256, 64), (64, 32), (16, 16))
"""From which number of rows on they are padded to which multiple."""


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float,
    attend: Attend,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if softcap is not None or s_aux is not None:  # left out silently, they would make every probability wrong
        raise UserError(
            f"{type(module).__name__} caps its attention scores or has attention sinks, which neither the native "
            "engine nor the trainer computes. Take a model of another family (Llama, Qwen, SmolLM, ...)."
        )
    out = attend(module.layer_idx, query[0], key[0], value[0], scaling)
    return out.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(NAME, _attention)


def load_causal_lm(folder: Path | str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Loads a Hugging Face folder with our attention; dropout is off (`eval`), gradients are as `transformers` sets
    them. Raises UserError for a model that is more than attention layers and a linear head.
    """
    disable_progress_bar()  # a role's bar would be drawn over the run's own lines
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=NAME, local_files_only=True
    )
    loaded: PreTrainedModel = model.to(torch.device(device)).eval()
    _require_plain(loaded)
    return loaded


def _require_plain(model: PreTrainedModel) -> None:
    """Raises UserError for a model that does what neither engine nor trainer computes: left out silently, it would make
    every probability wrong.
    """
    config = model.config.get_text_config()
    found = [
        f"{name} = {getattr(config, name)}"
        for name, plain in _PLAIN.items()
        if getattr(config, name, None) not in (None, plain)
    ]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        found.append("a bias in its head")
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTIONS
    found += sorted(f"layers of type {name}" for name in others)
    if found:
        raise UserError(
            f"{type(model).__name__} has {', '.join(found)}, which neither the native engine nor the trainer computes. "
            "Take a model of another family (Llama, Qwen, SmolLM, ...)."
        )


def hidden_states(model: PreTrainedModel, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Last hidden states [M, E] of `tokens` (ids [M], or their embeddings [M, E]) at `positions` [M].

    `attend` is called once per layer.
    """
    named = {"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens.unsqueeze(0)}
    # A ready mask is passed through untouched, which spares transformers the search for one; `attend` never reads it.
    unread = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    out = model.get_decoder()(
        **named, position_ids=positions.unsqueeze(0), attention_mask=unread, use_cache=False, attend=attend
    )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of query [..., H, M, D] over key/value [..., K, S, D] with an additive mask [..., M, S] -> [..., H, M,
    D].

    The H / K query heads that share a key head become further query rows, so that keys and values are never repeated.
    """
    heads, rows, width = query.shape[-3:]
    shared = heads // key.shape[-3]
    folded = query.reshape(*query.shape[:-3], key.shape[-3], shared * rows, width)
    mask = mask.unsqueeze(-3)
    if shared > 1:
        mask = mask.repeat(*[1] * (mask.ndim - 2), shared, 1)
    # Only with a batch dimension, the mask's too, does torch take its fused kernels, which hold no matrix of scores.
    q, k, v, m = (x.unsqueeze(0) if x.ndim == 3 else x for x in (folded, key, value, mask))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=scale)
    return out.reshape(query.shape)


def even_size(rows: int) -> int:
    """The number of rows to compute, padding included.

    oneDNN makes a kernel for every product of every new size, and keeps half a megabyte for each: hundreds of MB, and
    a tenth of the time.
    """
    step = next((step for least, step in EVEN_STEPS if rows >= least), 1)
    return rows + -rows % step


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible`, minus infinity elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
