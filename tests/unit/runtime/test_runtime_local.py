"""Roles in the controller's own process: how methods run, what crosses the border, what is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import runtime_roles

from rollforge.config import ConfigError, UserError
from rollforge.runtime import RoleDied, RoleError, RoleSpec, RoleTimeout, Runtime


def counter(name: str = "counter", **kwargs: object) -> RoleSpec:
    return RoleSpec(name, "runtime_roles:Counter", kwargs)


async def test_plain_methods_run_one_at_a_time() -> None:
    async with Runtime(in_process=True) as runtime:
        handle = await runtime.spawn(counter(start=1))
        # Each call reads, sleeps and writes: side by side they would overwrite each other.
        results = await asyncio.gather(*(handle.add(1) for _ in range(5)))
    assert results == [2, 3, 4, 5, 6]


async def test_async_methods_run_side_by_side() -> None:
    async with Runtime(in_process=True) as runtime:
        handle = (await runtime.spawn(counter())).with_limit(10)
        waiting = asyncio.ensure_future(handle.wait())
        await handle.open()
        assert await waiting == "open"


async def test_values_are_copied_as_if_they_had_travelled() -> None:
    values = [1]
    async with Runtime(in_process=True) as runtime:
        handle = await runtime.spawn(counter())
        assert await handle.change(values) == [1, 99]
    assert values == [1]


async def test_a_role_reaches_another_through_its_handle() -> None:
    async with Runtime(in_process=True) as runtime:
        peer = await runtime.spawn(counter("peer", start=41))
        handle = await runtime.spawn(counter("caller", peer=peer))
        assert await handle.via_peer("add", 1) == 42
        assert await peer.read() == 42


async def test_the_roles_own_exception_reaches_the_caller_with_its_trace() -> None:
    async with Runtime(in_process=True) as runtime:
        handle = await runtime.spawn(counter())
        with pytest.raises(ValueError, match="bad value 7") as caught:
            await handle.fail("value")
        assert "role 'counter', fail()" in caught.value.__notes__[0]
        assert "runtime_roles.py" in caught.value.__notes__[0]
        assert await handle.read() == 0


@pytest.mark.parametrize("kind", ["odd", "exit", "cancel"])
async def test_what_cannot_travel_becomes_a_role_error(kind: str) -> None:
    async with Runtime(in_process=True) as runtime:
        handle = await runtime.spawn(counter())
        with pytest.raises(RoleError) as caught:
            await handle.fail(kind)
    assert (caught.value.role, caught.value.method) == ("counter", "fail")
    assert "runtime_roles.py" in caught.value.trace


async def test_stop_iteration_in_a_plain_method_is_an_error_not_a_hang() -> None:
    async with Runtime(in_process=True) as runtime:
        handle = (await runtime.spawn(counter())).with_limit(10)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await handle.run_dry()


async def test_a_call_over_its_limit_names_role_method_and_seconds_and_is_cancelled() -> None:
    async with Runtime(in_process=True) as runtime:
        handle = await runtime.spawn(counter())
        with pytest.raises(RoleTimeout, match=r"'counter' did not answer wait\(\) within 0.05 s"):
            await handle.with_limit(0.05).wait()
        assert await handle.cancelled() == ["cancelled"]


async def test_a_timeout_error_of_the_role_itself_is_not_taken_for_the_limit() -> None:
    async with Runtime(in_process=True) as runtime:
        handle = await runtime.spawn(counter())
        with pytest.raises(TimeoutError, match="its own"):
            await handle.fail("timeout")


async def test_an_unknown_method_is_named_with_the_nearest() -> None:
    async with Runtime(in_process=True) as runtime:
        handle = await runtime.spawn(counter())
        with pytest.raises(AttributeError, match="no method 'reed'; did you mean 'read'"):
            await handle.reed()
        with pytest.raises(AttributeError, match="public methods only"):
            handle._secret  # noqa: B018


async def test_construction_failures_come_out_of_spawn() -> None:
    async with Runtime(in_process=True) as runtime:
        with pytest.raises(UserError, match="no tokenizer"):
            await runtime.spawn(RoleSpec("first", "runtime_roles:Refuses", {"kind": "user"}))
        assert runtime.failure is None
        with pytest.raises(RoleDied, match="'second' died: it could not be built: ValueError: no such thing"):
            await runtime.spawn(RoleSpec("second", "runtime_roles:Refuses", {"kind": "value"}))
        assert runtime.failure is not None and runtime.failure.role == "second"
        assert "Traceback" in runtime.failure.tail and "in __init__" in runtime.failure.tail, "it keeps its traceback"
        with pytest.raises(RoleDied, match="ModuleNotFoundError"):
            await runtime.spawn(RoleSpec("third", "no_such_module:Thing"))


async def test_close_is_called_on_exit_and_its_error_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot close"):
        async with Runtime(in_process=True) as runtime:
            await runtime.spawn(RoleSpec("good", "runtime_roles:Closing", {"path": str(tmp_path / "closed")}))
            await runtime.spawn(RoleSpec("bad", "runtime_roles:BadClose"))
    assert (tmp_path / "closed").read_text() == "closed\n"


async def test_an_error_under_way_is_not_hidden_by_close() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Runtime(in_process=True) as runtime:
            await runtime.spawn(RoleSpec("bad", "runtime_roles:BadClose"))
            raise KeyError("mine")


async def test_two_roles_of_one_name_are_refused() -> None:
    async with Runtime(in_process=True) as runtime:
        await runtime.spawn(counter())
        with pytest.raises(ConfigError, match="Two roles are named 'counter'"):
            await runtime.spawn(counter())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Bad Name"}, "lower-case"),
        ({"target": "package.module.Class"}, "package.module:Class"),
        ({"threads": 0}, "threads is 0"),
        ({"limit_s": 0}, "limit_s is 0"),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoleSpec(**{"name": "a", "target": "m:C", **fields})  # type: ignore[arg-type]


def test_threads_set_the_environment_and_env_wins() -> None:
    env = RoleSpec("a", "m:C", threads=2, env={"MKL_NUM_THREADS": "1", "X": "y"}).process_env()
    assert env["OMP_NUM_THREADS"] == "2" and env["MKL_NUM_THREADS"] == "1" and env["X"] == "y"
    assert RoleSpec("a", "m:C").process_env() == {}


def test_importing_the_room_loads_neither_monarch_nor_torch() -> None:
    code = "import sys, rollforge.runtime; print([m for m in ('monarch', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_odd_error_really_cannot_be_rebuilt() -> None:
    import pickle

    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(runtime_roles.OddError("a", "b")))
