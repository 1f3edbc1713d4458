"""The hit/stand chart: what a policy plays in every decision state, for the terminal and as a picture.

Knows: the decision states and the best play. Does not know: where a policy came from.

Rows are the player's totals, hard above soft; columns the dealer's card, ace last. The shade is the probability of a
hit among hit and stand, the letter the likeliest action (`?`: neither of the two), a frame a difference from the best
play.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.columns import Columns
from rich.style import Style
from rich.table import Table
from rich.text import Text

from rollforge.envs.blackjack.exact import (
    HIT,
    INDEX,
    STAND,
    Values,
    best_actions,
    clear_choices,
    expected_reward,
    greedy,
    reference_lines,
)
from rollforge.envs.blackjack.game import DEALER_CARDS, State, card_name

STAND_COLOUR, EVEN_COLOUR, HIT_COLOUR = (49, 104, 150), (247, 245, 240), (217, 112, 38)
INK, WRONG = "#22262b", "#c2112b"
ROWS = {False: range(21, 3, -1), True: range(21, 11, -1)}
"""The totals from top to bottom, hard and soft."""
CAPTION = (
    "H hit, S stand, ? neither.  Shade: chance of a hit (blue stand, orange hit).\n"
    "Red frame: differs from the best play (thick where the choice is clear)."
)

Panel = tuple[str, Values]
"""A title such as `before` and a policy [280, 3]."""


@dataclass(frozen=True)
class Reading:
    """A policy as the chart shows it: three arrays [280] and its expected reward when played greedily."""

    hits: Values
    letters: list[str]
    wrong: Any
    reward: float

    @classmethod
    def of(cls, policy: Values) -> Reading:
        """Raises ValueError for what is no policy."""
        likeliest = np.argmax(policy, axis=1)
        legal = policy[:, HIT] + policy[:, STAND]
        hits = np.divide(policy[:, HIT], legal, out=np.full(len(legal), 0.5), where=legal > 0)
        wrong = likeliest != np.where(best_actions(), HIT, STAND)
        return cls(hits, ["HS?"[action] for action in likeliest], wrong, expected_reward(greedy(policy)))

    @property
    def summary(self) -> str:
        """One line: the exact reward and how many states differ from the best play, clear choices apart."""
        clear = int(np.sum(self.wrong & clear_choices()))
        return f"{self.reward:+.3f} per hand; {int(self.wrong.sum())} of 280 differ ({clear} clear)"


def terminal_chart(panels: Sequence[Panel]) -> Columns:
    """The charts side by side, to be printed by rich. A difference from the best play stands in brackets."""
    return Columns([_table(title, Reading.of(policy)) for title, policy in panels], padding=(0, 3))


def save_chart(path: Path, panels: Sequence[Panel]) -> None:
    """Write the charts side by side as a PNG, above a scale with the reference lines. Raises OSError if it cannot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    readings = [(title, Reading.of(policy)) for title, policy in panels]
    figure = Figure(figsize=(max(7.2, 5.4 * len(panels)), 10.4), facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        3, len(panels), height_ratios=(18, 10, 3.4), left=0.07, right=0.97, top=0.875, bottom=0.04,
        hspace=0.17, wspace=0.16,
    )  # fmt: skip
    figure.suptitle("BlackJack: what the policy plays", x=0.07, y=0.975, ha="left", fontsize=17, weight="bold")
    figure.text(0.07, 0.917, CAPTION, ha="left", fontsize=9.5, linespacing=1.4, color="#5a6069")
    for column, (title, reading) in enumerate(readings):
        hard = figure.add_subplot(grid[0, column])
        hard.set_title(f"{title}:  {reading.summary}", loc="left", fontsize=10.5, color=INK, pad=8)
        _draw_block(hard, reading, soft=False)
        _draw_block(figure.add_subplot(grid[1, column]), reading, soft=True)
    _draw_scale(figure.add_subplot(grid[2, :]), readings)
    figure.savefig(path, dpi=150)


