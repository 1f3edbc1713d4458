"""The native engine on a GPU samples what it samples on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_kit import GREEDY, Bench, Oracle, random_ids

from rollforge.types import Sampling


@pytest.mark.gpu
def test_the_engine_on_a_gpu_equals_the_full_forward_on_a_cpu(tiny_model: Path, oracle: Oracle) -> None:
    bench = Bench(tiny_model, device="cuda")
    prompts = [random_ids(length, seed=length) for length in (1, 17, 200)]
    greedy = [bench.ask(prompt, GREEDY) for prompt in prompts]
    sampled = bench.ask(prompts[1], Sampling(max_tokens=9, seed=5), n=4)
    bench.finish()
    for prompt, (completion,) in zip(prompts, greedy, strict=True):
        oracle.agrees(prompt, completion, greedy=True)
    for completion in sampled:
        oracle.agrees(prompts[1], completion)
    assert len({completion.token_ids.tobytes() for completion in sampled}) > 1

    bench.engine.load(bench.state(scale=0.5), version=1)
    (after,) = bench.run(prompts[1])
    np.testing.assert_array_equal(after.versions, 1)
