"""What holds for every test: no internet, no process left behind, no GPU test where there is no GPU; and the model that
all loop tests share.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# Before any test imports a library that would read it; processes that tests start inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"

TESTS = Path(__file__).parent
TIERS_WITH_PROCESSES = {"integration", "loop"}
MARK = "ROLLFORGE_TEST"
SECONDS_TO_LEAVE = 5.0


GPU_TESTS = pytest.StashKey[int]()
"""How many tests were left out for want of a GPU."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests marked `gpu` out where torch finds no CUDA device; the last lines of the run say so."""
    from rollforge.recipes.base import has_cuda

    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_cuda():
        config.stash[GPU_TESTS] = len(marked)
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash.get(GPU_TESTS, 0):
        terminalreporter.write_line(f"gpu: {left_out} tests deselected, torch finds no CUDA device here", yellow=True)


class InternetForbidden(Exception):
    """A test tried to leave the machine. Not an OSError, which a client library might take for a network at rest."""


def _is_local(address: Any) -> bool:
    """Whether a socket address stays on this machine: a path (AF_UNIX), `localhost`, or a loopback address."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    if host in ("", "localhost"):
        return True
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified


def _guarded(connect: Callable[[socket.socket, Any], Any]) -> Callable[[socket.socket, Any], Any]:
    """`connect` that refuses every address beyond this machine."""

    def connect_locally(self: socket.socket, address: Any) -> Any:
        if not _is_local(address):
            raise InternetForbidden(f"a test may only connect to this machine, not to {address!r}")
        return connect(self, address)

    return connect_locally


@pytest.fixture(scope="session", autouse=True)
def no_internet() -> Iterator[None]:
    """Guards `socket.socket` in the test process, for every library that uses it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _guarded(socket.socket.connect))
        patch.setattr(socket.socket, "connect_ex", _guarded(socket.socket.connect_ex))
        yield


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _marked(mark: str) -> Iterator[psutil.Process]:
    """Processes started with this mark in their environment, wherever they hang in the process tree by now."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _is_pythons_own(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker lives as long as the process that first needed it."""
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid}: gone by now"


@pytest.fixture(autouse=True)
def no_process_left_behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test of the loop or integration tier that leaves processes behind, orphans included, and ends them."""
    if request.path.relative_to(TESTS).parts[0] not in TIERS_WITH_PROCESSES:
        yield
        return
    mark, before = uuid.uuid4().hex, _children()
    monkeypatch.setenv(MARK, mark)
    yield
    ours = {process for process in (_children() - before) | set(_marked(mark)) if not _is_pythons_own(process)}
    _, left = psutil.wait_procs(ours, timeout=SECONDS_TO_LEAVE)
    names = [_describe(process) for process in left]
    for process in left:
        if process.is_running():
            process.kill()
    psutil.wait_procs(left, timeout=SECONDS_TO_LEAVE)
    if names:
        pytest.fail("processes left behind:\n  " + "\n  ".join(names))


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the tiny fixture model: Llama architecture, about 100k parameters, character tokenizer."""
    from rollforge.data.models import resolve

    return Path(resolve("tiny"))
