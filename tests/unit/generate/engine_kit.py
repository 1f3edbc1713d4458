"""What the engine's tests share: an engine to drive by hand, and transformers' own forward to compare it with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rollforge.data.renderer import Renderer
from rollforge.generate.config import NativeConfig
from rollforge.generate.native.engine import Engine, Request
from rollforge.generate.native.model import EngineModel
from rollforge.types import Completion, IntArray, Sampling

GREEDY = Sampling(temperature=0, max_tokens=12)
MOST_STEPS = 2000


def ids(*tokens: int) -> IntArray:
    return np.asarray(tokens, dtype=np.int32)


def random_ids(count: int, seed: int = 0) -> IntArray:
    """Tokens of the tiny model, special ones left out."""
    return np.random.default_rng(seed).integers(3, 99, count).astype(np.int32)


def save_untied(source: Path, folder: Path) -> Path:
    """A random model of the tiny one's kind whose head is a matrix of its own."""
    config = LlamaConfig.from_pretrained(source)
    config.tie_word_embeddings = False
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


class Bench:
    """An engine driven by hand."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        *,
        device: str = "cpu",
        max_batch: int = 64,
        max_prefill: int = 512,
        cache_tokens: int = 4096,
        stop_ids: Sequence[int] = (),
    ) -> None:
        renderer = Renderer(folder)
        self.model = EngineModel(str(folder), dtype, device)
        config = NativeConfig(max_batch=max_batch, max_prefill=max_prefill, cache_tokens=cache_tokens)
        self.engine = Engine(self.model, renderer.decode, frozenset(stop_ids), config)
        self.prefills: list[int] = []

    def ask(self, prompt: IntArray, sampling: Sampling = GREEDY, n: int = 1) -> list[Completion]:
        """Submits a request; the list is filled when it has ended."""
        return self.submit(prompt, sampling, n)[1]

    def submit(self, prompt: IntArray, sampling: Sampling = GREEDY, n: int = 1) -> tuple[Request, list[Completion]]:
        ended: list[Completion] = []
        request = self.engine.prepare(prompt, sampling, n, ended.extend)
        self.engine.submit(request)
        return request, ended

    def steps(self, count: int) -> None:
        """At most so many: an engine without work is not stepped."""
        for _ in range(count if self.engine.busy else 0):
            before = self.engine.counts["prefill_tokens"]
            self.engine.step()
            self.prefills.append(self.engine.counts["prefill_tokens"] - before)
            if not self.engine.busy:
                return

    def finish(self) -> None:
        for _ in range(MOST_STEPS):
            if not self.engine.busy:
                return
            self.steps(1)
        raise AssertionError(f"the engine is still busy after {MOST_STEPS} steps")

    def run(self, prompt: IntArray, sampling: Sampling = GREEDY, n: int = 1) -> list[Completion]:
        ended = self.ask(prompt, sampling, n)
        self.finish()
        return ended

    def state(self, scale: float = 1.0) -> dict[str, Tensor]:
        """Weights to load: the model's own as its trainer would publish them, each times `scale`."""
        return {name: tensor * scale for name, tensor in self.weights.items()}

    @property
    def weights(self) -> dict[str, Tensor]:
        model = AutoModelForCausalLM.from_pretrained(self.model._model.name_or_path, dtype=self.model.dtype)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}


class Oracle:
    """transformers' own model and attention."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    @torch.inference_mode()
    def logprobs(self, prompt: IntArray, completion: IntArray, temperature: float = 1.0) -> Tensor:
        """[T, V]: the distribution each completion token was drawn from."""
        tokens = torch.from_numpy(np.concatenate([prompt, completion])).long()[None]
        logits = self.model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1)

    def agrees(self, prompt: IntArray, completion: Completion, temperature: float = 1.0, greedy: bool = False) -> None:
        """Asserts the completion's log-probabilities, and with `greedy` its tokens."""
        assert len(completion.token_ids)
        logprobs = self.logprobs(prompt, completion.token_ids, temperature)
        if greedy:
            np.testing.assert_array_equal(completion.token_ids, logprobs.argmax(-1).numpy())
        chosen = logprobs.gather(1, torch.from_numpy(completion.token_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, chosen.numpy(), atol=1e-4, rtol=0)
