"""Only the roles that compute hold torch: it costs every other process 150 to 200 MB, and its start a second or two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def imports_torch(code: str) -> bool:
    code += "; import sys; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    return out.strip() == "True"


def test_the_controller_does_without_torch() -> None:
    assert not imports_torch("import rollforge.recipes.run, rollforge.recipes.blackjack, rollforge.recipes.sums")


def test_an_environment_worker_does_without_torch(tiny_model: Path) -> None:
    code = f"import rollforge.rollout.worker, rollforge.data.renderer as r; r.Renderer({str(tiny_model)!r})"
    assert not imports_torch(code)


def test_torch_would_be_noticed() -> None:
    assert imports_torch("import rollforge.train.trainer")
