"""Brings roles up, watches them, and takes them down.

Knows: that no process outlives the run, that the death of a role is noticed and kept, and that the controller lives on
to report it. Does not know: what the roles do, or Monarch (see `mesh`), which is imported only when a process is
started. A dead role is not replaced.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import subprocess
import tempfile
import traceback
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rollforge.config import ConfigError, UserError
from rollforge.runtime import guard
from rollforge.runtime.errors import RoleDied, RoleTimeout
from rollforge.runtime.handle import Handle, LocalPort, Port
from rollforge.runtime.role import Role
from rollforge.runtime.spec import RoleSpec

if TYPE_CHECKING:
    from rollforge.runtime.mesh import Process

_CLOSE_LIMIT_S = 5.0


class Runtime:
    """The roles of one run, used as `async with Runtime() as runtime: handle = await runtime.spawn(spec)`.

    `in_process` builds every role in this process instead: same code, same results, easier to debug. `log_dir` gets one
    file per role with what it prints; without it the files live in a temporary folder as long as the run.
    On exit each role's own `close()`, if it has one, is called (it must not call other roles, and may be called twice),
    then every process is ended. An exception of a `close()` is raised unless another one is under way.
    """

    def __init__(self, *, in_process: bool = False, log_dir: Path | str | None = None) -> None:
        self.failure: RoleDied | None = None
        self._in_process = in_process
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._id = uuid.uuid4().hex
        self._scratch = Path(tempfile.gettempdir()) / f"rollforge-logs-{self._id}"  # used when there is no log_dir
        self._guard: subprocess.Popen[bytes] | None = None
        self._failed = asyncio.Event()
        self._names: set[str] = set()
        self._spawning: set[asyncio.Task[Any]] = set()
        self._closable: list[Handle] = []
        self._local: list[Role] = []
        self._processes: dict[str, Process] = {}
        self._watchers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def spawn(self, spec: RoleSpec) -> Handle:
        """Start a role and build its object; several may be started at once (`asyncio.gather`).

        Raises ConfigError for a name in use, UserError as the constructor raised it, RoleTimeout when the construction
        takes longer than `spec.limit_s`, and RoleDied for anything else that goes wrong, with its cause.
        """
        if spec.name in self._names:
            raise ConfigError(f"Two roles are named {spec.name!r}; give each role of a run a name of its own.")
        self._names.add(spec.name)
        task = asyncio.current_task()
        assert task is not None
        self._spawning.add(task)
        try:
            return await self._build(spec)
        except RoleDied as died:
            self._note(died)
            raise
        finally:
            self._spawning.discard(task)

    async def _build(self, spec: RoleSpec) -> Handle:
        try:
            async with asyncio.timeout(spec.limit_s) as limit:
                port, closable = await (self._build_here(spec) if self._in_process else self._build_apart(spec))
        except (UserError, RoleDied):
            raise
        except Exception as error:
            if limit.expired():
                raise RoleTimeout(spec.name, "__init__", spec.limit_s) from None
            trace = "".join(traceback.format_exception(error)).rstrip()
            raise RoleDied(spec.name, f"it could not be built: {type(error).__name__}: {error}", trace) from error
        handle = Handle(spec.name, port, spec.limit_s)
        if closable:
            self._closable.append(handle)
        return handle

    async def supervise(self) -> None:
        """Wait until a role dies and raise its RoleDied: a task beside the loop, ended by cancelling it."""
        await self._failed.wait()
        assert self.failure is not None
        raise RoleDied(*self.failure.args)

    def pids(self) -> Mapping[str, int]:
        """The process of each role (empty in process)."""
        return {name: process.pid for name, process in self._processes.items()}

    async def _build_here(self, spec: RoleSpec) -> tuple[Port, bool]:
        role = await Role.build(copy.deepcopy(spec))
        self._local.append(role)
        return LocalPort(role), role.has_close

    async def _build_apart(self, spec: RoleSpec) -> tuple[Port, bool]:
        from rollforge.runtime import mesh  # Monarch is heavy: not needed for `--help`, nor in process

        mesh.keep_running_on_faults()
        if self._guard is None:
            self._guard = guard.start(self._id, self._scratch)
        env = {**spec.process_env(), guard.VARIABLE: self._mark(spec.name)}
        process = await mesh.Process.start(spec, self._log_folder() / f"{spec.name}.log", env)
        self._processes[spec.name] = process
        self._watchers.append(asyncio.create_task(self._watch(spec.name, process)))
        try:
            return process.port, await process.port.build(spec)
        except asyncio.CancelledError:
            guard.kill_marked(self._mark(spec.name))  # half built it has nothing to close, and may be deaf for long
            raise

    async def _watch(self, name: str, process: Process) -> None:
        died = await process.port.died()
        self._note(died)
        await asyncio.to_thread(guard.kill_marked, self._mark(name))  # what the role had started goes with it

    def _note(self, died: RoleDied) -> None:
        if self.failure is None:
            self.failure = died
            self._failed.set()

    def _mark(self, name: str) -> str:
        return f"{self._id}/{name}/"

    def _log_folder(self) -> Path:
        folder = self._scratch if self._log_dir is None else self._log_dir
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._end_spawning()
            problems = await self._close_roles()
        finally:
            await self._end_processes()
        if error is None and problems:
            raise problems[0]

    async def _end_spawning(self) -> None:
        """Cancel what is still being started, e.g. when one of several spawns has failed."""
        pending = {task for task in self._spawning if task is not asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _close_roles(self) -> list[BaseException]:
        """Call `close()` of every role that has one, all at once. Returns what they raised, save known deaths."""
        closing = (handle.with_limit(_CLOSE_LIMIT_S).close() for handle in self._closable)
        results = await asyncio.gather(*closing, return_exceptions=True)
        return [result for result in results if isinstance(result, BaseException) and not isinstance(result, RoleDied)]

    async def _end_processes(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        for role in self._local:
            role.end()
        try:
            await asyncio.gather(*(process.stop() for process in self._processes.values()))
        finally:
            left = guard.kill_marked(self._id)
            if self._guard is not None:
                self._guard.kill()
                self._guard.wait()
            if self._scratch.is_dir():
                shutil.rmtree(self._scratch)
        if left:
            raise RuntimeError(f"processes {left} of this run cannot be killed")
