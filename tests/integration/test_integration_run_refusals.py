"""Bad input is refused with one paragraph and exit code 2 before anything heavy starts; so is a disk that fills up.

Also a reward that raises: retried, left out, counted, and, when there is too much of it, the end of the run.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from run_command import SMALL_BLACKJACK, SMALL_SUMS, SYNCHRONOUS, TINY, lines

from rollforge.cli.main import main
from rollforge.envs.server import EnvServer

MOODY = str(Path(__file__).parent / "moody_recipe.py")


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finding a recipe file changes is undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


@pytest.fixture
def nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    def heavy(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a role was started")

    monkeypatch.setattr("rollforge.runtime.runtime.Runtime.spawn", heavy)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one paragraph with which the command is refused."""
    assert main(["run", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.usefixtures("nothing_heavy")
@pytest.mark.parametrize(
    "recipe, options, words",
    [
        ("sums", "--sampling.temprature 1", ("sampling.temprature", "did you mean sampling.temperature")),
        ("sums", "--sampling.top-p 0.9", ("sampling.top_p", "Unknown key")),
        ("sums", "--steps many", ("steps", "'many'", "int")),
        ("sums", "--steps 0", ("steps is 0", "at least 1")),
        ("sums", "--generators 0", ("generators is 0", "at least 1")),
        ("sums", "--sampling.temperature 0", ("sampling.temperature is 0", "at least 0.001")),
        ("sums", "--rollout.group-size 1", ("rollout.group_size is 1", "at least 2")),
        ("sums", "--device gpu", ("device is 'gpu'", "cpu or cuda")),
        ("sums", "--model nobody/nothing", ("nobody/nothing", "hub")),
        ("sums", "--model ./no-such-folder", ("no-such-folder", "folder")),
        ("blackjack", "--sampling.max-tokens 2", ("sampling.max_tokens is 2", "Set it to 1")),
        ("blackjack", "--env.max-sessions 2", ("env.max_sessions is 2", "rollout.group_size 4")),
        (
            "blackjack",
            "--loop.groups-per-step 64 --hands.shoes-per-deal 6 --hands.deals-per-examples 1",
            ("hands.shoes_per_deal 6", "Set loop.groups_per_step to 66", "hands.shoes_per_deal to 2"),
        ),
        (
            "blackjack",
            "--loop.groups-per-step 64 --hands.shoes-per-deal 4 --hands.deals-per-examples 6",
            ("4 = 24", "Set hands.deals_per_examples to 2", "loop.groups_per_step to 72"),
        ),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: str, options: str, words: tuple[str, ...]
) -> None:
    err = refused(capsys, recipe, *options.split(), "--out", str(tmp_path / "run"))
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    "options",
    [
        "--loop.groups-per-step 66 --hands.shoes-per-deal 6 --hands.deals-per-examples 1",
        "--loop.groups-per-step 64 --hands.shoes-per-deal 2 --hands.deals-per-examples 1",
        "--loop.groups-per-step 64 --hands.shoes-per-deal 4 --hands.deals-per-examples 2",
        "--loop.groups-per-step 72 --hands.shoes-per-deal 4 --hands.deals-per-examples 6",
        "--loop.groups-per-step 4 --hands.shoes-per-deal 4 --hands.deals-per-examples 8",
    ],
)
def test_what_the_refusal_advises_is_accepted(options: str) -> None:
    from rollforge.config import load
    from rollforge.recipes.blackjack import Config

    words = options.split()
    config = load(Config, None, [(key[2:], value) for key, value in zip(words[::2], words[1::2], strict=True)])
    assert str(config.loop.groups_per_step) == words[1]


@pytest.mark.usefixtures("nothing_heavy")
def test_cuda_is_refused_where_there_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollforge.recipes.base.has_cuda", lambda: False)
    err = refused(capsys, "sums", "--device", "cuda", "--out", str(tmp_path / "run"))
    assert "no CUDA device" in err
    assert "rollforge doctor" in err


@pytest.mark.usefixtures("nothing_heavy")
@pytest.mark.parametrize(
    "lacking, words", [("tokenizer.json", "a tokenizer"), ("*.safetensors", "weights"), ("config.json", "config.json")]
)
def test_a_model_folder_that_is_not_whole_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path, lacking: str, words: str
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    for file in folder.glob(lacking):
        file.unlink()
    err = refused(capsys, "sums", "--model", str(folder), "--out", str(tmp_path / "run"))
    assert f"lacks {words}" in err
    assert str(folder) in err


@pytest.mark.usefixtures("nothing_heavy")
def test_messages_need_a_chat_template(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    options = ("--model", str(folder), "--out", str(tmp_path / "run"))
    assert "has no chat template" in refused(capsys, MOODY, "--chat", "true", *options)


@pytest.mark.usefixtures("nothing_heavy")
def test_an_environment_server_that_is_not_there_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    err = refused(capsys, "blackjack", *SMALL_BLACKJACK, "--env.url", url, "--out", str(tmp_path / "run"))
    assert url in err
    assert "Start the server" in err


@pytest.mark.usefixtures("nothing_heavy")
def test_a_server_of_ours_that_does_not_start_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = partial(EnvServer, "no_such_server")
    monkeypatch.setattr("rollforge.recipes.blackjack.EnvServer", lambda _, **options: server(**options))
    err = refused(capsys, "blackjack", *SMALL_BLACKJACK, "--out", str(tmp_path / "run"))
    assert "The environment server no_such_server" in err
    assert "did not start. Its last output" in err and "No module named no_such_server" in err


@pytest.mark.usefixtures("nothing_heavy")
def test_an_existing_output_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    assert "is not an empty folder" in refused(capsys, "sums", *TINY, "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_while_running_ends_the_run_and_spoils_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with largest_file(500_000):
        options = ("--held-out-prompts", "8", "--steps", "1000", "--in-process")
        assert main(["run", "sums", *TINY, *options, "--out", str(run)]) == 2
    err = capsys.readouterr().err
    assert "error: Could not write" in err
    assert str(run) in err
    assert "Traceback" not in err
    assert lines(run / "rollouts.jsonl")
    assert "ended by UserError: Could not write" in (run / "log.txt").read_text()
    assert json.loads((run / "summary.json").read_text())["ended"].startswith("UserError: Could not write")


@pytest.mark.parametrize("what", ["curve_png", "export"])
def test_a_disk_that_is_full_when_pictures_or_model_are_written_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {
        "curve_png": "rollforge.recipes.run.curve_png",
        "export": "rollforge.train.trainer.PolicyTrainer._export",
    }[what]
    monkeypatch.setattr(target, full)
    arguments = [*SMALL_SUMS, *SYNCHRONOUS, "--in-process", "--steps", "1", "--out", str(tmp_path / "run")]
    assert main(["run", "sums", *arguments]) == 2
    err = capsys.readouterr().err
    assert f"Could not write {'the pictures' if what == 'curve_png' else 'the model'}" in err
    assert "the disk is full" in err


def test_a_reward_that_raises_is_retried_left_out_counted_and_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--answers-that-raise", "9", "--loop.max-failed-share", "0.9", "--steps", "8")
    assert main(["run", MOODY, *SMALL_SUMS, *SYNCHRONOUS, *options, "--in-process", "--out", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.count("an episode failed and is left out: LookupError: no judge for 9") == 1, "the first of its kind"
    failed = lines(run / "metrics.jsonl")[-1]["episodes/failed"]
    assert failed > 0
    assert failed % 4 == 0, "whole groups failed, and each of their episodes counts"
    assert json.loads((run / "summary.json").read_text())["failed_episodes"] == failed
    log = (run / "log.txt").read_text()
    assert "LookupError: no judge for 9" in log
    assert f"{failed:.0f} episodes failed and were left out, the last one: LookupError" in log
    answers = {rollout["prompt"] for rollout in lines(run / "rollouts.jsonl")}
    assert answers
    assert not any(sum(map(int, prompt.splitlines()[-1].rstrip("=").split("+"))) == 9 for prompt in answers)


def test_a_reward_that_raises_too_often_ends_the_run_with_its_cause(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--answers-that-raise", "3,4,5,6,7,8,9", "--steps", "50")
    assert main(["run", MOODY, *SMALL_SUMS, *options, "--in-process", "--out", str(run)]) == 1
    err = capsys.readouterr().err
    assert "error: " in err
    assert "loop.max_failed_share = 0.2 allows." in err
    assert "The last one: LookupError: no judge for" in err
    assert "TooManyFailures" in (run / "log.txt").read_text()
