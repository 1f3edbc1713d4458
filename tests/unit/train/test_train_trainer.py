"""The trainer's verbs: what they leave behind, how they fail, and that they take turns."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from train_kit import PLAIN, Total, batch, gradients, parameters, random_ids, sample, shapes, trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollforge.algo.config import GRPOConfig
from rollforge.tensors import LossInputs, MetricPairs, TokenOutputs
from rollforge.train.trainer import MOST_SKIPPED, NotFinite
from rollforge.types import Batch

LIMIT = 20.0
SHAPES = shapes()


def given(folder: Path) -> Batch:
    return batch(SHAPES["several prompts"], folder)


class Shelf:
    def __init__(self) -> None:
        self.versions: dict[int, dict[str, Tensor]] = {}

    async def publish(self, version: int, tensors: Mapping[str, Any]) -> None:
        self.versions[version] = {name: tensor.clone() for name, tensor in tensors.items()}


class Failing(Total):
    """Its loss raises, or is not a number, at will."""

    factor, calls_left = 1.0, 10**9

    def loss(self, outputs: TokenOutputs, inputs: LossInputs) -> tuple[Tensor, MetricPairs]:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ArithmeticError("no loss today")
        total, metrics = super().loss(outputs, inputs)
        return total * self.factor, metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_training_lowers_the_loss(tiny_model: Path, dtype: str) -> None:
    given_batch = given(tiny_model)
    trained = trainer(tiny_model, dtype=dtype, learning_rate=5e-4, warmup_steps=0, total_steps=20)
    losses = []
    for step in range(6):
        losses.append((await trained.forward_backward(given_batch))["loss/total"])
        metrics = await trained.optim_step()
        assert metrics["train/learning_rate"] == 5e-4 and metrics["train/skipped"] == 0, step
        assert metrics["train/grad_norm"] > 0
    assert losses[-1] < losses[0] - 0.05


async def test_the_rate_and_the_loss_follow_the_steps(tiny_model: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Watching(Total):
        def loss(self, outputs: TokenOutputs, inputs: LossInputs) -> tuple[Tensor, MetricPairs]:
            seen.append((inputs.step, inputs.total_steps))
            return super().loss(outputs, inputs)

    trained = trainer(tiny_model, Watching(GRPOConfig()), learning_rate=1e-3, warmup_steps=3, total_steps=7)
    rates = []
    for _ in range(4):
        await trained.forward_backward(given(tiny_model))
        rates.append((await trained.optim_step())["train/learning_rate"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    assert seen == [(0, 7), (1, 7), (2, 7), (3, 7)]


async def test_a_second_call_before_the_step_adds_its_own_mean(tiny_model: Path) -> None:
    trained = trainer(tiny_model)
    await trained.forward_backward(given(tiny_model))
    once = gradients(trained)
    await trained.forward_backward(given(tiny_model))
    for name, gradient in gradients(trained).items():
        torch.testing.assert_close(gradient, 2 * once[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
async def test_a_loss_that_is_not_finite_changes_nothing_and_is_counted(
    tiny_model: Path, dtype: str, factor: float
) -> None:
    algorithm = Failing(GRPOConfig())
    trained = trainer(tiny_model, algorithm, dtype, warmup_steps=0, learning_rate=1e-2)
    before = parameters(trained)
    algorithm.factor = factor
    await trained.forward_backward(given(tiny_model))
    metrics = await trained.optim_step()
    assert metrics["train/skipped"] == 1 and not math.isfinite(metrics["train/grad_norm"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in parameters(trained).items())
    algorithm.factor = 1.0
    await trained.forward_backward(given(tiny_model))
    assert (await trained.optim_step())["train/skipped"] == 0
    after = parameters(trained)
    assert all(torch.isfinite(tensor).all() and not torch.equal(tensor, before[name]) for name, tensor in after.items())


async def test_gradients_that_stay_not_finite_end_the_run(tiny_model: Path) -> None:
    algorithm = Failing(GRPOConfig())
    trained = trainer(tiny_model, algorithm)
    for factor in (math.nan, 1.0, *[math.nan] * (MOST_SKIPPED - 1)):
        algorithm.factor = factor
        await trained.forward_backward(given(tiny_model))
        assert (await trained.optim_step())["train/skipped"] == (factor != 1)
    await trained.forward_backward(given(tiny_model))
    with pytest.raises(NotFinite, match=f"in {MOST_SKIPPED} optimizer steps in a row.*train.learning_rate"):
        await trained.optim_step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_call_that_raises_leaves_no_gradient(tiny_model: Path, dtype: str) -> None:
    algorithm = Failing(GRPOConfig())
    trained = trainer(tiny_model, algorithm, dtype, micro_batch_tokens=30)
    algorithm.calls_left = 2
    with pytest.raises(ArithmeticError, match="no loss today"):
        await trained.forward_backward(given(tiny_model))
    assert not any(gradient.any() for gradient in gradients(trained).values())
    algorithm.calls_left = 10**9
    await trained.forward_backward(given(tiny_model))
    fresh = trainer(tiny_model, PLAIN, dtype, micro_batch_tokens=30)
    await fresh.forward_backward(given(tiny_model))
    expected = gradients(fresh)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(trained).items())


async def test_a_batch_without_trained_tokens_is_refused(tiny_model: Path) -> None:
    one = sample((random_ids(4, 0), False), (random_ids(1, 0), True))
    with pytest.raises(ValueError, match="step 3 has no token"):
        await trainer(tiny_model).forward_backward(Batch(3, (replace(one, loss_mask=one.loss_mask & False),)))


async def test_publish_hands_out_each_weight_once(tiny_model: Path, untied_model: Path) -> None:
    for folder, head in ((tiny_model, False), (untied_model, True)):
        shelf = Shelf()
        trained = trainer(folder, weights=shelf)
        await trained.publish(1)
        await trained.forward_backward(given(folder))
        await trained.optim_step()
        metrics = await trained.publish(2)
        assert metrics.keys() == {"time/publish_s"}
        assert ("lm_head.weight" in shelf.versions[2]) == head
        tensors = shelf.versions[2]
        assert tensors.keys() == parameters(trained).keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in parameters(trained).items())
        assert any(not torch.equal(tensor, shelf.versions[1][name]) for name, tensor in tensors.items())
        assert not any(tensor.requires_grad for tensor in tensors.values())
    with pytest.raises(RuntimeError, match="no weight store"):
        await trainer(tiny_model).publish(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_an_export_is_the_trained_model(
    tiny_model: Path, untied_model: Path, tmp_path: Path, dtype: str, tied: bool
) -> None:
    folder = tiny_model if tied else untied_model
    trained = trainer(folder, dtype=dtype, learning_rate=1e-2, warmup_steps=0)
    await trained.forward_backward(given(folder))
    await trained.optim_step()
    await trained.export(str(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, dtype)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    own = parameters(trained)
    assert own.keys() == dict(loaded.named_parameters()).keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.named_parameters())
    same = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    same.load_state_dict(own, strict=not tied)
    ids = torch.from_numpy(random_ids(20, 0)).long()[None]
    assert torch.equal(loaded(input_ids=ids).logits, same(input_ids=ids).logits)

    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == sum(tensor.numel() for tensor in own.values())
    assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, dtype)}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == dtype and "rollforge" not in json.dumps(config)


async def test_an_export_has_the_tokenizer_and_the_generation_defaults(tiny_model: Path, tmp_path: Path) -> None:
    await trainer(tiny_model).export(str(tmp_path))
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_model, tmp_path))
    assert before.get_vocab() == after.get_vocab() and before.chat_template == after.chat_template
    for name in ("generation_config.json", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (tiny_model / name).read_bytes()


class Halfway:
    """Replaces the optimizer's step by one that waits in its middle: half of the weights are new, half are old."""

    def __init__(self, trained: Any) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._weights = list(trained._model.parameters())
        trained._optimizer.step = self.step

    @torch.no_grad()
    def step(self, rate: float) -> float:
        middle = len(self._weights) // 2
        for weight in self._weights[:middle]:
            weight.fill_(0.5)
        self.reached.set()
        assert self.go.wait(LIMIT)
        for weight in self._weights[middle:]:
            weight.fill_(0.5)
        return 1.0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_nobody_sees_half_an_optimizer_step(tiny_model: Path, tmp_path: Path, cancelled: bool) -> None:
    shelf = Shelf()
    trained = trainer(tiny_model, weights=shelf)
    halfway = Halfway(trained)
    stepping = asyncio.ensure_future(trained.optim_step())
    assert await asyncio.to_thread(halfway.reached.wait, LIMIT)
    if cancelled:
        stepping.cancel()
    readers = [asyncio.ensure_future(trained.export(str(tmp_path))), asyncio.ensure_future(trained.publish(1))]
    finished, _ = await asyncio.wait([stepping, *readers], timeout=0.2)
    assert not finished
    halfway.go.set()
    await asyncio.wait_for(asyncio.gather(*readers), LIMIT)
    assert stepping.cancelled() == cancelled
    for tensors in (load_file(tmp_path / "model.safetensors"), shelf.versions[1]):
        assert all((tensor == 0.5).all() for tensor in tensors.values())
