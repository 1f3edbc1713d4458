"""A role's object and the rules by which its methods run; the same in the role's own process and in the controller's.

Knows: async methods run on the event loop, side by side; plain methods and the constructor run on the role's one
thread, one after the other, so that neither blocks the loop.
Does not know: who calls, and from which process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import difflib
import importlib
import inspect
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

from rollforge.runtime.spec import RoleSpec

Job = tuple[concurrent.futures.Future[Any], Callable[[], Any]]


class _Thread:
    """Runs jobs one at a time on a daemon thread: unlike an executor's, it never holds up the end of the process."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except StopIteration as error:
                # A future cannot carry StopIteration; generators turn it into a RuntimeError as well (PEP 479).
                wrapped = RuntimeError(f"StopIteration raised: {error}")
                wrapped.__cause__ = error
                future.set_exception(wrapped)
            except BaseException as error:
                future.set_exception(error)

    async def run(self, work: Callable[[], Any]) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._jobs.put((future, work))
        return await asyncio.wrap_future(future)

    def end(self) -> None:
        self._jobs.put(None)


def _construct(target: str, kwargs: Mapping[str, Any]) -> Any:
    module, _, path = target.partition(":")
    cls: Any = reduce(getattr, path.split("."), importlib.import_module(module))
    return cls(**kwargs)


class Role:
    """A built role. Make it with `await Role.build(spec)`, which raises whatever the import or constructor raises."""

    def __init__(self, name: str, thread: _Thread, built: Any) -> None:
        self.name = name
        self._thread = thread
        self._object = built

    @classmethod
    async def build(cls, spec: RoleSpec) -> Role:
        thread = _Thread(spec.name)
        try:
            built = await thread.run(partial(_construct, spec.target, spec.kwargs))
        except BaseException:
            thread.end()
            raise
        return cls(spec.name, thread, built)

    @property
    def has_close(self) -> bool:
        return callable(getattr(self._object, "close", None))

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one method. Raises AttributeError when the role has no such public method."""
        function = self._find(method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await self._thread.run(partial(function, *args, **kwargs))
        return await result if inspect.isawaitable(result) else result

    def _find(self, method: str) -> Callable[..., Any]:
        function = None if method.startswith("_") else getattr(self._object, method, None)
        if callable(function):
            return function  # type: ignore[no-any-return]
        public = [name for name in dir(self._object) if not name.startswith("_")]
        near = difflib.get_close_matches(method, public, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"role {self.name!r} ({type(self._object).__name__}) has no method {method!r}{hint}")

    def end(self) -> None:
        """Let the role's thread go once its present job is done."""
        self._thread.end()
