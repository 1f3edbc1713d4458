"""A curve in the terminal, and the same as a picture.

Knows: points (x, y) and horizontal lines of reference. Does not know: runs, files of a run, what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

Points = Sequence[tuple[float, float]]

_BRAILLE = 0x2800
_BRAILLE_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row 0..3][column 0..1] of one character
_COLOURS = ("#2f6db3", "#d1711f", "#3a8f5c", "#8a5aa8", "#a04040")


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters a curve is drawn with; one character holds dots_x x dots_y dots."""

    dots_x: int
    dots_y: int
    tick: str
    wall: str
    corner: str
    floor: str
    reference: str


UNICODE = Glyphs(2, 4, "┤", "│", "└", "─", "╌")
ASCII = Glyphs(1, 1, "+", "|", "+", "-", ".")


def curve(
    points: Points,
    title: str = "",
    references: Mapping[str, float] | None = None,
    width: int = 78,
    height: int = 12,
    glyphs: Glyphs = UNICODE,
) -> str:
    """Lines of text, at most `width` characters wide and `height` rows between title and x axis.

    Points that are not finite are left out. `references` are drawn as dashed rows with their name at the right.
    """
    points = _finite(points)
    if not points:
        return f"{title}\n  (no values yet)".lstrip("\n")
    lines = {name: level for name, level in (references or {}).items() if math.isfinite(level)}
    low, high = _range([y for _, y in points] + list(lines.values()))
    labels = _labels(low, high, height)
    names = _row_names(lines, low, high, height)
    right = max((len(name) + 1 for name in names.values()), default=0)
    left = max(map(len, labels.values()))
    columns = max(width - left - 2 - right, 10)
    rows = _draw(points, low, high, columns, height, glyphs)
    for row in names:
        rows[row] = "".join(glyphs.reference if cell == " " else cell for cell in rows[row])
    walls = [glyphs.tick if row in labels else glyphs.wall for row in range(height)]
    body = [
        f"{labels.get(row, ''):>{left}} {walls[row]}{cells} {names.get(row, '')}".rstrip()
        for row, cells in enumerate(rows)
    ]
    axis = f"{'':>{left}} {glyphs.corner}{glyphs.floor * columns}"
    steps = f"{'':>{left + 2}}{_x_labels(points[0][0], points[-1][0], columns)}"
    return "\n".join([*([title] if title else []), *body, axis, steps])


def curve_png(
    path: Path | str,
    series: Mapping[str, Points],
    title: str,
    reference_lines: Mapping[str, float] | None = None,
    x_label: str = "step",
    y_label: str = "",
) -> None:
    """Writes a PNG with one curve per series and a dashed line per reference; leaves out points that are not finite."""
    # Here because it costs half a second, which `--help` must not pay; no pyplot: it holds state for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(series.items()):
        kept = _finite(points)
        colour = _COLOURS[index % len(_COLOURS)]
        axes.plot([x for x, _ in kept], [y for _, y in kept], color=colour, linewidth=1.6, marker=".", label=name)
    for name, level in (reference_lines or {}).items():
        axes.axhline(level, color="#777777", linewidth=0.9, linestyle="--")
        axes.annotate(name, (1.0, level), xycoords=("axes fraction", "data"), xytext=(4, 0), fontsize=8,
                      textcoords="offset points", va="center", color="#555555", annotation_clip=False)  # fmt: skip
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, format="png")


def _finite(points: Points) -> list[tuple[float, float]]:
    return sorted((float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y))


def _range(levels: Sequence[float]) -> tuple[float, float]:
    """A little more than what the levels span, never empty."""
    low, high = min(levels), max(levels)
    pad = 0.04 * (high - low) or max(abs(high), 1.0) * 0.1
    return low - pad, high + pad


def _labels(low: float, high: float, height: int) -> dict[int, str]:
    """Row -> y label, at the top, in the middle and at the bottom."""
    places = max(0, 2 - math.floor(math.log10(high - low)))
    style = f".{places}f" if places <= 6 and max(abs(low), abs(high)) < 1e7 else ".2e"
    rows = {0, height // 2, height - 1}
    return {row: f"{high - (row + 0.5) / height * (high - low):{style}}" for row in rows}


def _row(level: float, low: float, high: float, rows: int) -> int:
    return min(rows - 1, int((high - level) / (high - low) * rows))


def _row_names(lines: Mapping[str, float], low: float, high: float, height: int) -> dict[int, str]:
    """Row -> the names of the reference lines that fall on it."""
    names: dict[int, str] = {}
    for name, level in lines.items():
        row = _row(level, low, high, height)
        names[row] = f"{names[row]}, {name}" if row in names else name
    return names


def _draw(points: Points, low: float, high: float, columns: int, height: int, glyphs: Glyphs) -> list[str]:
    """The curve as `height` strings of `columns` characters; neighbouring points are joined."""
    wide, tall = columns * glyphs.dots_x, height * glyphs.dots_y
    first, last = points[0][0], points[-1][0]
    heaps: dict[int, list[float]] = {}
    for x, y in points:
        place = round((x - first) / (last - first) * (wide - 1)) if last > first else wide // 2
        heaps.setdefault(place, []).append(y)
    # More points than dots: each column of dots shows the mean of its points.
    path = [(place, _row(sum(ys) / len(ys), low, high, tall)) for place, ys in heaps.items()]
    dots = {path[0]}
    for (x0, y0), (x1, y1) in pairwise(path):
        steps = max(x1 - x0, abs(y1 - y0))
        dots.update((round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(steps + 1))
    return [_characters(dots, row, columns, glyphs) for row in range(height)]


def _characters(dots: set[tuple[int, int]], row: int, columns: int, glyphs: Glyphs) -> str:
    if glyphs.dots_x == 1:
        return "".join("*" if (column, row) in dots else " " for column in range(columns))
    bits = [
        sum(_BRAILLE_BITS[j][i] for j in range(4) for i in range(2) if (2 * column + i, 4 * row + j) in dots)
        for column in range(columns)
    ]
    return "".join(chr(_BRAILLE + bit) if bit else " " for bit in bits)


def _x_labels(first: float, last: float, columns: int) -> str:
    if last <= first:
        return f"{first:^{columns}g}".rstrip()
    left, middle, right = f"{first:g}", f"{(first + last) / 2:g}", f"{last:g}"
    if len(left) + len(middle) + len(right) + 4 > columns:
        return f"{left}{right:>{columns - len(left)}}"
    return f"{left}{middle:^{columns - len(left) - len(right)}}{right}"
