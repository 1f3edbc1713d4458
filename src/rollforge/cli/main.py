"""The `rollforge` command.

Knows: the names of the commands and what each kind of failure means to the shell. Does not know: what a command does;
each stands in a file of its own and is imported when it is called.

Exit codes: what the command says (0 when all is well), 1 an unforeseen error (with traceback), a run that cannot go on
(one paragraph, the end of a log), or output that nobody reads any more (nothing), 2 bad input (one paragraph), 130
interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import select
import sys
import traceback
from collections.abc import Sequence

from rollforge import __version__
from rollforge.cli.arguments import Parser
from rollforge.config import RunFailed, UserError

COMMANDS = {
    "run": "train a model with a recipe",
    "recipes": "list the recipes there are",
    "eval": "evaluate a model the way a recipe does",
    "inspect": "look at a run: summary, reward curve, a rollout turn by turn",
    "doctor": "what this machine can run, and what to do about the rest",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark, not a crash
    try:
        code = _command(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not (isinstance(error, BrokenPipeError) and _nobody_reads()):
            traceback.print_exc()
        return 1


def _nobody_reads() -> bool:
    """Whether the reader of our output has gone, as `head` does early; then nothing more goes there."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # an error is told without being asked for
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's own flush at the end must not fail
    return True


def _command(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        code: int = importlib.import_module(f"rollforge.cli.{arguments[0]}").main(arguments[1:])
        return code
    commands = "\n".join(f"  {name:<10}{text}" for name, text in COMMANDS.items())
    parser = Parser("rollforge", "Reinforcement-learning post-training for language models.", f"commands:\n{commands}")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="`COMMAND --help` says more")
    parsed = parser.parse_args(arguments)
    if parsed.version:
        print(f"rollforge {__version__}")
        return 0
    parser.print_help()
    return 0 if parsed.help else 2


if __name__ == "__main__":
    sys.exit(main())
