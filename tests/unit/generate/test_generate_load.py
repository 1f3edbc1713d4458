"""New weights in flight: nothing old is used again, running sequences go on, the head follows a tied embedding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import Bench, random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollforge.types import IntArray, Sampling

DTYPES = [torch.float32, torch.bfloat16]
SAMPLED = Sampling(max_tokens=8, seed=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_loaded_weights_equal_a_fresh_engine_with_them(
    tiny_model: Path, untied_model: Path, tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    folder = tiny_model if tied else untied_model
    bench, prompt = Bench(folder, dtype), random_ids(30)
    before = bench.run(prompt, SAMPLED)[0]
    new = bench.state(1.2)
    bench.engine.load(new, 1)
    assert bench.engine._prefix.size == 0
    after = bench.run(prompt, SAMPLED)[0]
    assert after.cached_tokens == 0 and after.versions.tolist() == [1] * 8
    assert not np.allclose(before.logprobs, after.logprobs, atol=1e-3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.load_state_dict(new, strict=False)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    fresh = Bench(tmp_path, dtype).run(prompt, SAMPLED)[0]
    np.testing.assert_array_equal(after.token_ids, fresh.token_ids)
    np.testing.assert_allclose(after.logprobs, fresh.logprobs, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tied_head_follows_the_embedding(tiny_model: Path, dtype: torch.dtype) -> None:
    bench = Bench(tiny_model, dtype)
    new = bench.state()
    (name,) = [name for name in new if "embed_tokens" in name]
    assert not any("lm_head" in name for name in new)
    hidden = torch.randn(3, 64, dtype=dtype)
    before = bench.model.logits(hidden)
    bench.engine.load(new | {name: new[name] * 2}, 1)
    torch.testing.assert_close(bench.model.logits(hidden), before * 2)


def test_a_running_sequence_goes_on_and_each_token_has_its_version(tiny_model: Path) -> None:
    bench, prompt = Bench(tiny_model), random_ids(20)
    ended = bench.ask(prompt, replace(SAMPLED, max_tokens=10), n=3)
    unchanged = Bench(tiny_model).run(prompt, replace(SAMPLED, max_tokens=10), n=3)
    bench.steps(4)
    bench.engine.load(bench.state(1.0), 1)
    bench.steps(3)
    bench.engine.load(bench.state(1.2), 2)
    bench.finish()
    for completion, alone in zip(ended, unchanged, strict=True):
        assert completion.versions.tolist() == [0] * 4 + [1] * 3 + [2] * 3
        # Version 1 has equal weights, so its tokens are those of an undisturbed run.
        np.testing.assert_array_equal(completion.token_ids[:7], alone.token_ids[:7])
        np.testing.assert_allclose(completion.logprobs[:7], alone.logprobs[:7], atol=1e-5)
        assert completion.cached_tokens == 0
        context = np.concatenate([prompt, completion.token_ids[:7]])
        fresh = _next_logprob(_engine(tiny_model, bench.state(1.2)), context, int(completion.token_ids[7]))
        assert float(completion.logprobs[7]) == pytest.approx(fresh, abs=1e-5)


def _engine(folder: Path, weights: dict[str, torch.Tensor]) -> Bench:
    bench = Bench(folder)
    bench.engine.load(weights, 1)
    return bench


def _next_logprob(bench: Bench, prompt: IntArray, token: int) -> float:
    (completion,) = bench.run(prompt, Sampling(max_tokens=1, logprob_ids=(token,)))
    assert completion.extra_logprobs is not None
    return float(completion.extra_logprobs[0, 0])


def test_waiting_requests_are_computed_under_the_new_weights(tiny_model: Path) -> None:
    bench, prompt = Bench(tiny_model, max_batch=2), random_ids(20)
    ended = bench.ask(prompt, SAMPLED, n=4)
    bench.steps(3)
    bench.engine.load(bench.state(1.2), 1)
    bench.finish()
    alone = _engine(tiny_model, bench.state(1.2)).run(prompt, SAMPLED, n=4)
    assert ended[0].versions.tolist() == [0] * 3 + [1] * 5
    for completion, expected in zip(ended[2:], alone[2:], strict=True):
        assert completion.versions.tolist() == [1] * 8
        np.testing.assert_array_equal(completion.token_ids, expected.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_weights_are_refused_as_a_whole(tiny_model: Path, dtype: torch.dtype) -> None:
    bench, prompt = Bench(tiny_model, dtype), random_ids(20)
    (before,) = bench.run(prompt, SAMPLED)
    good = bench.state(1.2)
    gone = next(iter(good))
    cases = {
        r"unknown \['model.strange'\]": good | {"model.strange": torch.zeros(2)},
        rf"missing \['{gone}'\]": {name: tensor for name, tensor in good.items() if name != gone},
        rf"shape \['{gone}'\]": good | {gone: torch.zeros(3, 64)},
    }
    for text, weights in cases.items():
        with pytest.raises(ValueError, match=text):
            bench.engine.load(weights, 1)
    (after,) = bench.run(prompt, SAMPLED)
    assert bench.engine.version == 0 and after.cached_tokens == 20
    np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-6)


def test_float32_weights_load_into_a_bf16_engine(tiny_model: Path) -> None:
    bench = Bench(tiny_model, torch.bfloat16)
    (before,) = bench.run(random_ids(20), SAMPLED)
    bench.engine.load({name: tensor.float() for name, tensor in bench.state().items()}, 1)
    (after,) = bench.run(random_ids(20), SAMPLED)
    np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-6)
