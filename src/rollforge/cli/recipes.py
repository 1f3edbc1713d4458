"""`rollforge recipes`: lists the recipes that come with Rollforge."""

from __future__ import annotations

from rollforge.cli.arguments import Parser
from rollforge.cli.recipe import available


def main(arguments: list[str]) -> int:
    """Prints one line for each recipe."""
    parser = Parser("rollforge recipes", "Lists the recipes that come with Rollforge.")
    if parser.parse_args(arguments).help:
        parser.print_help()
        return 0
    for recipe in available():
        print(f"{recipe.name:<16}{recipe.summary}")
    return 0
