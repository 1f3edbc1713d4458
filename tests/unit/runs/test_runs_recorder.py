"""What the recorder writes is what the reader gives, and what TensorBoard shows."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollforge.config import UserError
from rollforge.runs.folder import RunFolder
from rollforge.runs.reader import RunReader
from rollforge.runs.recorder import RunRecorder
from rollforge.types import (
    Completion,
    Credit,
    Group,
    Message,
    Observation,
    Prompt,
    Recorder,
    Rollout,
    Scored,
    Turn,
)

TWO: Any = np.float32(2)  # numbers come as numpy scalars, too


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run")
    made.save_config("sums", "seed: 1\n")
    return made


def turn(reward: float | None = None, logprobs: tuple[float, ...] = (-0.123456789, -math.inf)) -> Turn:
    completion = Completion(
        token_ids=np.array([5, 6], dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.array([3, 4], dtype=np.int32),
        text="HIT",
        finish_reason="stop",
    )
    return Turn(np.array([1, 2, 3], dtype=np.int32), completion, Observation("You have 20.", reward))


def scored(index: int, credit: Credit, prompt: Prompt | None = None) -> Scored:
    prompt = prompt or Prompt(f"p{index}", text="You have 12.")
    rollouts = (
        Rollout(f"p{index}/0", (turn(), turn(1.0)), 1.0, {"illegal": TWO}),
        Rollout(f"p{index}/1", (turn(-1.0),), -1.0),
    )
    return Scored(Group(index, prompt, rollouts), credit, ())


CREDIT = Credit(advantages=((0.5, 0.25), (-0.1,)))


async def test_it_has_the_verbs_of_the_role(folder: RunFolder) -> None:
    recorder: Recorder = RunRecorder(str(folder.path))
    assert inspect.iscoroutinefunction(recorder.log) and inspect.iscoroutinefunction(recorder.rollouts)


async def test_metrics_go_to_lines_and_tensorboard(folder: RunFolder) -> None:
    recorder = RunRecorder(str(folder.path))
    for step in (1, 2, 3):
        await recorder.log(step, {"reward/mean": step / 4, "loss": TWO, "bad": math.nan})
    reader = RunReader(folder.path)
    records = list(reader.metrics())
    assert [record["step"] for record in records] == [1, 2, 3]
    assert {"reward/mean": 0.25, "loss": 2.0, "bad": None}.items() <= records[0].items()
    assert records[0]["time"] > 1.7e9
    assert reader.series("reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert reader.series("bad") == []
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert math.isnan(events.Scalars("bad")[0].value)


async def test_evaluations_have_their_own_lines_and_names(folder: RunFolder) -> None:
    recorder = RunRecorder(str(folder.path))
    await recorder.evaluation(0, {"accuracy": 0.5})
    await recorder.evaluation(10, {"accuracy": 0.75})
    await recorder.close()
    found = [(record["step"], record["accuracy"]) for record in RunReader(folder.path).evaluations()]
    assert found == [(0, 0.5), (10, 0.75)]
    assert RunReader(folder.path).series("accuracy") == []
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    assert [event.value for event in events.Scalars("evaluation/accuracy")] == [0.5, 0.75]


async def test_a_rollout_comes_back_as_it_was(folder: RunFolder) -> None:
    recorder = RunRecorder(str(folder.path))
    await recorder.rollouts(7, [scored(0, CREDIT), scored(1, Credit((), dropped="zero variance"))])
    reader = RunReader(folder.path)
    first, second, third, fourth = reader.rollouts()
    one_turn = {
        "prompt_ids": [1, 2, 3],
        "completion": "HIT",
        "token_ids": [5, 6],
        "logprobs": [-0.12346, None],
        "versions": [3, 4],
        "finish_reason": "stop",
        "observation": "You have 20.",
    }
    assert first == {
        "step": 7,
        "id": "p0/0",
        "group": 0,
        "prompt_id": "p0",
        "prompt": "You have 12.",
        "reward": 1.0,
        "advantages": [0.5, 0.25],
        "dropped": None,
        "counts": {"illegal": 2.0},
        "turns": [{**one_turn, "reward": None}, {**one_turn, "reward": 1.0}],
    }
    assert second["advantages"] == [-0.1]
    assert (third["dropped"], third["advantages"]) == ("zero variance", [])
    assert fourth == reader.last_rollout() == reader.rollout("p1/1")


async def test_messages_are_kept_as_messages(folder: RunFolder) -> None:
    prompt = Prompt("chat", messages=(Message("system", "Play."), Message("user", "12 against 6\n\ud83d")))
    recorder = RunRecorder(str(folder.path))
    await recorder.rollouts(1, [scored(0, CREDIT, prompt)])
    record = RunReader(folder.path).last_rollout()
    assert record is not None
    assert record["prompt"] == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "12 against 6\n\ud83d"},
    ]


async def test_rollouts_are_found_by_step_and_id(folder: RunFolder) -> None:
    recorder = RunRecorder(str(folder.path))
    for step in (1, 2, 12):
        await recorder.rollouts(step, [scored(step, CREDIT)])
    reader = RunReader(folder.path)
    assert [record["id"] for record in reader.rollouts(step=1)] == ["p1/0", "p1/1"]
    assert list(reader.rollouts(step=3)) == []
    found = reader.rollout("p12/1")
    assert found is not None and found["step"] == 12
    assert reader.rollout("p2") is None


@pytest.mark.parametrize(
    "credit",
    [Credit(((0.5, 0.5),)), Credit(((0.5,), (0.5,))), Credit(()), Credit(((0.5,), (0.5,)), dropped="stale")],
)
async def test_advantages_that_do_not_fit_are_refused(folder: RunFolder, credit: Credit) -> None:
    with pytest.raises(ValueError, match=r"advantages|zip"):
        await RunRecorder(str(folder.path)).rollouts(1, [scored(0, credit)])
    assert RunReader(folder.path).last_rollout() is None


@pytest.mark.parametrize("name", ["step", "time"])
async def test_a_metric_cannot_take_the_place_of_a_field(folder: RunFolder, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        await RunRecorder(str(folder.path)).log(1, {name: 3.0})


async def test_closing_twice_is_fine_and_the_summary_marks_the_end(folder: RunFolder) -> None:
    reader = RunReader(folder.path)
    recorder = RunRecorder(str(folder.path))
    await recorder.close()
    await recorder.close()
    assert reader.summary() is None
    folder.save_summary({"ended": "finished", "best": np.float32(0.5), "peak": math.inf, "rows": [("a", 1)]})
    assert reader.summary() == {"ended": "finished", "best": 0.5, "peak": None, "rows": [["a", 1]]}


async def test_a_second_recorder_goes_on_where_a_killed_one_stopped(folder: RunFolder) -> None:
    await RunRecorder(str(folder.path)).log(1, {"loss": 1.0})
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    await RunRecorder(str(folder.path)).log(2, {"loss": 2.0})
    assert RunReader(folder.path).series("loss") == [(1, 1.0), (2, 2.0)]
    assert len(list(folder.tensorboard.iterdir())) == 2, "each recorder has an event file of its own"


def test_a_new_run_has_nothing_to_read_yet(folder: RunFolder) -> None:
    reader = RunReader(folder.path)
    assert reader.config().endswith("\nseed: 1\n")
    assert [*reader.metrics(), *reader.evaluations(), *reader.rollouts()] == []
    assert (reader.last_rollout(), reader.rollout("x"), reader.summary()) == (None,) * 3


@pytest.mark.parametrize("line", [b'{"step": 2, "loss"', b"[1, 2]", b"\x00\x00"])
def test_a_damaged_line_is_named(folder: RunFolder, line: bytes) -> None:
    folder.metrics.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl"):
        list(RunReader(folder.path).metrics())


WRITER = """
import asyncio, sys
from rollforge.runs.recorder import RunRecorder

