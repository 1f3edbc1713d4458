"""`rollforge inspect RUN`: a run's summary, its reward curve in the terminal, and one rollout turn by turn.

Knows: the records of a run folder (`rollforge.runs`) and how they are shown. Does not know: who wrote them. It only
reads, so it may look at a run that is going on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollforge.cli.arguments import Parser
from rollforge.config import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rollforge.runs.reader import Record, RunReader

_REWARD = "reward/mean"
_RESERVED = ("step", "time")


def main(arguments: list[str]) -> int:
    """Shows a run. Raises UserError if the folder is no run, or has no such rollout."""
    parser = Parser("rollforge inspect", "Shows a run: summary, reward curve, a rollout turn by turn.")
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run folder; the run may be going on")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--rollout", metavar="ID", help="show this rollout (default: the newest)")
    choice.add_argument("--best", action="store_true", help="show the rollout with the highest reward")
    choice.add_argument("--worst", action="store_true", help="show the rollout with the lowest reward")
    parsed = parser.parse_args(arguments)
    if parsed.help:
        parser.print_help()
        return 0
    if parsed.run is None:
        raise UserError("which run? Usage: rollforge inspect RUN, with the folder that `rollforge run` printed.")
    from rich.console import Console

    from rollforge.runs.reader import RunReader

    console = Console(highlight=False)
    reader = RunReader(parsed.run)
    chosen = _choose(reader, parsed.rollout, parsed.best, parsed.worst)
    _show_summary(console, reader)
    if chosen is None:
        console.print("\nno rollout has been written yet")
    else:
        show_rollout(console, chosen)
    return 0


def _choose(reader: RunReader, rollout_id: str | None, best: bool, worst: bool) -> Record | None:
    """The rollout to show; the first of equals. None if there is none yet."""
    if rollout_id is not None:
        found = reader.rollout(rollout_id)
        if found is None:
            newest = reader.last_rollout()
            hint = f"the newest is {newest['id']}" if newest else "none has been written yet"
            raise UserError(f"--rollout {rollout_id}: {reader.folder.path} holds no rollout of that id; {hint}.")
        return found
    if not (best or worst):
        return reader.last_rollout()
    scored = (record for record in reader.rollouts() if record["reward"] is not None)
    pick = max if best else min
    return pick(scored, key=lambda record: float(record["reward"]), default=None)


def _show_summary(console: Console, reader: RunReader) -> None:
    from rich.text import Text

    from rollforge.observe.plot import ASCII, UNICODE, curve

    metrics, evaluations, summary = list(reader.metrics()), list(reader.evaluations()), reader.summary()
    folder = reader.folder
    console.print(Text.assemble((str(folder.path), "bold"), f"  {_visible(_state(metrics, summary))}"), soft_wrap=True)
    if summary is not None:
        results = {name: value for name, value in summary.items() if isinstance(value, str | int | float)}
        del results["ended"]  # told already
        console.print(_table(["result", "value"], [[name, _number(value)] for name, value in results.items()]))
    for title, records in (("metric", metrics), ("evaluation", evaluations)):
        if records:
            console.print(_first_and_last(title, records))
    points = [(record["step"] + 1, record[_REWARD]) for record in metrics if record.get(_REWARD) is not None]
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    width = min(console.width, 100)
    console.print()
    console.print(Text(curve(points, "mean reward by step", width=width, glyphs=UNICODE if unicode else ASCII)))
    places = [folder.config, folder.log, folder.metrics, folder.rollouts, folder.model, *folder.pictures()]
    there = ", ".join(place.name for place in places if place.exists())
    console.print(Text(f"\nin the folder: {there}", style="dim"))


def _state(metrics: Sequence[Record], summary: Record | None) -> str:
    """How many steps were made, and how the run ended. Steps count from 1 on the screen, from 0 in the files."""
    steps = f"{metrics[-1]['step'] + 1} steps" if metrics else "no step yet"
    if summary is not None:
        return f"{steps}, {summary['ended']}"
    ago = f", the last {max(0.0, time.time() - metrics[-1]['time']):,.0f} s ago" if metrics else ""
    return f"{steps}{ago}, not ended: it is going on, or was killed (there is no summary.json)"


def _first_and_last(title: str, records: Sequence[Record]) -> Table:
    """Every metric of the records with its first, lowest, highest and last value."""
    names = sorted({name for record in records for name in record if name not in _RESERVED})
    rows = []
    for name in names:
        values = [record[name] for record in records if record.get(name) is not None]
        if values:
            rows.append([name, *(_number(value) for value in (values[0], min(values), max(values), values[-1]))])
    return _table([title, "first", "lowest", "highest", "last"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for index, title in enumerate(header):
        table.add_column(title, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def show_rollout(console: Console, record: Record) -> None:
    """Prints one record of rollouts.jsonl turn by turn."""
    from rich.rule import Rule
    from rich.text import Text

    console.print()
    console.print(Rule(f"rollout {_visible(record['id'])}", style="dim"))
    facts = {
        "step": record["step"] + 1,
        "group": record["group"],
        "prompt": record["prompt_id"],
        "reward": _number(record["reward"]),
        "dropped": record.get("dropped"),
        **{name: _number(value) for name, value in record["counts"].items()},
    }
    shown = "   ".join(f"{name} {_visible(str(value))}" for name, value in facts.items() if value is not None)
    console.print(Text(shown, style="bold"))
    for role, text in _opening(record["prompt"]):
        _say(console, role, text, "dim")
    for index, turn in enumerate(record["turns"]):
        advantage = record["advantages"][index] if index < len(record["advantages"]) else None
        console.print(Text(f"\nturn {index + 1}   {_turn_facts(turn, advantage)}", style="dim"))
        _say(console, "model", turn["completion"], "cyan")
        _say(console, "environment", turn["observation"], "")
        if turn["reward"] is not None:
            _say(console, "reward", _number(turn["reward"]), "bold")


def _turn_facts(turn: dict[str, Any], advantage: float | None) -> str:
    """How the turn came to be: tokens, policy versions, how sure the policy was."""
    logprobs = [value for value in turn["logprobs"] if value is not None]
    oldest, newest = min(turn["versions"], default=None), max(turn["versions"], default=None)
    versions = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
    parts = [
        f"{len(turn['prompt_ids'])} tokens in, {len(turn['token_ids'])} out ({turn['finish_reason']})",
        f"policy version {versions}",
        f"mean log-probability {_number(sum(logprobs) / len(logprobs))}" if logprobs else "",
        f"advantage {_number(advantage)}" if advantage is not None else "",
    ]
    return "   ".join(part for part in parts if part)


def _opening(prompt: str | list[dict[str, str]]) -> list[tuple[str, str]]:
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    return [(message["role"], message["content"]) for message in prompt]


def _say(console: Console, who: str, text: str, style: str) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=11, style="dim")
    line.add_column(overflow="fold")
    line.add_row(who, Text(_visible(text), style=style))
    console.print(Padding(line, (0, 0, 0, 2)))


def _visible(text: str) -> str:
    """The text with control characters spelled out: what a model wrote must not steer the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def _number(value: float | str | None) -> str:
    """A number as short as it may be; `-` where it was not finite."""
    if value is None or isinstance(value, str | bool):
        return "-" if value is None else str(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"
