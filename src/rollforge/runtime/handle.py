"""How a role is called.

Knows: that `await handle.step(batch)` is the call, and that no call waits for ever.
Does not know: whether the role lives in this process or in another (see `Port`).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from rollforge.runtime.errors import RoleTimeout, capture
from rollforge.runtime.role import Role


class Port(Protocol):
    """The way to a role. A cancelled call is cancelled in the role as well."""

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...


def cancelled_from_outside(error: BaseException) -> bool:
    """Whether `error` is the cancellation of the running task, not one that the role's code raised by itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


class LocalPort:
    """The way to a role in this process. Arguments and results are copied, as if they had travelled."""

    def __init__(self, role: Role) -> None:
        self._role = role

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = copy.deepcopy((args, kwargs))
        try:
            result = await self._role.call(method, args, kwargs)
        except BaseException as error:
            if cancelled_from_outside(error):
                raise
            raise capture(self._role.name, method, error).rebuild() from error
        return copy.deepcopy(result)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalPort:
        return self


class Handle:
    """Calls a role: any public method of the role's class is an awaitable method of its handle.

    A call raises the role's own exception, with the remote traceback as a note; RoleError when that exception cannot be
    rebuilt here; RoleDied when the role's process is gone; RoleTimeout when the limit has passed.
    A handle may be handed to other roles, in their kwargs or in calls.
    """

    def __init__(self, name: str, port: Port, limit_s: float) -> None:
        self._name, self._port, self._limit_s = name, port, limit_s

    def with_limit(self, seconds: float) -> Handle:
        """The same role with another limit for each call, in seconds."""
        return Handle(self._name, self._port, seconds)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(f"a handle reaches public methods only, not {method!r}")
        return partial(self._call, method)

    async def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                return await self._port.call(method, args, kwargs)
        except TimeoutError:
            if limit.expired():
                raise RoleTimeout(self._name, method, self._limit_s) from None
            raise

    def __repr__(self) -> str:
        return f"<role {self._name}>"
