"""Roles as Monarch actors, each in a process of its own. The only module that imports monarch.

Knows: how a process is started, how a call and its outcome travel, and how Monarch says that a process is gone.
Does not know: which roles there are. Unix sockets in the abstract namespace carry all messages: no port, no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from rollforge.runtime import child, guard
from rollforge.runtime.errors import Raised, RoleDied, RoleError, capture, log_tail
from rollforge.runtime.handle import cancelled_from_outside
from rollforge.runtime.process import Watch, exited, killed, start_time
from rollforge.runtime.role import Role
from rollforge.runtime.spec import RoleSpec

# Read by Monarch when it is loaded, here and in every role: how often it asks whether the processes live. `Watch` tells
# that one is gone; Monarch's report, half a second later at most, how.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")
os.environ.setdefault("MONARCH_FILE_LOG", "warn")  # its own log grows by some 50 kB a run otherwise

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, concurrent_endpoint, endpoint, this_host

_STOP_LIMIT_S = 5.0
_START_LIMIT_S = 60.0
_CAUSE_LIMIT_S = 1.0


def _pack(value: Any) -> bytes:
    packed: bytes = cloudpickle.dumps(value)
    return packed


class _Host(Actor):  # type: ignore[misc]
    """The actor in a role's process: builds the role, runs its methods, hands outcomes back as bytes."""

    def __init__(self) -> None:
        self._role: Role | None = None
        self._running: dict[str, asyncio.Task[Any]] = {}

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def build(self, packed: bytes) -> bytes:
        spec: RoleSpec = cloudpickle.loads(packed)
        try:
            self._role = await Role.build(spec)
        except Exception as error:
            return _pack(capture(spec.name, "__init__", error))
        return _pack(self._role.has_close)

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def run(self, call_id: str, method: str, packed: bytes) -> bytes:
        assert self._role is not None, "a handle exists only once the role is built"
        task = asyncio.current_task()
        assert task is not None
        self._running[call_id] = task
        try:
            args, kwargs = cloudpickle.loads(packed)
            return _pack(await self._role.call(method, args, kwargs))
        except BaseException as error:
            if cancelled_from_outside(error):
                raise
            return _pack(capture(self._role.name, method, error))
        finally:
            del self._running[call_id]

    @endpoint  # type: ignore[untyped-decorator]
    async def drop(self, call_id: str) -> None:
        """Cancel a call whose caller has gone."""
        if (task := self._running.get(call_id)) is not None:
            task.cancel()

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def linger(self) -> None:
        """Never answers: the call fails when this process ends, and says how it ended."""
        await asyncio.Event().wait()


class ActorPort:
    """The way to a role in another process; usable from any process of the run."""

    def __init__(self, role: str, host: Any, log: str, watch: Watch) -> None:
        self._role, self._host, self._log, self.watch = role, host, log, watch

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call_id = uuid.uuid4().hex
        packed = _pack((args, kwargs))
        try:
            return await self._ask(method, self._host.run, call_id, method, packed)
        except asyncio.CancelledError:
            self._host.drop.broadcast(call_id)
            raise

    async def build(self, spec: RoleSpec) -> bool:
        """Build the role's object; whether it has a `close` method. Raises what its import or constructor raises."""
        return bool(await self._ask("__init__", self._host.build, _pack(spec)))

    async def died(self) -> RoleDied:
        """Wait until the role's process is gone."""
        try:
            await self._ask("linger", self._host.linger)
        except RoleDied as died:
            return died
        except RoleError as error:
            return RoleDied(self._role, f"its actor failed: {error.trace}", log_tail(self._log))
        raise AssertionError("linger never answers")

    async def _ask(self, method: str, remote: Any, *arguments: Any) -> Any:
        answer = asyncio.ensure_future(_wait_for(remote.call_one(*arguments)))
        gone = self.watch.gone()
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and gone.result() is None:
                await asyncio.wait({answer}, timeout=_CAUSE_LIMIT_S)  # Monarch may still say how it ended
            if not answer.done():
                cause = gone.result() or f"its process {self.watch.pid} is gone (how it ended is not known)"
                raise RoleDied(self._role, cause, log_tail(self._log))
            outcome = cloudpickle.loads(answer.result())
        except SupervisionError as error:
            raise RoleDied(self._role, _cause(str(error)), log_tail(self._log)) from None
        except ActorError as error:
            raise RoleError(self._role, method, str(error)) from None
        finally:
            answer.cancel()
        if isinstance(outcome, Raised):
            raise outcome.rebuild() from None
        return outcome


async def _wait_for(future: Any) -> Any:
    """Monarch's future as a coroutine, so that asyncio can make a task of it."""
    return await future


class Process:
    """A role's process: started by `await Process.start(...)`, ended by `stop`."""

    def __init__(self, procs: Any, port: ActorPort) -> None:
        self._procs, self.port = procs, port

    @property
    def pid(self) -> int:
        return self.port.watch.pid

    @classmethod
    async def start(cls, spec: RoleSpec, log: Path, env: Mapping[str, str]) -> Process:
        """Start the process and its actor; the role itself is not built yet. Raises RoleDied when it does not start."""
        command = BootstrapCommand(sys.executable, None, child.arguments(spec.name, str(log)), dict(env))
        with _standard_error_to(log.with_name("monarch.log")):
            host_mesh = this_host()
        procs = host_mesh.spawn_procs(per_host={"role": 1}, name=spec.name, bootstrap_command=command)
        host = procs.spawn(spec.name, _Host)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                pid = await host.pid.call_one()
        except asyncio.CancelledError:
            guard.kill_marked(env[guard.VARIABLE])  # it would hear of a stop only once it has started
            await _stop(procs)
            raise
        except TimeoutError:
            raise RoleDied(spec.name, f"its process did not start within {_START_LIMIT_S:g} s", log_tail(log)) from None
        except Exception as error:
            raise RoleDied(spec.name, f"its process did not start: {_cause(str(error))}", log_tail(log)) from None
        watch = Watch(pid, start_time(pid))
        return cls(procs, ActorPort(spec.name, host, str(log), watch))

    async def stop(self) -> None:
        """Ask the process to end, for a few seconds at most; a dead one is no error."""
        await _stop(self._procs)
        self.port.watch.close()


async def _stop(procs: Any) -> None:
    with contextlib.suppress(SupervisionError, ActorError, TimeoutError):
        async with asyncio.timeout(_STOP_LIMIT_S):
            await procs.stop()


def keep_running_on_faults() -> None:
    """Monarch ends the client when an actor's failure reaches it unhandled; here the Runtime handles every one."""
    monarch.actor.unhandled_fault_hook = _note_fault


def _note_fault(failure: Any) -> None:
    del failure  # `ActorPort.died` reports the same event, with the role it belongs to


def _cause(report: str) -> str:
    """Monarch's report in plain words where it is known, else its last line."""
    if match := re.search(r"Killed\(sig=(\d+)\)", report):
        return killed(int(match[1]))
    if match := re.search(r"(?:non-zero code|exit_code:) (-?\d+)", report):
        return exited(int(match[1]))
    if "exited cleanly" in report:
        return exited(0)
    return report.strip().splitlines()[-1] if report.strip() else "unknown"


@contextlib.contextmanager
def _standard_error_to(path: Path) -> Iterator[None]:
    """Send file descriptor 2 to `path` for a moment: Monarch greets there, once, when it is first used."""
    sys.stderr.flush()
    saved, log = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(log, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(log)
