"""Sharing prefixes, cutting the embedding off and splitting into micro-batches change no loss and no gradient."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from train_kit import (
    FULL,
    PLAIN,
    Total,
    batch,
    gradients,
    group,
    logprobs,
    random_ids,
    sample,
    shapes,
    trainer,
    unshared,
)

from rollforge.algo.config import GRPOConfig
from rollforge.data.transformer import even_size
from rollforge.data.trie import build
from rollforge.train.forward import micro_batches, token_outputs, tree_attention
from rollforge.types import TrainSample

SHAPES = shapes()


def assert_equal_gradients(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        assert torch.isfinite(gradient).all() and gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, right[name], atol=tolerance, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_loss_and_gradients_equal_the_unshared_computation(
    tiny_model: Path, untied_model: Path, name: str, tied: bool
) -> None:
    folder = tiny_model if tied else untied_model
    given = batch(SHAPES[name], folder, temperature=0.7)
    trained = trainer(folder, FULL, temperature=0.7)
    metrics = await trained.forward_backward(given)
    loss, expected = unshared(folder, FULL, given, temperature=0.7)
    assert metrics["loss/total"] == pytest.approx(loss, abs=1e-5)
    assert_equal_gradients(gradients(trained), expected)
    assert metrics["train/computed_tokens"] < metrics["train/padded_tokens"]
    assert metrics["train/tokens"] == sum(s.loss_mask.sum() for s in given.samples)


@pytest.mark.parametrize("norm", ["token", "sequence", "constant"])
async def test_any_split_into_micro_batches_gives_the_same(tiny_model: Path, norm: Any) -> None:
    config = replace(FULL.config, loss_norm=norm, constant_tokens=8 if norm == "constant" else None)
    given = batch(SHAPES["everything"], tiny_model)
    whole = trainer(tiny_model, Total(config), micro_batch_tokens=10_000)
    metrics = await whole.forward_backward(given)
    assert metrics["train/micro_batches"] == 1
    for tokens in (1, 40, 75):
        parts = trainer(tiny_model, Total(config), micro_batch_tokens=tokens)
        split = await parts.forward_backward(given)
        assert split["train/micro_batches"] > 1
        assert split["loss/total"] == pytest.approx(metrics["loss/total"], abs=1e-6)
        for name in ("entropy", "ratio/mean", "legal/kl", "kl/reference", "tokens"):
            assert split[name] == pytest.approx(metrics[name], rel=1e-5), name
        assert_equal_gradients(gradients(parts), gradients(whole), 1e-6)


async def test_order_of_samples_does_not_matter(tiny_model: Path) -> None:
    given = batch(SHAPES["everything"], tiny_model)
    assert given.reference_logprobs is not None
    turned = replace(given, samples=given.samples[::-1], reference_logprobs=given.reference_logprobs[::-1])
    left, right = trainer(tiny_model, FULL, micro_batch_tokens=40), trainer(tiny_model, FULL, micro_batch_tokens=40)
    await left.forward_backward(given)
    await right.forward_backward(turned)
    assert_equal_gradients(gradients(left), gradients(right), 1e-6)


async def test_the_padding_token_is_trained_as_torch_trains_it(tiny_model: Path) -> None:
    """Token 0 is the model's padding: as an input it gets no gradient, as a target it does."""
    prompt = np.asarray([0, 5, 0, 6], dtype=np.int32)
    given = batch([sample((prompt, False), (np.asarray([0, 9, 0], dtype=np.int32), True))], tiny_model)
    trained = trainer(tiny_model)
    assert trained._embedding.padding_idx == 0
    await trained.forward_backward(given)
    assert_equal_gradients(gradients(trained), unshared(tiny_model, PLAIN, given)[1])


