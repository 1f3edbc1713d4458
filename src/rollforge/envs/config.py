"""Settings of the OpenEnv client. Light to import."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollforge.config import ConfigError, option, require_at_least, require_seconds


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig:
    """How to reach an OpenEnv server, and every limit on waiting for it."""

    url: str = option(
        "",
        help="http(s):// or ws(s):// address of a server that runs already, without the /ws path; else one is started",
    )
    max_sessions: int = option(
        64, help="sessions held at a time at most; further callers queue, first come first served"
    )
    queue_limit: int = option(10_000, help="callers that may queue; one more fails at once")
    queue_timeout_s: float = option(
        300.0, help="seconds to wait for a session at most, in the queue and for a server at its capacity"
    )
    connect_timeout_s: float = option(10.0, help="seconds to wait for a connection to open at most")
    message_timeout_s: float = option(60.0, help="seconds to wait for the answer to one reset or step at most")
    # Servers end idle sessions without closing the connection.
    idle_limit_s: float = option(300.0, help="a session idle for longer is closed and not used again; 0: none is")
    # Off by default: every message has its own limit, and pings end healthy sessions behind tunnels that drop them or
    # while either side is busy computing.
    keepalive_s: float = option(0.0, help="seconds between pings on a connection; 0: none")

    def __post_init__(self) -> None:
        require_at_least(self, "env", max_sessions=1, queue_limit=1)
        require_seconds(self, "env", "queue_timeout_s", "connect_timeout_s", "message_timeout_s")
        for name in ("idle_limit_s", "keepalive_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"env.{name} is {getattr(self, name):g}; give 0 or a finite number of seconds.")
