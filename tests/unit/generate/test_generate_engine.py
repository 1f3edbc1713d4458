"""The engine's scheduling never shows in its results: they equal transformers' own full forward, however requests
come and go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import GREEDY, Bench, Oracle, ids, random_ids

from rollforge.config import UserError
from rollforge.types import Completion, Sampling

SAMPLED = Sampling(max_tokens=9, seed=5)


def same(left: Completion, right: Completion) -> None:
    np.testing.assert_array_equal(left.token_ids, right.token_ids)
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 17, 200])
def test_one_greedy_request_equals_the_full_forward(tiny_model: Path, oracle: Oracle, length: int) -> None:
    prompt = random_ids(length)
    (completion,) = Bench(tiny_model).run(prompt)
    oracle.agrees(prompt, completion, greedy=True)
    assert completion.finish_reason == "length" and len(completion.token_ids) == 12
    assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
    assert completion.versions.tolist() == [0] * 12


def test_requests_in_one_batch_that_join_late_and_leave_early(tiny_model: Path, oracle: Oracle) -> None:
    bench = Bench(tiny_model)
    asked = []
    for seed in range(7):
        prompt = random_ids(3 + 11 * seed, seed)
        asked.append((prompt, bench.ask(prompt, replace(GREEDY, max_tokens=1 + 4 * (seed % 4)))))
        bench.steps(2)
    bench.finish()
    for seed, (prompt, ended) in enumerate(asked):
        oracle.agrees(prompt, ended[0], greedy=True)
        assert len(ended[0].token_ids) == 1 + 4 * (seed % 4)
    assert bench.engine.counts["sequences"] == 7


def test_samples_share_one_prefill_and_differ(tiny_model: Path, oracle: Oracle) -> None:
    bench, prompt = Bench(tiny_model), random_ids(40)
    ended = bench.run(prompt, SAMPLED, n=8)
    assert bench.engine.counts["prefill_tokens"] == 40
    assert len(ended) == 8 and len({c.token_ids.tobytes() for c in ended}) > 1
    for completion in ended:
        oracle.agrees(prompt, completion)


def test_a_repeated_prompt_costs_no_forward_and_nothing_changes(tiny_model: Path, oracle: Oracle) -> None:
    bench, prompt = Bench(tiny_model), random_ids(30)
    (first,) = bench.run(prompt)
    (second,) = bench.run(prompt)
    assert bench.engine.counts["prefill_tokens"] == 30
    assert (first.cached_tokens, second.cached_tokens) == (0, 30)
    same(first, second)
    oracle.agrees(prompt, second, greedy=True)


def test_the_same_prompt_twice_in_one_step_is_computed_once(tiny_model: Path, oracle: Oracle) -> None:
    bench, prompt = Bench(tiny_model), random_ids(30)
    asked = [bench.ask(prompt) for _ in range(3)]
    bench.finish()
    assert bench.engine.counts["prefill_tokens"] == 30
    for ended in asked:
        oracle.agrees(prompt, ended[0], greedy=True)


@pytest.mark.parametrize("apart", [False, True], ids=["one step", "later"])
def test_prompts_that_share_beginnings_and_prefixes_of_others(tiny_model: Path, oracle: Oracle, apart: bool) -> None:
    bench, long = Bench(tiny_model), random_ids(50)
    prompts = [long, long[:20], np.concatenate([long[:30], random_ids(9, 1)]), long[:1], long, long[:20]]
    asked = []
    for prompt in prompts:
        asked.append(bench.ask(prompt))
        bench.steps(int(apart))
    bench.finish()
    for prompt, ended in zip(prompts, asked, strict=True):
        oracle.agrees(prompt, ended[0], greedy=True)
    # 50 + 9 new tokens; apart, the ends of the two prefixes were not kept and are computed again, once each.
    assert bench.engine.counts["prefill_tokens"] == 59 + 2 * apart


def test_a_recomputed_end_keeps_the_longer_prompts_below_it(tiny_model: Path, oracle: Oracle) -> None:
    bench, long = Bench(tiny_model), random_ids(40)
    for prompt in (long, long[:10], np.concatenate([long, ids(9)])):
        oracle.agrees(prompt, bench.run(prompt)[0], greedy=True)
    assert bench.engine.counts["prefill_tokens"] == 40 + 1 + 1


def test_a_group_larger_than_the_batch_is_admitted_in_parts(tiny_model: Path, oracle: Oracle) -> None:
    prompt = random_ids(25)
    bench = Bench(tiny_model, max_batch=3)
    ended = bench.run(prompt, SAMPLED, n=8)
    whole = Bench(tiny_model).run(prompt, SAMPLED, n=8)
    assert bench.engine.counts["prefill_tokens"] == 25
    for part, all_at_once in zip(ended, whole, strict=True):
        same(part, all_at_once)
        oracle.agrees(prompt, part)
        assert part.cached_tokens == 0


def test_long_prompts_take_a_step_of_their_own(tiny_model: Path, oracle: Oracle) -> None:
    bench = Bench(tiny_model, max_prefill=32)
    prompts = [random_ids(length, length) for length in (20, 10, 90, 5, 30)]
    asked = [bench.ask(prompt) for prompt in prompts]
    bench.finish()
    assert bench.prefills[:4] == [30, 90, 5, 30]
    for prompt, ended in zip(prompts, asked, strict=True):
        oracle.agrees(prompt, ended[0], greedy=True)


def test_cached_tokens_do_not_count_as_prefill(tiny_model: Path, oracle: Oracle) -> None:
    bench, start = Bench(tiny_model, max_prefill=32), random_ids(30)
    bench.run(start)
    bench.prefills.clear()
    prompts = [np.concatenate([start, random_ids(8, seed)]) for seed in range(4)]
    asked = [bench.ask(prompt) for prompt in prompts]
    bench.finish()
    assert bench.prefills[:2] == [32, 0]
    for prompt, ended in zip(prompts, asked, strict=True):
        oracle.agrees(prompt, ended[0], greedy=True)


def test_a_full_cache_is_emptied_between_steps_while_sequences_run(tiny_model: Path, oracle: Oracle) -> None:
    bench = Bench(tiny_model, cache_tokens=60)
    asked = []
    for seed in range(6):
        prompt = random_ids(25, seed)
        asked.append((prompt, bench.ask(prompt, replace(GREEDY, max_tokens=20))))
        bench.steps(1)
        assert bench.engine._prefix.size <= 60 + 25
    bench.finish()
    for prompt, ended in asked:
        oracle.agrees(prompt, ended[0], greedy=True)


def test_remembered_ends_are_bounded_by_the_cache(tiny_model: Path) -> None:
    bench = Bench(tiny_model, cache_tokens=50)
    for seed in range(40):
        bench.run(random_ids(5, seed), Sampling(max_tokens=1))
        assert len(bench.engine._prefix._ends) <= bench.engine._prefix.size <= 55


def test_the_context_limit_ends_a_sequence(tiny_model: Path, oracle: Oracle) -> None:
    prompt = random_ids(505)
    bench = Bench(tiny_model)
    (completion,) = bench.run(prompt, replace(GREEDY, max_tokens=100))
    assert len(completion.token_ids) == 512 - 505 and completion.finish_reason == "length"
    oracle.agrees(prompt, completion, greedy=True)


def test_a_request_is_the_same_whatever_else_runs(tiny_model: Path) -> None:
    prompt = random_ids(12)
    alone = Bench(tiny_model).run(prompt, SAMPLED, n=3)
    bench = Bench(tiny_model, max_batch=5)
    bench.ask(random_ids(60, 1), replace(SAMPLED, seed=9), n=4)
    bench.steps(3)
    crowded = bench.ask(prompt, SAMPLED, n=3)
    bench.ask(prompt, replace(SAMPLED, seed=6), n=2)
    bench.finish()
    assert len(crowded) == 3
    for left, right in zip(alone, crowded, strict=True):
        same(left, right)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
def test_logprobs_are_of_the_tempered_distribution(tiny_model: Path, oracle: Oracle, temperature: float) -> None:
    prompt = random_ids(20)
    completions = Bench(tiny_model).run(prompt, replace(SAMPLED, temperature=temperature), n=4)
    assert len({c.token_ids.tobytes() for c in completions}) > 1
    for completion in completions:
        oracle.agrees(prompt, completion, temperature)


def test_logprobs_are_of_the_truncated_distribution_and_removed_tokens_never_come(
    tiny_model: Path, oracle: Oracle
) -> None:
    prompt = random_ids(20)
    for completion in Bench(tiny_model).run(prompt, replace(SAMPLED, top_k=3), n=6):
        full = oracle.logprobs(prompt, completion.token_ids)
        for row, token, logprob in zip(full, completion.token_ids.tolist(), completion.logprobs, strict=True):
            best = row.topk(3)
            assert token in best.indices.tolist()
            assert float(row[token] - best.values.logsumexp(0)) == pytest.approx(float(logprob), abs=1e-4)


def test_extra_logprobs_are_those_of_the_asked_tokens(tiny_model: Path, oracle: Oracle) -> None:
    prompt, wanted = random_ids(20), (4, 50, 7)
    bench = Bench(tiny_model)
    (completion,) = bench.run(prompt, replace(SAMPLED, logprob_ids=wanted))
    assert completion.extra_logprobs is not None and completion.extra_logprobs.shape == (9, 3)
    full = oracle.logprobs(prompt, completion.token_ids)[:, list(wanted)]
    np.testing.assert_allclose(completion.extra_logprobs, full.numpy(), atol=1e-4)
    assert bench.run(prompt, SAMPLED)[0].extra_logprobs is None


def test_bf16_with_packed_weights_stays_close(tiny_model: Path, oracle: Oracle) -> None:
    prompt = random_ids(30)
    (completion,) = Bench(tiny_model, torch.bfloat16).run(prompt, SAMPLED)
    full = oracle.logprobs(prompt, completion.token_ids)
    chosen = full.gather(1, torch.from_numpy(completion.token_ids).long()[:, None])[:, 0].numpy()
    np.testing.assert_allclose(completion.logprobs, chosen, atol=0.15)


def test_abort_midway_keeps_what_there_is_and_leaves_the_others_alone(tiny_model: Path, oracle: Oracle) -> None:
    bench, prompt = Bench(tiny_model, max_batch=4), random_ids(10)
    other = bench.ask(random_ids(15, 1))
    request, ended = bench.submit(prompt, replace(GREEDY, max_tokens=50), n=6)
    bench.steps(4)
    bench.engine.abort(request)
    assert [c.finish_reason for c in ended] == ["abort"] * 6
    assert [len(c.token_ids) for c in ended] == [4, 4, 4, 0, 0, 0]
    oracle.agrees(prompt, ended[0], greedy=True)
    bench.finish()
    oracle.agrees(random_ids(15, 1), other[0], greedy=True)
    assert len(ended) == 6 and bench.engine.counts["tokens"] == 3 * 4 + 12


def test_abort_of_an_ended_request_reports_nothing_again(tiny_model: Path) -> None:
    bench = Bench(tiny_model)
    request, ended = bench.submit(random_ids(10))
    bench.finish()
    bench.engine.abort(request)
    assert len(ended) == 1 and ended[0].finish_reason == "length"
    assert not bench.engine.busy


WRONG = [
    (Sampling(temperature=-0.1), "temperature is -0.1"),
    (Sampling(temperature=float("nan")), "temperature is nan"),
    (Sampling(temperature=float("inf")), "temperature is inf"),
    (Sampling(temperature=1e-30), "temperature is 1e-30"),
    (Sampling(top_p=0.0), "top_p is 0.0"),
    (Sampling(top_p=1.1), "top_p is 1.1"),
    (Sampling(top_k=-1), "top_k is -1"),
    (Sampling(min_p=1.5), "min_p is 1.5"),
    (Sampling(max_tokens=0), "max_tokens is 0"),
    (Sampling(stop=("x", "")), "stop string is empty"),
    (Sampling(logprob_ids=(5, 99)), "logprob_ids are (5, 99)"),
    (Sampling(logprob_ids=(-1,)), "logprob_ids are (-1,)"),
]


@pytest.mark.parametrize(("sampling", "text"), WRONG, ids=[text for _, text in WRONG])
def test_impossible_sampling_is_refused_at_once(tiny_model: Path, sampling: Sampling, text: str) -> None:
    with pytest.raises(UserError, match="Sampling cannot be done as asked") as raised:
        Bench(tiny_model).ask(ids(5), sampling)
    assert text in str(raised.value)


def test_impossible_prompts_are_refused_at_once(tiny_model: Path) -> None:
    bench = Bench(tiny_model)
    with pytest.raises(UserError, match="no tokens"):
        bench.ask(ids())
    with pytest.raises(UserError, match="512 tokens and the model reads 512"):
        bench.ask(random_ids(512))
    for wrong in (ids(5, 99), ids(-1)):
        with pytest.raises(UserError, match="another model's tokenizer"):
            bench.ask(wrong)
    with pytest.raises(UserError, match="n is 0"):
        bench.ask(ids(5), n=0)
    assert not bench.engine.busy
