"""Plays prompts with the policy in an environment: Generator x Environment -> Group.

Knows: turns, the renderer, retries. Does not know: which engine, which environment, any algorithm. The group's first
turn is one request for all rollouts (one prefill); later turns are their own requests, so that a slow episode holds up
no other.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import replace

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


class RolloutFailed(Exception):
    """Too few rollouts of a group came to an end for it to be compared."""


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

    async def run(self, prompt: Prompt, index: int, seed: int) -> Group:
        """Plays `group_size` episodes of a prompt; an episode that keeps failing is left out and told in `failures`.

        Raises RolloutFailed when fewer than two are left.
        """
        first = _FirstTurn(self._config.group_size)
        played = await asyncio.gather(
            *(self._persist(prompt, at, seed, first) for at in range(self._config.group_size)), return_exceptions=True
        )
        rollouts = tuple(p for p in played if isinstance(p, Rollout))
        failures = [p for p in played if isinstance(p, BaseException)]
        for failure in failures:
            if not isinstance(failure, Exception):
                raise failure
        if len(rollouts) < 2:
            texts = Counter(f"{type(e).__name__}: {e}" for e in failures)
            raise RolloutFailed(
                f"{len(failures)} of {len(played)} episodes of prompt {prompt.id} failed, most often: "
                f"{texts.most_common(1)[0][0]}"
            ) from failures[0]
        return Group(index, prompt, rollouts, tuple(f"{type(e).__name__}: {e}" for e in failures))

    async def play(self, prompt: Prompt, sampling: Sampling) -> Rollout:
        """Plays one episode outside any group, sampled as asked: for evaluation."""
        async with asyncio.timeout(self._config.time_limit_s):
            return await self._play(prompt, 0, sampling.seed, None, sampling)

    async def _persist(self, prompt: Prompt, at: int, seed: int, first: _FirstTurn) -> Rollout:
        for attempt in range(self._config.retries + 1):
            try:
                async with asyncio.timeout(self._config.time_limit_s):
                    return await self._play(prompt, at, seed, first if attempt == 0 else None, self._sampling)
            except Exception:
                first.leave()
                if attempt == self._config.retries:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _play(self, prompt: Prompt, at: int, seed: int, first: _FirstTurn | None, sampling: Sampling) -> Rollout:
        turns: list[Turn] = []
        async with self._environments.session() as environment:
            observation = await environment.reset(prompt.task)
            while not observation.done and len(turns) < self._config.max_turns:
                prompt_ids = self._prompt_ids(prompt, turns, observation)
                if first is not None and not turns:
                    shared = replace(sampling, seed=_seed(seed, prompt.id))
                    completion = await first.join(self._generator, prompt_ids, shared)
                else:
                    own = replace(sampling, seed=_seed(seed, prompt.id, at, len(turns)))
                    (completion,) = await self._generator.generate(prompt_ids, own)
                turn, observation = await self._turn(environment, prompt, observation, prompt_ids, completion)
                turns.append(turn)
        return self._rollout(f"{prompt.id}/{at}", turns)

    async def _turn(
        self,
        environment: Environment,
        prompt: Prompt,
        before: Observation,
        prompt_ids: IntArray,
        completion: Completion,
    ) -> tuple[Turn, Observation]:
        if completion.finish_reason == "abort":
            raise RuntimeError("the policy server aborted the request")
        after = await environment.step(completion.text)
        legal = (
            self._renderer.first_token_ids(before.legal_actions, raw=not prompt.messages)
            if before.legal_actions
            else ()
        )
        return Turn(prompt_ids, completion, after, legal), after

    def _prompt_ids(self, prompt: Prompt, turns: list[Turn], observation: Observation) -> IntArray:
        if turns and self._config.history == "full":
            last = turns[-1]
            chat = bool(prompt.messages)
            return self._renderer.next_ids(last.prompt_ids, last.completion.token_ids, observation.text, chat)
        if prompt.messages:
            return self._renderer.prompt_ids(
                replace(prompt, messages=(*prompt.messages, Message("user", observation.text)))
            )
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
    """Gathers the first turns of a group into one request for all; whoever fails before it leaves."""

    def __init__(self, size: int) -> None:
        self._expected = size
        self._joined: list[asyncio.Future[Completion]] = []
        self._request: tuple[Generator, IntArray, Sampling] | None = None
        self._task: asyncio.Task[None] | None = None

    async def join(self, generator: Generator, prompt_ids: IntArray, sampling: Sampling) -> Completion:
        """One of the completions of the request that all rollouts share."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._joined.append(future)
        if self._request is not None and prompt_ids.tobytes() != self._request[1].tobytes():
            raise ValueError("episodes of one prompt began with different observations: they cannot be compared")
        self._request = (generator, prompt_ids, sampling)
        self._start_if_complete()
        return await future

    def leave(self) -> None:
        """One rollout fewer to wait for."""
        self._expected -= 1
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if self._task is None and self._request is not None and len(self._joined) >= self._expected:
            self._task = asyncio.ensure_future(self._send(*self._request))

    async def _send(self, generator: Generator, prompt_ids: IntArray, sampling: Sampling) -> None:
        try:
            completions = await generator.generate(prompt_ids, sampling, len(self._joined))
        except Exception as error:
            for future in self._joined:
                if not future.done():
                    future.set_exception(error)
            return
        for future, completion in zip(self._joined, completions, strict=True):
            if not future.done():
                future.set_result(completion)


def _seed(*parts: object) -> int:
    """A 63-bit seed that depends on all parts, the same in every process."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
