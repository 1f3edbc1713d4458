"""The live progress of a run.

Knows: a title, facts, steps with their metrics, evaluations, a table of results. Does not know: who measured them.

On a terminal each step scrolls by as one row of a table, above two lines that stay in place: how far the run is and
what the last evaluation said. Elsewhere (a pipe, a file, a dumb terminal) each step is one plain line.
"""

from __future__ import annotations

import atexit
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import rich.console
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Row = tuple[str, float | str | None, float | str | None]
"""One row of the table of results: what, before, after. None leaves a field empty."""

_HEADER_EVERY = 25
_RATE_STEPS = 10
_STEP_WIDTH = 11


@dataclass(frozen=True, slots=True)
class Column:
    """One number of a step: the first of `metrics` that has a value is shown."""

    title: str
    metrics: tuple[str, ...]
    form: str
    width: int

    def text(self, values: Mapping[str, float]) -> str:
        """The number as shown; empty if there is none."""
        found = (values.get(name) for name in self.metrics)
        number = next((value for value in found if value is not None and not math.isnan(value)), None)
        return "" if number is None else format(float(number), self.form)


COLUMNS = (
    Column("reward", ("reward/mean",), "+.3f", 8),
    Column("KL", ("kl/reference", "kl/behaviour"), ".4f", 9),
    Column("tokens/s", ("generate/tokens_per_second",), ",.0f", 9),
    Column("staleness", ("staleness/mean",), ".2f", 10),
    Column("seconds", ("time/step_s",), ".1f", 8),
)


class Console:
    """Shows one run from its first to its last step; `close` (or `finish`, or leaving a `with`) frees the terminal."""

    def __init__(
        self,
        title: str,
        facts: Mapping[str, str],
        total_steps: int,
        output: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prints the header. `output` is the standard output by default, `clock` counts seconds."""
        self._out = output or rich.console.Console(highlight=False)
        self._clock = clock
        self._total = total_steps
        self._start = clock()
        self._done = 0
        self._rows = 0
        self._marks: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS + 1)
        self._last_evaluation = ""
        self._live = Live(console=self._out, get_renderable=self._footer, refresh_per_second=4, transient=True)
        self._fancy = self._out.is_terminal and not self._out.is_dumb_terminal
        self._header(title, facts)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows optimizer step number `step` (the first is 1), now done. Metrics without a column are not shown."""
        self._done = step
        self._marks.append((step, self._clock()))
        place, left = f"{step}/{self._total}", duration(self._seconds_left())
        texts = [column.text(metrics) for column in COLUMNS]
        if self._fancy:
            self._table_row(place, texts, left)
        else:
            shown = [f"{column.title} {text}" for column, text in zip(COLUMNS, texts, strict=True) if text]
            self._print(Text("  ".join([f"step {place}", *shown, f"left {left}"])))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows an evaluation made after `step` optimizer steps."""
        shown = "  ".join(f"{name} {number(value)}" for name, value in metrics.items() if not math.isnan(value))
        self._last_evaluation = f"evaluation at step {step}:  {shown}"
        self._print(Text(self._last_evaluation, style="cyan"))

    def note(self, text: str) -> None:
        """Shows a line of text."""
        self._print(Text(text, style="dim"))

    def show(self, content: rich.console.RenderableType) -> None:
        """Shows anything rich can print."""
        self._out.print()
        self._out.print(content)

    def finish(self, rows: Sequence[Row], next_steps: Sequence[str]) -> None:
        """Shows the table of results (before, after) and where to look next, and frees the terminal."""
        self.close()
        if rows:
            table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
            table.add_column("result")
            table.add_column("before", justify="right")
            table.add_column("after", justify="right", style="bold")
            for name, before, after in rows:
                table.add_row(*(Text(number(field)) for field in (name, before, after)))
            self._out.print()
            self._out.print(Padding(table, (0, 0, 0, 2)))
        if next_steps:
            self._out.print()
            self._print(Text("where to look next", style="dim"))
            for line in next_steps:
                self._print(Text(f"  {line}"))

    def close(self) -> None:
        """Removes the lines that stay in place and gives the cursor back; closing twice is fine."""
        self._live.stop()
        atexit.unregister(self._live.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _header(self, title: str, facts: Mapping[str, str]) -> None:
        self._print(Text(title, style="bold"))
        width = max(map(len, facts), default=0)
        for name, fact in facts.items():
            value = Text(fact)
            value.highlight_regex(r"\([^()]*\)$", "dim")  # how it was chosen
            self._print(Text.assemble("  ", (f"{name:<{width}}", "dim"), "  ", value))
        self._out.print()

    def _print(self, text: Text) -> None:
        self._out.print(text, soft_wrap=not self._fancy)

    def _table_row(self, place: str, texts: Sequence[str], left: str) -> None:
        if self._rows % _HEADER_EVERY == 0:
            titles = "".join(f"{column.title:>{column.width + 1}}" for column in COLUMNS)
            self._print(Text(f"{'step':>{_STEP_WIDTH}}{titles}{'left':>9}", style="dim"))
        numbers = "".join(f"{text or '-':>{column.width + 1}}" for column, text in zip(COLUMNS, texts, strict=True))
        self._print(Text.assemble((f"{place:>{_STEP_WIDTH}}", "bold"), numbers, f"{left:>9}"))
        self._rows += 1
        self._refresh()

    def _refresh(self) -> None:
        if not self._live.is_started:
            atexit.register(self._live.stop)  # an exception elsewhere must not leave the terminal without a cursor
            self._live.start()
        self._live.refresh()

    def _footer(self) -> rich.console.RenderableType:
        share = self._done / self._total if self._total else 1.0
        passed, left = duration(self._clock() - self._start), duration(self._seconds_left())
        line = Table.grid(expand=True, padding=(0, 1))
        line.add_column()
        line.add_column(ratio=1)
        line.add_column()
        line.add_row(
            Text(f"{self._done}/{self._total}", style="bold"),
            ProgressBar(total=1.0, completed=share, complete_style="green", finished_style="green"),
            Text(f"{share:4.0%}  {passed} passed, {left} left"),
        )
        last = Text(self._last_evaluation, style="cyan", no_wrap=True, overflow="ellipsis")
        return rich.console.Group("", line, last) if self._last_evaluation else rich.console.Group("", line)

    def _seconds_left(self) -> float | None:
        """From the pace of the last steps, with the evaluations between them; None while it is unknown."""
        if len(self._marks) < 2:
            return None
        (first, start), (last, end) = self._marks[0], self._marks[-1]
        return max(0.0, (self._total - last) * (end - start) / (last - first))


def duration(seconds: float | None) -> str:
    """`m:ss` or `h:mm:ss`; `-` if unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | str | None) -> str:
    """A number with four significant digits (whole ones as they are), text as it is, nothing for None."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1000 else f"{value:.4g}"
