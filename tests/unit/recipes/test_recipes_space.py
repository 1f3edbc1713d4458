"""A disk too small for what the model at hand will write is refused before anything heavy starts."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rollforge.config import UserError, dump
from rollforge.data.models import num_parameters
from rollforge.recipes import run as shared
from rollforge.recipes.sums import Config, Sums
from rollforge.runs.folder import RunFolder


def test_parameters_are_counted_from_the_files_as_torch_counts_them(tiny_model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert num_parameters(tiny_model) == sum(parameter.numel() for parameter in loaded.parameters())


@pytest.mark.parametrize(("dtype", "gigabytes"), [("bfloat16", 4.0), ("float32", 7.0)])
def test_the_disk_must_hold_the_model_in_its_compute_dtype(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, gigabytes: float
) -> None:
    """A model of 1.5 billion parameters on a disk that holds any run of a small one."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, int(3.5e9)))
    monkeypatch.setattr(shared, "num_parameters", lambda folder: 1_500_000_000)
    monkeypatch.setattr(shared.asyncio, "run", lambda _: pytest.fail("the run was started"))  # type: ignore[attr-defined]
    config = Config(model=str(tiny_model), dtype=dtype)  # type: ignore[arg-type]
    folder = RunFolder.create(tmp_path / "run")
    folder.save_config("sums", dump(config))
    with pytest.raises(UserError, match=rf"3\.5 GB free and a run needs {gigabytes} GB.*--out"):
        shared.run(Sums(config), folder.path)
