"""Models on disk: from what the user wrote after `--model` to a folder that transformers loads.

Knows: the names `smollm2` and `tiny`, folders, the Hugging Face hub, and what a complete folder holds.
Does not know: architectures, devices, dtypes. Light to import; torch comes only when a model must be made.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from rollforge.config import UserError
from rollforge.data import smollm2, tiny
from rollforge.data.cache import make_once

_MADE = {
    "smollm2": (smollm2.NAME, smollm2.unpack, smollm2.SIZE),
    "tiny": (tiny.NAME, tiny.create, tiny.SIZE),
}
_INDEX = "model.safetensors.index.json"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER_FILES = (
    *_VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def resolve(model: str) -> Path:
    """The complete Hugging Face folder of a model: `smollm2`, `tiny`, a folder, or a hub name `org/name`.

    `smollm2` and `tiny` are made on first use and kept in the user's cache (`./tiny` is the folder of that name).
    Raises UserError, with the remedy, when there is no such model or its folder lacks config, weights or tokenizer.
    """
    if model in _MADE:
        return make_once(*_MADE[model])
    path = Path(model).expanduser()
    folder = path if model and path.is_dir() else _download(model)
    _require_complete(folder)
    return folder.resolve()


def num_parameters(folder: Path) -> int:
    """Parameters in a model folder's weight files, tied ones counted once; only their headers are read."""
    from safetensors import safe_open

    indexed = set(_read(folder / _INDEX).get("weight_map", {}).values())  # a folder may hold a second copy in one file
    total = 0
    for file in [folder / name for name in indexed] or folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def lasting_name(model: str) -> str:
    """What means the same model in whatever folder it is said: an absolute path for a folder, a name as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if model not in _MADE and path.is_dir() else model


def require_chat_template(folder: Path) -> None:
    """Raises UserError when the folder's tokenizer has no chat template; only prompts made of messages need one."""
    if (folder / "chat_template.jinja").is_file() or "chat_template" in _read(folder / "tokenizer_config.json"):
        return
    raise no_chat_template(folder)


def no_chat_template(folder: Path) -> UserError:
    """The error of prompts made of messages meeting a model without a chat template."""
    return UserError(
        f"The model folder {folder} has no chat template (chat_template.jinja, or 'chat_template' in "
        "tokenizer_config.json), and this recipe's prompts are messages. Use the instruct variant of the model, put "
        "the template of its family there as chat_template.jinja, or use a recipe with raw text prompts."
    )


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template and generation defaults, byte for byte, beside weights saved in `target`."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def end_ids(folder: Path) -> tuple[int, ...]:
    """The ids the model's own generation defaults end at: `eos_token_id`, one or several; () when not said."""
    for name in ("generation_config.json", "config.json"):
        ids = _read(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _download(model: str) -> Path:
    if not _HUB_NAME.fullmatch(model):
        raise UserError(
            f"--model {model!r} is neither a folder nor a model's name. Give an existing folder with config, weights "
            f"and tokenizer, a name on the Hugging Face hub (org/name), or one of: {', '.join(sorted(_MADE))}."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # the network's, of whatever library it uses

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, HTTPError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--model {model!r} is not a folder here and could not be fetched from the Hugging Face hub: {reason} "
            "Check the spelling and the network, log in (hf auth login) if the model is gated, or download it on "
            "another machine and give its folder."
        ) from error


def _require_complete(folder: Path) -> None:
    missing = [
        what
        for what, present in (
            ("config.json", (folder / "config.json").is_file()),
            ("weights (*.safetensors)", any(folder.glob("*.safetensors"))),
            (
                "a tokenizer (tokenizer.json or tokenizer.model)",
                any((folder / name).is_file() for name in _VOCABULARIES),
            ),
        )
        if not present
    ]
    index = _read(folder / _INDEX).get("weight_map", {})
    missing += sorted(name for name in set(index.values()) if not (folder / name).is_file())
    if missing:
        raise UserError(
            f"The model folder {folder} lacks {', '.join(missing)}. Give a folder as transformers' save_pretrained "
            "writes it for both model and tokenizer (weights in safetensors format), or copy the missing files there."
        )
    if "model_type" not in _read(folder / "config.json"):
        raise UserError(
            f"{folder / 'config.json'} names no 'model_type', so it is not a model's configuration. Give a folder as "
            "transformers' save_pretrained writes it."
        )


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; {} when there is no such file. Raises UserError when the file is something else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}. Copy it again from the model's source.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} does not hold a JSON object. Copy it again from the model's source.")
    return content
