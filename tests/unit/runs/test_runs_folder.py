"""Making and opening run folders."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from rollforge.config import UserError
from rollforge.runs.folder import RunFolder


def test_a_new_folder_becomes_a_run_with_its_config(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "deep" / "run")
    with pytest.raises(UserError, match=r"holds no config\.yaml"):
        RunFolder.open(folder.path)
    folder.save_config("my/recipe.py", "seed: 1\n")
    assert RunFolder.open(folder.path) == folder
    assert folder.config.read_text() == "# rollforge run my/recipe.py --config config.yaml\nseed: 1\n"
    assert folder.recipe() == "my/recipe.py"
    assert folder.tensorboard.is_dir()


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    assert RunFolder.create(str(tmp_path)).path == tmp_path


def test_a_relative_path_stays_valid_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunFolder.create("run").path == tmp_path / "run"


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))} exists and is not an empty folder.*--out"):
        RunFolder.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run")
    with pytest.raises(UserError, match="exists"):
        RunFolder.create(tmp_path / "run")


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        RunFolder.create(tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot be made: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.EACCES, "cannot be made: no way.*--out"),
        (errno.EROFS, "cannot be made: no way.*--out"),
        (errno.ENOSPC, "Could not write a new run folder.*the disk is full"),
    ],
)
def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str) -> None:
    def mkdir(*_: object, **__: object) -> None:
        raise OSError(code, "no way")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UserError, match=message):
        RunFolder.create(tmp_path / "run")


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        RunFolder.open(tmp_path / "absent")
    with pytest.raises(UserError, match=r"holds no config\.yaml"):
        RunFolder.open(tmp_path)


def test_notes_and_logs(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.note("started")
    folder.note("first\nsecond")
    lines = folder.log.read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == ["started", "first", "second"]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d  ", line) for line in lines)
    assert folder.role_log("trainer") == folder.path / "logs" / "trainer.log"
    (folder.path / "chart.png").write_bytes(b"")
    assert [path.name for path in folder.pictures()] == ["chart.png"]
