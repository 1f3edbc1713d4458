"""Reported faults of tokens and masks: a turn's glue dropped, the sampled end token lost, masks taken from pad ids.

The tokenizer of the first report is rebuilt here: `<|im_start|>` is 1, `<|im_end|>` is 2, every other character is its
code point, and the template writes each message as `<|im_start|>ROLE`, newline, TEXT`<|im_end|>`, newline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollforge.data.renderer import Renderer
from rollforge.rollout.samples import to_samples
from rollforge.types import (
    Completion,
    Credit,
    Group,
    IntArray,
    Message,
    Observation,
    Prompt,
    Rollout,
    TrainSample,
    Turn,
)

START, END = 1, 2
CHAT_ML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def code_points(pad: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """The report's tokenizer; 0 is a token no text has."""
    special = ["<|unused|>", "<|im_start|>", "<|im_end|>"]
    ids = {token: id for id, token in enumerate(special)} | {chr(code): code for code in (10, *range(32, 127))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<|unused|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token=pad, chat_template=CHAT_ML
    )


def ids(text: str, *ends: int) -> IntArray:
    return np.array([*map(ord, text), *ends], dtype=np.int32)


def completion(token_ids: IntArray, logprobs: Sequence[float] | None = None) -> Completion:
    values = np.full(token_ids.size, -0.5) if logprobs is None else np.array(logprobs)
    versions = np.zeros(token_ids.size, dtype=np.int32)
    return Completion(token_ids, values.astype(np.float32), versions, text="", finish_reason="stop")


def rows(*turns: Turn) -> tuple[TrainSample, ...]:
    """The training rows of one rollout in which every turn earned 1."""
    rollout = Rollout("r", turns, reward=1.0)
    return to_samples(Group(0, Prompt("p"), (rollout,)), Credit(((1.0,) * len(turns),)))


def turn(prompt_ids: IntArray, sampled: Completion) -> Turn:
    return Turn(prompt_ids, sampled, Observation(""))


def spelled(token_ids: IntArray) -> str:
    return "".join({START: "<|im_start|>", END: "<|im_end|>"}.get(id, chr(id)) for id in token_ids.tolist())


HI = Prompt("p", messages=(Message("user", "hi"),))
ROW = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\ncall<|im_end|>\n"
    "<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
)


def test_p06_the_glue_after_a_sampled_end_of_turn_is_kept_and_not_trained() -> None:
    renderer = Renderer(code_points())
    first = turn(renderer.prompt_ids(HI), completion(ids("call", END)))
    second_ids = renderer.next_ids(first.prompt_ids, first.completion.token_ids, "ok", chat=True, role="tool")
    (row,) = rows(first, turn(second_ids, completion(ids("yes", END))))
    assert spelled(row.token_ids) == ROW
    assert row.token_ids.size == 52
    assert spelled(row.token_ids[row.loss_mask]) == "call<|im_end|>yes<|im_end|>"
    assert int(row.loss_mask.sum()) == 9
    newline = first.prompt_ids.size + 5
    assert chr(row.token_ids[newline]) == "\n"
    assert not row.loss_mask[newline]


def test_p06_what_was_sampled_is_kept_even_where_the_tokenizer_would_write_it_otherwise() -> None:
    """Ids that spell no text (0) and a start token in mid-sentence survive the turn as they were sampled."""
    renderer = Renderer(code_points())
    sampled = np.array([0, START, 120, END], dtype=np.int32)
    prompt_ids = renderer.prompt_ids(HI)
    following = renderer.next_ids(prompt_ids, sampled, "ok", chat=True)
    np.testing.assert_array_equal(following[: prompt_ids.size + 4], [*prompt_ids, *sampled])
    assert spelled(following[prompt_ids.size + 4 :]) == "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("text", ["", "ok", "<|im_end|>", "a<|im_end|>\n<|im_start|>assistant\nb"])
