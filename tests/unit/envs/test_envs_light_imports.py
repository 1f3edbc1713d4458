"""The client side starts fast: no tensors, no OpenEnv server side, no drawing until a picture is asked for."""

from __future__ import annotations

import subprocess
import sys

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


def test_the_client_side_imports_nothing_heavy() -> None:
    code = f"import sys, {', '.join(CLIENT)}; print([name for name in {HEAVY!r} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "[]"
