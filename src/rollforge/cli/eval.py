"""`rollforge eval RECIPE --model PATH`: evaluates a model the way a recipe does."""

from __future__ import annotations

from pathlib import Path

from rollforge.cli.arguments import Parser, describe_keys, split_options, with_values
from rollforge.cli.recipe import find
from rollforge.config import UserError, keys, load

_USAGE = "rollforge eval RECIPE --model PATH [--key.path value ...] [--config FILE.yaml]"


def main(arguments: list[str]) -> int:
    """Prints the recipe's metrics of the model, one a line."""
    rest, options = split_options(arguments, {"config"})
    parser = Parser("rollforge eval", "Evaluates a model the way a recipe does.", usage=_USAGE)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a name, a dotted module or a .py file")
    parser.add_argument("--model", metavar="PATH", help="a folder (RUN/model), a hub name, smollm2 or tiny")
    parser.add_argument("--config", metavar="FILE.yaml", type=Path, help="keys as YAML, such as RUN/config.yaml")
    parsed = parser.parse_args(rest)
    if parsed.recipe is None and not parsed.help:
        raise UserError(f"which recipe? Usage: {_USAGE}; `rollforge recipes` lists them.")
    if parsed.help:
        keys_text = f"\nkeys:\n{describe_keys(keys(find(parsed.recipe).config))}" if parsed.recipe else ""
        print(parser.format_help() + keys_text)
        return 0
    recipe = find(parsed.recipe)
    if "model" not in dict(options):
        raise UserError(f"which model? Add --model PATH, a folder such as RUN/model. Usage: {_USAGE}.")
    config = load(recipe.config, parsed.config, with_values(options, recipe.config))
    metrics = recipe.evaluate(config, config.model)
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:.6g}")
    return 0