async def test_a_scaled_embedding_is_left_to_autograd(tiny_model: Path) -> None:
    class Scaled(torch.nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return 3.0 * super().forward(ids)

    given = batch(SHAPES["one prompt"], tiny_model)
    trained, plain = trainer(tiny_model), trainer(tiny_model)
    for each in (trained, plain):
        each._embedding.__class__ = Scaled
    await trained.forward_backward(given)
    (micro,) = micro_batches(given.samples, 1000)
    outputs = token_outputs(plain._model, micro, 1.0, entropy_gradient=False)
    PLAIN.loss(outputs, plain._inputs(micro, given, micro.num_tokens, len(given.samples)))[0].backward()
    assert_equal_gradients(gradients(trained), gradients(plain))


async def test_entropy_gradient_by_finite_differences(tiny_model: Path) -> None:
    """Along the gradient itself, the entropy bonus changes by the gradient's length."""
    algorithm = Total(GRPOConfig(entropy_coef=1.0))
    flat = batch([replace(s, advantages=0 * s.advantages) for s in SHAPES["several prompts"]], tiny_model)
    trained = trainer(tiny_model, algorithm)
    await trained.forward_backward(flat)
    found = gradients(trained)
    length = float(torch.stack([g.norm() for g in found.values()]).norm())
    step, losses = 3e-3, []
    for sign in (1, -1):
        with torch.no_grad():
            for name, parameter in trained._model.named_parameters():
                parameter += sign * step * found[name] / length
        losses.append((await trained.forward_backward(flat))["loss/total"])
        with torch.no_grad():
            for name, parameter in trained._model.named_parameters():
                parameter -= sign * step * found[name] / length
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(length, rel=0.01)


def test_legal_ids_belong_to_their_trained_position() -> None:
    prompt = random_ids(5, 0)
    first = replace(
        sample((prompt, False), (random_ids(3, 1), True)), legal_ids=((2, (9,)), (5, (11, 12)), (7, (13, 14, 15)))
    )
    second = sample((prompt, False), (random_ids(2, 2), True))
    (micro,) = micro_batches([second, first], 1000)
    ids, mask = micro.legal_ids()
    at = {sample.rollout_id + str(len(sample.token_ids)): 0 for sample in micro.samples}
    assert len(at) == 2
    rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    expected = {7: [[], []], 8: [[11, 12], [], [13, 14, 15]]}  # position 2 is not trained
    assert rows == [row for s in micro.samples for row in expected[len(s.token_ids)]]
    assert ids.shape == mask.shape == (5, 3) and not ids[~mask].any()


def test_outputs_stand_in_the_order_of_samples_and_positions(tiny_model: Path) -> None:
    samples = SHAPES["everything"]
    model, expected = trainer(tiny_model)._model, logprobs(tiny_model, samples)
    for micro in micro_batches(samples, 50):
        with torch.no_grad():
            outputs = token_outputs(model, micro, 1.0, entropy_gradient=False)
        np.testing.assert_allclose(outputs.logprobs_N.numpy(), micro.gather(expected), atol=1e-5)
        assert micro.sequence_ids_N.tolist() == sorted(micro.sequence_ids_N.tolist())
        assert not outputs.entropy_N.requires_grad


def test_what_follows_the_last_trained_token_is_not_computed() -> None:
    one = sample((random_ids(4, 0), False), (random_ids(2, 1), True), (random_ids(50, 2), False))
    (micro,) = micro_batches([one], 1000)
    assert micro.trie.token_ids.tolist() == one.token_ids[:5].tolist()


def test_samples_that_cannot_be_trained_on() -> None:
    untrained = sample((random_ids(4, 0), False), (random_ids(1, 0), True))
    untrained = replace(untrained, loss_mask=np.zeros(5, dtype=np.bool_))
    assert micro_batches([untrained], 10) == []
    with pytest.raises(ValueError, match="r3: the first token"):
        micro_batches([sample((random_ids(4, 0), True), seed=3)], 10)


@pytest.mark.parametrize("nodes", [1000, 2500])
def test_masks_are_made_per_tree_and_fast(tiny_model: Path, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten trees of a long prompt and eight completions each: a mask over all nodes would be a hundred times one's."""
    model = trainer(tiny_model)._model
    samples: list[TrainSample] = []
    for tree in range(10):
        first = np.asarray([3 + tree], dtype=np.int32)
        samples += group(np.concatenate([first, random_ids(nodes // 10 - 40, tree)]), 8, tree)
    (micro,) = micro_batches(samples, 10**6)
    assert len(micro.trie.trees()) == 10 and micro.trie.token_ids.size > 0.9 * nodes
    sizes: list[int] = []
    monkeypatch.setattr(
        "rollforge.train.forward.additive_mask", lambda visible, dtype: sizes.append(visible.numel()) or visible
    )
    started = time.process_time()
    tree_attention(micro.trie, model)
    assert time.process_time() - started < 1.0
    # Even, for each new size of attention would leave its kernels behind: 3 MB a step.
    assert sizes == [even_size(tree.stop - tree.start) ** 2 for tree in micro.trie.trees()]


def test_a_tree_mask_is_its_part_of_the_whole_mask() -> None:
    folded = build([random_ids(length, seed) for seed, length in enumerate((3, 9, 1, 5))] + [random_ids(3, 1)])
    whole = folded.ancestor_mask()
    covered = np.zeros_like(whole)
    for tree in folded.trees():
        np.testing.assert_array_equal(folded.ancestor_mask(tree), whole[tree, tree])
        covered[tree, tree] = True
    assert not whole[~covered].any()
