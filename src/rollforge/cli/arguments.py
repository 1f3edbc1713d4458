"""What the commands' argument parsing shares.

Knows: argparse, `--key.path value` options, how keys are listed in help. Does not know: any command or recipe.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Collection, Sequence
from typing import NoReturn

from rollforge.config import Key, UserError, keys

Options = list[tuple[str, str | None]]
"""Dotted keys, dashes as underscores, with the text that was given; None where only the key stood there."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are UserErrors, and whose `--help` is a flag that the command answers."""

    def __init__(self, prog: str, description: str, epilog: str = "", usage: str | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self.add_argument("-h", "--help", action="store_true", help="print this help")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`.")


def split_options(arguments: Sequence[str], own: Collection[str]) -> tuple[list[str], Options]:
    """The arguments for a command's own parser, and the `--key value` or `--key=value` options for a configuration.

    `own` are the command's options that take a value. An option's value is the next argument unless that begins with
    `--`. `--in-process` takes only true or false as its value, so that a recipe's name may follow it.
    """
    rest: list[str] = []
    options: Options = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        if not argument.startswith("--") or argument == "--help":
            rest.append(argument)
            continue
        name, equals, text = argument[2:].partition("=")
        key, value = name.replace("-", "_"), text if equals else None
        if value is None and waiting and _is_value(key, waiting[-1]):
            value = waiting.pop()
        if key in own:
            rest += [f"--{name}"] if value is None else [f"--{name}={value}"]
        else:
            options.append((key, value))
    return rest, options


def _is_value(key: str, argument: str) -> bool:
    return argument in ("true", "false") if key == "in_process" else not argument.startswith("--")


def with_values(options: Options, cls: type) -> list[tuple[str, str]]:
    """The options as overrides of `cls`: a key without a value means true, and only for keys that are true or false."""
    types = {item.key: item.type for item in keys(cls)}
    for key, value in options:
        if value is None and "true|false" not in types.get(key, "true|false").split(" or "):
            raise UserError(f"--{key} needs a value: --{key} <{types[key]}>.")
    return [(key, "true" if value is None else value) for key, value in options]


def describe_keys(listed: Sequence[Key]) -> str:
    """Every key with its type, help and default, for a terminal's width."""
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    return "\n".join(
        f"  --{item.key} <{item.type}>\n"
        + textwrap.fill(
            f"{item.help} ({'required' if item.default == 'required' else f'default: {item.default or chr(34) * 2}'})",
            width=width,
            initial_indent=" " * 8,
            subsequent_indent=" " * 8,
        )
        for item in listed
    )