def _table(title: str, reading: Reading) -> Table:
    table = Table(title=f"{title}\n{reading.summary}", box=box.SIMPLE_HEAD, padding=0, title_justify="left")
    table.add_column("dealer", justify="right", style="dim")
    for dealer in DEALER_CARDS:
        table.add_column(card_name(dealer), justify="center", width=3)
    for soft, totals in ROWS.items():
        for total in totals:
            cells = [_cell(reading, i) for i in _row(total, soft)]
            table.add_row(f"{'soft' if soft else 'hard'} {total} ", *cells, end_section=total == totals[-1])
    return table


def _cell(reading: Reading, i: int) -> Text:
    letter = reading.letters[i]
    background = "rgb({},{},{})".format(*_shade(float(reading.hits[i])))
    style = Style(color=WRONG if reading.wrong[i] else INK, bgcolor=background, bold=bool(reading.wrong[i]))
    return Text(f"({letter})" if reading.wrong[i] else f" {letter} ", style)


def _shade(hit: float) -> tuple[int, ...]:
    """RGB 0 to 255 for a chance of a hit: blue, near white at one half, orange."""
    end = HIT_COLOUR if hit > 0.5 else STAND_COLOUR
    weight = min(1.0, abs(2 * hit - 1)) * 0.85
    return tuple(round(a + (b - a) * weight) for a, b in zip(EVEN_COLOUR, end, strict=True))


def _unit(colour: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(channel / 255 for channel in colour)


def _row(total: int, soft: bool) -> Iterator[int]:
    return (INDEX[State(total, soft, dealer)] for dealer in DEALER_CARDS)


def _draw_block(axes: Any, reading: Reading, soft: bool) -> None:
    """One block of cells, hard or soft."""
    from matplotlib.patches import Rectangle

    totals, clear = ROWS[soft], clear_choices()
    for y, total in enumerate(totals):
        for x, i in enumerate(_row(total, soft)):
            hit = float(reading.hits[i])
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=_unit(_shade(hit)), edgecolor="white", linewidth=1.2))
            if reading.wrong[i]:
                width = 2.0 if clear[i] else 0.9
                frame = Rectangle((x + 0.07, y + 0.07), 0.86, 0.86, fill=False, edgecolor=WRONG, linewidth=width)
                axes.add_patch(frame)
            axes.text(
                x + 0.5, y + 0.52, reading.letters[i], ha="center", va="center", fontsize=9.5,
                color="white" if hit < 0.2 else INK, weight="bold" if reading.wrong[i] else "normal",
            )  # fmt: skip
    axes.set(xlim=(0, 10), ylim=(len(totals), 0), ylabel="soft total" if soft else "hard total")
    axes.set_xticks([x + 0.5 for x in range(10)], [card_name(dealer) for dealer in DEALER_CARDS])
    axes.set_yticks([y + 0.5 for y in range(len(totals))], [str(total) for total in totals])
    axes.tick_params(length=0, labelsize=9.5, colors=INK)
    axes.spines[:].set_visible(False)
    if soft:
        axes.set_xlabel("dealer's card")


def _draw_scale(axes: Any, readings: Sequence[tuple[str, Reading]]) -> None:
    """A line of expected rewards with the reference plays below it and the panels above."""
    lines = reference_lines()
    low = min(*lines.values(), *(reading.reward for _, reading in readings)) - 0.02
    axes.axhline(0, color="#b9bec5", linewidth=1.5, zorder=1)
    for name, value in lines.items():
        axes.plot([value], [0], "|", color=INK, markersize=13, markeredgewidth=1.6, zorder=2)
        side = "left" if name == "best" else "right" if name == "hit below 17" else "center"
        axes.text(value, -0.55, f"{name}\n{value:+.3f}", ha=side, va="top", fontsize=9, color=INK)
    lowest = min(reading.reward for _, reading in readings)
    for place, (title, reading) in enumerate(readings):
        side = "right" if reading.reward == lowest else "left"  # close ones stay apart
        colour = _unit(HIT_COLOUR if place else STAND_COLOUR)
        label = f"{title} {reading.reward:+.3f}"
        axes.plot([reading.reward], [0], "o", color=colour, markersize=9, zorder=3)
        axes.text(reading.reward, 0.55, label, ha=side, fontsize=10, color=colour, weight="bold")
    axes.set(xlim=(low, 0.0), ylim=(-2.2, 1.4))
    axes.set_xlabel("expected reward per hand, exact, greedy play", fontsize=10, color=INK)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
