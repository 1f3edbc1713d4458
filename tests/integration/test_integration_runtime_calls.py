"""Roles as real Monarch actors in real processes: calls, exceptions, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from run_command import alive

from rollforge.config import UserError
from rollforge.runtime import RoleDied, RoleError, RoleSpec, RoleTimeout, Runtime

ROLES = Path(__file__).parent.parent / "unit" / "runtime"
SOON_S = 5.0
"""Deaths are told within about a second; Monarch's own default is 10 s, and a busy machine may be slow."""


UNKNOWN = "how it ended is not known"
"""Said of a death, rarely, when Monarch has collected the exit status first and does not report it in time."""


@pytest.fixture(autouse=True)
def importable_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROLES))


def counter(name: str = "counter", **kwargs: Any) -> RoleSpec:
    return RoleSpec(name, "runtime_roles:Counter", kwargs, limit_s=60)


async def play(runtime: Runtime) -> list[Any]:
    """The same little program, wherever the roles live."""
    peer = await runtime.spawn(counter("peer", start=5))
    handle = await runtime.spawn(counter("caller", peer=peer))
    sums = await asyncio.gather(*(handle.via_peer("add", n) for n in range(4)))
    with pytest.raises(ValueError, match="bad value 7"):
        await handle.via_peer("fail", "value")
    with pytest.raises(RoleError):
        await handle.fail("odd")
    return [sorted(sums)[-1], await peer.read(), await handle.draws(3), await handle.change([1])]


async def test_in_process_and_as_actors_the_results_are_the_same() -> None:
    async with Runtime(in_process=True) as runtime:
        here = await play(runtime)
    async with Runtime() as runtime:
        apart = await play(runtime)
    assert here == apart


async def test_each_role_has_its_own_process_environment_and_no_ctrl_c(tmp_path: Path) -> None:
    async with Runtime(log_dir=tmp_path) as runtime:
        specs = [
            RoleSpec("first", "runtime_roles:Counter", threads=3, env={"ROLE_EXTRA": "x"}),
            RoleSpec("second", "runtime_roles:Counter", threads=1),
        ]
        first, second = await asyncio.gather(*(runtime.spawn(spec) for spec in specs))
        facts = [await first.facts(), await second.facts()]
        assert {fact["pid"] for fact in facts} == set(runtime.pids().values())
        assert os.getpid() not in {fact["pid"] for fact in facts}
        assert [(fact["threads"], fact["extra"]) for fact in facts] == [("3", "x"), ("1", None)]
        assert all(fact["sigint"] and fact["group"] != os.getpgid(0) for fact in facts)
        pids = dict(runtime.pids())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.log", "monarch.log", "second.log"]
    assert_gone(pids)


async def test_a_waiting_call_does_not_block_the_next_and_plain_ones_queue() -> None:
    async with Runtime() as runtime:
        handle = await runtime.spawn(counter())
        waiting = asyncio.ensure_future(handle.wait())
        assert sorted(await asyncio.gather(*(handle.add(1) for _ in range(5)))) == [1, 2, 3, 4, 5]
        await handle.open()
        assert await waiting == "open"


async def test_exceptions_keep_their_type_and_the_role_lives_on() -> None:
    async with Runtime() as runtime:
        handle = await runtime.spawn(counter())
        with pytest.raises(UserError, match="field x is 3; use 4") as caught:
            await handle.fail("user")
        assert "role 'counter', fail(), process " in caught.value.__notes__[0]
        for kind in ("odd", "exit", "cancel"):
            with pytest.raises(RoleError, match=r"'counter' failed in fail\(\)"):
                await handle.fail(kind)
        with pytest.raises(TypeError, match="cannot pickle"):
            await handle.unpicklable()
        with pytest.raises(AttributeError, match="did you mean 'read'"):
            await handle.reed()
        assert await handle.read() == 0
        assert runtime.failure is None


async def test_a_call_over_its_limit_is_cancelled_in_the_role() -> None:
    async with Runtime() as runtime:
        handle = await runtime.spawn(counter())
        with pytest.raises(RoleTimeout, match=r"'counter' did not answer wait\(\) within 0.3 s"):
            await handle.with_limit(0.3).wait()
        assert await until(handle.cancelled) == ["cancelled"]


async def test_megabytes_travel_whole() -> None:
    sent = np.random.default_rng(0).integers(0, 255, 10 * 2**20, dtype=np.uint8)
    async with Runtime() as runtime:
        handle = await runtime.spawn(counter())
        np.testing.assert_array_equal(await handle.echo(sent), sent)


