"""Prompts and messages to tokens, turn by turn, without ever re-tokenising what the model sampled.

Knows: a model's tokenizer, its chat template, and which ids end a turn. Does not know: engines, environments, masks.

A conversation grows at its end only: the next prompt is the last prompt, the completion exactly as sampled, and then
what the template puts there (the newline after the end of the turn, the new message, the assistant's header). The
`renderers` package knows this glue for the models it names; for any other template it is taken from the template
itself, by rendering a stand-in conversation and keeping what follows its end of turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollforge.config import UserError
from rollforge.data.models import end_ids, no_chat_template
from rollforge.types import IntArray, Prompt

if TYPE_CHECKING:
    from renderers import Renderer as TurnRenderer
    from transformers import PreTrainedTokenizerBase

_STAND_IN: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]


ENCODED_TEXTS = 16_384
"""Texts whose token ids are remembered."""


class Renderer:
    """Message and text to token ids for one model; made from its folder, or from a tokenizer at hand."""

    def __init__(self, source: PreTrainedTokenizerBase | Path | str) -> None:
        self._tokenizer: Any = _load(source) if isinstance(source, (str, Path)) else source
        self._folder = Path(self._tokenizer.name_or_path)
        # All rollouts of a group encode the same text, and short observations come back all the time.
        self._encode = lru_cache(ENCODED_TEXTS)(self._encode_anew)
        self._turns = _turn_renderer(self._tokenizer, self._folder)
        self._turn_end, self._turn_ends = self._find_turn_end() if self._tokenizer.chat_template else (None, 0)
        own = [] if self._turn_end is None else [self._turn_end]
        self.stop_ids = tuple(sorted({*end_ids(self._folder), *self._turns.get_stop_token_ids(), *own}))
        """All ids that end a completion: the tokenizer's, the model's own defaults', and the template's end of turn."""

    def prompt_ids(self, prompt: Prompt) -> IntArray:
        """The opening context [L] int32: messages and the assistant's header, or the raw text without special tokens.

        Raises UserError when the prompt has messages and the model has no chat template, or has both messages and text.
        """
        if not prompt.messages:
            return _ids(self._encode(prompt.text))
        if prompt.text:
            raise UserError(f"Prompt {prompt.id!r} has both text and messages: give the one or the other.")
        self._require_template()
        messages: list[Any] = [{"role": message.role, "content": message.content} for message in prompt.messages]
        return _ids(self._turns.render_ids(messages, add_generation_prompt=True))

    def next_ids(
        self,
        previous_prompt_ids: IntArray,
        completion_ids: IntArray,
        observation_text: str,
        chat: bool,
        role: Literal["user", "tool"] = "user",
    ) -> IntArray:
        """The full prompt of the next turn, [L] int32: previous prompt and completion, unchanged, and what follows.

        In a chat, a completion that was cut off before its end of turn gets one: it belongs to the glue, no one sampled
        it. Without chat the observation's text follows at once. Raises UserError when the chat template has no special
        token that ends an assistant's turn.
        """
        before = [*previous_prompt_ids.tolist(), *completion_ids.tolist()]
        if not chat:
            return _ids([*before, *self._encode(observation_text)])
        self._require_template()
        if self._turn_end is None:
            raise UserError(
                f"The chat template of {self._folder} ends an assistant's turn with no special token, so a "
                "conversation cannot go on from the sampled tokens. Use raw text prompts with this model, or another "
                "template."
            )
        message: Any = {"role": role, "content": observation_text}
        bridged = self._turns.bridge_to_next_turn(previous_prompt_ids.tolist(), completion_ids.tolist(), [message])
        if bridged is not None and bridged.token_ids[: len(before)] == before:
            return _ids(bridged.token_ids)
        ended = completion_ids.size > 0 and int(completion_ids[-1]) in self.stop_ids
        return _ids([*before, *([] if ended else [self._turn_end]), *self._glue(message)])

    def first_token_ids(self, texts: Sequence[str], raw: bool) -> tuple[int, ...]:
        """The ids with which these actions may begin, each once. After raw text an action follows a space (` hit`).

        Raises ValueError for an empty action.
        """
        if "" in texts:
            raise ValueError("a legal action is a text that is not empty")
        spaced = (" " + text if raw and not text[0].isspace() else text for text in texts)
        return tuple(dict.fromkeys(self._encode(text)[0] for text in spaced))

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text of token ids, special tokens left out, spaces as they are."""
        text: str = self._tokenizer.decode(
            [int(id) for id in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def vocabulary(self) -> list[str]:
        """The text of every token id, in their order."""
        return [self.decode([id]) for id in range(len(self._tokenizer))]

    def _encode_anew(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _template(self, messages: list[Any], header: bool) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=header, return_dict=False)
        return ids

    def _find_turn_end(self) -> tuple[int | None, int]:
        """The last special id of a conversation whose last word is the assistant's, and how often it stands there."""
        special = {id for id, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        ids = self._template(_STAND_IN, header=False)
        end = next((id for id in reversed(ids) if id in special), None)
        return end, sum(id == end for id in ids)

    def _glue(self, message: Any) -> list[int]:
        """What the template puts after an assistant's end of turn: the rest of its line, the message, a new header."""
        ids = self._template([*_STAND_IN, message], header=True)
        at = [place for place, id in enumerate(ids) if id == self._turn_end][self._turn_ends - 1]
        return ids[at + 1 :]

    def _require_template(self) -> None:
        if not self._tokenizer.chat_template:
            raise no_chat_template(self._folder)


def _load(folder: Path | str) -> PreTrainedTokenizerBase:
    if (Path(folder) / "tokenizer.json").is_file():  # all there is to know; and AutoTokenizer imports torch, 200 MB
        from transformers import PreTrainedTokenizerFast

        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        return tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _turn_renderer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> TurnRenderer:
    """The package's renderer for the model if it names it (by hub name, also when loaded from the hub's cache)."""
    from renderers import DefaultRendererConfig, config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    cached = [part.removeprefix("models--").replace("--", "/") for part in folder.parts if part.startswith("models--")]
    name = MODEL_RENDERER_MAP.get(cached[-1] if cached else tokenizer.name_or_path)
    return create_renderer(tokenizer, config_from_name(name) if name else DefaultRendererConfig())


def _ids(ids: Sequence[int]) -> IntArray:
    return np.array(ids, dtype=np.int32)
