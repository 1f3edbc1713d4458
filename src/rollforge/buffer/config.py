"""Configuration of the replay buffer."""

from __future__ import annotations

from dataclasses import dataclass

from rollforge.config import ConfigError, option, require_seconds


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """How far generation may run ahead of training."""

    max_staleness: int = option(1, help="versions a trained token may be old; 0 is fully synchronous")
    wait_limit_s: float = option(
        900.0, help="seconds the trainer waits for a batch before the run ends with the reason"
    )

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(f"buffer.max_staleness is {self.max_staleness}; it must be 0 (synchronous) or more.")
        require_seconds(self, "buffer", "wait_limit_s")