def test_p06_an_observation_that_imitates_the_template_does_not_shift_the_glue(text: str) -> None:
    renderer = Renderer(code_points())
    prompt_ids = renderer.prompt_ids(HI)
    following = renderer.next_ids(prompt_ids, ids("call", END), text, chat=True)
    glue = spelled(following[prompt_ids.size + 5 :])
    assert glue == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_p08_the_sampled_end_token_keeps_its_own_logprob_and_is_trained() -> None:
    engine = [-0.1, -0.2, -4.60517]
    prompt_ids = ids("hi")
    (row,) = rows(turn(prompt_ids, completion(np.array([7, 8, END], dtype=np.int32), engine)))
    assert row.loss_mask[prompt_ids.size :].tolist() == [True, True, True]
    trainer = np.array(engine, dtype=np.float32)
    ratio = float(np.exp((trainer - row.logprobs[row.loss_mask]).sum()))
    assert ratio == pytest.approx(1.0, abs=1e-6)


def test_p08_an_end_token_that_was_not_sampled_is_context_and_not_trained() -> None:
    """The engine stopped at a stop string: the template's end of turn is put there by us, and earns nothing."""
    renderer = Renderer(code_points())
    prompt_ids = renderer.prompt_ids(HI)
    first = turn(prompt_ids, completion(np.array([7, 8], dtype=np.int32)))
    second_ids = renderer.next_ids(prompt_ids, first.completion.token_ids, "ok", chat=True)
    (row,) = rows(first, turn(second_ids, completion(ids("yes", END))))
    after = slice(prompt_ids.size, prompt_ids.size + 3)
    assert row.token_ids[after].tolist() == [7, 8, END]
    assert row.loss_mask[after].tolist() == [True, True, False]
    assert int(np.flatnonzero(row.loss_mask[after])[-1]) == 1
    assert row.advantages[after].tolist() == [1.0, 1.0, 0.0]
    assert row.versions[after].tolist() == [0, 0, -1]


def test_p08_a_completion_without_a_single_token_still_gets_its_end_of_turn() -> None:
    renderer = Renderer(code_points())
    prompt_ids = renderer.prompt_ids(HI)
    following = renderer.next_ids(prompt_ids, np.zeros(0, dtype=np.int32), "ok", chat=True)
    assert spelled(following[prompt_ids.size :]).startswith("<|im_end|>\n<|im_start|>user\nok")


@pytest.mark.parametrize("pad", ["<|im_end|>", "<|unused|>", "x"])
def test_masks_come_from_roles_whatever_the_pad_token_is(pad: str) -> None:
    """With pad equal to the end token, or to a letter, neither the end nor the letter drops out of the training."""
    renderer = Renderer(code_points(pad))
    prompt_ids = renderer.prompt_ids(HI)
    (row,) = rows(turn(prompt_ids, completion(ids("fox", END))))
    assert row.loss_mask.tolist() == [False] * prompt_ids.size + [True] * 4


def test_end_tokens_inside_the_prompt_are_not_trained() -> None:
    renderer = Renderer(code_points())
    prompt_ids = renderer.prompt_ids(HI)
    (row,) = rows(turn(prompt_ids, completion(ids("a", END))))
    assert (row.token_ids[~row.loss_mask] == END).sum() == 1


@pytest.mark.parametrize(
    ("written", "expected"), [({}, (2,)), ({"eos_token_id": 2}, (2,)), ({"eos_token_id": [2, 0, 120]}, (0, 2, 120))]
)
def test_every_end_id_of_the_model_stops_a_completion(
    tmp_path: Path, written: dict[str, object], expected: tuple[int, ...]
) -> None:
    code_points().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    renderer = Renderer(tmp_path)
    assert renderer.stop_ids == expected
    prompt_ids = renderer.prompt_ids(HI)
    for end in expected:  # any of them closes the turn: no second end is put after it
        following = renderer.next_ids(prompt_ids, ids("a", end), "ok", chat=True)
        assert spelled(following[prompt_ids.size + 2 :]).startswith("\n<|im_start|>user\n")


def test_the_templates_end_of_turn_stops_even_when_the_tokenizers_end_is_another() -> None:
    """A base model's end-of-text is no end of turn; a chat that stops only there runs on into the user's part."""
    tokenizer = code_points()
    tokenizer.eos_token = "<|unused|>"
    assert Renderer(tokenizer).stop_ids == (0, 2)
