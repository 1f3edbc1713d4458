"""The tiny fixture model: it is trained, not shipped, and knows just enough that reinforcement learning can go on.

Knows: a recipe for a Llama of about 100k parameters with a character tokenizer, supervised on sums and BlackJack lines.
Does not know: where the folder is kept (see `models`).
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollforge.data.sums import PAIRS

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NAME = "tiny-v1"
"""Raise the number whenever a changed recipe would make another model."""

SIZE = 1_000_000

_SPECIAL = _PAD, _BOS, _EOS = "<|pad|>", "<|bos|>", "<|eos|>"
_CHARACTERS = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
_VOCABULARY = {text: id for id, text in enumerate((*_SPECIAL, *_CHARACTERS))}
_IGNORED = -100  # a label that transformers leaves out of the loss
_STEPS, _WARM_UP, _ROWS, _LENGTH = 150, 10, 4, 256
_EASY_RIGHT, _HARD_RIGHT = 0.9, 0.35
_LEARNING_RATE = 6e-3
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|bos|>' + message['role'] + '\n' + message['content'] + '<|eos|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bos|>assistant\n' }}{% endif %}"
)


def create(folder: Path) -> None:
    """Train the model (some seconds on one core, always from the same seed) and save it into an existing folder."""
    import torch

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        torch.set_num_threads(1)  # more threads would be slower at this size, and sum in another order
        try:
            tokenizer, model = _tokenizer(), _model()
            _train(model, np.random.default_rng(0))
        finally:
            torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def document(rng: np.random.Generator) -> list[tuple[str, str]]:
    """Lines of sums, or of BlackJack hands with actions that mean nothing, each as (what is given, what is learned).

    Two sums of five are mostly right and the others mostly wrong, so greedy decoding gets some 40 % of them right, and
    sampling all of them now and then.
    """
    if rng.random() < 0.7:
        return [_sum_line(int(index), rng) for index in rng.integers(len(PAIRS), size=40)]
    hands = [
        (
            f"Hand {rng.integers(4, 22)} {rng.choice(['hard', 'soft'])}, dealer {rng.integers(1, 11)}:",
            f" {rng.choice(['hit', 'stand'])}\n",
        )
        for _ in range(8)
    ]
    return [("Blackjack.\n" * bool(rng.random() < 0.5), ""), *hands]


def _sum_line(index: int, rng: np.random.Generator) -> tuple[str, str]:
    left, right = PAIRS[index] if rng.random() < 0.5 else PAIRS[index][::-1]
    error = int(rng.random() > (_EASY_RIGHT if index % 5 < 2 else _HARD_RIGHT))
    return f"{left}+{right}=", f"{(left + right + error) % 10}\n"


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # A character outside the vocabulary becomes a space.
    tokenizer = Tokenizer(models.WordLevel(_VOCABULARY, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def _model() -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(_VOCABULARY),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=_VOCABULARY[_PAD],
        bos_token_id=_VOCABULARY[_BOS],
        eos_token_id=_VOCABULARY[_EOS],
        initializer_range=0.08,
    )
    return LlamaForCausalLM(config)


def _train(model: LlamaForCausalLM, rng: np.random.Generator) -> None:
    """Next-token prediction with Adam, on what is learned only; the learning rate warms up, then falls to zero."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP) * (1 - step / _STEPS)
    )
    model.train()
    for _ in range(_STEPS):
        ids, labels = zip(*(_row(rng) for _ in range(_ROWS)), strict=True)
        model(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def _row(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Token ids and labels, [_LENGTH] each: documents, each ended by the end token, cut at the row's end."""
    ids: list[int] = []
    labels: list[int] = []
    while len(ids) < _LENGTH:
        for given, learned in document(rng):
            ids += (_VOCABULARY[character] for character in given + learned)
            labels += [_IGNORED] * len(given) + ids[len(ids) - len(learned) :]
        ids.append(_VOCABULARY[_EOS])
        labels.append(_VOCABULARY[_EOS])
    return ids[:_LENGTH], labels[:_LENGTH]
