"""The chart says in the terminal and in the picture what the policy plays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rollforge.envs.blackjack.chart import Reading, save_chart, terminal_chart
from rollforge.envs.blackjack.exact import INDEX, Values, best_actions, policy_of
from rollforge.envs.blackjack.game import STATES, State


def best() -> Values:
    hits = best_actions()
    return policy_of(lambda state: float(hits[INDEX[state]]))


def with_mistake() -> Values:
    policy = best()
    policy[INDEX[State(20, False, 6)]] = (0.7, 0.3, 0.0)  # clear
    policy[INDEX[State(16, False, 10)]] = (0.4, 0.6, 0.0)  # close
    policy[INDEX[State(4, False, 2)]] = (0.1, 0.1, 0.8)  # says neither
    return policy


def test_a_reading_finds_the_differences_from_the_best_play() -> None:
    perfect, flawed = Reading.of(best()), Reading.of(with_mistake())
    assert not perfect.wrong.any()
    assert {STATES[i] for i in np.flatnonzero(flawed.wrong)} == {
        State(20, False, 6),
        State(16, False, 10),
        State(4, False, 2),
    }
    assert flawed.letters[INDEX[State(4, False, 2)]] == "?"
    assert flawed.hits[INDEX[State(4, False, 2)]] == pytest.approx(0.5)
    assert "3 of 280 differ (2 clear)" in flawed.summary
    assert perfect.summary.startswith("-0.047 per hand; 0 of 280")


def test_the_terminal_shows_two_charts_side_by_side_without_colours() -> None:
    console = Console(width=120, record=True, no_color=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal_chart([("before", policy_of(lambda state: 0.0)), ("after", with_mistake())]))
    lines = console.export_text().splitlines()
    row = next(line for line in lines if "hard 20" in line)
    assert row.count("hard 20") == 2
    assert row.count("(H)") == 1
    assert row.split()[2:12] == ["S"] * 10
    assert any("soft 12" in line and line.count("(S)") == 10 for line in lines)


@pytest.mark.parametrize("panels", [1, 2])
def test_the_picture_is_a_png_of_the_expected_size(tmp_path: Path, panels: int) -> None:
    path = tmp_path / "chart.png"
    save_chart(path, [("before", best()), ("after", with_mistake())][:panels])
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20], "big") == (1080 if panels == 1 else 1620)


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        save_chart(tmp_path / "missing" / "chart.png", [("now", best())])


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        Reading.of(np.ones((279, 3)) / 3)
