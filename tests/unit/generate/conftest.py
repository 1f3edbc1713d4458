"""Models and oracles that the engine's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kit import Oracle, save_untied


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@pytest.fixture(scope="session")
def untied_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untied(tiny_model, tmp_path_factory.mktemp("untied"))
