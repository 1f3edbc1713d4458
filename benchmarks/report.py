"""Writes what is known elsewhere into README.md and the pages of docs/: results, and the keys of the configuration.

A page holds a place for each, and what stands between its two marks is replaced:

    <!-- result engine -->     a --json file of a benchmark, in benchmarks/results/: no number there is typed by hand
    <!-- end -->
    <!-- pictures blackjack -->     only its pictures
    <!-- end -->
    <!-- keys train -->        a section of every recipe's configuration (`run`: the keys outside any section)
    <!-- end -->
    <!-- keys blackjack/hands -->     a section that only one recipe has
    <!-- end -->

    python benchmarks/report.py [--check]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import HERE, ROOT, cell, describe, stop

if TYPE_CHECKING:
    from rollforge.config import Key

RESULTS, DOCS = HERE / "results", ROOT / "docs"
PLACE = re.compile(r"(<!-- (result|pictures|keys) ([a-z_/]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is not up to date")
    args = parser.parse_args()
    stale = []
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = page.read_text()
        filled = PLACE.sub(partial(filled_place, page), text)
        if filled != text:
            stale.append(str(page.relative_to(ROOT)))
            if not args.check:
                page.write_text(filled)
    print("\n".join(stale) or "every page is up to date")
    return 1 if args.check and stale else 0


def filled_place(page: Path, place: re.Match[str]) -> str:
    """A place with its two marks and, between them, what belongs there now."""
    match place[2]:
        case "keys":
            text = key_table(place[3])
        case "pictures":
            text = "".join(f"{line}\n" for line in pictures(read(place[3]), page))
        case _:
            text = section(place[3], page)
    return place[1] + text + place[4]


def read(name: str) -> dict[str, Any]:
    """A recorded result; empty when there is none."""
    file = RESULTS / f"{name}.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if result.get("quick"):
        stop(f"{file} is of a quick run, which is no result; run {result['command']} without --quick.")
    return result


def section(name: str, page: Path) -> str:
    """One result as Markdown, its pictures linked from `page`."""
    result = read(name)
    if not result:
        return "No result is recorded yet.\n"
    lines = [f"`{result['command']}` on {result['date']}: {describe(result['machine'])}.", "", *markdown_table(result)]
    lines += ["", *map(goal_line, result["goals"]), "", *(f"{note}.  " for note in result["notes"])]
    for picture in pictures(result, page):
        lines += ["", picture]
    return "\n".join(lines).rstrip() + "\n"


def pictures(result: dict[str, Any], page: Path) -> list[str]:
    """The result's pictures, as they are linked from `page`."""
    there = [ROOT / name for name in result.get("pictures", []) if (ROOT / name).is_file()]
    paths = [Path(os.path.relpath(picture, page.parent)) for picture in there]
    return [f"![{path.stem}]({path.as_posix()})" for path in paths]


def markdown_table(result: dict[str, Any]) -> list[str]:
    """The result's table; all columns but the first are numbers."""
    rows = [result["columns"], ["---", *["---:"] * (len(result["columns"]) - 1)], *result["rows"]]
    return [f"| {' | '.join(map(cell, row))} |" for row in rows]


def goal_line(goal: dict[str, Any]) -> str:
    """A goal with its verdict."""
    sign, verdict = ("at least" if goal["at_least"] else "at most"), ("reached" if goal["met"] else "**missed**")
    return f"- {goal['what']}: {cell(goal['value'])}, goal {sign} {cell(goal['bound'])}: {verdict}"


def key_table(name: str) -> str:
    """A section's keys, each with its default, and with those of recipes where they are others."""
    from rollforge.cli.recipe import available
    from rollforge.config import keys
    from rollforge.recipes.base import RunConfig

    recipes = {recipe.name: {key.key: key for key in keys(recipe.config)} for recipe in available()}
    recipe, _, section_name = name.rpartition("/")
    every = recipes[recipe] if recipe else {key.key: key for key in keys(RunConfig)}
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in every.values():
        parent = key.key.rpartition(".")[0]
        if parent == ("" if section_name == "run" else section_name):
            others = {} if recipe else {name: default_of(key.key, of) for name, of in recipes.items()}
            differ = [f"{name}: {text}" for name, text in others.items() if text != default_of(key.key, every)]
            default = "; ".join([default_of(key.key, every), *differ])
            rows.append(f"| {code(key.key)} | {escape(key.type)} | {default} | {escape(key.help)} |")
    if len(rows) == 2:
        stop(f"no recipe has keys in a section {name!r}")
    return "\n".join(rows) + "\n"


def default_of(name: str, listed: Mapping[str, Key]) -> str:
    """A key's default; that of a schedule is its two ends."""
    if f"{name}.start" in listed and listed[name].default == "see below":
        return " to ".join(code(listed[f"{name}.{end}"].default) for end in ("start", "end"))
    return code(listed[name].default)


def code(text: str) -> str:
    """A value as one types it; an empty one and a line break are spelled out."""
    return f"`{escape(text).encode('unicode_escape').decode()}`" if text else "none"


def escape(text: str) -> str:
    """Text that does not end a cell of a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
