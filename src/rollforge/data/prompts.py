"""Prompt sources whose position can be saved: a list in shuffled epochs, or prompts made as they are needed.

Knows: order, position, and how training and held-out prompts are kept apart. Does not know: tokens, environments.

Both sources are pure functions of (seed, position), so the position alone is their whole state and a restored source
goes on exactly as an unbroken one would, also from the very end of an epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from rollforge.config import UserError
from rollforge.types import Prompt

Part = Literal["train", "held_out"]
_TRIES = 10_000


def split(prompts: Sequence[Prompt], held_out: float) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held-out) prompts, in input order; `held_out` is the share of different contents that is kept back.

    Membership hangs on content alone, so equal prompts stay on one side, and order and seed do not matter. Both sides
    get at least one content when 0 < held_out < 1. Raises UserError for a share outside [0, 1), or above 0 with fewer
    than two different contents.
    """
    _require_share(held_out)
    ranked = sorted({_content_key(prompt) for prompt in prompts})
    if held_out and len(ranked) < 2:
        raise UserError(
            f"A held-out share of {held_out} needs two different prompts or more, and there are {len(ranked)}."
        )
    kept_back = min(max(round(held_out * len(ranked)), 1), len(ranked) - 1) if held_out else 0
    chosen = set(ranked[:kept_back])
    training = [prompt for prompt in prompts if _content_key(prompt) not in chosen]
    return training, [prompt for prompt in prompts if _content_key(prompt) in chosen]


class PromptList:
    """types.PromptSource over a fixed list: endless epochs, each in its own shuffled order.

    A drawn prompt's id is `<prefix><epoch>-<index in the list>`, whatever id it had in the list.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, prefix: str = "") -> None:
        if not prompts:
            raise UserError("The list of prompts is empty: give at least one prompt.")
        self._prompts = tuple(prompts)
        self._seed, self._prefix = seed, prefix
        self._epoch = self._position = 0
        self._order = self._shuffled(0)
        self._fingerprint = _digest([seed, *map(_content_key, prompts)])

    async def draw(self) -> Prompt:
        """The next prompt; after the last of an epoch, the first of the next."""
        if self._position == len(self._prompts):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        index = self._order[self._position]
        self._position += 1
        return replace(self._prompts[index], id=f"{self._prefix}{self._epoch}-{index}")

    async def state(self) -> Mapping[str, Any]:
        """What `restore` needs, as JSON values: the epoch, the prompts of it already drawn, and a fingerprint."""
        return {"fingerprint": self._fingerprint, "epoch": self._epoch, "position": self._position}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises UserError when prompts or seed are not those of the state."""
        _require_same(state, self._fingerprint)
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)).tolist()
        return order


class GeneratedPrompts:
    """types.PromptSource that makes its prompts: the k-th is `make(generator seeded by (seed, k))`.

    Its id is `<prefix><k>`, whatever id `make` gave it.

    Where `held_out` is above 0, contents are divided by their hash, and this source hands out those of its `part` only:
    the training and the held-out source never hand out the same content, whatever their seeds.
    """

    def __init__(
        self,
        make: Callable[[np.random.Generator], Prompt],
        seed: int,
        prefix: str = "",
        held_out: float = 0.0,
        part: Part = "train",
    ) -> None:
        _require_share(held_out)
        if part == "held_out" and not held_out:
            raise UserError("A held-out source needs a held-out share above 0.")
        self._make, self._seed, self._prefix = make, seed, prefix
        self._held_out, self._part = held_out, part
        self._position = 0
        self._fingerprint = _digest([seed, part, held_out, _content_key(self._at(0))])

    async def draw(self) -> Prompt:
        """The next prompt."""
        prompt = self._at(self._position)
        self._position += 1
        return prompt

    async def state(self) -> Mapping[str, Any]:
        """What `restore` needs, as JSON values: the number of prompts drawn, and a fingerprint."""
        return {"fingerprint": self._fingerprint, "position": self._position}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises UserError when generator or seed are not those of the state."""
        _require_same(state, self._fingerprint)
        self._position = state["position"]

    def first(self, count: int) -> tuple[Prompt, ...]:
        """The first `count` prompts, for evaluation; the position stays where it is."""
        return tuple(self._at(position) for position in range(count))

    def _at(self, position: int) -> Prompt:
        rng = np.random.default_rng([self._seed, position])
        for _ in range(_TRIES):
            prompt = self._make(rng)
            if not self._held_out or self._part == _part(prompt, self._held_out):
                return replace(prompt, id=f"{self._prefix}{position}")
        raise UserError(
            f"None of {_TRIES} generated prompts belongs to the {self._part} part (held-out share {self._held_out}): "
            "the generator makes too few different prompts. Give it more variety, or change the share."
        )


def _part(prompt: Prompt, held_out: float) -> Part:
    return "held_out" if int(_content_key(prompt), 16) < held_out * 2**128 else "train"


def _content_key(prompt: Prompt) -> str:
    """Equal for prompts that ask the same: what the model sees, or the task where only the environment speaks."""
    if prompt.text or prompt.messages:
        return _digest([prompt.text, *([message.role, message.content] for message in prompt.messages)])
    return _digest(dict(prompt.task))


def _digest(value: Any) -> str:
    """128 bits as hex."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _require_share(held_out: float) -> None:
    if not 0 <= held_out < 1:
        raise UserError(f"The held-out share is {held_out}; it must be at least 0 and below 1.")


def _require_same(state: Mapping[str, Any], fingerprint: str) -> None:
    if state["fingerprint"] != fingerprint:
        raise UserError(
            "The saved position in the prompts belongs to other prompts or another seed than this run's. Resume with "
            "the data and the seed the run was started with, or start a new run."
        )
