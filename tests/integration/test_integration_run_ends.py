"""How a run ends before its time: Ctrl-C, a killed role, a killed environment server, a killed controller.

In no case does it hang, and in no case does a process stay (conftest looks, too). What was foreseen comes without a
traceback.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from run_command import (
    SMALL_BLACKJACK,
    SMALL_SUMS,
    Process,
    is_alive,
    processes,
    shared_memory,
    started,
    steps_done,
    wait_until,
)
from transformers import AutoModelForCausalLM

from rollforge.envs.server import EnvServer
from rollforge.weights.folder import sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

START_LIMIT_S = 120.0
END_LIMIT_S = 30.0
GONE_LIMIT_S = 10.0
SOON_S = 15.0
SERVER = "rollforge.envs.blackjack.server"
ENDLESS = ("--steps", "100000", "--loop.evaluate-every", "0")


@contextmanager
def endless_run(folder: Path, *arguments: str) -> Iterator[tuple[Process, dict[str, psutil.Process]]]:
    """A run that has done its first step, and its processes."""
    with started("run", *arguments, *ENDLESS, "--out", str(folder)) as process:
        wait_until(lambda: steps_done(folder) >= 1, START_LIMIT_S, "the first step", process)
        yield process, processes(process)


def assert_gone(tree: dict[str, psutil.Process], limit_s: float = GONE_LIMIT_S) -> None:
    wait_until(lambda: not any(map(is_alive, tree.values())), limit_s, f"the end of {tree}")


def ended(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["ended"])


def interrupt(process: Process, tree: dict[str, psutil.Process], limit_s: float) -> None:
    """Ctrl-C, after which the command ends without having saved a model."""
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=limit_s)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert_gone(tree)
    assert shared_memory(process.pid) == []


@pytest.mark.parametrize("begun", ["logs/environment-server.log", "logs/weights.log", "logs/trainer.log"])
def test_ctrl_c_before_the_first_step_ends_the_start(tmp_path: Path, begun: str) -> None:
    """While the server, the first role, or many roles come up."""
    run = tmp_path / "run"
    with started("run", "blackjack", *SMALL_BLACKJACK, *ENDLESS, "--out", str(run)) as process:
        wait_until((run / begun).exists, START_LIMIT_S, begun, process)
        interrupt(process, processes(process), SOON_S)
    assert ended(run) == "interrupted"
    assert not (run / "model").exists()


def test_a_second_ctrl_c_ends_the_saving_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with endless_run(run, "sums", *SMALL_SUMS) as (process, tree):
        tree["trainer"].suspend()  # it will never have saved the model
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: "saving the model" in (run / "log.txt").read_text(), END_LIMIT_S, "the saving", process)
        interrupt(process, tree, SOON_S)
    assert ended(run) == "interrupted"


def test_ctrl_c_saves_the_model_and_exits_with_130(tmp_path: Path) -> None:
    with endless_run(tmp_path / "run", "sums", *SMALL_SUMS) as (process, tree):
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=END_LIMIT_S)
        assert process.returncode == 130, err
        assert "Traceback" not in err
        assert_gone(tree)
        assert shared_memory(process.pid) == []
    assert ended(tmp_path / "run") == "interrupted"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").num_parameters() > 50_000
    assert "interrupted" in out
    assert "interrupted" in (tmp_path / "run/log.txt").read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("recipe", "victim", "named"),
    [
        ("sums", "prompts", "prompts"),
        ("sums", "generator", "generator"),
        ("blackjack", "trainer", "trainer"),
        ("blackjack", SERVER, "environment-server"),
    ],
)
def test_a_killed_process_ends_the_run_with_its_name_and_cause(
    tmp_path: Path, recipe: str, victim: str, named: str
) -> None:
    options = SMALL_SUMS if recipe == "sums" else SMALL_BLACKJACK
    with endless_run(tmp_path / "run", recipe, *options) as (process, tree):
        tree[victim].kill()
        killed = time.monotonic()
        _, err = process.communicate(timeout=END_LIMIT_S)
        seconds = time.monotonic() - killed
        assert process.returncode == 1
        assert "Traceback" not in err
        cause = r"its process (was killed by signal 9 \(SIGKILL\)|\d+ is gone)"  # the latter where a role tells first
        assert re.match(f"error: role '{named}' died: {cause}", err), err
        assert f"Its log is {tmp_path / 'run/logs' / named}.log" in err
        assert seconds < END_LIMIT_S
        assert_gone(tree)
        assert shared_memory(process.pid) == []
    assert f"role '{named}' died" in (tmp_path / "run/log.txt").read_text()
    assert ended(tmp_path / "run").startswith(f"RoleDied: role '{named}' died: its process")


def test_the_death_of_a_server_of_the_users_own_ends_the_run_with_one_paragraph(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with (
        EnvServer(SERVER, log=tmp_path / "server.log") as server,
        endless_run(run, "blackjack", *SMALL_BLACKJACK, "--env.url", server.url) as (process, tree),
    ):
        assert SERVER not in tree, "the run started none of its own"
        os.kill(server.pid, signal.SIGKILL)
        _, err = process.communicate(timeout=END_LIMIT_S)
        assert process.returncode == 1
        assert re.match(r"error: \d+ of the last \d+ episodes failed, .* The last one: EnvironmentLost: ", err), err
        assert f"127.0.0.1:{server.port}" in err
        assert err.count("\n") == 1
        assert_gone(tree)
    assert ended(run).startswith("TooManyFailures: ")


def test_a_killed_controller_takes_everything_with_it(tmp_path: Path) -> None:
    with endless_run(tmp_path / "run", "blackjack", *SMALL_BLACKJACK) as (process, tree):
        assert {"generator", "trainer", SERVER} <= tree.keys()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(GONE_LIMIT_S)
        assert_gone(tree)
        sweep(Path("/dev/shm"))  # what the next run does first
        assert shared_memory(process.pid) == []
