"""What a run computes on: chosen by what is there, said in words, and every choice can be set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rollforge.config import ConfigError, dump, load
from rollforge.recipes import base, sums
from rollforge.recipes.base import choose_machine

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def cpu_with_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a GPU; returns the file that lists its processor's instructions."""
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: any\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n")
    monkeypatch.setattr(base, "_CPU", file)
    monkeypatch.setattr(base, "has_cuda", lambda: False)
    return file


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def chosen(**settings: Any) -> tuple[str, str, str, int]:
    machine = choose_machine(sums.Config(**settings))
    return machine.device, machine.dtype, machine.engine, machine.threads


def facts(**settings: Any) -> dict[str, str]:
    return choose_machine(sums.Config(**settings)).facts


def test_without_a_gpu_the_cpu_is_chosen() -> None:
    assert chosen() == ("cpu", "bfloat16", "native", CORES)
    assert facts() == {
        "model": "smollm2",
        "device": "cpu (chosen)",
        "dtype": "bfloat16 (chosen), masters float32",
        "engine": "native (chosen)",
        "threads": f"{CORES} of {CORES} (chosen)",
        "staleness": "at most 1",
    }


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_there_is_chosen() -> None:
    assert chosen() == ("cuda", "bfloat16", "native", CORES)
    assert facts()["device"] == "cuda (chosen)"


@pytest.mark.usefixtures("gpu")
def test_what_is_set_is_kept_and_said_to_be_set() -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "engine": "native", "threads": 3}
    assert chosen(**settings) == ("cpu", "float32", "native", 3)
    assert facts(**settings) == {
        "model": "smollm2",
        "device": "cpu (set)",
        "dtype": "float32 (set), masters float32",
        "engine": "native (set)",
        "threads": f"3 of {CORES} (set)",
        "staleness": "at most 1",
    }


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda', but torch finds no CUDA device.*set device to cpu"):
        choose_machine(sums.Config(device="cuda"))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((10, 0), "bfloat16")])
def test_an_old_gpu_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert chosen()[1] == dtype
    assert ("no bfloat16 instructions" in facts()["dtype"]) == (dtype == "float32")
    assert chosen(dtype="bfloat16")[1] == "bfloat16"


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx_vnni", "float32"),
        ("flags\t\t: fpu avx512f avx512_vnni", "float32"),
        ("flags\t\t: fpu amx_bf16 amx_tile", "bfloat16"),
        ("Features\t: fp asimd sve bf16", "bfloat16"),
    ],
)
def test_a_cpu_without_bfloat16_computes_in_float32(cpu_with_bfloat16: Path, line: str, dtype: str) -> None:
    cpu_with_bfloat16.write_text(f"processor\t: 0\n{line}\n")
    assert chosen()[1] == dtype
    assert ("no bfloat16 instructions" in facts()["dtype"]) == (dtype == "float32")
    assert chosen(dtype="bfloat16")[1] == "bfloat16"


def test_the_resolved_configuration_leaves_nothing_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    config = sums.Config(model="./model", steps=7)
    resolved = choose_machine(config).resolve(config)
    assert resolved == sums.Config(
        model=str(tmp_path / "model"), steps=7, device="cpu", dtype="bfloat16", engine="native", threads=CORES
    )
    assert choose_machine(resolved).resolve(resolved) == resolved
    (tmp_path / "config.yaml").write_text(dump(resolved))
    assert load(sums.Config, tmp_path / "config.yaml") == resolved


@pytest.mark.parametrize("name", ["smollm2", "tiny", "nobody/nothing"])
def test_the_names_of_models_stay_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "tiny").mkdir()  # a folder of that name is ./tiny
    monkeypatch.chdir(tmp_path)
    config = sums.Config(model=name)
    assert choose_machine(config).resolve(config).model == name
