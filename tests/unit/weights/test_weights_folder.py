"""The run's folder in shared memory: room, ownership, and that nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollforge.config import UserError
from rollforge.weights import folder as folder_module
from rollforge.weights.folder import default_roots, sweep, weight_folder

HOLDER = """
import sys, time
from pathlib import Path
from rollforge.weights.folder import weight_folder
with weight_folder(1, [Path(sys.argv[1])]) as folder:
    (folder / "v00000001.safetensors").write_bytes(b"x" * 100)
    print(folder, flush=True)
    sys.stdin.readline()
"""


def hold(root: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a weight folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_is_named_for_its_owner_and_removed_at_the_end(tmp_path: Path) -> None:
    with weight_folder(1, [tmp_path]) as folder:
        assert folder.parent == tmp_path and f"-{os.getpid()}-" in folder.name
        (folder / "x").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_it_is_removed_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), weight_folder(1, [tmp_path]):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_two_folders_of_one_process_are_strangers(tmp_path: Path) -> None:
    with weight_folder(1, [tmp_path]) as one, weight_folder(1, [tmp_path]) as two:
        assert one != two and one.is_dir() and two.is_dir()


def test_a_new_run_sweeps_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "somebody-elses").mkdir()
    killed, left = hold(tmp_path)
    living, kept = hold(tmp_path)
    try:
        killed.kill()
        killed.wait()
        assert left.is_dir()
        with weight_folder(1, [tmp_path]):
            assert not left.exists()
            assert (kept / "v00000001.safetensors").is_file()
    finally:
        living.communicate("\n", timeout=30)
        killed.communicate(timeout=30)
    assert [path.name for path in tmp_path.iterdir()] == ["somebody-elses"]


def test_a_reused_process_id_is_not_taken_for_the_owner(tmp_path: Path) -> None:
    with weight_folder(1, [tmp_path]) as own:
        pid, started, rest = own.name.removeprefix("rollforge-weights-").split("-", 2)
        stale = tmp_path / f"rollforge-weights-{pid}-{int(started) - 1}-{rest}"
        stale.mkdir()
        assert sweep(tmp_path) == [stale]
        assert own.is_dir()


def test_a_folder_of_another_process_namespace_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "rollforge-weights-999999999-1-12345-abcdef00"
    foreign.mkdir()
    assert sweep(tmp_path) == []
    assert foreign.is_dir()


def test_too_little_shared_memory_falls_back_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    monkeypatch.setattr(folder_module, "free_bytes", lambda root: 64 if root == small else 5000)
    with pytest.warns(UserWarning, match=r"has 64 of the 1,000 bytes"), weight_folder(1000, [small, large]) as folder:
        assert folder.parent == large


def test_no_room_anywhere_names_needed_and_free_bytes(tmp_path: Path) -> None:
    free = folder_module.free_bytes(tmp_path)
    missing = tmp_path / "missing"
    with pytest.raises(UserError, match=r"need 1,000,000,000,000,000,000 bytes") as caught:
        weight_folder(10**18, [tmp_path, missing]).__enter__()
    assert f"{missing} has 0" in str(caught.value)
    assert free > 0 and f"{tmp_path} has " in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_comes_first() -> None:
    assert default_roots()[0] == Path("/dev/shm")
