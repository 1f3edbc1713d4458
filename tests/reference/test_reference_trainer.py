"""Known-right numbers for the trainer: reported faults P01, P08, P18 and P23, through the model that is really
trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rollforge.algo.config import GRPOConfig
from rollforge.algo.grpo import GRPO
from rollforge.generate.config import NativeConfig
from rollforge.generate.native.policy import NativePolicy
from rollforge.tensors import LossInputs, MetricPairs, TokenOutputs
from rollforge.train.config import TrainConfig
from rollforge.train.trainer import PolicyTrainer
from rollforge.types import Batch, Completion, IntArray, Sampling, TrainSample

PROMPT: IntArray = np.arange(20, 45, dtype=np.int32)


def trainer(folder: Path, algorithm: Any, temperature: float = 1.0, dtype: str = "float32", **settings: Any) -> Any:
    return PolicyTrainer(str(folder), dtype, "cpu", TrainConfig(**settings), algorithm, 10, temperature)


def sample(tokens: IntArray, logprobs: Any, advantage: float) -> TrainSample:
    """The prompt, and tokens that are all trained."""
    size = len(PROMPT) + len(tokens)
    mask = np.arange(size) >= len(PROMPT)
    behaviour = np.zeros(size, dtype=np.float32)
    behaviour[mask] = logprobs
    return TrainSample(
        rollout_id="r",
        token_ids=np.concatenate([PROMPT, tokens]),
        loss_mask=mask,
        logprobs=behaviour,
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
    )


class Costs:
    """Each token costs its advantage (and has a gradient): the mean over the step's tokens."""

    needs_reference = needs_entropy = False

    def loss(self, outputs: TokenOutputs, inputs: LossInputs) -> tuple[Tensor, MetricPairs]:
        one_N = (outputs.logprobs_N - outputs.logprobs_N.detach()).exp()
        costs = (one_N * inputs.advantages_N).sum()
        return costs / inputs.num_tokens, {"loss": (costs.detach(), torch.tensor(float(one_N.numel())))}


async def test_p01_a_token_mean_is_the_same_in_every_split(tiny_model: Path) -> None:
    batch = Batch(
        0,
        (
            sample(np.asarray([50, 51], dtype=np.int32), 0.0, 1.0),
            sample(np.asarray([60, 61, 62, 63, 64, 65], dtype=np.int32), 0.0, 3.0),
        ),
    )
    whole, split = (trainer(tiny_model, Costs(), micro_batch_tokens=tokens) for tokens in (1000, 27))
    metrics = [await each.forward_backward(batch) for each in (whole, split)]
    assert [m["train/micro_batches"] for m in metrics] == [1, 2]
    assert [m["loss"] for m in metrics] == pytest.approx([2.5, 2.5], abs=1e-6)
    for left, right in zip(whole._model.parameters(), split._model.parameters(), strict=True):
        assert left.grad is not None and left.grad.any()
        torch.testing.assert_close(left.grad, right.grad, atol=1e-5, rtol=1e-5)


async def completions(folder: Path, sampling: Sampling) -> list[Completion]:
    return await NativePolicy(str(folder), "float32", "cpu", NativeConfig()).generate(PROMPT, sampling, n=8)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_p18_engine_and_trainer_mean_one_distribution(tiny_model: Path, temperature: float) -> None:
    sampled = await completions(tiny_model, Sampling(temperature=temperature, max_tokens=20, seed=1))
    batch = Batch(0, tuple(sample(c.token_ids, c.logprobs, 1.0) for c in sampled))
    own = await trainer(tiny_model, GRPO(GRPOConfig()), temperature).forward_backward(batch)
    assert own["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    assert own["ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert own["kl/behaviour"] == pytest.approx(0.0, abs=1e-6)
    other = await trainer(tiny_model, GRPO(GRPOConfig()), temperature + 0.3).forward_backward(batch)
    assert other["kl/behaviour"] > 1e-3, "another temperature must show"


async def test_p08_the_sampled_stop_token_is_trained_with_its_own_logprob(tiny_model: Path) -> None:
    sampled = await completions(tiny_model, Sampling(max_tokens=40, temperature=1.3, seed=1, stop_ids=(4, 5, 6, 7)))
    ended = [c for c in sampled if c.finish_reason == "stop"]
    assert ended and all(c.logprobs[-1] < 0 for c in ended)
    batch = Batch(0, tuple(sample(c.token_ids, c.logprobs, 1.0) for c in ended))
    metrics = await trainer(tiny_model, GRPO(GRPOConfig()), 1.3).forward_backward(batch)
    assert metrics["train/tokens"] == sum(len(c.token_ids) for c in ended)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-4)


@pytest.fixture
def toy_model(tmp_path: Path) -> Path:
    """Vocabulary 4, width 2, tied head: the embedding, and a final norm of 2 numbers, are all its weights."""
    config = LlamaConfig(
        vocab_size=4,
        hidden_size=2,
        intermediate_size=2,
        num_hidden_layers=0,
        num_attention_heads=1,
        head_dim=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=1.0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


async def test_p23_an_export_is_what_was_trained(toy_model: Path, tmp_path: Path) -> None:
    trained = trainer(toy_model, GRPO(GRPOConfig()), dtype="bfloat16", learning_rate=0.1, warmup_steps=0)
    before = trained._embedding.weight.detach().clone()
    one = TrainSample(
        rollout_id="r",
        token_ids=np.asarray([1, 3, 0, 2], dtype=np.int32),
        loss_mask=np.asarray([False, True, True, True]),
        logprobs=np.full(4, -1.4, dtype=np.float32),
        versions=np.zeros(4, dtype=np.int32),
        advantages=np.ones(4, dtype=np.float32),
    )
    await trained.forward_backward(Batch(0, (one,)))
    await trained.optim_step()
    after = trained._embedding.weight.detach()
    assert not torch.equal(before, after), "the step must have moved the embedding"

    await trained.export(str(tmp_path / "out"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == {"model.embed_tokens.weight", "model.norm.weight"}
    assert stored["model.embed_tokens.weight"].numel() == 8
    assert torch.equal(stored["model.embed_tokens.weight"], after)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert loaded.dtype == torch.bfloat16 and torch.equal(loaded.get_input_embeddings().weight, after)
