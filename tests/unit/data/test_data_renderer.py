"""The renderer on the tiny model, on a model the `renderers` package names, and on templates that misbehave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rollforge.config import UserError
from rollforge.data.renderer import Renderer
from rollforge.types import Message, Prompt

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> Renderer:
    return Renderer(tiny_model)


def characters(
    chat_template: str | None, special: tuple[str, ...] = ("<|end|>",), tags: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A character tokenizer with these added tokens; the last special one is its end."""
    vocabulary = {text: id for id, text in enumerate((*special, *tags, "\n", *map(chr, range(32, 127))))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[-1], chat_template=chat_template)


def test_raw_text_is_encoded_without_special_tokens_and_grows_at_its_end(renderer: Renderer) -> None:
    prompt_ids = renderer.prompt_ids(Prompt("p", text="Hand 16:"))
    assert prompt_ids.dtype == np.int32
    assert prompt_ids.size == 8
    following = renderer.next_ids(prompt_ids, renderer.prompt_ids(Prompt("p", text=" hit\n")), "Hand 18:", chat=False)
    assert renderer.decode(following) == "Hand 16: hit\nHand 18:"


def test_messages_open_with_the_assistants_header(renderer: Renderer, tiny_model: Path) -> None:
    prompt = Prompt("p", messages=(Message("system", "be brief"), Message("user", "hi")))
    text = AutoTokenizer.from_pretrained(tiny_model).decode(renderer.prompt_ids(prompt))
    assert text == "<|bos|>system\nbe brief<|eos|>\n<|bos|>user\nhi<|eos|>\n<|bos|>assistant\n"


def test_a_conversation_rendered_turn_by_turn_equals_the_whole_one(renderer: Renderer) -> None:
    messages = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    opened = renderer.prompt_ids(Prompt("p", messages=messages[:1]))
    sampled = np.append(renderer.prompt_ids(Prompt("p", text="b")), renderer.stop_ids[0]).astype(np.int32)
    grown = renderer.next_ids(opened, sampled, "c", chat=True)
    np.testing.assert_array_equal(grown, renderer.prompt_ids(Prompt("p", messages=messages)))


def test_decode_leaves_special_tokens_out_and_spaces_in(renderer: Renderer) -> None:
    ids = renderer.prompt_ids(Prompt("p", text=" hit , stand\n")).tolist()
    assert renderer.decode([*ids, *renderer.stop_ids]) == " hit , stand\n"


def test_actions_begin_with_a_space_after_raw_text_only(renderer: Renderer) -> None:
    def first(text: str) -> int:
        return int(renderer.prompt_ids(Prompt("p", text=text))[0])

    assert renderer.first_token_ids(("hit", "stand"), raw=False) == (first("h"), first("s"))
    assert renderer.first_token_ids(("hit", "stand"), raw=True) == (first(" "),)
    assert renderer.first_token_ids(("\nhit",), raw=True) == (first("\n"),)
    with pytest.raises(ValueError, match="not empty"):
        renderer.first_token_ids(("hit", ""), raw=True)


def test_a_prompt_of_both_kinds_is_refused(renderer: Renderer) -> None:
    with pytest.raises(UserError, match="both text and messages"):
        renderer.prompt_ids(Prompt("p7", text="a", messages=(Message("user", "b"),)))


def test_messages_without_a_chat_template_are_refused_and_raw_text_is_not() -> None:
    renderer = Renderer(characters(chat_template=None))
    assert renderer.stop_ids == (0,)
    assert renderer.decode(renderer.prompt_ids(Prompt("p", text="ab"))) == "ab"
    with pytest.raises(UserError, match="no chat template"):
        renderer.prompt_ids(Prompt("p", messages=(Message("user", "a"),)))
    with pytest.raises(UserError, match="no chat template"):
        renderer.next_ids(np.zeros(1, np.int32), np.zeros(1, np.int32), "a", chat=True)


def test_a_template_without_an_end_of_turn_is_refused_at_the_second_turn_only() -> None:
    plain = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    renderer = Renderer(characters(plain))
    opened = renderer.prompt_ids(Prompt("p", messages=(Message("user", "a"),)))
    assert renderer.decode(opened) == "user: a\n"
    with pytest.raises(UserError, match="no special token"):
        renderer.next_ids(opened, opened, "b", chat=True)


def test_a_template_that_rewrites_earlier_turns_still_gives_the_right_glue() -> None:
    """Reasoning models show the last answer's thoughts and hide older ones: the rendered prefix changes every turn."""
    template = (
        "{% for message in messages %}"
        "{% if message['role'] == 'assistant' and loop.last %}[thoughts]{% endif %}"
        "<{{ message['role'] }}>{{ message['content'] }}<|end|>;{% endfor %}"
        "{% if add_generation_prompt %}<go>{% endif %}"
    )
    renderer = Renderer(characters(template))
    opened = renderer.prompt_ids(Prompt("p", messages=(Message("user", "a"),)))
    sampled = np.append(renderer.prompt_ids(Prompt("p", text="[x]b")), 0).astype(np.int32)
    grown = renderer.next_ids(opened, sampled, "c", chat=True)
    np.testing.assert_array_equal(grown[: opened.size + sampled.size], [*opened, *sampled])
    assert renderer.decode(grown[opened.size + sampled.size :]) == ";<user>c;<go>"


@pytest.mark.parametrize("ended", [True, False])
def test_a_model_the_renderers_package_names_keeps_what_was_sampled(ended: bool) -> None:
    """The package writes a tool's answer as this model's family does; the stand-in template here does not know how."""
    stand_in = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
    tokenizer = characters(stand_in, QWEN_SPECIAL, QWEN_TAGS)
    tokenizer.name_or_path = "Qwen/Qwen3-4B-Instruct-2507"
    renderer = Renderer(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert set(renderer.stop_ids) == {end, tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    opened = renderer.prompt_ids(Prompt("p", messages=(Message("user", "hi"),)))
    assert tokenizer.decode(opened) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    sampled = np.array([*tokenizer.encode("yes", add_special_tokens=False), *([end] * ended)], dtype=np.int32)
    grown = renderer.next_ids(opened, sampled, "ok", chat=True, role="tool")
    np.testing.assert_array_equal(grown[: opened.size + sampled.size], [*opened, *sampled])
    tool = "<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n"
    expected = ("" if ended else "<|im_end|>") + f"\n{tool}<|im_start|>assistant\n"
    assert tokenizer.decode(grown[opened.size + sampled.size :]) == expected