async def main():
    recorder = RunRecorder(sys.argv[1])
    for step in range(1, 10**9):
        await recorder.log(step, {f"metric/{index}": step / 7 for index in range(200)})
        print(step, flush=True)

asyncio.run(main())
"""


def test_a_recorder_killed_while_it_writes(folder: RunFolder) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(folder.path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(50):
        assert child.stdout.readline()
    child.kill()
    rest, _ = child.communicate(timeout=30)
    steps = [step for step, _ in RunReader(folder.path).series("metric/199")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 50 + len(rest.splitlines())
    events = EventAccumulator(str(folder.tensorboard), size_guidance={"scalars": 0}).Reload()
    assert len(events.Scalars("metric/0")) >= 50 + len(rest.splitlines())


def test_reading_needs_neither_torch_nor_tensorboard() -> None:
    code = "import sys, rollforge.runs.reader, rollforge.observe.console, rollforge.observe.plot; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "tensorboard", "matplotlib", "tensorflow"} & set(done.stdout.split())


def test_recording_needs_no_torch() -> None:
    code = "import sys, rollforge.runs.recorder; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "tensorflow"} & set(done.stdout.split())


def test_no_line_of_a_run_holds_what_json_forbids(folder: RunFolder) -> None:
    async def write() -> None:
        recorder = RunRecorder(str(folder.path))
        await recorder.log(1, {"a": math.nan, "b": -math.inf})
        await recorder.rollouts(1, [scored(0, CREDIT)])

    def refuse(word: str) -> None:
        raise AssertionError(word)

    asyncio.run(write())
    for path in (folder.metrics, folder.rollouts):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)
