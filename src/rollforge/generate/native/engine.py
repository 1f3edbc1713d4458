"""Continuous batching: requests join and leave between steps; a prompt is computed once, however many samples it has.

Knows: requests, rows, when a sequence ends. Does not know: asyncio, actors, where weights come from (`load` is handed
them). A step is one pass over new prompt tokens and one token of every running sequence. New weights empty both
caches; sequences that were running are computed again under the new weights and go on, each token stamped with the
version it was drawn from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rollforge.config import UserError
from rollforge.generate.config import NativeConfig
from rollforge.generate.native.cache import PrefixCache, Rows
from rollforge.generate.native.model import EngineModel, Prefill
from rollforge.generate.native.sampling import draw, log_distribution, sample_seed, uniforms
from rollforge.runtime.memory import give_back
from rollforge.types import LOWEST_TEMPERATURE, Completion, FinishReason, IntArray, Sampling

LOGIT_ROWS = 128
"""Rows of logits handled at once: bounds the float32 memory (25 MB a copy at a vocabulary of 49,152)."""


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence being sampled."""

    request: Request
    seed: np.uint64
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    extra: list[list[float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A prompt [L], how to sample, and who is told: `on_token(index, token_id, logprob)`, `on_done(completions)`."""

    prompt_ids: IntArray
    sampling: Sampling
    samples: list[Sample]
    on_done: Callable[[list[Completion]], object]
    on_token: Callable[[int, int, float], object] | None = None
    cached_tokens: int = 0


@dataclass(slots=True)
class _Waiting:
    """Samples that need the keys and values of `context` (prompt, and what they sampled before new weights came)."""

    context: IntArray
    samples: list[Sample]


@dataclass(slots=True)
class _Plan:
    """One step: the prompt part, and for each admitted entry its path and the row of `hidden` (None: remembered)."""

    prefill: Prefill
    admitted: list[tuple[_Waiting, list[int], int | None]]


class Engine:
    """The scheduler. `submit`, `abort` and `step` are called from one thread at a time."""

    def __init__(
        self,
        model: EngineModel,
        decode_text: Callable[[list[int]], str],
        stop_ids: frozenset[int],
        config: NativeConfig,
    ) -> None:
        self._model, self._decode_text, self._stop_ids, self._config = model, decode_text, stop_ids, config
        self._waiting: deque[_Waiting] = deque()
        self._running: list[Sample] = []
        self._prefix = PrefixCache(model.shape, config.cache_tokens)
        self._rows = Rows(model.shape)
        self.version = 0
        self.counts = {"tokens": 0, "prefill_tokens": 0, "cached_tokens": 0, "steps": 0, "sequences": 0}

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def prepare(
        self,
        prompt_ids: IntArray,
        sampling: Sampling,
        n: int,
        on_done: Callable[[list[Completion]], object],
        on_token: Callable[[int, int, float], object] | None = None,
    ) -> Request:
        """A request for `n` samples of a prompt. Raises UserError for an empty or too long prompt and impossible
        sampling.
        """
        ids = np.asarray(prompt_ids, dtype=np.int32)
        _check_prompt(ids, self._model)
        _check_sampling(sampling, n, self._model.vocabulary)
        request = Request(ids, sampling, [], on_done, on_token)
        request.samples = [Sample(request, sample_seed(sampling.seed, i)) for i in range(n)]
        return request

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self._waiting.append(_Waiting(request.prompt_ids, list(request.samples)))

    def abort(self, request: Request) -> None:
        """Ends a request with what it has; its unfinished samples get finish reason `abort`. An ended one is left
        alone.
        """
        if all(sample.finish_reason for sample in request.samples):
            return
        for row in reversed(range(len(self._running))):
            if self._running[row].request is request:
                self._leave(row)
        self._waiting = deque(w for w in self._waiting if w.samples[0].request is not request)
        for sample in request.samples:
            sample.finish_reason = sample.finish_reason or "abort"
        self._report(request)

    def reset(self) -> None:
        """Forgets every request, unreported, and all that was computed: the way on after a step that raised."""
        self._waiting.clear()
        self._running = []
        self._forget()

    def _forget(self) -> None:
        self._prefix.clear()
        self._rows = Rows(self._model.shape)

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Takes new weights between two steps; nothing computed under the old ones is used again.

        Raises ValueError, with everything as it was, for weights that are not this model's.
        """
        self._model.check(tensors)
        self._forget()
        give_back()  # what the caches held, before the new weights come
        self._model.load(tensors)
        self.version = version
        for sample in reversed(self._running):
            context = np.concatenate([sample.request.prompt_ids, np.asarray(sample.token_ids, dtype=np.int32)])
            self._waiting.appendleft(_Waiting(context, [sample]))
        self._running = []

    @torch.inference_mode()
    def step(self) -> None:
        """One pass: admits what fits, draws one token for every running sequence, ends what is finished."""
        if self._prefix.full:
            self._prefix.clear()
        plan = self._plan()
        decode = np.asarray([sample.token_ids[-1] for sample in self._running], dtype=np.int32)
        hidden = self._model.forward(plan.prefill, self._prefix, decode, self._rows)
        new = plan.prefill.token_ids.size
        sources: list[Tensor] = []
        samples: list[Sample] = []
        rows: list[int] = []
        for entry, path, at in plan.admitted:
            end = self._prefix.end(path[-1]) if at is None else hidden[at].clone()
            assert end is not None, "an entry without a row of its own was found remembered"
            self._prefix.set_end(path[-1], end)
            rows += [len(sources)] * len(entry.samples)
            samples += entry.samples
            sources.append(end)
        for row, sample in enumerate(self._running):
            rows.append(len(sources))
            samples.append(sample)
            sources.append(hidden[new + row])
        self._draw(torch.stack(sources), samples, rows)
        self._settle(plan)
        self.counts["steps"] += 1
        self.counts["prefill_tokens"] += new

    def _plan(self) -> _Plan:
        """Takes entries off the queue while rows and prompt tokens last."""
        build = _PrefillBuilder(self._prefix)
        admitted: list[tuple[_Waiting, list[int], int | None]] = []
        room = self._config.max_batch - len(self._running)
        while self._waiting and room > 0:
            entry = self._waiting[0]
            if build.size and build.size + build.missing(entry.context) > self._config.max_prefill:
                break
            self._waiting.popleft()
            if _needs_rows(entry.samples[0]):
                if len(entry.samples) > room:
                    self._waiting.appendleft(_Waiting(entry.context, entry.samples[room:]))
                    entry = _Waiting(entry.context, entry.samples[:room])
                room -= len(entry.samples)
            path, cached, at = build.add(entry.context)
            request = entry.samples[0].request
            if not any(sample.token_ids for sample in request.samples):  # a later part, or after new weights
                request.cached_tokens = cached
            self.counts["cached_tokens"] += cached
            admitted.append((entry, path, at))
        return _Plan(build.finish(), admitted)

    def _draw(self, hidden: Tensor, samples: list[Sample], rows: list[int]) -> None:
        """Appends one token to every sample; sample s draws from `hidden[rows[s]]`; rows ascend."""
        row_S = np.asarray(rows)
        sampling_R = [samples[int(i)].request.sampling for i in np.unique(row_S, return_index=True)[1]]
        for first in range(0, len(sampling_R), LOGIT_ROWS):
            chosen = np.flatnonzero((row_S >= first) & (row_S < first + LOGIT_ROWS))
            logprobs = log_distribution(
                self._model.logits(hidden[first : first + LOGIT_ROWS]), sampling_R[first : first + LOGIT_ROWS]
            )
            here = [samples[int(i)] for i in chosen]
            positions = np.asarray([len(s.token_ids) for s in here], dtype=np.uint64)
            uniform = uniforms(np.asarray([s.seed for s in here], dtype=np.uint64), positions)
            greedy = np.asarray([s.request.sampling.temperature == 0 for s in here])
            device = hidden.device
            row = torch.from_numpy(row_S[chosen] - first).to(device)
            drawn = draw(logprobs, row, torch.from_numpy(uniform).to(device), torch.from_numpy(greedy).to(device))
            for sample, token, logprob, at in zip(
                here, drawn.token_ids_S.tolist(), drawn.logprobs_S.tolist(), row.tolist(), strict=True
            ):
                self._append(sample, token, logprob)
                if sample.request.sampling.logprob_ids:
                    sample.extra.append(logprobs[at, list(sample.request.sampling.logprob_ids)].tolist())

    def _append(self, sample: Sample, token: int, logprob: float) -> None:
        sample.token_ids.append(token)
        sample.logprobs.append(logprob)
        sample.versions.append(self.version)
        self.counts["tokens"] += 1
        request, sampling = sample.request, sample.request.sampling
        if self._is_stop_id(token, sampling) or self._hit_stop_string(sample):
            sample.finish_reason = "stop"
        elif len(sample.token_ids) >= sampling.max_tokens or self._at_limit(sample):
            sample.finish_reason = "length"
        if request.on_token is not None:
            request.on_token(request.samples.index(sample), token, logprob)

    def _is_stop_id(self, token: int, sampling: Sampling) -> bool:
        return token in self._stop_ids or token in sampling.stop_ids

    def _at_limit(self, sample: Sample) -> bool:
        return len(sample.request.prompt_ids) + len(sample.token_ids) >= self._model.context_limit

    def _hit_stop_string(self, sample: Sample) -> bool:
        stop = sample.request.sampling.stop
        if not stop:
            return False
        # Most tokens are at least one byte, so a stop string that ends here began at most so many tokens ago; the
        # window grows while tokens without text of their own (special ones) leave it shorter than a stop string.
        longest, reach = max(map(len, stop)), max(len(s.encode()) for s in stop) + 1
        while True:
            tail = self._decode_text(sample.token_ids[-reach:])
            if any(s in tail for s in stop):
                return True
            if reach >= len(sample.token_ids) or len(tail) >= longest + len(self._decode_text(sample.token_ids[-1:])):
                return False
            reach *= 2

    def _settle(self, plan: _Plan) -> None:
        """Ended sequences leave, admitted ones that go on get rows, finished requests are reported."""
        ended = {id(s.request): s.request for s in self._running if s.finish_reason}
        for row in reversed(range(len(self._running))):
            if self._running[row].finish_reason:
                self._leave(row)
        for entry, path, _ in plan.admitted:
            going = [s for s in entry.samples if s.finish_reason is None]
            if going:
                self._rows.add(self._prefix, path, len(going))
                self._running += going
            if len(going) < len(entry.samples):
                ended[id(entry.samples[0].request)] = entry.samples[0].request
        for request in ended.values():
            if all(s.finish_reason for s in request.samples):
                self._report(request)

    def _leave(self, row: int) -> None:
        self._rows.remove(row)
        self._running[row] = self._running[-1]
        self._running.pop()

    def _report(self, request: Request) -> None:
        self.counts["sequences"] += len(request.samples)
        request.on_done([self._completion(sample) for sample in request.samples])

    def _completion(self, sample: Sample) -> Completion:
        ended_by_id = sample.token_ids and self._is_stop_id(sample.token_ids[-1], sample.request.sampling)
        text = self._decode_text(sample.token_ids[:-1] if ended_by_id else sample.token_ids)
        ends = [at for at in (text.find(s) for s in sample.request.sampling.stop) if at >= 0]
        extra = np.asarray(sample.extra, dtype=np.float32) if sample.request.sampling.logprob_ids else None
        return Completion(
            token_ids=np.asarray(sample.token_ids, dtype=np.int32),
            logprobs=np.asarray(sample.logprobs, dtype=np.float32),
            versions=np.asarray(sample.versions, dtype=np.int32),
            text=text[: min(ends)] if ends else text,
            finish_reason=sample.finish_reason or "abort",
            extra_logprobs=extra,
            cached_tokens=sample.request.cached_tokens,
        )


def _needs_rows(sample: Sample) -> bool:
    """Whether the sample goes on after its next token: one that ends with it needs no keys and values of its own."""
    return sample.request.sampling.max_tokens - len(sample.token_ids) > 1


class _PrefillBuilder:
    """Gathers the prompt tokens of one pass: each node once, cached ones not at all."""

    def __init__(self, prefix: PrefixCache) -> None:
        self._prefix = prefix
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._nodes: list[int] = []
        self._paths: list[list[int]] = []
        self._at: dict[int, int] = {}

    @property
    def size(self) -> int:
        return len(self._tokens)

    def missing(self, context: IntArray) -> int:
        """How many tokens of the context this pass would have to compute."""
        return len(context) - len(self._prefix.match(context.tolist()))

    def add(self, context: IntArray) -> tuple[list[int], int, int | None]:
        """(path of nodes, how many were cached before this pass, row of the last token in this pass or None)."""
        token_ids = context.tolist()
        path = self._prefix.match(token_ids)
        cached = sum(node not in self._at for node in path)
        if len(path) == len(token_ids) and path[-1] not in self._at:
            if self._prefix.end(path[-1]) is not None:
                return path, cached, None
            cached -= 1  # the hidden state of this token was not kept: compute the token again
            self._compute(path[-1:], token_ids, len(path) - 1)
        new = self._prefix.extend(path, token_ids[len(path) :])
        self._compute(new, token_ids, len(path))
        path = path + new
        self._paths.append(path)
        return path, cached, self._at[path[-1]]

    def _compute(self, nodes: list[int], token_ids: list[int], first: int) -> None:
        for position, node in enumerate(nodes, first):
            self._at[node] = len(self._tokens)
            self._tokens.append(token_ids[position])
            self._positions.append(position)
            self._nodes.append(node)

    def finish(self) -> Prefill:
        cached = sorted({node for path in self._paths for node in path} - self._at.keys())
        column = {node: at for at, node in enumerate(cached)} | {n: len(cached) + at for n, at in self._at.items()}
        visible = np.zeros((len(self._tokens), len(column)), dtype=np.bool_)
        for path in self._paths:
            rows = np.asarray([self._at.get(node, -1) for node in path])
            columns = np.asarray([column[node] for node in path])
            for depth in np.flatnonzero(rows >= 0):
                visible[rows[depth], columns[: depth + 1]] = True
        arrays = (np.asarray(a, dtype=np.int32) for a in (self._tokens, self._positions, self._nodes, cached))
        token_ids, positions, nodes, seen = arrays
        return Prefill(token_ids, positions, nodes, seen, visible)


def _check_prompt(prompt_ids: IntArray, model: EngineModel) -> None:
    if not len(prompt_ids):
        raise UserError("The prompt has no tokens; a completion needs at least one to start from.")
    if len(prompt_ids) >= model.context_limit:
        raise UserError(
            f"The prompt has {len(prompt_ids)} tokens and the model reads {model.context_limit} at most, the "
            "completion included; shorten the prompt."
        )
    if prompt_ids.min() < 0 or prompt_ids.max() >= model.vocabulary:
        raise UserError(
            f"The prompt has token ids from {prompt_ids.min()} to {prompt_ids.max()} and the model knows 0 to "
            f"{model.vocabulary - 1}; was it made with another model's tokenizer?"
        )


def _check_sampling(sampling: Sampling, n: int, vocabulary: int) -> None:
    temperature, ids = sampling.temperature, sampling.logprob_ids
    wrong = [
        text
        for bad, text in (
            (n < 1, f"n is {n}, it must be at least 1"),
            (sampling.max_tokens < 1, f"max_tokens is {sampling.max_tokens}, it must be at least 1"),
            (
                temperature != 0 and not LOWEST_TEMPERATURE <= temperature < float("inf"),
                f"temperature is {temperature}, it must be 0 (greedy) or at least {LOWEST_TEMPERATURE}",
            ),
            (not 0 < sampling.top_p <= 1, f"top_p is {sampling.top_p}, it must be above 0 and at most 1"),
            (sampling.top_k < 0, f"top_k is {sampling.top_k}, it must be 0 (off) or more"),
            (not 0 <= sampling.min_p <= 1, f"min_p is {sampling.min_p}, it must be between 0 and 1"),
            ("" in sampling.stop, "a stop string is empty, it would end every completion at once"),
            (
                any(not 0 <= id < vocabulary for id in ids),
                f"logprob_ids are {ids}, the model knows token ids from 0 to {vocabulary - 1}",
            ),
        )
        if bad
    ]
    if wrong:
        raise UserError("Sampling cannot be done as asked: " + "; ".join(wrong) + ".")
