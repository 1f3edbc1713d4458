"""`rollforge run`, `recipes` and `eval`: options, help, exit codes, the run folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollforge.cli.arguments import split_options
from rollforge.cli.main import main
from rollforge.cli.recipe import available
from rollforge.runs.folder import RunFolder

RULES = """
import sys
from rollforge.cli.main import main
code = main(sys.argv[1:])
print("HEAVY", sorted({"torch", "transformers", "monarch", "matplotlib"} & set(sys.modules)))
sys.exit(code)
"""


def run_folder() -> Path:
    (folder,) = Path("runs").iterdir()
    return folder


def test_a_run_makes_its_folder_with_the_resolved_config(recipe: str, tmp_path: Path) -> None:
    assert main(["run", recipe, "--steps", "3", "--loss.kl=1e-3", "--in-process", "--out", "a/b"]) == 0
    assert (tmp_path / "a/b/result.txt").read_text().startswith("3 True")
    again = ["run", recipe, "--config", "a/b/config.yaml", "--out", "again"]
    assert main(again) == 0
    assert (tmp_path / "again/config.yaml").read_text() == (tmp_path / "a/b/config.yaml").read_text()
    assert "kl: 0.001" in (tmp_path / "again/config.yaml").read_text()


def test_the_default_folder_is_named_after_recipe_and_time(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", recipe]) == 0
    name, day, second = run_folder().name.rsplit("-", 2)
    assert (name, len(day), len(second)) == ("stub_recipe", 8, 6)
    assert str(run_folder()) in capsys.readouterr().out


def test_p28_runs_of_one_moment_get_folders_of_their_own(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run makes the folder at the very moment in which this one wants it."""
    mkdir: Callable[..., None] = Path.mkdir
    taken: list[Path] = []

    def make_second(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.parent.name == "runs" and not taken:
            taken.append(path)
            mkdir(path / "logs", parents=True)
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", make_second)
    assert main(["run", recipe]) == 0
    assert main(["run", recipe]) == 0
    assert len(list(Path("runs").iterdir())) == 3


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--loss.klip", "0.1"], ["loss.klip", "--loss.klip", "loss.clip"]),
        (["--steps", "1.5"], ["steps", "'1.5'", "int"]),
        (["--steps", "0"], ["at least one step"]),
        (["--model", "--steps", "3"], ["--model needs a value"]),
        (["--outcome", "great"], ["outcome", "good|bad"]),
        (["--config", "absent.yaml"], ["absent.yaml", "cannot be read"]),
        (["--config"], ["--config"]),
        (["another"], ["another", "rollforge run --help"]),
        (["-q"], ["-q"]),
        (["--outcome", "refused"], ["the server is not there"]),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(
    recipe: str, options: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", recipe, *options]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("error: ")
    assert complaint.count("\n") == 1
    for part in parts:
        assert part in complaint
    assert Path("runs").exists() == ("refused" in options)


def test_each_way_a_run_ends_has_its_exit_code(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", recipe, "--outcome", "bad"]) == 7
    assert main(["run", recipe, "--outcome", "broken"]) == 1
    assert "ValueError: something unforeseen" in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130_without_a_traceback(recipe: str) -> None:
    command = [sys.executable, "-m", "rollforge.cli.main", "run", recipe, "--outcome", "waiting"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("run folder ")
        running.send_signal(signal.SIGINT)
        _, complaint = running.communicate(timeout=30)
    assert (running.returncode, complaint) == (130, "interrupted\n")


def test_a_run_that_cannot_go_on_is_told_without_a_traceback(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", recipe, "--outcome", "dead"]) == 1
    assert capsys.readouterr().err == "error: role 'trainer' died.\n"


@pytest.mark.parametrize("arguments", [["run", "--help"], ["run", "STUB", "--help"], ["inspect", "RUN"]])
def test_output_that_nobody_reads_ends_the_command_quietly(recipe: str, arguments: list[str]) -> None:
    folder = RunFolder.create("RUN")
    folder.save_config("sums", "")
    command = [sys.executable, "-m", "rollforge.cli.main", *(recipe if item == "STUB" else item for item in arguments)]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_existing_folder_is_refused_and_untouched(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    assert main(["run", recipe, "--out", "full"]) == 2
    assert "--out" in capsys.readouterr().err
    assert [path.name for path in Path("full").iterdir()] == ["notes.txt"]
    Path("empty").mkdir()
    assert main(["run", recipe, "--out", "empty"]) == 0


def test_a_place_that_cannot_be_written_is_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("not a folder")
    assert main(["run", recipe, "--out", "file/run"]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_a_full_disk_is_refused_with_the_number(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, 3 * 10**8))
    assert main(["run", recipe, "--out", "run"]) == 2
    complaint = capsys.readouterr().err
    assert "0.3 GB free" in complaint
    assert "needs 1.0 GB" in complaint
    assert not Path("run").exists()


def test_general_help_and_recipe_help(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    general = capsys.readouterr().out
    for part in ("RECIPE", "--config FILE.yaml", "--out DIR", "--steps N", "--seed N", "--model M", "--in-process"):
        assert part in general
    assert main(["run", recipe, "--help"]) == 0
    listed = capsys.readouterr().out
    for part in ("a stub that trains nothing", "--loss.kl <float>", "weight of the KL term (default: 0.1)", "--out"):
        assert part in listed
    for command in ("eval", "inspect", "doctor", "recipes"):
        assert main([command, "--help"]) == 0
        assert "usage: rollforge" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["run", "--help"], ["run", "STUB", "--help"], ["recipes"], ["--help"], ["run", "STUB", "--steps", "x"]],
)
def test_answers_come_within_a_second_and_without_torch(recipe: str, arguments: list[str]) -> None:
    command = [sys.executable, "-c", RULES, *(recipe if item == "STUB" else item for item in arguments)]
    seconds = []
    for _ in range(3):  # the fastest of three: another process may hold the machine for a moment
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        seconds.append(time.perf_counter() - start)
    assert done.returncode == (2 if "x" in arguments else 0)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    assert min(seconds) < 1.0


def test_the_command_without_arguments_shows_help_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    for command in ("run", "recipes", "eval", "inspect", "doctor"):
        assert f"  {command} " in shown
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rollforge 0.")
    assert main(["rnu"]) == 2
    assert "rnu" in capsys.readouterr().err


def test_eval_prints_the_recipes_metrics(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", recipe, "--model", "folder", "--steps", "9"]) == 0
    assert capsys.readouterr().out.split() == ["accuracy", "0.875", "steps", "9", "name_length", "6"]
    assert main(["eval", recipe]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_recipe_is_found_by_module_name_too(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(recipe, "stub_copy.py")
    Path("mine").mkdir()
    shutil.copy(recipe, "mine/stub_inside.py")
    assert main(["run", "mine.stub_inside", "--out", "one"]) == 0
    assert main(["run", "stub_copy.py", "--out", "two"]) == 0
    # Roles in processes of their own import the recipe by name, so they are told where it lies.
    assert str(Path.cwd()) in Path("two/result.txt").read_text().split()[-1].split(os.pathsep)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("no_such_recipe", "There is no recipe 'no_such_recipe'"),
        ("no.such.module", "There is no recipe"),
        ("os.path", "There is no recipe"),
        ("absent.py", "There is no recipe file absent.py"),
        ("my-recipe.py", "rename it"),
        ("json.py", "the name of another module"),
        ("lacking.py", "lacks Config, run, evaluate"),
        ("fields.py", "lacks the fields in_process, seed"),
        ("plain.py", "not a dataclass"),
    ],
)
def test_what_is_no_recipe_is_refused(recipe: str, given: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    rest = "def run(config, folder): return 0\ndef evaluate(config, model): return {}\n"
    fields = "from dataclasses import dataclass\n@dataclass\nclass Config:\n    steps: int = 1\n    model: str = ''\n"
    Path("lacking.py").write_text("SUMMARY = 'x'\n")
    Path("fields.py").write_text(f"SUMMARY = 'x'\n{fields}{rest}")
    Path("plain.py").write_text(f"SUMMARY = 'x'\nclass Config: ...\n{rest}")
    for name in ("my-recipe.py", "json.py"):
        Path(name).write_text("SUMMARY = 'x'\n")
    assert main(["run", given]) == 2
    assert part in capsys.readouterr().err


def test_an_error_inside_a_recipe_module_is_not_taken_for_its_absence(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("needy.py").write_text("import a_package_that_is_not_there\n")
    assert main(["run", "needy.py"]) == 1
    assert "a_package_that_is_not_there" in capsys.readouterr().err


def test_every_packaged_recipe_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [item.name for item in available()]


@pytest.mark.parametrize(
    ("arguments", "rest", "options"),
    [
        (["sums", "--a.b", "1"], ["sums"], [("a.b", "1")]),
        (["sums", "--a-b=x=y"], ["sums"], [("a_b", "x=y")]),
        (["sums", "--kl", "-0.1"], ["sums"], [("kl", "-0.1")]),
        (["sums", "--stop="], ["sums"], [("stop", "")]),
        (["sums", "--flag", "--out", "d"], ["sums", "--out=d"], [("flag", None)]),
        (["--in-process", "sums"], ["sums"], [("in_process", None)]),
        (["--in_process", "false", "sums"], ["sums"], [("in_process", "false")]),
        (["--help", "sums", "-h"], ["--help", "sums", "-h"], []),
    ],
)
def test_options_are_split_from_the_commands_own(
    arguments: list[str], rest: list[str], options: list[tuple[str, str | None]]
) -> None:
    assert split_options(arguments, {"out"}) == (rest, options)
