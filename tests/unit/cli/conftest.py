"""What the command line's tests share: the stub recipe, and a place to run in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of the stub recipe; the test runs in an empty folder, and what finding a recipe changes is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return str(Path(__file__).parent / "stub_recipe.py")
