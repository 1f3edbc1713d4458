"""When a sequence ends, what its text then is, and that no sampled token is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_kit import Bench, Oracle, random_ids

from rollforge.data.renderer import Renderer
from rollforge.types import Completion, Sampling

PROMPT = random_ids(20)
LENGTH = 30


@pytest.fixture(scope="module")
def whole(tiny_model: Path) -> Completion:
    """One completion that nothing stops; a known, varied run of tokens to stop in."""
    (completion,) = Bench(tiny_model).run(PROMPT, Sampling(temperature=1.6, max_tokens=LENGTH, seed=2))
    assert completion.finish_reason == "length" and len(completion.text) > 20
    return completion


def run(folder: Path, stop: Sequence[str] = (), stop_ids: Sequence[int] = (), own: Sequence[int] = ()) -> Completion:
    sampling = Sampling(temperature=1.6, max_tokens=LENGTH, seed=2, stop=tuple(stop), stop_ids=tuple(stop_ids))
    return Bench(folder, stop_ids=own).run(PROMPT, sampling)[0]


def test_several_stop_ids_the_first_drawn_ends_it_and_is_kept(
    tiny_model: Path, oracle: Oracle, whole: Completion
) -> None:
    tokens = whole.token_ids.tolist()
    late, early = tokens[20], tokens[6]
    ended = run(tiny_model, stop_ids=(late, early, 1))
    first = min(tokens.index(late), tokens.index(early))
    assert ended.finish_reason == "stop"
    np.testing.assert_array_equal(ended.token_ids, whole.token_ids[: first + 1])
    assert ended.text == Renderer(tiny_model).decode(tokens[:first])
    oracle.agrees(PROMPT, ended, 1.6)


def test_the_models_own_stop_ids_end_it_as_well(tiny_model: Path, whole: Completion) -> None:
    token = int(whole.token_ids[6])
    ended = run(tiny_model, own=(token,))
    assert ended.finish_reason == "stop"
    np.testing.assert_array_equal(ended.token_ids, run(tiny_model, stop_ids=(token,)).token_ids)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_stop_string_across_tokens_is_cut_from_the_text_and_its_tokens_stay(
    tiny_model: Path, whole: Completion, width: int
) -> None:
    start = 8
    stop = whole.text[start : start + width]
    ended = run(tiny_model, stop=("never said", stop))
    first = whole.text.index(stop)
    assert ended.finish_reason == "stop"
    assert ended.text == whole.text[:first]
    assert ended.token_ids.tolist() == whole.token_ids.tolist()[: len(ended.token_ids)]
    assert Renderer(tiny_model).decode(ended.token_ids).endswith(stop)


def test_of_two_stop_strings_the_earlier_cuts(tiny_model: Path, whole: Completion) -> None:
    ended = run(tiny_model, stop=(whole.text[9:11], whole.text[8:11]))
    assert ended.text == whole.text[: min(whole.text.index(whole.text[9:11]), whole.text.index(whole.text[8:11]))]


def test_max_tokens_of_one(tiny_model: Path, oracle: Oracle) -> None:
    bench = Bench(tiny_model)
    ended = bench.run(PROMPT, Sampling(max_tokens=1), n=100)  # more than the batch holds: none needs a row
    assert [len(c.token_ids) for c in ended] == [1] * 100
    assert {c.finish_reason for c in ended} == {"length"}
    assert bench.engine.counts["steps"] == 1
    oracle.agrees(PROMPT, ended[0])


def test_a_stop_on_the_last_allowed_token_is_a_stop(tiny_model: Path, whole: Completion) -> None:
    token = int(whole.token_ids[0])
    sampling = Sampling(temperature=1.6, max_tokens=1, seed=2, stop_ids=(token,))
    (ended,) = Bench(tiny_model).run(PROMPT, sampling)
    assert (ended.finish_reason, ended.text, ended.token_ids.tolist()) == ("stop", "", [token])


def test_a_stop_string_interrupted_by_many_tokens_without_text_is_found(tiny_model: Path) -> None:
    """Special tokens have no text, so the string may reach further back than its own length in tokens."""
    renderer, bench = Renderer(tiny_model), Bench(tiny_model)
    a, b, other, special = 39, 40, 5, 0
    text = renderer.decode([a, b])
    assert len(text) == 2 and renderer.decode([special]) == ""
    request, _ = bench.submit(PROMPT, Sampling(stop=(text,), max_tokens=100))
    (sample,) = request.samples
    for token in (other, a, *[special] * 20):
        bench.engine._append(sample, token, -1.0)
        assert sample.finish_reason is None
    bench.engine._append(sample, b, -1.0)
    assert sample.finish_reason == "stop"
    assert bench.engine._completion(sample).text == renderer.decode([other])
