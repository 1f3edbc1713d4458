"""The client side's handle on an environment server: starts it as a process of its own, waits for it, and ends it.

Knows: the announcement and options of `rollforge.envs.serve`, and OpenEnv's /health. Does not know: any environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from rollforge.config import UserError

TAIL_CHARS = 2000
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EnvServer:
    """`with EnvServer("rollforge.envs.blackjack.server") as server:` and `server.url` answers until the block ends.

    `module` is run with `python -m` and must call `rollforge.envs.serve.main`. `log` is the file that takes the
    server's output (default: a temporary one). `port` 0 takes a free port. Starting blocks for at most `limit_s`
    seconds and raises UserError, with the tail of the server's output, when the server does not come up.
    """

    def __init__(
        self,
        module: str,
        options: Sequence[str] = (),
        *,
        port: int = 0,
        sessions: int = 64,
        log: Path | None = None,
        limit_s: float = 60.0,
    ) -> None:
        self.url = ""
        self.port = port
        self._module = module
        self._options = ["--port", str(port), "--sessions", str(sessions), "--parent", str(os.getpid()), *options]
        self._log_path = log
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def start(self) -> EnvServer:
        """Start the process and return once /health answers."""
        self.launch()
        self.wait()
        return self

    def launch(self) -> None:
        """Start the process; from then on `close` ends it."""
        self._log = self._log_path.open("w+b") if self._log_path else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, *self._options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Return once /health answers; ends early, by some exception, where another thread calls `close`."""
        deadline = time.monotonic() + self._limit_s
        try:
            self._read_announcement(deadline)
            self._wait_for_health(deadline)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The server's process id, which is also its process group."""
        if self._process is None:
            raise RuntimeError("the environment server is not running")
        return self._process.pid

    def close(self) -> None:
        """End the server and everything it started; a second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        for sign, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
        if process.stdout:
            process.stdout.close()
        if self._log:
            self._log.close()

    def __enter__(self) -> EnvServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_announcement(self, deadline: float) -> None:
        assert self._process and self._process.stdout
        out = self._process.stdout
        ready, _, _ = select.select([out], [], [], max(0.0, deadline - time.monotonic()))
        line = out.readline() if ready else b""
        if not line:
            raise self._failure("did not start" if ready else f"said nothing within {self._limit_s:g} s")
        try:
            announced = json.loads(line)
            self.url, self.port = str(announced["url"]), int(announced["port"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._failure(f"announced {line!r} instead of its URL and port") from error

    def _wait_for_health(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise self._failure("ended while starting")
            left = max(0.1, deadline - time.monotonic())
            try:
                with _DIRECT.open(f"{self.url}/health", timeout=min(2.0, left)):
                    return
            except OSError:  # refused, reset or not answered yet; the loop has the limit
                time.sleep(0.02)
        raise self._failure(f"did not answer {self.url}/health within {self._limit_s:g} s")

    def _failure(self, what: str) -> UserError:
        assert self._process and self._log
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace")[-TAIL_CHARS:].strip() or "nothing"
        port = f"port {self.port}" if self.port else "a free port"
        return UserError(
            f"The environment server {self._module} ({port}, exit code {self._process.poll()}) {what}. "
            f"Its last output: {tail}"
        )
