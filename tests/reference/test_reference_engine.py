"""Known-right numbers for the native engine: reported faults P16 (stale caches) and P18 (two distributions), with
their kinds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollforge.data.models import copy_tokenizer
from rollforge.generate.config import NativeConfig
from rollforge.generate.native.policy import NativePolicy
from rollforge.generate.native.sampling import log_distribution
from rollforge.types import IntArray, Sampling

PROMPT: IntArray = np.arange(10, 50, dtype=np.int32)
SAMPLING = Sampling(max_tokens=6, seed=1, logprob_ids=(20, 30, 40))
LIMIT = 20.0


class Versions:
    """Version w: the model's weights times w."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def at(self, w: int) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() * (1 + 0.2 * (w - 1)) for name, parameter in self.model.named_parameters()}

    @asynccontextmanager
    async def read(self, version: int) -> AsyncIterator[Mapping[str, Any]]:
        yield self.at(version)


async def test_p16_nothing_cached_survives_new_weights(tiny_model: Path, tmp_path: Path) -> None:
    versions = Versions(tiny_model)
    policy = NativePolicy(str(tiny_model), "float32", "cpu", NativeConfig(), versions)
    await policy.load(1)
    (first,) = await policy.generate(PROMPT, SAMPLING)
    (again,) = await policy.generate(PROMPT, SAMPLING)
    await asyncio.wait_for(policy.load(2), LIMIT)
    (second,) = await policy.generate(PROMPT, SAMPLING)
    (third,) = await policy.generate(PROMPT, SAMPLING)

    versions.model.load_state_dict(versions.at(2), strict=False)
    versions.model.save_pretrained(tmp_path)
    copy_tokenizer(tiny_model, tmp_path)
    (fresh,) = await NativePolicy(str(tmp_path), "float32", "cpu", NativeConfig()).generate(PROMPT, SAMPLING)

    assert [c.cached_tokens for c in (first, again, second, third)] == [0, len(PROMPT), 0, len(PROMPT)]
    assert first.extra_logprobs is not None and fresh.extra_logprobs is not None
    assert np.abs(first.extra_logprobs[0] - fresh.extra_logprobs[0]).max() > 0.01, "the weights must matter"
    for completion in (second, third):
        assert completion.extra_logprobs is not None
        np.testing.assert_array_equal(completion.token_ids, fresh.token_ids)
        np.testing.assert_allclose(completion.logprobs, fresh.logprobs, atol=1e-6)
        np.testing.assert_allclose(completion.extra_logprobs, fresh.extra_logprobs, atol=1e-6)
        assert set(completion.versions.tolist()) == {2}


async def test_p16_a_sequence_in_flight_reads_no_old_keys_either(tiny_model: Path) -> None:
    """Its tokens after the update have the probabilities of one full forward under the new weights."""
    versions = Versions(tiny_model)
    policy = NativePolicy(str(tiny_model), "float32", "cpu", NativeConfig(), versions)
    running = asyncio.ensure_future(policy.generate(PROMPT, Sampling(max_tokens=300, temperature=1.5, seed=3), n=4))
    async with asyncio.timeout(LIMIT):
        while (await policy.metrics())["generate/steps"] < 3:
            await asyncio.sleep(0.001)
    await asyncio.wait_for(policy.load(2), LIMIT)
    completions = await asyncio.wait_for(running, LIMIT)
    updated = [c for c in completions if c.versions[-1] == 2]
    assert updated and all(c.versions[0] == 0 for c in updated)
    versions.model.load_state_dict(versions.at(2), strict=False)
    for completion in updated:
        tokens = torch.from_numpy(np.concatenate([PROMPT, completion.token_ids])).long()
        with torch.inference_mode():
            logits = versions.model(input_ids=tokens[None]).logits[0, len(PROMPT) - 1 : -1]
        expected = (logits / 1.5).log_softmax(-1).gather(1, tokens[len(PROMPT) :, None])[:, 0].numpy()
        new = completion.versions == 2
        np.testing.assert_allclose(completion.logprobs[new], expected[new], atol=1e-4)


def test_p18a_temperature() -> None:
    logprobs = log_distribution(torch.tensor([[2.0, 1.0, 0.0]]), [Sampling(temperature=0.5)])
    assert logprobs[0, 1].item() == pytest.approx(-2.142932, abs=1e-6)


def test_p18b_top_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    truncated = log_distribution(logits, [Sampling(top_p=0.8)])[0]
    assert truncated[1].item() == pytest.approx(-0.980829, abs=1e-6)
    assert torch.isfinite(truncated).tolist() == [True, True, False, False]
    full = log_distribution(logits, [Sampling()])[0]
    assert full[1].item() == pytest.approx(-1.203973, abs=1e-6)
    assert math.exp(full[1] - truncated[1]) == pytest.approx(0.8)


@pytest.mark.parametrize("shift", [-30.0, 0.0, 7.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p18_kind_borders_do_not_depend_on_rounding(shift: float, dtype: torch.dtype) -> None:
    """Equal tokens in a number that divides top_p exactly: just as many are kept, wherever the logits lie."""
    logits = torch.full((1, 10), shift, dtype=dtype)
    for kept in range(1, 10):
        row = log_distribution(logits, [Sampling(top_p=kept / 10)])[0]
        assert int(torch.isfinite(row).sum()) == kept
        assert row.max().item() == pytest.approx(-math.log(kept), abs=1e-5)
