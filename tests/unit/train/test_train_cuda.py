"""One optimizer step on a GPU is the step that a CPU takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_kit import FULL, batch, gradients, parameters, shapes, trainer


@pytest.mark.gpu
async def test_a_step_on_a_gpu_equals_one_on_a_cpu(tiny_model: Path) -> None:
    given = batch(shapes()["everything"], tiny_model)
    cpu, gpu = (
        trainer(tiny_model, FULL, device=device, learning_rate=1e-3, warmup_steps=0) for device in ("cpu", "cuda")
    )
    expected, found = await cpu.forward_backward(given), await gpu.forward_backward(given)
    for name in (name for name in expected if not name.startswith("time")):
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
    on_gpu = gradients(gpu)
    assert {gradient.device.type for gradient in on_gpu.values()} == {"cuda"}
    for name, gradient in gradients(cpu).items():
        torch.testing.assert_close(on_gpu[name].cpu(), gradient, rtol=1e-3, atol=1e-5, msg=name)
    before = parameters(gpu)
    expected, found = await cpu.optim_step(), await gpu.optim_step()
    assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-3)
    assert all(torch.isfinite(after).all() for after in parameters(gpu).values())
    assert any(not torch.equal(after, before[name]) for name, after in parameters(gpu).items())
