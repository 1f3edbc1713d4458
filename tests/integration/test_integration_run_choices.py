"""What was chosen or set for a run reaches its roles, its output and its config.yaml, which says it all again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from run_command import SMALL, SYNCHRONOUS, deterministic, lines

from rollforge.cli.main import main
from rollforge.config import load
from rollforge.recipes import sums

pytestmark = pytest.mark.timeout(240)

SUMS = ("sums", "--in-process", *SMALL, "--held-out-prompts", "8", *SYNCHRONOUS)
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_reaches_trainer_and_engine_and_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    from rollforge.generate.native import model as engine
    from rollforge.train import trainer

    loaded: dict[str, torch.dtype] = {}
    for module in (engine, trainer):
        load_model = module.load_causal_lm

        def watched(*arguments: Any, load: Any = load_model, name: str = module.__name__, **named: Any) -> Any:
            model = load(*arguments, **named)
            loaded[name] = next(model.parameters()).dtype
            return model

        monkeypatch.setattr(module, "load_causal_lm", watched)
    assert (
        main(["run", *SUMS, "--model", "tiny", "--steps", "1", "--dtype", dtype, "--out", str(tmp_path / "run")]) == 0
    )
    assert loaded == dict.fromkeys([engine.__name__, trainer.__name__], getattr(torch, dtype))
    said = " ".join(capsys.readouterr().out.split())
    for fact in ("device cpu (", "engine native (chosen)", f"dtype {dtype} (set), masters float32"):
        assert fact in said
    assert f"dtype: {dtype} (set), masters float32" in (tmp_path / "run/log.txt").read_text()


def test_a_synchronous_run_repeats_itself_from_its_config_wherever_that_lies(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, again = tmp_path / "one", tmp_path / "again"
    shutil.copytree(tiny_model, tmp_path / "here/model")
    monkeypatch.chdir(tmp_path / "here")
    options = ("--model", "./model", "--device", "cpu", "--dtype", "float32", "--steps", "2", "--seed", "3")
    assert main(["run", *SUMS, *options, "--out", str(one)]) == 0
    written = load(sums.Config, one / "config.yaml")
    assert (written.device, written.dtype, written.engine) == ("cpu", "float32", "native")
    assert (written.threads, written.model) == (CORES, str(tmp_path / "here/model"))
    assert (one / "config.yaml").read_text().startswith("# rollforge run sums --config config.yaml\n")

    monkeypatch.chdir(tmp_path)
    assert main(["run", "sums", "--config", str(one / "config.yaml"), "--out", str(again)]) == 0
    assert (again / "config.yaml").read_bytes() == (one / "config.yaml").read_bytes()
    assert (again / "rollouts.jsonl").read_bytes() == (one / "rollouts.jsonl").read_bytes()
    assert (again / "model/model.safetensors").read_bytes() == (one / "model/model.safetensors").read_bytes()
    assert deterministic(lines(again / "metrics.jsonl")) == deterministic(lines(one / "metrics.jsonl"))
