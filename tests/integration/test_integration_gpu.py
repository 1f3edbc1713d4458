"""A whole run on a GPU: every role that computes does so there."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_command import SMALL_SUMS, lines, rollforge_command
from transformers import AutoModelForCausalLM

from rollforge.cli.main import main


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_recipe_runs_on_the_gpu_that_it_chose(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = rollforge_command("run", "sums", *SMALL_SUMS, "--algo.kl-coef", "0.01", "--steps", "2", "--out", str(run))
    assert done.returncode == 0, done.stderr
    assert "device: cuda (chosen)" in (run / "log.txt").read_text()
    assert [one["step"] for one in lines(run / "metrics.jsonl")] == [0, 1]
    assert AutoModelForCausalLM.from_pretrained(run / "model").num_parameters() > 50_000
    assert main(["eval", "sums", "--model", str(run / "model"), "--device", "cuda"]) == 0
