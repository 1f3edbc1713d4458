"""`rollforge inspect` on runs that ended, are going on, or are no runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollforge.cli.main import main
from rollforge.runs.folder import RunFolder


def rollout(name: str, reward: float | None, completion: str = " HIT") -> dict[str, Any]:
    turn = {
        "prompt_ids": [1, 2, 3],
        "completion": completion,
        "token_ids": [7, 8],
        "logprobs": [-0.5, -1.5],
        "versions": [3, 4],
        "finish_reason": "stop",
        "observation": "you drew a 5",
        "reward": None,
    }
    last = {**turn, "completion": " STAND", "observation": "you win", "reward": 1.0, "versions": [4, 4]}
    return {
        "step": 1,
        "id": name,
        "group": 0,
        "prompt_id": "deal-9",
        "prompt": [{"role": "user", "content": "Your hand: 10 and 2."}],
        "reward": reward,
        "advantages": [0.25, -0.5],
        "dropped": None,
        "counts": {"illegal": 2.0},
        "turns": [turn, last],
    }


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that is going on: three steps, three rollouts, and a half-written line in both files."""
    folder = RunFolder.create(tmp_path / "run")
    folder.save_config("sums", "steps: 3\n")
    rewards = (-0.4, -0.2, 0.1)
    metrics = [{"step": i, "time": time.time(), "reward/mean": rewards[i], "kl": i / 10} for i in range(3)]
    rollouts = [
        rollout("g0-r0", 0.0),
        rollout("g0-r1", 1.0, " \x1b[31mHIT"),
        rollout("g0-r2", -1.0),
        rollout("nan", None),
    ]
    for path, records in ((folder.metrics, metrics), (folder.rollouts, rollouts)):
        path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 4, "rew')
    return folder


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 0
    return capsys.readouterr().out


def test_a_running_run_is_summed_up(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    shown = inspect(capsys, str(run.path))
    assert "3 steps, the last 0 s ago, not ended: it is going on, or was killed (there is no summary.json)" in shown
    line = next(line for line in shown.splitlines() if line.startswith("reward/mean"))
    assert line.split() == ["reward/mean", "-0.4", "-0.4", "0.1", "0.1"]
    assert "mean reward by step" in shown
    assert "config.yaml, metrics.jsonl, rollouts.jsonl" in shown


@pytest.mark.parametrize("ended", ["finished", "interrupted", "RoleDied: role 'trainer' died: killed"])
def test_an_ended_run_shows_how_and_its_results_and_evaluations(
    run: RunFolder, capsys: pytest.CaptureFixture[str], ended: str
) -> None:
    run.save_summary({"ended": ended, "final/reward": 0.125, "seconds": 60, "nested": {"not": "shown"}})
    run.evaluations.write_text(json.dumps({"step": 0, "time": 1.0, "accuracy": 0.44}) + "\n")
    shown = inspect(capsys, str(run.path))
    assert f"3 steps, {ended}\n" in shown and "not ended" not in shown
    assert "final/reward" in shown and "0.125" in shown
    assert "accuracy" in shown and "0.44" in shown


def test_a_rollout_is_shown_turn_by_turn(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    shown = inspect(capsys, str(run.path), "--rollout", "g0-r0")
    order = ["rollout g0-r0", "Your hand: 10 and 2.", "turn 1", "HIT", "you drew a 5", "turn 2", "STAND", "you win"]
    places = [shown.index(part) for part in order]
    assert places == sorted(places)
    for part in ("3 tokens in, 2 out (stop)", "policy version 3 to 4", "mean log-probability -1", "advantage -0.5"):
        assert part in " ".join(shown.split())
    assert "step 2" in shown and "illegal 2" in shown


@pytest.mark.parametrize(("option", "name"), [("--best", "g0-r1"), ("--worst", "g0-r2")])
def test_best_and_worst_ignore_rewards_that_are_no_number(
    run: RunFolder, capsys: pytest.CaptureFixture[str], option: str, name: str
) -> None:
    assert f"rollout {name}" in inspect(capsys, str(run.path), option)


def test_the_newest_rollout_is_the_default(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert "rollout nan" in inspect(capsys, str(run.path))


def test_what_a_model_wrote_cannot_steer_the_terminal(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    shown = inspect(capsys, str(run.path), "--best")
    assert "\x1b" not in shown
    assert "\\x1b[31mHIT" in shown


def test_a_run_before_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "fresh")
    folder.save_config("sums", "steps: 3\n")
    shown = inspect(capsys, str(folder.path))
    assert "no step yet" in shown
    assert "no values yet" in shown
    assert "no rollout has been written yet" in shown


def test_a_narrow_and_ascii_terminal_is_served(run: RunFolder) -> None:
    run.rollouts.write_text(json.dumps(rollout("g1-r0", 1.0, " 牌")) + "\n")
    code = "import sys; from rollforge.cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {"PYTHONIOENCODING": "ascii", "COLUMNS": "40", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code, "inspect", str(run.path)]
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"mean reward by step" in done.stdout


@pytest.mark.parametrize("arguments", [["absent"], ["."], [], ["RUN", "--rollout", "g9"], ["RUN", "--best", "--worst"]])
def test_what_cannot_be_shown_is_refused(
    run: RunFolder, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.path.parent)
    assert main(["inspect", *(str(run.path) if item == "RUN" else item for item in arguments)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
