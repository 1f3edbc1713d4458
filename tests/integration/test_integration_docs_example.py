"""The pages hold what they should: the quickstart's example runs as shown, results and keys are up to date."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollforge.runs.reader import RunReader

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "larger.py"
STEPS = 2


def _rollforge(*words: str) -> str:
    """What the command prints; one compute thread, since the machine has other tests to run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "rollforge.cli.main", *words],
        capture_output=True, text=True, timeout=110, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_docs_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert EXAMPLE.read_text() in blocks


def test_docs_pages_hold_the_keys_and_results_of_today() -> None:
    """If this fails: `python benchmarks/report.py`."""
    check = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_docs_example_trains_and_evaluates(tmp_path: Path, tiny_model: Path) -> None:
    out = tmp_path / "run"
    small = ["--rollout.group_size", "4", "--loop.groups_per_step", "4", "--questions", "8", "--threads", "1"]
    told = _rollforge("run", str(EXAMPLE), "--model", str(tiny_model), "--steps", str(STEPS), "--out", str(out), *small)
    assert f"rollforge eval {EXAMPLE} --model {out / 'model'}" in told
    reader = RunReader(out)
    assert [record["step"] for record in reader.metrics()] == list(range(STEPS))
    evaluated = list(reader.evaluations())
    assert evaluated[0]["step"] == 0 and evaluated[-1]["step"] == STEPS
    assert all(0 <= record["eval/reward"] <= 1 for record in evaluated)
    rollouts = list(reader.rollouts())
    assert len(rollouts) == STEPS * 4 * 4 and {record["reward"] for record in rollouts} <= {0.0, 0.2, 1.0}
    assert json.loads((out / "model" / "config.json").read_text())["model_type"] == "llama"
    shown = _rollforge("eval", str(EXAMPLE), "--model", str(out / "model"), "--in-process", *small)
    assert float(shown.split()[-1]) == pytest.approx(evaluated[-1]["eval/reward"], abs=1e-5)
