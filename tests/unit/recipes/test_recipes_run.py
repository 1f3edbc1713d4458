"""How a run is watched and interrupted, and what a failed export becomes."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import rollforge
from rollforge.config import ConfigError, UserError
from rollforge.recipes.base import SamplingConfig
from rollforge.recipes.run import _beside, _export_guard, _supervise_server, _until_interrupted
from rollforge.runtime import RoleDied

LIMIT_S = 10.0
SOURCE = Path(rollforge.__file__).parent.parent


async def forever() -> None:
    await asyncio.Event().wait()


async def fail(after_s: float, error: Exception) -> None:
    await asyncio.sleep(after_s)
    raise error


async def test_work_ends_and_takes_its_watches_with_it() -> None:
    async with asyncio.timeout(LIMIT_S):
        await _beside(asyncio.sleep(0.01), [forever(), forever()])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_death_of_a_role_that_nobody_calls_ends_the_work() -> None:
    with pytest.raises(RoleDied, match="role 'idle' died"):
        async with asyncio.timeout(LIMIT_S):
            await _beside(forever(), [fail(0.01, RoleDied("idle", "killed"))])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_death_explains_a_failure_that_was_heard_of_first() -> None:
    with pytest.raises(RoleDied, match="role 'server' died"):
        await _beside(fail(0, ConnectionError("lost")), [forever(), fail(0.05, RoleDied("server", "killed"))])


async def test_a_failure_without_a_death_is_raised_as_it_is() -> None:
    error = KeyError("x")
    with pytest.raises(KeyError) as raised:
        async with asyncio.timeout(LIMIT_S):
            await _beside(fail(0, error), [forever()])
    assert raised.value is error


async def test_a_server_that_ends_is_told_with_its_cause_and_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.txt"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as server:
        watching = asyncio.create_task(_supervise_server(server.pid, log))
        await asyncio.sleep(0.01)
        assert not watching.done()
        server.kill()
        with pytest.raises(RoleDied) as died:
            await asyncio.wait_for(watching, LIMIT_S)
    assert "role 'environment-server' died: its process was killed by signal 9 (SIGKILL)" in str(died.value)
    assert "line 99" in str(died.value)
    assert "line 59" not in str(died.value)


async def test_ctrl_c_cancels_the_work_and_says_so() -> None:
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await forever()
        except asyncio.CancelledError:
            cancelled = True
            raise

    assert await asyncio.wait_for(_until_interrupted(work()), LIMIT_S) is True
    assert cancelled
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_work_that_is_not_interrupted_says_so_and_failures_pass() -> None:
    assert await _until_interrupted(asyncio.sleep(0)) is False
    with pytest.raises(KeyError):
        await _until_interrupted(fail(0, KeyError("x")))


async def test_a_cancellation_that_is_no_ctrl_c_is_none() -> None:
    running = asyncio.create_task(_until_interrupted(forever()))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


SAVING = """
import asyncio, sys
from rollforge.recipes.run import _until_interrupted

async def work():
    print("working", flush=True)
    await asyncio.sleep(60)

async def main():
    await _until_interrupted(work())
    print("saving", flush=True)
    await asyncio.sleep(60)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_second_ctrl_c_ends_the_saving_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAVING],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for said in ("working", "saving"):
            assert process.stdout.readline() == f"{said}\n"
            process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130


def test_a_full_disk_during_the_export_is_a_user_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"Could not write the model to .*file size limit"), _export_guard(tmp_path):
            save_file({"x": torch.zeros(100_000)}, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_other_failures_of_an_export_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError, match="shared"), _export_guard(tmp_path):
        raise SafetensorError("shared tensors")
    with pytest.raises(PermissionError), _export_guard(tmp_path):
        raise SafetensorError("I/O error: Permission denied (os error 13)")


def test_rollouts_are_sampled_as_configured_and_from_the_whole_distribution() -> None:
    sampling = SamplingConfig(temperature=0.7, max_tokens=3, stop=("\n",)).sampling()
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (0.7, 3, ("\n",))
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, 0.0)
    with pytest.raises(ConfigError, match=re.escape("sampling.max_tokens is 0")):
        SamplingConfig(max_tokens=0)
