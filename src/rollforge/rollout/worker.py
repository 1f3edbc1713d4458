"""Plays prompts with the policy in an environment: Generator x Environment -> Group.

Knows: turns, the renderer, retries. Does not know: which engine, which environment, any algorithm. The group's first
turn is one request for all rollouts (one prefill); later turns are their own requests, so that a slow episode holds up
no other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from rollforge.config import UserError
from rollforge.data.renderer import Renderer
from rollforge.rollout.config import RolloutConfig
from rollforge.types import (
    Completion,
    Environment,
    EnvironmentPool,
    Generator,
    Group,
    IntArray,
    Message,
    Observation,
    Prompt,
    Rollout,
    Sampling,
    Turn,
)

CLOSE_LIMIT_S = 3.0

Sample = Callable[[int, IntArray], Awaitable[Completion]]
"""Samples a turn: its number, from 0, and its prompt [L]."""

_log = logging.getLogger(__name__)


class RolloutFailed(Exception):
    """Too few rollouts of a group, `played` of them, came to an end for it to be compared. `failures` holds one text
    per failed one.
    """

    def __init__(self, prompt_id: str, failures: tuple[str, ...], played: int = 0) -> None:
        super().__init__(prompt_id, failures, played)
        self.prompt_id, self.failures, self.played = prompt_id, failures, played

    def __str__(self) -> str:
        [(commonest, _)] = Counter(self.failures).most_common(1)
        return f"{len(self.failures)} episodes of prompt {self.prompt_id} failed, most often: {commonest}"


class EpisodeWorker:
    """Implements `rollforge.types.RolloutWorker`."""

    def __init__(
        self,
        folder: str,
        generator: Generator,
        environments: EnvironmentPool,
        sampling: Sampling,
        config: RolloutConfig,
    ) -> None:
        self._renderer = Renderer(folder)
        self._generator, self._environments = generator, environments
        self._sampling, self._config = sampling, config

    async def check(self) -> None:
        """Raises UserError when the environment cannot be used."""
        await self._environments.check()

    async def close(self) -> None:
        """Ends the sessions with the environments; a server that is no longer there holds up nothing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._environments.close()

    async def run(self, prompt: Prompt, index: int, seed: int) -> Group:
        """Plays `group_size` episodes of a prompt; an episode that keeps failing is left out and told in `failures`.

        Raises RolloutFailed when fewer than two are left, and UserError as it comes: playing again would not help.
        """
        size = self._config.group_size
        first = _FirstTurn(self._generator, size, replace(self._sampling, seed=_seed(seed, prompt.id)))
        played = await asyncio.gather(
            *(self._member(prompt, at, seed, first) for at in range(size)), return_exceptions=True
        )
        rollouts = tuple(p for p in played if isinstance(p, Rollout))
        errors = [p for p in played if isinstance(p, BaseException)]
        for error in errors:
            if isinstance(error, UserError) or not isinstance(error, Exception):
                raise error
        failures = tuple(f"{type(error).__name__}: {error}" for error in errors)
        if len(rollouts) < 2:
            raise RolloutFailed(prompt.id, failures, len(rollouts)) from errors[0]
        return Group(index, prompt, rollouts, failures)

    async def complete(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
        """One completion of each prompt as it stands, no environment involved: for evaluation."""
        ids = [self._renderer.prompt_ids(prompt) for prompt in prompts]
        found = await asyncio.gather(*(self._generator.generate(one, sampling) for one in ids))
        return [completion for (completion,) in found]

    async def vocabulary(self) -> list[str]:
        """The text of every token id, in their order."""
        return self._renderer.vocabulary()

    async def play(self, prompt: Prompt, sampling: Sampling) -> Rollout:
        """Plays one episode outside any group, sampled as asked: for evaluation. Raises what its last try raised."""

        async def sample(turn: int, prompt_ids: IntArray) -> Completion:
            return await self._sample(prompt_ids, sampling, sampling.seed, prompt.id, 0, turn)

        return await self._persist(lambda: self._play(prompt, 0, sample))

    async def _member(self, prompt: Prompt, at: int, seed: int, first: _FirstTurn) -> Rollout:
        """One episode of a group; a second try samples its first turn by itself."""

        async def sample(turn: int, prompt_ids: IntArray) -> Completion:
            if turn == 0 and self._config.same_start:
                first.compare(prompt_ids)
                if first.expects(at):
                    return await first.join(at)
            return await self._sample(prompt_ids, self._sampling, seed, prompt.id, at, turn)

        async def play() -> Rollout:
            try:
                return await self._play(prompt, at, sample)
            finally:
                first.leave(at)

        return await self._persist(play)

    async def _persist(self, play: Callable[[], Awaitable[Rollout]]) -> Rollout:
        """Plays again what failed, `retries` times at most; each failure is logged, and retries are counted."""
        for attempt in range(self._config.retries + 1):
            try:
                rollout = await play()
            except UserError:
                raise
            except Exception as error:
                left = self._config.retries - attempt
                _log.warning("an episode failed (%d more tries): %s", left, error, exc_info=error)
                if not left:
                    raise
            else:
                return replace(rollout, counts={**rollout.counts, "retried": float(attempt)})
        raise AssertionError("the last attempt returns or raises")

    async def _sample(self, prompt_ids: IntArray, sampling: Sampling, *parts: object) -> Completion:
        """A completion whose seed depends on `parts`."""
        (completion,) = await self._generator.generate(prompt_ids, replace(sampling, seed=_seed(*parts)))
        return completion

    async def _play(self, prompt: Prompt, at: int, sample: Sample) -> Rollout:
        """One episode in an environment of its own; waiting for one does not count as playing time."""
        async with self._environments.session() as environment:
            try:
                async with asyncio.timeout(self._config.time_limit_s) as clock:
                    turns = await self._turns(environment, prompt, sample)
            except TimeoutError:
                if not clock.expired():
                    raise
                limit = f"rollout.time_limit_s = {self._config.time_limit_s:g}"
                raise TimeoutError(f"an episode took longer than {limit}") from None
        return self._rollout(f"{prompt.id}/{at}", turns)

    async def _turns(self, environment: Environment, prompt: Prompt, sample: Sample) -> list[Turn]:
        turns: list[Turn] = []
        observation = await environment.reset(prompt.task)
        while not observation.done and len(turns) < self._config.max_turns:
            prompt_ids = self._prompt_ids(prompt, turns, observation)
            completion = await sample(len(turns), prompt_ids)
            if completion.finish_reason == "abort" or not completion.token_ids.size:
                size, reason = completion.token_ids.size, completion.finish_reason
                raise RuntimeError(f"the policy server ended a turn of {size} tokens by {reason!r}")
            legal_ids = self._legal_ids(prompt, observation)
            observation = await environment.step(completion.text)
            turns.append(Turn(prompt_ids, completion, observation, legal_ids))
        return turns

    def _legal_ids(self, prompt: Prompt, observation: Observation) -> tuple[int, ...]:
        """The token ids with which an answer to the observation may begin; none where any text will do."""
        return self._renderer.first_token_ids(observation.legal_actions, raw=not prompt.messages)

    def _prompt_ids(self, prompt: Prompt, turns: list[Turn], observation: Observation) -> IntArray:
        if turns and self._config.history == "full":
            last = turns[-1]
            chat = bool(prompt.messages)
            return self._renderer.next_ids(last.prompt_ids, last.completion.token_ids, observation.text, chat)
        if prompt.messages:
            said = (Message("user", observation.text),) if observation.text else ()
            return self._renderer.prompt_ids(replace(prompt, messages=(*prompt.messages, *said)))
        return self._renderer.prompt_ids(replace(prompt, text=prompt.text + observation.text))

    def _rollout(self, id: str, turns: list[Turn]) -> Rollout:
        if not turns:
            raise ValueError("the environment ended the episode before the model could say anything")
        rewards = [turn.observation.reward for turn in turns if turn.observation.reward is not None]
        done = turns[-1].observation.done
        if done and not rewards:
            raise ValueError("the environment ended the episode without a reward")
        counts = dict(turns[-1].observation.info.get("counts", {}))
        return Rollout(id, tuple(turns), float(sum(rewards)), counts | {"unfinished": float(not done)})


class _FirstTurn:
    """Gathers the first turns of a group into one request, sent once every member has joined or left.

    A member joins at most once, and leaves, whatever became of it, when its first try is over.
    """

    def __init__(self, generator: Generator, size: int, sampling: Sampling) -> None:
        self._generator, self._sampling = generator, sampling
        self._awaited = set(range(size))
        self._joined: dict[int, asyncio.Future[Completion]] = {}
        self._opening: IntArray | None = None
        self._sending: asyncio.Task[None] | None = None

    def compare(self, prompt_ids: IntArray) -> None:
        """Raises ValueError when an episode begins unlike those before it."""
        if self._opening is None:
            self._opening = prompt_ids
        elif not np.array_equal(self._opening, prompt_ids):
            raise ValueError(
                "episodes of one prompt began with different observations: they cannot be compared; for an environment "
                "that cannot begin alike, set rollout.same_start to false"
            )

    def expects(self, member: int) -> bool:
        """Whether the member has neither joined nor left."""
        return member in self._awaited

    async def join(self, member: int) -> Completion:
        """The member's completion of the request that all share, from the opening that `compare` was given."""
        self._joined[member] = asyncio.get_running_loop().create_future()
        self._awaited.discard(member)
        self._send_if_complete()
        return await self._joined[member]

    def leave(self, member: int) -> None:
        """One member fewer to wait for; when none is left, nobody wants the answer."""
        self._awaited.discard(member)
        self._joined.pop(member, None)
        if self._joined:
            self._send_if_complete()
        elif self._sending is not None:
            self._sending.cancel()

    def _send_if_complete(self) -> None:
        if self._sending is None and not self._awaited:
            self._sending = asyncio.create_task(self._send(dict(sorted(self._joined.items()))))

    async def _send(self, joined: dict[int, asyncio.Future[Completion]]) -> None:
        """Completions go to members by their number, not in the order in which their environments were ready."""
        assert self._opening is not None, "who joins has compared its opening"
        try:
            completions = await self._generator.generate(self._opening, self._sampling, len(joined))
            pairs = list(zip(joined.values(), completions, strict=True))
        except Exception as error:
            for future in joined.values():
                if not future.done():
                    future.set_exception(error)
            return
        for future, completion in pairs:
            if not future.done():
                future.set_result(completion)


def _seed(*parts: object) -> int:
    """A 63-bit seed that depends on all parts, the same in every process."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
