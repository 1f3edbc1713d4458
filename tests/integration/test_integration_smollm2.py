"""The packaged default model, unpacked from its real file: it is the language model it claims to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_command import LIMIT_S, lines, started
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollforge.data import models
from rollforge.envs.blackjack.game import read_action

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return models.resolve("smollm2")


def test_the_real_file_unpacks_to_a_model_that_speaks(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.config.model_type, model.dtype) == ("llama", torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight

    def go_on(ids: torch.Tensor, tokens: int) -> str:
        with torch.inference_mode():
            made = model.generate(ids, do_sample=False, max_new_tokens=tokens)
        return str(tokenizer.decode(made[0, ids.shape[1] :]))

    for text, continuation in (("The capital of France is", " Paris."), ("1, 2, 3, 4, 5,", " 6, 7")):
        assert go_on(tokenizer(text, return_tensors="pt").input_ids, 6).startswith(continuation)

    models.require_chat_template(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert models.num_parameters(folder) == 134_515_008
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert tokenizer.decode(ids[0]).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    assert go_on(ids, 20) == "The capital of France is Paris.<|im_end|>"
    assert models.end_ids(folder) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_it_plays_hands_of_blackjack_through_the_whole_stack(folder: Path, tmp_path: Path) -> None:
    """The server deals, the model's own tokens are its actions, and their outcomes train it."""
    run = tmp_path / "run"
    small = ("--steps", "2", "--loop.groups-per-step", "16", "--hands.first-deals", "0", "--eval.hands", "8")
    with started(
        "run", "blackjack", "--model", str(folder), *small, "--eval.examples", "1", "--out", str(run)
    ) as process:
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
    rollouts = lines(run / "rollouts.jsonl")
    assert len(rollouts) == 2 * 16 * 4
    read = [rollout for rollout in rollouts if not rollout["counts"]["illegal"]]
    assert {rollout["reward"] for rollout in read} >= {-1.0, 1.0}
    assert {rollout["reward"] for rollout in read} <= {-1.0, 0.0, 1.0}
    said = {read_action(turn["completion"]) for rollout in read for turn in rollout["turns"]}
    assert said == {"hit", "stand"}
    assert any(len(rollout["turns"]) > 1 for rollout in read)
    assert any(advantage for rollout in read for advantage in rollout["advantages"])
    before, after = lines(run / "evaluations.jsonl")
    assert 0.2 < before["eval/legal_mass"] < 1
    assert before["eval/exact"] != after["eval/exact"]
