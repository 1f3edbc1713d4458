"""Whole runs of the shipped recipes by the command line, on the tiny model: what they leave, and that they repeat."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from run_command import (
    SMALL_BLACKJACK,
    SMALL_SUMS,
    SYNCHRONOUS,
    deterministic,
    lines,
    rollforge_command,
    shared_memory,
    started,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollforge.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LIMIT_S = 200.0


def run_in_process(*arguments: str) -> None:
    assert main(["run", *arguments, "--in-process"]) == 0


def whole_run(*arguments: str) -> str:
    """A run with its roles in processes of their own; returns what it printed."""
    with started("run", *arguments) as process:
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert shared_memory(process.pid) == []
    return str(out)


@pytest.fixture(scope="module")
def blackjack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("blackjack") / "run"
    return folder, whole_run("blackjack", *SMALL_BLACKJACK, "--steps", "2", "--out", str(folder))


def test_a_run_folder_holds_everything(blackjack: tuple[Path, str]) -> None:
    folder, out = blackjack
    assert [one["step"] for one in lines(folder / "metrics.jsonl")] == [0, 1]
    assert [one["step"] for one in lines(folder / "evaluations.jsonl")] == [0, 2]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["recipe"], summary["ended"], summary["failed_episodes"]) == ("blackjack", "finished", 0)
    assert summary["after"]["eval/exact"] == lines(folder / "evaluations.jsonl")[1]["eval/exact"]
    for picture in ("chart.png", "reward.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    assert "finished" in (folder / "log.txt").read_text()
    assert re.search(
        r"^step 2/2  reward [+-]\d\.\d+  KL \d\.\d+  tokens/s \d+  staleness [01]\.\d+  seconds \d+\.\d  left 0:00$",
        out,
        re.M,
    )
    for row in ("expected reward per hand, exact", "for comparison: best", "minutes", "peak memory of all processes"):
        assert row in out, "a table of results ends the run"
    assert "hard 20" in out, "the chart is drawn in the terminal"
    assert "rollforge inspect" in out
    assert f"rollforge eval blackjack --model {folder / 'model'}" in out


def test_a_clean_run_leaves_nothing_alarming_in_its_roles_logs(blackjack: tuple[Path, str]) -> None:
    logs = {path.stem: path.read_text() for path in (blackjack[0] / "logs").glob("*.log")}
    assert {"generator", "environment", "trainer", "buffer", "prompts", "weights", "metrics"} <= logs.keys()
    assert "reference" not in logs, "no coefficient needs it"
    for role, text in logs.items():
        assert "Traceback" not in text, (role, text)
        assert "rror" not in text, (role, text)


def test_every_rollout_is_recorded_with_tokens_and_versions(blackjack: tuple[Path, str]) -> None:
    rollouts = lines(blackjack[0] / "rollouts.jsonl")
    assert len(rollouts) == 2 * 4 * 4
    assert len({rollout["id"] for rollout in rollouts}) == len(rollouts)
    assert sorted({rollout["group"] for rollout in rollouts}) == list(range(8))
    for rollout in rollouts:
        assert rollout["step"] == rollout["group"] // 4
        assert len(rollout["advantages"]) == len(rollout["turns"]) > 0
        # The tiny model's tokens are single characters: told once that it cannot be read, then the hand is forfeit.
        assert (rollout["counts"]["illegal"], rollout["counts"]["forfeit"]) == (2, 1)
        for turn in rollout["turns"]:
            assert len(turn["token_ids"]) == len(turn["logprobs"]) == len(turn["versions"]) == 1
            assert all(0 <= rollout["step"] - version <= 1 for version in turn["versions"])
    metrics = lines(blackjack[0] / "metrics.jsonl")
    assert max(one["staleness/max"] for one in metrics) <= 1
    assert [(one["count/illegal"], one["count/forfeit"]) for one in metrics] == [(2, 1)] * 2


def test_tensorboard_reads_the_events(blackjack: tuple[Path, str]) -> None:
    events = EventAccumulator(str(blackjack[0] / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [0, 1]


def test_transformers_loads_the_exported_model(blackjack: tuple[Path, str], tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(blackjack[0] / "model")
    tokenizer = AutoTokenizer.from_pretrained(blackjack[0] / "model")
    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert tokenizer.decode(tokenizer.encode("1+2=", add_special_tokens=False)) == "1+2="
    changes = [
        (after.float() - before.float()).abs().max()
        for after, before in zip(model.parameters(), start.parameters(), strict=True)
    ]
    assert 0 < max(changes) < 0.1
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_inspect_and_eval_work_on_the_result(blackjack: tuple[Path, str]) -> None:
    shown = rollforge_command("inspect", str(blackjack[0]), "--best")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "Hand" in shown.stdout
    config = str(blackjack[0] / "config.yaml")
    judged = rollforge_command("eval", "blackjack", "--model", str(blackjack[0] / "model"), "--config", config)
    assert judged.returncode == 0, judged.stderr
    found = {line.split()[0]: float(line.split()[1]) for line in judged.stdout.splitlines()}
    after = lines(blackjack[0] / "evaluations.jsonl")[-1]
    for name in ("eval/exact", "eval/sampled", "eval/played", "eval/legal_mass"):
        assert found[name] == pytest.approx(after[name], abs=1e-5), name


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit, save what a clock measured."""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert deterministic(lines(one / name)) == deterministic(lines(other / name))
    assert (one / "rollouts.jsonl").read_bytes() == (other / "rollouts.jsonl").read_bytes()
    assert (one / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()


def test_a_synchronous_run_is_the_same_in_processes_and_in_one_and_from_its_config(tmp_path: Path) -> None:
    """With two generators and a reference model, so that every role takes part."""
    options = (*SMALL_SUMS, *SYNCHRONOUS, "--generators", "2", "--algo.kl-coef", "0.01", "--steps", "3")
    apart, together, again = tmp_path / "apart", tmp_path / "together", tmp_path / "again"
    whole_run("sums", *options, "--out", str(apart))
    run_in_process("sums", *options, "--out", str(together))
    run_in_process("sums", "--config", str(apart / "config.yaml"), "--out", str(again))
    assert_same_run(apart, together)
    assert_same_run(together, again)

    logs = {path.stem for path in (apart / "logs").glob("*.log")}
    assert {"reference", "generator_0", "generator_1", "environment_0", "environment_1"} <= logs
    metrics = lines(apart / "metrics.jsonl")
    assert [one["staleness/max"] for one in metrics] == [0, 0, 0]
    assert all("kl/reference" in one for one in metrics)
    rollouts = lines(apart / "rollouts.jsonl")
    assert rollouts
    for rollout in rollouts:
        versions = {version for turn in rollout["turns"] for version in turn["versions"]}
        assert versions == {rollout["step"]}


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    for seed in ("0", "1"):
        run_in_process("sums", *SMALL_SUMS, *SYNCHRONOUS, "--steps", "1", "--seed", seed, "--out", str(tmp_path / seed))
    first, second = ((tmp_path / seed / "rollouts.jsonl").read_bytes() for seed in ("0", "1"))
    assert first != second


def test_p28_two_runs_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Of one seed, each with its own server, whose environments answer in whatever order they like: the same run."""
    folders = [tmp_path / "one", tmp_path / "other"]

    def run(folder: Path) -> str:
        return whole_run("blackjack", *SMALL_BLACKJACK, *SYNCHRONOUS, "--steps", "2", "--out", str(folder))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, folders))
    assert_same_run(*folders)
    assert all(one["staleness/max"] == 0 for one in lines(folders[0] / "metrics.jsonl"))
