"""Metrics and spans, recorded from anywhere in a process and drained once per step.

Knows: names and numbers, and how partial results of ranks, roles and micro-batches of unequal size become one value.
Does not know: actors, sinks, steps, what a name means.

A mean is carried as (weighted sum, weight) until the end, so that 2 clipped of 20 tokens and 3 of 5 give 5/25 and not
the average of two averages. A value that is None or NaN abstains: it adds neither sum nor weight, and a name of which
nobody gave a value is absent from the result, never 0 and never NaN.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, SupportsFloat

Kind = Literal["mean", "total", "max", "gauge"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What is known of one name so far. For a mean, `value` is the weighted sum and `weight` the sum of weights."""

    kind: Kind
    value: float
    weight: float = 1.0

    def combined(self, later: Cell) -> Cell:
        """This cell and a later one of the same kind as one. A gauge keeps the later value. Raises ValueError."""
        if self.kind != later.kind:
            raise ValueError(f"recorded both as {self.kind} and as {later.kind}; one name has one kind")
        match self.kind:
            case "mean":
                return Cell("mean", self.value + later.value, self.weight + later.weight)
            case "total":
                return Cell("total", self.value + later.value)
            case "max":
                return Cell("max", max(self.value, later.value))
            case "gauge":
                return later

    def result(self) -> float:
        """The number to report."""
        return self.value / self.weight if self.kind == "mean" else self.value


Partial = Mapping[str, Cell]
"""What one meter took in since it was last emptied: picklable, and merged without loss with other processes' own."""


def merge(partials: Iterable[Partial]) -> dict[str, Cell]:
    """One partial of many, in the order given. Raises ValueError if a name comes in two kinds."""
    merged: dict[str, Cell] = {}
    for partial in partials:
        for name, cell in partial.items():
            _put(merged, name, cell)
    return merged


def values(partial: Partial) -> dict[str, float]:
    """The numbers to report, by name."""
    return {name: cell.result() for name, cell in partial.items()}


def mean_over_steps(steps: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Averages already drained steps; each step that has a value counts once, however many micro-batches it had."""
    meter = Meter()
    for step in steps:
        for name, value in step.items():
            meter.add(name, value)
    return meter.drain()


class Meter:
    """Takes in values from any thread of a process.

    A name has one kind (mean, total, max or gauge) between two drains; a second kind raises ValueError.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cells: dict[str, Cell] = {}

    def add(self, name: str, value: SupportsFloat | None, weight: SupportsFloat = 1.0) -> None:
        """One observation of a weighted mean; `weight` is what the value stands for (tokens, rollouts)."""
        heft = float(weight)
        if not (math.isfinite(heft) and heft >= 0):
            raise ValueError(f"weight of {name} is {heft}; a weight is a finite number of at least 0")
        number = _number(value)
        if number is not None and heft > 0:
            self._record(name, Cell("mean", number * heft, heft))

    def count(self, name: str, amount: SupportsFloat | None = 1.0) -> None:
        """Adds to a total (events, tokens)."""
        self._record_number(name, "total", amount)

    def max(self, name: str, value: SupportsFloat | None) -> None:
        """Keeps the largest value."""
        self._record_number(name, "max", value)

    def gauge(self, name: str, value: SupportsFloat | None) -> None:
        """Keeps the last value."""
        self._record_number(name, "gauge", value)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times a block, also one that raises: totals `<name>_seconds` (monotonic) and `<name>_count`.

        Spans that overlap (tasks, threads) are summed, so the total may exceed the time that passed.
        """
        start = self._clock()
        try:
            yield
        finally:
            self.count(f"{name}_seconds", self._clock() - start)
            self.count(f"{name}_count")

    def take(self) -> dict[str, Cell]:
        """Empties the meter; for merging with the partials of others."""
        with self._lock:
            taken, self._cells = self._cells, {}
        return taken

    def drain(self) -> dict[str, float]:
        """Empties the meter; returns the numbers to report."""
        return values(self.take())

    def _record_number(self, name: str, kind: Kind, value: SupportsFloat | None) -> None:
        number = _number(value)
        if number is not None:
            self._record(name, Cell(kind, number))

    def _record(self, name: str, cell: Cell) -> None:
        with self._lock:
            _put(self._cells, name, cell)


def _number(value: SupportsFloat | None) -> float | None:
    number = math.nan if value is None else float(value)
    return None if math.isnan(number) else number


def _put(cells: dict[str, Cell], name: str, cell: Cell) -> None:
    try:
        cells[name] = cells[name].combined(cell) if name in cells else cell
    except ValueError as error:
        raise ValueError(f"metric {name!r}: {error}") from error


meter = Meter()
"""The process's own meter, for code that is not handed one."""
