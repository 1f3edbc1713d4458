"""Configuration of the loop."""

from __future__ import annotations

from dataclasses import dataclass

from rollforge.config import ConfigError, option, require_at_least


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Batches, evaluation, and when to give up."""

    groups_per_step: int = option(16, help="groups that one optimizer step trains on")
    evaluate_every: int = option(
        10, help="steps between evaluations (one before and one after always); 0: only those two"
    )
    max_failed_share: float = option(
        0.2, help="the run stops when more than this share of the last 256 episodes failed"
    )

    def __post_init__(self) -> None:
        require_at_least(self, "loop", groups_per_step=1, evaluate_every=0)
        if not 0 <= self.max_failed_share <= 1:
            raise ConfigError(f"loop.max_failed_share is {self.max_failed_share}; it must be between 0 and 1.")
