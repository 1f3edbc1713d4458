"""A recipe that trains nothing: what it does is chosen by its configuration."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollforge.config import ConfigError, RunFailed, UserError, option

SUMMARY = "a stub that trains nothing"


@dataclass(frozen=True, kw_only=True)
class Loss:
    kl: float = option(0.1, help="weight of the KL term")
    clip: tuple[float, float] = option((0.2, 0.2), help="clip range, low and high")


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = option(5, help="optimizer steps")
    seed: int = option(0, help="seed of everything")
    model: str = option("tiny", help="which model")
    in_process: bool = option(False, help="all roles in one process")
    outcome: Literal["good", "bad", "refused", "broken", "dead", "waiting"] = option("good", help="how the run ends")
    loss: Loss = option(Loss(), help="the loss")

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}: a run has at least one step; set it to 1 or more.")


def run(config: Config, folder: Path) -> int:
    if config.outcome == "refused":
        (folder / "metrics.jsonl").touch()  # as the roles do when they come up
        raise UserError("the server is not there; start it first.")
    if config.outcome == "dead":
        raise RunFailed("role 'trainer' died.")
    if config.outcome == "broken":
        raise ValueError("something unforeseen")
    if config.outcome == "waiting":
        time.sleep(60)
    (folder / "result.txt").write_text(f"{config.steps} {config.in_process} {os.environ.get('PYTHONPATH', '')}")
    return 0 if config.outcome == "good" else 7


def evaluate(config: Config, model: str) -> Mapping[str, float]:
    return {"accuracy": 0.875, "steps": float(config.steps), "name_length": float(len(model))}
