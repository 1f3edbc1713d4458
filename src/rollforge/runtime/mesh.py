"""Roles as Monarch actors, each in a process of its own. The only module that imports monarch.

Knows: how a process is started, how a call and its outcome travel, and how Monarch says that a process is gone.
Does not know: which roles there are. Unix sockets in the abstract namespace carry all messages: no port, no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from rollforge.runtime import child
from rollforge.runtime.errors import Raised, RoleDied, RoleError, capture
from rollforge.runtime.handle import cancelled_from_outside
from rollforge.runtime.role import Role
from rollforge.runtime.spec import RoleSpec

# Read by Monarch when it is loaded, here and in every role. 250 ms: a caller in a third process hears of a death after
# two polls, and this keeps it within a second on a busy machine.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "250ms")
os.environ.setdefault("MONARCH_FILE_LOG", "warn")

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, concurrent_endpoint, endpoint, this_host

_TAIL_LINES = 40
_STOP_LIMIT_S = 5.0
_START_LIMIT_S = 60.0


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

    def __init__(self, role: str, host: Any, log: str) -> None:
        self._role, self._host, self._log = role, host, log

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
            await self._host.linger.call_one()
        except (SupervisionError, ActorError) as error:
            return self._death(error)
        return RoleDied(self._role, "its actor ended", log_tail(self._log))

    async def _ask(self, method: str, remote: Any, *arguments: Any) -> Any:
        try:
            outcome = cloudpickle.loads(await remote.call_one(*arguments))
        except SupervisionError as error:
            raise self._death(error) from None
        except ActorError as error:
            raise RoleError(self._role, method, str(error)) from None
        if isinstance(outcome, Raised):
            raise outcome.rebuild() from None
        return outcome

    def _death(self, error: Exception) -> RoleDied:
        return RoleDied(self._role, _cause(str(error)), log_tail(self._log))


class Process:
    """A role's process: started by `await Process.start(...)`, ended by `stop`."""

    def __init__(self, procs: Any, port: ActorPort, pid: int) -> None:
        self._procs, self.port, self.pid = procs, port, pid

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
            await _stop(procs)
            raise
        except Exception as error:
            raise RoleDied(spec.name, f"its process did not start: {_cause(str(error))}", log_tail(str(log))) from None
        return cls(procs, ActorPort(spec.name, host, str(log)), pid)

    async def stop(self) -> None:
        await _stop(self._procs)


async def _stop(procs: Any) -> None:
    """Ask a process to end, for a few seconds at most; a dead one is no error."""
    with contextlib.suppress(SupervisionError, ActorError, TimeoutError):
        async with asyncio.timeout(_STOP_LIMIT_S):
            await procs.stop()


def keep_running_on_faults() -> None:
    """Monarch ends the client when an actor's failure reaches it unhandled; here the Runtime handles every one."""
    monarch.actor.unhandled_fault_hook = _note_fault


def _note_fault(failure: Any) -> None:
    del failure  # `ActorPort.died` reports the same event, with the role it belongs to


def log_tail(log: str) -> str:
    """The last lines of a role's log file; empty when there is none."""
    try:
        text = Path(log).read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


def _cause(report: str) -> str:
    """Monarch's report in plain words where it is known, else its last line."""
    if killed := re.search(r"Killed\(sig=(\d+)\)", report):
        number = int(killed[1])
        names = {item.value: item.name for item in signal.Signals}
        return f"its process was killed by signal {number} ({names.get(number, 'unknown')})"
    if exited := re.search(r"(?:non-zero code|exit_code:) (-?\d+)", report):
        return f"its process exited with code {exited[1]}"
    if "exited cleanly" in report:
        return "its process exited with code 0"
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
