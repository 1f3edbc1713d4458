"""The values that flow through Rollforge, and the roles that hand them on.

Knows: what a prompt, a turn, a rollout, a group, a sample and a weight version are, and which verbs each role has.
Does not know: torch, Monarch, any model, any algorithm. Everything here is frozen, picklable and light to import.

Tokens are the truth: a completion keeps the ids and log-probabilities the engine sampled and the policy version of
every token; nothing is ever re-tokenised from text.

Shape legend: L tokens of one sample, N trained tokens of a batch, T tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: a stop id or stop string was sampled; `length`: max_tokens reached; `abort`: cancelled before its end."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one group of rollouts starts from.

    `id` is unique within a run and stable across resumes; `text` (raw continuation) or `messages` (chat template)
    opens the context; `task` is what the environment needs (a seed, an answer) and never reaches the model.
    """

    id: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    task: Mapping[str, Any] = field(default_factory=dict)


LOWEST_TEMPERATURE = 1e-3
"""Below it a float32 logit divided by the temperature may overflow; 0 is greedy."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy (its log-probabilities are those at temperature 1), any other is
    at least `LOWEST_TEMPERATURE`.

    `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off. `logprob_ids` asks, at each sampled position, for the
    log-probabilities of these token ids as well. `seed` makes the draw independent of whatever else is in the batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    logprob_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled for one request.

    token_ids [T] int32, logprobs [T] float32 (of the distribution actually sampled), versions [T] int32 (policy
    version of each token), extra_logprobs [T, len(Sampling.logprob_ids)] float32. `text` is the decoded completion,
    without the stop string. A sampled stop id is kept as the last token, with its own log-probability.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    text: str
    finish_reason: FinishReason
    extra_logprobs: FloatArray | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers. `text` is shown to the model; `legal_actions` are the texts it may say (empty: free
    text).

    `reward` is None when the environment gave none (never 0.0 by default). `info` goes to logs and metrics only.
    """

    text: str
    reward: float | None = None
    done: bool = False
    legal_actions: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: the exact tokens the model saw, what it sampled, and what the environment answered.

    `legal_ids` are the token ids with which a legal action may begin (empty: no such notion).
    """

    prompt_ids: IntArray
    completion: Completion
    observation: Observation
    legal_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode. `reward` is its total; `counts` are environment events (illegal actions, ...) to be summed."""

    id: str
    turns: tuple[Turn, ...]
    reward: float
    counts: Mapping[str, float] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        """The lowest policy version among all sampled tokens."""
        return min(int(turn.completion.versions.min()) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one prompt, compared with each other. `index` is the place in the order of admission."""

    index: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    failures: tuple[str, ...] = ()
    """What went wrong in the rollouts that are missing from the group, one text each."""

    @property
    def oldest_version(self) -> int:
        """The lowest policy version among all sampled tokens of the group."""
        return min(rollout.oldest_version for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Credit:
    """What an algorithm makes of a group: one advantage per rollout and turn, or why the group teaches nothing."""

    advantages: tuple[tuple[float, ...], ...]
    dropped: str | None = None


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One token sequence to train on; all arrays have length L.

    loss_mask is True on sampled tokens to train, logprobs are the behaviour policy's, versions the policy version of
    each token (-1 where not sampled). `legal_ids[i]` belong to the i-th trained token that has any: (position, ids).
    """

    rollout_id: str
    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    advantages: FloatArray
    legal_ids: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trains on: the samples of its groups, in the order of admission."""

    step: int
    samples: tuple[TrainSample, ...]
    reference_logprobs: tuple[FloatArray, ...] | None = None
    """One array per sample, shape [L], aligned with `TrainSample.logprobs`; None when no reference model is in use."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A group with its credit and the samples made of it: what the replay buffer holds."""

    group: Group
    credit: Credit
    samples: tuple[TrainSample, ...]


Metrics = Mapping[str, float]


class PromptSource(Protocol):
    """Hands out prompts without end; its position can be saved and restored."""

    async def draw(self) -> Prompt: ...
    async def state(self) -> Mapping[str, Any]: ...
    async def restore(self, state: Mapping[str, Any]) -> None: ...


class Generator(Protocol):
    """The policy server."""

    async def generate(self, prompt_ids: IntArray, sampling: Sampling, n: int = 1) -> list[Completion]: ...
    async def load(self, version: int) -> Metrics: ...
    async def version(self) -> int: ...
    async def metrics(self) -> Metrics: ...


class Environment(Protocol):
    """One episode at a time: `reset` starts it from a prompt's task, `step` answers the model's text."""

    async def reset(self, task: Mapping[str, Any]) -> Observation: ...
    async def step(self, action: str) -> Observation: ...
    async def close(self) -> None: ...


class Reward(Protocol):
    """Scores a finished exchange outside an environment; None: it abstains, which is not 0."""

    async def __call__(self, prompt: Prompt, completion: str) -> float | None: ...


class EnvironmentPool(Protocol):
    """Lends environments, one per episode, at most so many at once; `check` raises UserError when there are none."""

    async def check(self) -> None: ...
    def session(self) -> AbstractAsyncContextManager[Environment]: ...
    async def close(self) -> None: ...


class RolloutWorker(Protocol):
    """Plays one prompt with the policy: Generator x Environment -> Group."""

    async def run(self, prompt: Prompt, index: int, seed: int) -> Group: ...
    async def play(self, prompt: Prompt, sampling: Sampling) -> Rollout: ...
    async def complete(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]: ...
    async def vocabulary(self) -> list[str]: ...
    async def check(self) -> None: ...


class Scorer(Protocol):
    """A frozen model's log-probabilities of given samples: one float32 array [L] per sample (0 where not trained)."""

    async def score(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]: ...


class Buffer(Protocol):
    """Holds scored groups between generation and training, in the order of admission, within a staleness bound."""

    async def put(self, scored: Scored) -> bool: ...
    async def take(self, version: int, groups: int) -> list[Scored]: ...
    async def metrics(self) -> Metrics: ...


class Trainer(Protocol):
    """Owns the weights being trained."""

    async def forward_backward(self, batch: Batch) -> Metrics: ...
    async def optim_step(self) -> Metrics: ...
    async def publish(self, version: int) -> Metrics: ...
    async def export(self, folder: str) -> None: ...


class WeightStore(Protocol):
    """Knows which weight versions exist and where; keeps the newest, and any that is being read."""

    async def announce(self, version: int, location: str) -> None: ...
    async def acquire(self, version: int) -> str: ...
    async def release(self, version: int) -> None: ...


class WeightReader(Protocol):
    """Reads a published version: Hugging Face names to tensors, valid inside the context."""

    def read(self, version: int) -> AbstractAsyncContextManager[Mapping[str, Any]]: ...


class WeightPublisher(Protocol):
    """Publishes a version: visible as a whole or not at all."""

    async def publish(self, version: int, tensors: Mapping[str, Any]) -> None: ...


class Recorder(Protocol):
    """The metrics role: takes what every other role measured and writes it to the run folder."""

    async def log(self, step: int, metrics: Metrics) -> None: ...
    async def rollouts(self, step: int, scored: Sequence[Scored]) -> None: ...
    async def evaluation(self, step: int, metrics: Metrics) -> None: ...
    async def close(self) -> None: ...


class Algorithm(Protocol):
    """Credit assignment and loss: pure, and the only thing a researcher must write.

    `credit` runs beside the rollouts on plain numbers; `loss` runs in the trainer on tensors (see `rollforge.algo`).
    """

    needs_reference: bool
    needs_entropy: bool

    def credit(self, group: Group) -> Credit: ...
    def loss(self, outputs: Any, inputs: Any) -> Any: ...


Evaluate = Callable[[int], Awaitable[Metrics]]
"""Evaluates the policy currently served; the argument is its version."""
