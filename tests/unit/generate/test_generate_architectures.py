"""Models of other families: biases in packed layers, sliding windows, and attention that is not computed here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import Bench, Oracle, random_ids
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rollforge.config import UserError
from rollforge.types import Sampling

SIZE = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
}


def save(model: Any, tokenizer: Path, folder: Path) -> Path:
    """With random biases: a fresh model's are zero, and would hide their loss."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_with_biases(tiny_model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    folder = save(Qwen2ForCausalLM(Qwen2Config(**SIZE)), tiny_model, tmp_path)
    bench, prompt = Bench(folder, dtype), random_ids(20)
    (first,) = bench.run(prompt, Sampling(max_tokens=6))
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    expected = Oracle(folder).logprobs(prompt, first.token_ids).numpy()[np.arange(6), first.token_ids]
    np.testing.assert_allclose(first.logprobs, expected, atol=tolerance)
    zero = {name: tensor * (0 if name.endswith("bias") else 1) for name, tensor in bench.weights.items()}
    asked = Sampling(max_tokens=1, logprob_ids=(int(first.token_ids[0]),))
    bench.engine.load(zero, 1)
    (second,) = bench.run(prompt, asked)
    assert second.extra_logprobs is not None
    assert abs(float(second.extra_logprobs[0, 0]) - float(first.logprobs[0])) > tolerance, "biases load as well"


def test_a_sliding_window_bounds_the_context(tiny_model: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    folder = save(MistralForCausalLM(MistralConfig(**SIZE, sliding_window=32)), tiny_model, tmp_path)
    bench, prompt = Bench(folder), random_ids(20)
    (completion,) = bench.run(prompt, Sampling(max_tokens=100))
    assert len(completion.token_ids) == 12 and completion.finish_reason == "length"
    Oracle(folder).agrees(prompt, completion)
    with pytest.raises(UserError, match="32 tokens and the model reads 32"):
        bench.ask(random_ids(32))


def test_capped_attention_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = save(Gemma2ForCausalLM(Gemma2Config(**SIZE, final_logit_softcapping=None)), tiny_model, tmp_path)
    with pytest.raises(UserError, match="caps its attention scores"):
        Bench(folder).run(random_ids(5), Sampling(max_tokens=1))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: GraniteForCausalLM(GraniteConfig(**SIZE, logits_scaling=8.0)), r"logits_scaling = 8\.0"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZE)), r"final_logit_softcapping = 30\.0"),
        (lambda: PhiForCausalLM(PhiConfig(**SIZE)), "a bias in its head"),
        (lambda: Lfm2ForCausalLM(Lfm2Config(**SIZE, layer_types=["conv", "full_attention"])), "layers of type conv"),
    ],
    ids=["scaled logits", "capped logits", "head with a bias", "convolutions"],
)
def test_what_would_be_left_out_is_refused(
    tiny_model: Path, tmp_path: Path, make: Callable[[], PreTrainedModel], named: str
) -> None:
    """Engine and trainer would agree on wrong probabilities, and nothing would show it."""
    folder = save(make(), tiny_model, tmp_path)
    with pytest.raises(UserError, match=named):
        Bench(folder)


def test_scales_that_do_nothing_are_accepted(tiny_model: Path, tmp_path: Path) -> None:
    folder = save(GraniteForCausalLM(GraniteConfig(**SIZE, logits_scaling=1.0)), tiny_model, tmp_path)
    bench, prompt = Bench(folder), random_ids(9)
    (completion,) = bench.run(prompt, Sampling(max_tokens=4))
    assert completion.token_ids.size == 4
    Oracle(folder).agrees(prompt, completion)
