"""Curves: everything stands where its number says, and nothing breaks on odd numbers."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from rollforge.observe.plot import ASCII, UNICODE, Glyphs, curve, curve_png


def test_a_rising_line_rises() -> None:
    text = curve([(0, 0.0), (10, 1.0)], width=30, height=5, glyphs=ASCII)
    rows = text.splitlines()[:5]
    first_star = [row.index("*") for row in rows]
    assert first_star == sorted(first_star, reverse=True)
    assert first_star[0] > first_star[-1]
    assert all("*" in row for row in rows), "neighbouring points are joined"


def test_axis_labels_give_the_range() -> None:
    *_, axis, steps = curve([(0, -0.2), (200, -0.05)], title="reward", glyphs=ASCII).splitlines()
    assert set(axis.strip()) == {"+", "-"}
    assert steps.split() == ["0", "100", "200"]
    labels = [line.split()[0] for line in curve([(0, -0.2), (200, -0.05)]).splitlines() if "┤" in line]
    assert len(labels) == 3
    assert -0.05 >= float(labels[0]) > float(labels[1]) > float(labels[2]) >= -0.2


def test_reference_lines_are_named_on_their_row() -> None:
    lines = curve([(0, 0.0), (1, 0.4)], references={"best": 1.0, "random": -1.0}, height=9).splitlines()
    assert lines[0].endswith("best") and "╌" in lines[0]
    assert lines[8].endswith("random")


def test_more_points_than_dots_are_averaged() -> None:
    """Noise of +1 and -1 around 0.5 shows as a flat line, not as a filled block."""
    points = [(x, 0.5 + (-1) ** x) for x in range(10_000)]
    rows = curve(points, references={"a": 2.0, "b": -1.0}, width=60, height=9, glyphs=ASCII).splitlines()[:9]
    assert [index for index, row in enumerate(rows) if "*" in row] == [4]


@pytest.mark.parametrize("points", [[], [(0, math.nan)], [(1, math.inf), (2, -math.inf)]])
def test_nothing_to_draw_is_said(points: list[tuple[float, float]]) -> None:
    assert curve(points, title="reward") == "reward\n  (no values yet)"


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_any_points_fit_the_size(glyphs: Glyphs) -> None:
    chance = random.Random(3)
    for _ in range(150):
        scale = 10.0 ** chance.randrange(-8, 12)
        points = [
            (chance.randrange(1000), chance.choice([math.nan, 0.0, scale, chance.gauss(0, scale)]))
            for _ in range(chance.randrange(1, 50))
        ]
        lines = curve(points, "t", {"line": chance.gauss(0, scale)}, width=60, height=7, glyphs=glyphs).splitlines()
        assert all(len(line) <= 60 for line in lines)
        assert len(lines) in (2, 10)
        if glyphs is ASCII:
            assert "".join(lines).isascii()


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "reward.png"
    curve_png(path, {"exact": [(0, -0.2), (1, math.nan), (2, -0.1)], "play": []}, "reward", {"best": -0.05})
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000
