"""The controller of a run holds no tensors: torch would cost it 150 MB and the start of every run a second or two."""

from __future__ import annotations

import subprocess
import sys


def test_the_controller_imports_no_torch() -> None:
    code = "import sys, rollforge.recipes.run; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "False"
