"""The server side of an environment: runs an OpenEnv app under uvicorn, announces its port, and ends with its parent.

Knows: sockets, uvicorn, and the process that started it. Does not know: any environment (it is handed the app's maker),
nor the client. An environment of your own is served by calling `main(make_app)` under `if __name__ == "__main__"`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

PARENT_POLL_S = 0.5
GRACE_S = 2
"""How long open sessions may take to end after SIGTERM."""

MakeApp = Callable[[argparse.Namespace], Any]
"""Makes the ASGI app from the parsed options (`sessions`, `session_timeout` and those added to the parser)."""


def parser(description: str) -> argparse.ArgumentParser:
    """The options every environment server has; add your own to it."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--host", default="127.0.0.1", help="address to listen on")
    options.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    options.add_argument("--sessions", type=int, default=64, help="most sessions at a time")
    options.add_argument("--session-timeout", type=float, default=600.0, help="seconds until an idle session is ended")
    options.add_argument("--parent", type=int, default=0, help="end when this parent process has ended")
    return options


def main(make_app: MakeApp, options: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM, Ctrl-C or the parent's end. Exits with code 2 when the port cannot be had.

    The first line on stdout is JSON, {"url", "port", "pid"}. It is written once the port is held and listening, before
    the app is imported (OpenEnv takes seconds): a taken port is known at once, and early callers wait in the backlog.
    """
    args = options.parse_args(argv)
    if args.parent:
        threading.Thread(target=_end_with, args=(args.parent,), daemon=True).start()
    listener = _listen(args.host, args.port)
    port = listener.getsockname()[1]
    print(json.dumps({"url": f"http://{args.host}:{port}", "port": port, "pid": os.getpid()}), flush=True)
    os.dup2(2, 1)  # what an environment prints goes to the log, and nobody needs to keep reading our stdout
    _run(make_app(args), listener)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        print(f"cannot listen on port {port} of {host}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from error


def _run(app: Any, listener: socket.socket) -> None:
    """Uvicorn without compression and access log, which cost time on small messages, and without server pings: a client
    that computes for longer than they allow is healthy, and dead sessions are ended by OpenEnv's idle reaper."""
    import uvicorn

    config = uvicorn.Config(
        _with_quiet_hangups(app),
        ws_per_message_deflate=False,
        ws_ping_interval=None,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _with_quiet_hangups(app: Any) -> Any:
    """A client ends its session by hanging up; OpenEnv then closes the connection once more, which fails. That is no
    error of the server's, and its log is for those."""
    from starlette.websockets import WebSocketDisconnect

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            await app(scope, receive, send)

    return asgi


def _end_with(parent: int) -> None:
    """Ends this process once its parent is another one than `parent`, which is when that one has died.

    Not the kernel's parent-death signal: that one fires when the *thread* that started us ends, and starters are often
    worker threads. What the environments started ends with us, if we lead a process group of our own.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
