"""Settings of the OpenEnv client. Light to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpenEnvConfig:
    """How to reach an OpenEnv server, and every limit on waiting for it."""

    url: str = ""
    """http(s):// or ws(s):// address of the server, without the /ws path."""
    max_sessions: int = 64
    """Most sessions this client holds at a time; further callers queue, first come first served."""
    queue_limit: int = 10_000
    """Most callers that may queue; one more fails at once."""
    queue_timeout_s: float = 300.0
    """Longest wait for a session, in the queue and for a server at its capacity."""
    connect_timeout_s: float = 10.0
    """Longest wait for a connection to open."""
    message_timeout_s: float = 60.0
    """Longest wait for the answer to one reset or step."""
    idle_limit_s: float = 300.0
    """A session idle for longer is closed, not reused: servers end idle sessions without closing the connection."""
    keepalive_s: float = 0.0
    """Seconds between pings on a connection, 0 for none. Off by default: every message has its own limit, and pings end
    healthy sessions behind tunnels that drop them or while either side is busy computing."""
