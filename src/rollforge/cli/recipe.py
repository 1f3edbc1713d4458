"""Finds a recipe by its name, by a dotted module path, or in a user's own file.

Knows: what a recipe module offers. Does not know: any recipe. Nothing here imports one statically, since no room may
depend on them.

A recipe module has `SUMMARY: str`, `Config` (a dataclass whose fields include steps, seed, model and in_process),
`run(config, folder) -> int` (the exit code) and `evaluate(config, model) -> Mapping[str, float]`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rollforge.config import UserError, nearest

_PACKAGE = "rollforge.recipes"
_SHARED = {"base", "run"}
"""The modules beside the recipes that recipes are made with."""
_PARTS = ("SUMMARY", "Config", "run", "evaluate")
_FIELDS = {"steps", "seed", "model", "in_process"}


@dataclass(frozen=True)
class Recipe:
    """A recipe, ready to be configured; `given` is how the user named it, `name` a short name for folders."""

    given: str
    name: str
    summary: str
    config: type[Any]
    run: Callable[[Any, Path], int]
    evaluate: Callable[[Any, str], Mapping[str, float]]


def available() -> list[Recipe]:
    """The recipes that come with Rollforge, by name."""
    package = importlib.import_module(_PACKAGE)
    names = sorted(item.name for item in pkgutil.iter_modules(package.__path__) if item.name not in _SHARED)
    return [_recipe(name, importlib.import_module(f"{_PACKAGE}.{name}")) for name in names]


def find(given: str) -> Recipe:
    """The recipe `given`: a name (`sums`), a module (`my.recipe`) or a file (`my/recipe.py`). Raises UserError."""
    if given.endswith(".py"):
        return _recipe(given, _from_file(Path(given)))
    if "." in given and all(part.isidentifier() for part in given.split(".")):
        _make_importable(Path.cwd())
        if _exists(given):
            return _recipe(given, importlib.import_module(given))
    elif given.isidentifier() and given not in _SHARED and _exists(f"{_PACKAGE}.{given}"):
        return _recipe(given, importlib.import_module(f"{_PACKAGE}.{given}"))
    names = [recipe.name for recipe in available()]
    near = nearest(given, names)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(names) or 'none'}."
    raise UserError(f"There is no recipe {given!r}; {hint} A module's dotted name or a .py file will do as well.")


def _exists(module: str) -> bool:
    """Whether a module can be found; an import error inside one of its parents is shown, not taken for absence."""
    parts = module.split(".")
    for depth in range(1, len(parts)):
        package = importlib.util.find_spec(".".join(parts[:depth]))
        if package is None or package.submodule_search_locations is None:
            return False
    return importlib.util.find_spec(module) is not None


def _from_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UserError(f"There is no recipe file {file}.")
    if not file.stem.isidentifier():
        raise UserError(f"The recipe file {file} cannot be imported under its name; rename it, say to my_recipe.py.")
    _make_importable(file.resolve().parent)
    module = importlib.import_module(file.stem)
    if module.__file__ is None or Path(module.__file__).resolve() != file.resolve():
        raise UserError(f"The recipe file {file} has the name of another module, {module.__name__}; rename it.")
    return module


def _make_importable(folder: Path) -> None:
    """For this process and for those it will start: roles in processes of their own import the recipe by its name."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(folder) if not before else os.pathsep.join([str(folder), before])


def _recipe(given: str, module: ModuleType) -> Recipe:
    lacking = [part for part in _PARTS if not hasattr(module, part)]
    if lacking:
        raise UserError(f"{given} is not a recipe: it lacks {', '.join(lacking)}. A recipe has {', '.join(_PARTS)}.")
    config: Any = module.Config
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise UserError(f"{given} is not a recipe: its Config is not a dataclass.")
    absent = _FIELDS - {item.name for item in dataclasses.fields(config)}
    if absent:
        raise UserError(f"{given} is not a recipe: its Config lacks the fields {', '.join(sorted(absent))}.")
    name = module.__name__.rpartition(".")[2]
    return Recipe(given, name, module.SUMMARY, config, module.run, module.evaluate)
