"""Coefficients that change over a run.

Knows: start, end and the way between them. Does not know: torch, what the coefficient weighs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from rollforge.config import ConfigError, option

Shape = Literal["linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Goes from `start` (step 0) to `end` over the first `share` of the steps, then stays at `end`.

    Where a configuration takes a Schedule it also takes a plain number, which stays constant. Raises ConfigError.
    """

    start: float = option(help="value at the first step")
    end: float = option(0.0, help="value once `share` of the steps are done")
    shape: Shape = option("linear", help="way from start to end")
    share: float = option(1.0, help="part of the run the way takes")

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"schedule {name} is {getattr(self, name)}; give a finite number.")
        if self.shape not in get_args(Shape):
            known = " or ".join(get_args(Shape))
            raise ConfigError(f"schedule shape is {self.shape!r}; use {known}, or a plain number for a constant.")
        if not 0 < self.share <= 1:
            raise ConfigError(f"schedule share is {self.share}; give the part of the run it lasts, above 0, at most 1.")

    @classmethod
    def of(cls, value: float | Schedule) -> Schedule:
        """The schedule itself, or the one that stays at the given number."""
        return value if isinstance(value, Schedule) else cls(start=value, end=value)

    @property
    def is_off(self) -> bool:
        """True when the coefficient is 0 at every step."""
        return self.start == 0 and self.end == 0

    def at(self, step: int, total_steps: int) -> float:
        """The value at `step` (0 to total_steps - 1); with share 1 the last step is at `end`, a lone one at `start`."""
        last = self.share * (total_steps - 1)
        progress = min(1.0, step / last) if last > 0 else 0.0
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress
