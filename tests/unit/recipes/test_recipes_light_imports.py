"""Processes import what they work with: no tensors in the controller, the environment workers and their clients (torch
costs each 150 to 200 MB, and its start a second or two), and in a client no OpenEnv server side, and no drawing until a
picture is asked for.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CLIENT = (
    "rollforge.envs.blackjack.chart",
    "rollforge.envs.blackjack.codecs",
    "rollforge.envs.blackjack.server",
    "rollforge.envs.openenv",
    "rollforge.envs.rewards",
    "rollforge.envs.server",
    "rollforge.envs.single_turn",
)
HEAVY = ("torch", "openenv", "gradio", "matplotlib", "fastapi", "transformers", "monarch")


def heavy(code: str) -> list[str]:
    """Which heavy packages a fresh interpreter has imported after `code`."""
    code += f"; import sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    return out.split()


def test_the_client_side_imports_nothing_heavy() -> None:
    assert heavy(f"import {', '.join(CLIENT)}") == []


def test_the_controller_does_without_torch() -> None:
    assert "torch" not in heavy("import rollforge.recipes.run, rollforge.recipes.blackjack, rollforge.recipes.sums")


def test_an_environment_worker_does_without_torch(tiny_model: Path) -> None:
    code = f"import rollforge.rollout.worker, rollforge.data.renderer as r; r.Renderer({str(tiny_model)!r})"
    assert "torch" not in heavy(code)


def test_torch_would_be_noticed() -> None:
    assert "torch" in heavy("import rollforge.train.trainer")
