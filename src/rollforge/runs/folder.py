"""Where everything of a run lies.

Knows: names of files and folders. Does not know: who writes them or what they mean.

    RUN/config.yaml         the resolved configuration; running it again reproduces the run
        metrics.jsonl       one line per optimizer step
        rollouts.jsonl      one line per rollout
        evaluations.jsonl   one line per evaluation
        summary.json        how the run ended, and its results; absent while it is going on, or if it was killed
        log.txt             what happened, one dated line each
        logs/<role>.log     what each role's process printed
        tensorboard/        event files
        model/              the final model as a Hugging Face folder
        *.png               pictures
        policies.json       blackjack: the policies that its chart shows
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollforge.config import UserError
from rollforge.runs.files import LineFile, disk_guard, to_json, write_atomic

_HEAD, _TAIL = "# rollforge run ", " --config config.yaml"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder; build it with `create` or `open`."""

    path: Path

    @classmethod
    def create(cls, path: Path | str) -> Self:
        """Makes the folder (an empty one may exist). Raises UserError if something is there or it cannot be made."""
        folder = cls(Path(path).expanduser().absolute())
        try:
            with disk_guard(folder.path, "a new run folder"):
                folder.path.mkdir(parents=True, exist_ok=True)
                if any(folder.path.iterdir()):
                    raise FileExistsError
                folder._logs.mkdir()  # of two runs started at once with one folder, only one gets past this line
                folder.tensorboard.mkdir()
        except FileExistsError as error:
            raise UserError(
                f"The output folder {folder.path} exists and is not an empty folder. Nothing in it was touched; choose "
                "another one with --out, or remove it if it is no longer needed."
            ) from error
        except OSError as error:
            raise UserError(
                f"The output folder {folder.path} cannot be made: {error.strerror}. Choose a place that can be "
                "written to with --out."
            ) from error
        return folder

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """An existing run, going on or finished. Raises UserError if the path is none."""
        folder = cls(Path(path).expanduser().absolute())
        if not folder.config.is_file():
            reason = "does not exist" if not folder.path.exists() else f"holds no {folder.config.name}"
            raise UserError(
                f"{folder.path} is not the folder of a run: it {reason}. Give the folder that `rollforge run` printed "
                "at its start (its --out)."
            )
        return folder

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def _logs(self) -> Path:
        return self.path / "logs"

    def role_log(self, role: str) -> Path:
        """Where the output of a role's process goes."""
        return self._logs / f"{role}.log"

    def pictures(self) -> list[Path]:
        """The pictures that exist, by name."""
        return sorted(self.path.glob("*.png"))

    def save_config(self, recipe: str, text: str) -> None:
        """Writes config.yaml, headed by the command that runs it again; from then on the folder is a run."""
        write_atomic(self.config, f"{_HEAD}{recipe}{_TAIL}\n{text}")

    def recipe(self) -> str:
        """The recipe as it was given to `rollforge run`: a name, a module or a file."""
        return self.config.read_text().partition("\n")[0].removeprefix(_HEAD).removesuffix(_TAIL)

    def save_summary(self, data: Mapping[str, Any]) -> None:
        """Writes summary.json, which marks the run as ended; `data["ended"]` says how, in one line."""
        write_atomic(self.summary, to_json(data, indent=2) + "\n")

    def note(self, text: str) -> None:
        """Appends to log.txt, each line with date and time."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        log = LineFile(self.log)
        try:
            log.append(f"{now}  {line}" for line in text.splitlines())
        finally:
            log.close()
