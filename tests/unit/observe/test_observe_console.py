"""What a run shows, on a terminal and in a pipe."""

from __future__ import annotations

import io
import math
import re

import pytest
import rich.console

from rollforge.observe.console import Console, duration, number

FACTS = {"model": "smollm2 (set)", "device": "cpu (automatic)"}
METRICS = {
    "reward/mean": -0.125,
    "kl/reference": 0.0123,
    "generate/tokens_per_second": 1234.4,
    "staleness/mean": 0.5,
    "time/step_s": 4.25,
}


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(terminal: bool, total: int = 20, width: int = 80) -> tuple[Console, io.StringIO, Clock]:
    clock, out = Clock(), io.StringIO()
    kind = "xterm-256color" if terminal else "dumb"
    output = rich.console.Console(
        file=out, force_terminal=terminal, width=width, highlight=False, _environ={"TERM": kind}, legacy_windows=False
    )
    return Console("blackjack: GRPO", FACTS, total, output, clock), out, clock


def test_plain_lines_in_a_pipe() -> None:
    console, out, clock = make(terminal=False)
    for step in (1, 2, 3):
        clock.now = 10.0 * step
        console.step(step, METRICS)
    console.close()
    lines = out.getvalue().splitlines()
    assert lines[:4] == ["blackjack: GRPO", "  model   smollm2 (set)", "  device  cpu (automatic)", ""]
    assert lines[4].startswith("step 1/20  reward -0.125  KL 0.0123  tokens/s 1,234  staleness 0.50  seconds 4.2")
    assert lines[4].endswith("left -")
    assert lines[6].endswith("left 2:50")
    assert len(lines) == 7
    assert "\x1b" not in out.getvalue()


def test_a_value_that_is_missing_or_nan_is_not_made_up() -> None:
    console, out, _ = make(terminal=False)
    console.step(1, {"reward/mean": math.nan, "kl/behaviour": 0.5})
    assert out.getvalue().splitlines()[-1] == "step 1/20  KL 0.5000  left -"


def test_a_terminal_shows_rows_and_keeps_its_cursor() -> None:
    console, out, clock = make(terminal=True)
    with console:
        console.evaluation(0, {"accuracy": 0.44})
        for step in (1, 2):
            clock.now += 3.0
            console.step(step, METRICS)
    text = out.getvalue()
    assert "2/20" in text and " 10%  0:06 passed, 0:54 left" in text
    assert "evaluation at step 0:  accuracy 0.44" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


def test_every_terminal_line_fits_80_columns() -> None:
    console, out, clock = make(terminal=True, total=10_000)
    for step in range(9_990, 9_999):
        clock.now += 700.0
        console.step(
            step, {**METRICS, "generate/tokens_per_second": 123_456.0, "kl/reference": 12.5, "reward/mean": -100}
        )
        console.evaluation(step, {f"measure_{index}": index / 7 for index in range(8)})
    console.finish([("exact reward per hand", -0.2, -0.05)], ["rollforge inspect outputs/run"])
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert max(len(line) for line in re.split(r"[\r\n]", plain)) <= 80
    row = next(line for line in plain.splitlines() if line.startswith(" 9998/10000"))
    assert row.split() == ["9998/10000", "-100.000", "12.5000", "123,456", "0.50", "4.2", "23:20"]


def test_text_of_users_is_shown_as_it_is() -> None:
    console, out, _ = make(terminal=False)
    console.note("replica [1/2] restarted: [bold]why[/bold]")
    assert out.getvalue().endswith("replica [1/2] restarted: [bold]why[/bold]\n")


def test_results_and_where_to_look_next() -> None:
    console, out, _ = make(terminal=False)
    console.finish([("win rate", 0.351, 0.42), ("always stand", None, -0.1864)], ["rollforge inspect runs/1"])
    lines = [line.split("  ") for line in out.getvalue().splitlines()]
    fields = [[field.strip() for field in line if field.strip()] for line in lines]
    assert ["result", "before", "after"] in fields
    assert ["win rate", "0.351", "0.42"] in fields
    assert ["always stand", "-0.1864"] in fields
    assert fields[-2:] == [["where to look next"], ["rollforge inspect runs/1"]]


def test_a_resumed_run_counts_its_own_pace() -> None:
    console, out, clock = make(terminal=False, total=200)
    for step in (101, 102):
        clock.now += 2.0
        console.step(step, {})
    assert out.getvalue().endswith("left 3:16\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0:00"), (59.6, "1:00"), (3599.7, "1:00:00"), (7325, "2:02:05")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), ("basic", "basic"), (1500.0, "1,500"), (-0.08123, "-0.08123"), (2, "2")]
)
def test_numbers(value: float | str | None, text: str) -> None:
    assert number(value) == text
