"""A model whose head is not tied, for the trainer's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def untied_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    config = LlamaConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings = False
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
