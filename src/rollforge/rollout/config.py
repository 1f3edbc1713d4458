"""Configuration of rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollforge.config import ConfigError, option, require_at_least, require_seconds


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How a group of episodes is played."""

    group_size: int = option(8, help="rollouts per prompt, compared with each other")
    max_turns: int = option(16, help="an episode that is not done by then is cut off and counted as unfinished")
    history: Literal["full", "last"] = option(
        "full", help="what the model sees of earlier turns: all of them, or none (the observation says it all)"
    )
    same_start: bool = option(
        True, help="a group's episodes begin alike, and their first turn is one request; false: each may begin anew"
    )
    retries: int = option(1, help="how often a failed episode is played again before it is dropped")
    time_limit_s: float = option(600.0, help="seconds after which an episode counts as failed")

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ConfigError(
                f"rollout.group_size is {self.group_size}; a group is compared within itself and needs at least 2 "
                f"rollouts."
            )
        require_at_least(self, "rollout", max_turns=1, retries=0)
        require_seconds(self, "rollout", "time_limit_s")
