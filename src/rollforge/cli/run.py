"""`rollforge run RECIPE`: configures a recipe, makes its run folder, and runs it.

Knows: options, the run folder, the space on the disk. Does not know: what a recipe does. Everything that can be refused
is refused here, before the recipe imports anything heavy.
"""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rollforge.cli.arguments import Parser, describe_keys, split_options, with_values
from rollforge.cli.recipe import Recipe, available, find
from rollforge.config import UserError, dump, keys, load

if TYPE_CHECKING:
    from rollforge.runs.folder import RunFolder

MIN_FREE_BYTES = 10**9
"""What any run needs; how much the model takes is checked once it is known."""

_USAGE = "rollforge run RECIPE [--key.path value ...] [--config FILE.yaml] [--out DIR]"
_OWN = {"config", "out"}


def main(arguments: list[str]) -> int:
    """Runs a recipe and returns its exit code. Raises UserError before anything heavy starts."""
    rest, options = split_options(arguments, _OWN)
    parser = _parser()
    parsed = parser.parse_args(rest)
    if parsed.recipe is None:
        if not parsed.help:
            raise UserError(f"which recipe? Usage: {_USAGE}; `rollforge recipes` lists them.")
        recipes = "\n".join(f"  {item.name:<16}{item.summary}" for item in available())
        print(f"{parser.format_help()}\nrecipes:\n{recipes}")
        return 0
    recipe = find(parsed.recipe)
    if parsed.help:
        print(_recipe_help(recipe))
        return 0
    config = load(recipe.config, parsed.config, with_values(options, recipe.config))
    folder = _make_folder(recipe.name, parsed.out)
    folder.save_config(recipe.given, dump(config))
    print(f"run folder {folder.path}", flush=True)
    try:
        return recipe.run(config, folder.path)
    except UserError:
        if not (
            folder.metrics.exists() and folder.metrics.stat().st_size
        ):  # refused before the first step: the corrected command may use the same folder
            shutil.rmtree(folder.path)
        raise


def _parser() -> Parser:
    parser = Parser("rollforge run", "Trains a model with a recipe.", usage=_USAGE)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a name, a dotted module or a .py file")
    parser.add_argument("--config", metavar="FILE.yaml", type=Path, help="keys as YAML; options win over it")
    parser.add_argument("--out", metavar="DIR", type=Path, help="the run folder (default: runs/<recipe>-<time>)")
    every = parser.add_argument_group("keys of every recipe (`rollforge run RECIPE --help` lists all of its keys)")
    every.add_argument("--steps", metavar="N", help="optimizer steps")
    every.add_argument("--seed", metavar="N", help="seed of everything drawn by chance")
    every.add_argument("--model", metavar="M", help="a folder, a hub name, smollm2 (packaged) or tiny (for tests)")
    every.add_argument("--in-process", metavar="true|false", nargs="?", help="all roles in one process, to debug")
    return parser


def _recipe_help(recipe: Recipe) -> str:
    return (
        f"usage: {_USAGE.replace('RECIPE', recipe.given)}\n\n{recipe.summary}\n\n"
        f"options:\n  --config <FILE.yaml>\n        keys as YAML; options win over it\n"
        f"  --out <DIR>\n        the run folder (default: runs/{recipe.name}-<time>)\n\n"
        f"keys, as options or in the file:\n{describe_keys(keys(recipe.config))}"
    )


def _make_folder(recipe: str, out: Path | None) -> RunFolder:
    """The run folder, made, on a disk with room. Raises UserError if there is something in it or it cannot be made."""
    from rollforge.runs.files import require_space
    from rollforge.runs.folder import RunFolder

    now = datetime.datetime.now()
    path = out if out is not None else Path("runs") / f"{recipe}-{now:%Y%m%d-%H%M%S}"
    path = path.expanduser()
    require_space(path, MIN_FREE_BYTES)
    while out is None and not _claim(path):  # another run started in the same second
        now += datetime.timedelta(seconds=1)
        path = path.with_name(f"{recipe}-{now:%Y%m%d-%H%M%S}")
    return RunFolder.create(path)


def _claim(path: Path) -> bool:
    """Makes a folder; False when there is one already. What else hinders it, `RunFolder.create` will say."""
    try:
        path.mkdir(parents=True)
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True
