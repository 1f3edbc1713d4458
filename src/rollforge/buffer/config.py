"""Configuration of the replay buffer."""

from __future__ import annotations

from dataclasses import dataclass

from rollforge.config import option, require_at_least, require_seconds


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """How far generation may run ahead of training."""

    max_staleness: int = option(1, help="versions a trained token may be old; 0 is fully synchronous")
    wait_limit_s: float = option(
        900.0, help="seconds the trainer waits for a batch before the run ends with the reason"
    )

    def __post_init__(self) -> None:
        require_at_least(self, "buffer", max_staleness=0)
        require_seconds(self, "buffer", "wait_limit_s")