async def test_a_role_whose_loop_is_blocked_is_not_taken_for_dead() -> None:
    async with Runtime() as runtime:
        handle = await runtime.spawn(counter())
        await handle.block_loop(2.0)
        assert await handle.read() == 0
        assert runtime.failure is None


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("kill", "killed by signal 9 (SIGKILL)"),
        ("segfault", "killed by signal 11 (SIGSEGV)"),
        ("3", "exited with code 3"),
        ("0", "exited with code 0"),
    ],
)
async def test_a_dead_role_fails_every_call_and_the_controller_lives(how: str, cause: str) -> None:
    async with Runtime() as runtime:
        victim = await runtime.spawn(counter("victim"))
        other = await runtime.spawn(counter("other", peer=victim))
        calls = [victim.wait(), other.via_peer("wait"), runtime.supervise()]
        pending = [asyncio.ensure_future(call) for call in calls]
        await victim.read()  # both waits are under way in order before it, or soon will be
        died = time.monotonic()
        with pytest.raises(RoleDied):
            await victim.die(how)
        for error in await asyncio.gather(*pending, return_exceptions=True):
            assert isinstance(error, RoleDied) and error.role == "victim"
        assert time.monotonic() - died < SOON_S
        assert runtime.failure is not None
        assert cause in runtime.failure.cause or UNKNOWN in runtime.failure.cause
        assert "last words" in str(runtime.failure)
        for later in (victim.read(), other.via_peer("read")):
            with pytest.raises(RoleDied, match="victim"):
                await later
        assert await other.read() == 0


async def test_the_death_of_an_idle_role_is_told_and_its_children_go_with_it() -> None:
    async with Runtime() as runtime:
        handle = await runtime.spawn(counter())
        child = psutil.Process(await handle.start_child())
        os.kill(runtime.pids()["counter"], signal.SIGKILL)
        with pytest.raises(RoleDied, match=f"SIGKILL|{UNKNOWN}"):
            await asyncio.wait_for(runtime.supervise(), SOON_S)
        await asyncio.to_thread(assert_gone, {"child": child.pid})


async def test_children_of_living_roles_end_with_the_run() -> None:
    async with Runtime() as runtime:
        handle = await runtime.spawn(counter())
        child = await handle.start_child()
        assert psutil.pid_exists(child)
    assert_gone({"child": child})


@pytest.mark.parametrize(("kind", "cause"), [("value", "ValueError: no such thing"), ("exit", "exited with code 7")])
async def test_a_role_that_cannot_be_built_is_dead(kind: str, cause: str) -> None:
    async with Runtime() as runtime:
        with pytest.raises(RoleDied, match=f"{cause}|{UNKNOWN}") as caught:
            await runtime.spawn(RoleSpec("bad", "runtime_roles:Refuses", {"kind": kind}))
        assert caught.value.role == "bad"
        assert runtime.failure is not None and runtime.failure.role == "bad"


async def test_bad_input_found_by_a_constructor_stays_a_user_error() -> None:
    async with Runtime() as runtime:
        with pytest.raises(UserError, match="no tokenizer; add one"):
            await runtime.spawn(RoleSpec("bad", "runtime_roles:Refuses", {"kind": "user"}))


async def test_a_constructor_that_hangs_meets_its_limit_and_leaves_nothing() -> None:
    async with Runtime() as runtime:
        with pytest.raises(RoleTimeout, match="__init__"):
            await runtime.spawn(RoleSpec("bad", "runtime_roles:Refuses", {"kind": "hang"}, limit_s=3))


async def test_one_failing_spawn_of_several_leaves_no_process() -> None:
    with pytest.raises(UserError):
        async with Runtime() as runtime:
            bad = RoleSpec("bad", "runtime_roles:Refuses", {"kind": "user"})
            slow = RoleSpec("slow", "runtime_roles:Refuses", {"kind": "hang"})
            await asyncio.gather(runtime.spawn(slow), runtime.spawn(bad), runtime.spawn(counter()))


async def until(ask: Any) -> Any:
    """The first true answer, within SOON_S."""
    async with asyncio.timeout(SOON_S):
        while not (answer := await ask()):
            await asyncio.sleep(0.02)
    return answer


def assert_gone(pids: Mapping[str, int]) -> None:
    deadline = time.monotonic() + SOON_S
    while left := {name: pid for name, pid in pids.items() if alive(pid)}:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)
