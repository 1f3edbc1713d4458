"""Prompt sources: endless, shuffled, resumable at any point, and never mixing training with held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from rollforge.config import UserError
from rollforge.data.prompts import GeneratedPrompts, Part, PromptList, split
from rollforge.data.sums import PAIRS, sums
from rollforge.types import Message, Prompt, PromptSource

LIST = [Prompt(id=f"own-{i}", text=f"question {i}") for i in range(8)]


def make(rng: np.random.Generator) -> Prompt:
    return Prompt(id="", task={"seed": int(rng.integers(500))})


SOURCES: dict[str, Callable[[], PromptSource]] = {
    "list": lambda: PromptList(LIST, seed=3),
    "generated": lambda: GeneratedPrompts(make, seed=3),
    "held out": lambda: GeneratedPrompts(make, seed=3, held_out=0.25, part="held_out"),
}


async def draw(source: PromptSource, count: int) -> list[Prompt]:
    return [await source.draw() for _ in range(count)]


def through_json(state: Mapping[str, Any]) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = json.loads(json.dumps(dict(state)))
    return loaded


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("killed_at", [0, 1, 7, 8, 9, 16, 21])
async def test_a_restored_source_goes_on_as_an_unbroken_one(name: str, killed_at: int) -> None:
    unbroken = await draw(SOURCES[name](), 40)
    killed = SOURCES[name]()
    await draw(killed, killed_at)
    resumed = SOURCES[name]()
    await draw(resumed, 5)  # restoring counts, not where the new one stood
    await resumed.restore(through_json(await killed.state()))
    assert await draw(resumed, 40 - killed_at) == unbroken[killed_at:]


async def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own() -> None:
    drawn = await draw(PromptList(LIST, seed=0), 24)
    epochs = [[prompt.text for prompt in drawn[start : start + 8]] for start in (0, 8, 16)]
    assert all(sorted(epoch) == [prompt.text for prompt in LIST] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert len({prompt.id for prompt in drawn}) == 24
    assert {prompt.id for prompt in drawn[8:16]} == {f"1-{index}" for index in range(8)}
    assert all(LIST[int(prompt.id.split("-")[1])].text == prompt.text for prompt in drawn)


async def test_the_seed_decides_the_order() -> None:
    texts = [[prompt.text for prompt in await draw(PromptList(LIST, seed), 8)] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


async def test_a_state_of_other_prompts_or_another_seed_is_refused() -> None:
    state = await PromptList(LIST, seed=3).state()
    for other in (PromptList(LIST[:7], seed=3), PromptList(LIST, seed=4), PromptList(LIST[::-1], seed=3)):
        with pytest.raises(UserError, match="other prompts or another seed"):
            await other.restore(state)
    generated = await GeneratedPrompts(make, seed=3).state()
    with pytest.raises(UserError, match="other prompts or another seed"):
        await GeneratedPrompts(make, seed=4).restore(generated)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(UserError, match="empty"):
        PromptList([], seed=0)


def test_split_parts_never_share_a_content_even_between_equal_prompts() -> None:
    prompts = [Prompt(id=str(i), text=f"question {i % 10}", task={"answer": str(i)}) for i in range(40)]
    training, held_out = split(prompts, 0.3)
    assert sorted([*training, *held_out], key=lambda prompt: int(prompt.id)) == prompts
    assert not {prompt.text for prompt in training} & {prompt.text for prompt in held_out}
    assert len({prompt.text for prompt in held_out}) == 3


def test_split_is_the_same_in_any_order() -> None:
    def texts(prompts: list[Prompt]) -> set[str]:
        return {prompt.text for prompt in split(prompts, 0.3)[1]}

    assert texts(LIST) == texts(LIST[::-1])


def test_split_tells_messages_and_tasks_apart() -> None:
    by_message = [Prompt(id="", messages=(Message("user", str(i)),)) for i in range(10)]
    by_task = [Prompt(id="", task={"seed": i}) for i in range(10)]
    for prompts in (by_message, by_task):
        training, held_out = split(prompts, 0.2)
        assert (len(training), len(held_out)) == (8, 2)


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UserError, match="held-out share"):
        split(LIST, share)
    with pytest.raises(UserError, match="held-out share"):
        GeneratedPrompts(make, seed=0, held_out=share)


def test_split_of_a_single_content_is_refused() -> None:
    with pytest.raises(UserError, match="two different prompts"):
        split([LIST[0], LIST[0]], 0.5)
    assert split([LIST[0]], 0.0) == ([LIST[0]], [])


def test_generated_parts_are_disjoint_whatever_their_seeds() -> None:
    def contents(seed: int, part: Part) -> set[int]:
        source = GeneratedPrompts(make, seed, held_out=0.25, part=part)
        return {prompt.task["seed"] for prompt in source.first(2000)}

    training = contents(0, "train") | contents(1, "train")
    held_out = contents(2, "held_out") | contents(3, "held_out")
    assert not training & held_out
    assert len(training | held_out) == 500
    assert 0.15 < len(held_out) / 500 < 0.35


async def test_first_leaves_the_position_alone_and_prefixes_keep_ids_apart() -> None:
    source = GeneratedPrompts(make, seed=0, prefix="eval-")
    assert list(source.first(3)) == await draw(source, 3)
    assert [prompt.id for prompt in source.first(2)] == ["eval-0", "eval-1"]


def test_a_generator_without_variety_is_told() -> None:
    def always_the_same(rng: np.random.Generator) -> Prompt:
        return Prompt(id="", text="the same")

    def in_part(part: Part) -> GeneratedPrompts:
        return GeneratedPrompts(always_the_same, seed=0, held_out=0.5, part=part)

    refused = []
    parts: tuple[Part, ...] = ("train", "held_out")
    for part in parts:
        try:
            in_part(part)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) == 1
    assert "more variety" in refused[0]


def test_held_out_part_without_a_share_is_refused() -> None:
    with pytest.raises(UserError, match="above 0"):
        GeneratedPrompts(make, seed=0, part="held_out")


def pairs_of(text: str) -> list[tuple[int, int]]:
    """The sums of a prompt, smaller number first."""
    operands = [line.split("=")[0].split("+") for line in text.split("\n")]
    return [(min(int(a), int(b)), max(int(a), int(b))) for a, b in operands]


@pytest.mark.parametrize("seed", range(3))
def test_held_out_sums_are_seen_nowhere_in_training(seed: int) -> None:
    training, held_out = sums(seed).first(2000), sums(seed, "held_out").first(500)
    seen = {pair for prompt in training for pair in pairs_of(prompt.text)}
    asked = {pairs_of(prompt.text)[-1] for prompt in held_out}
    assert len(asked) == 6
    assert not seen & asked
    assert seen | asked == set(PAIRS)


def test_a_sums_prompt_is_different_right_sums_and_an_open_one() -> None:
    for prompt in (*sums(0).first(300), *sums(0, "held_out", shots=5).first(100)):
        *solved, question = prompt.text.split("\n")
        for line in solved:
            left, rest = line.split("+")
            right, answer = rest.split("=")
            assert int(left) + int(right) == int(answer) <= 9
        left, right = question.removesuffix("=").split("+")
        assert prompt.task == {"question": "", "answer": str(int(left) + int(right))}
        pairs = pairs_of(prompt.text)
        assert len(set(pairs)) == len(pairs)
    assert len(pairs_of(sums(0).first(1)[0].text)) == 3


@pytest.mark.parametrize("shots", [-1, 24])
def test_more_examples_than_there_are_sums_are_refused(shots: int) -> None:
    with pytest.raises(UserError, match="0 to 23"):
        sums(0, shots=shots)


@pytest.mark.parametrize("share", [0.0, 0.001, 1.0])
def test_a_sums_split_with_an_empty_side_is_refused(share: float) -> None:
    with pytest.raises(UserError, match="empty"):
        sums(0, held_out=share)
