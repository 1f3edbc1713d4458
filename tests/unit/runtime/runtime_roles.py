"""The roles that the tests of the runtime host: small, plain, and able to misbehave in every way that matters."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

from rollforge.config import UserError
from rollforge.runtime import Handle


class OddError(Exception):
    """Cannot be rebuilt from its pickled form: the constructor wants two arguments, `args` holds one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class Counter:
    """Holds a number; plain and async methods."""

    def __init__(self, start: int = 0, peer: Handle | None = None) -> None:
        self.value = start
        self.peer = peer
        self.gate = asyncio.Event()
        self.seen: list[str] = []

    def add(self, amount: int) -> int:
        before = self.value
        time.sleep(0.01)
        self.value = before + amount
        return self.value

    async def read(self) -> int:
        return self.value

    async def wait(self) -> str:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise
        return "open"

    async def open(self) -> None:
        self.gate.set()

    async def cancelled(self) -> list[str]:
        return self.seen

    async def draws(self, seed: int) -> list[float]:
        return [float(x) for x in np.random.default_rng(seed).standard_normal(5)]

    async def echo(self, value: Any) -> Any:
        return value

    async def change(self, values: list[int]) -> list[int]:
        values.append(99)
        return values

    async def via_peer(self, method: str, *args: Any) -> Any:
        assert self.peer is not None
        return await getattr(self.peer, method)(*args)

    async def fail(self, kind: str) -> None:
        errors: dict[str, BaseException] = {
            "value": ValueError("bad value 7"),
            "user": UserError("field x is 3; use 4"),
            "odd": OddError("a", "b"),
            "exit": SystemExit(3),
            "timeout": TimeoutError("its own"),
            "cancel": asyncio.CancelledError("its own"),
        }
        raise errors[kind]

    def run_dry(self) -> int:
        return next(iter(()))

    async def unpicklable(self) -> Any:
        return time.sleep, (x for x in ())

    async def facts(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "extra": os.environ.get("ROLE_EXTRA"),
            "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "group": os.getpgid(0),
        }

    async def die(self, how: str) -> None:
        print("last words", file=sys.stderr, flush=True)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segfault":
            ctypes.string_at(0)
        else:
            os._exit(int(how))

    async def block_loop(self, seconds: float) -> None:
        time.sleep(seconds)

    def start_child(self) -> int:
        """A process in a session of its own that would outlive everything."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid


class Closing:
    """Writes a file when closed."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def close(self) -> None:
        with open(self.path, "a", encoding="utf-8") as out:
            out.write("closed\n")


class BadClose:
    async def close(self) -> None:
        raise ValueError("cannot close")


class Refuses:
    """Fails to be built."""

    def __init__(self, kind: str) -> None:
        if kind == "user":
            raise UserError("model folder x has no tokenizer; add one")
        if kind == "exit":
            os._exit(7)
        if kind == "hang":
            time.sleep(600)
        raise ValueError("no such thing")
