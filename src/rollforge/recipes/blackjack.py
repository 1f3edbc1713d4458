"""BlackJack: the policy learns when to hit and when to stand from the outcomes of hands it plays itself.

The environment is Rollforge's own OpenEnv server, in a process of its own. One rollout is one hand; all rollouts of a
group play the same deal from the same shoe. The policy is evaluated exactly: its action in all 280 decision states,
under examples never seen in training, and the expected reward of playing so by dynamic programming.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from rollforge.algo.config import GRPOConfig
from rollforge.algo.schedule import Schedule
from rollforge.buffer.config import BufferConfig
from rollforge.config import ConfigError, option, require_at_least
from rollforge.envs.blackjack import exact
from rollforge.envs.blackjack.codecs import BlackjackCodec, OpenSpielBlackjackCodec
from rollforge.envs.blackjack.game import ACTIONS, STATES, describe, read_action, remind
from rollforge.envs.blackjack.hands import Hands, HandsConfig
from rollforge.envs.config import OpenEnvConfig
from rollforge.envs.openenv import OpenEnvPool
from rollforge.envs.server import EnvServer
from rollforge.generate.config import NativeConfig
from rollforge.loop.config import LoopConfig
from rollforge.recipes.base import RunConfig, SamplingConfig
from rollforge.rollout.config import RolloutConfig
from rollforge.runs.files import write_atomic
from rollforge.train.config import TrainConfig
from rollforge.types import EnvironmentPool, Metrics, Prompt, Sampling

if TYPE_CHECKING:
    from rollforge.recipes.run import Report, Served
    from rollforge.runtime import RoleSpec

SUMMARY = "SmolLM2 learns hit and stand from played hands (OpenEnv server, exact evaluation, chart)"
CHART, POLICIES = "chart.png", "policies.json"
CODECS = {"rollforge": BlackjackCodec, "openspiel": OpenSpielBlackjackCodec}


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How a policy is judged."""

    examples: int = option(
        2, help="sets of example lines, none seen in training, that the exact value is averaged over"
    )
    hands: int = option(200, help="held-out hands played at each evaluation; 0: none")

    def __post_init__(self) -> None:
        require_at_least(self, "eval", examples=1, hands=0)


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """BlackJack's keys and defaults."""

    steps: int = option(130, help="optimizer steps")
    sampling: SamplingConfig = option(SamplingConfig(max_tokens=1), help="an action is one token")
    rollout: RolloutConfig = option(RolloutConfig(group_size=4, history="last"), help="how hands are played")
    generate: NativeConfig = option(NativeConfig(cache_tokens=2048), help="the policy server")
    train: TrainConfig = option(
        TrainConfig(learning_rate=1e-4, beta1=0.5, final_share=0.1, micro_batch_tokens=640), help="the trainer"
    )
    algo: GRPOConfig = option(
        GRPOConfig(
            advantage="group_center",
            baseline="turn",
            filter_zero_variance=False,
            legal_coef=Schedule(start=0.2, end=0.03),
        ),
        help="GRPO with centred advantages, anchor states, and a regulariser that keeps both actions alive",
    )
    buffer: BufferConfig = option(BufferConfig(max_staleness=0), help="the replay buffer")
    loop: LoopConfig = option(LoopConfig(groups_per_step=128, evaluate_every=20), help="batches and evaluation")
    hands: HandsConfig = option(HandsConfig(), help="which hands are dealt")
    env: OpenEnvConfig = option(
        OpenEnvConfig(max_sessions=512), help="the OpenEnv server; without a url one is started"
    )
    server: Literal["rollforge", "openspiel"] = option(
        "rollforge", help="whose server it is: ours, or the public openspiel_env, which deals at random"
    )
    eval: EvalConfig = option(EvalConfig(), help="how a policy is judged")

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if self.sampling.max_tokens != 1:
            raise ConfigError(
                f"sampling.max_tokens is {self.sampling.max_tokens}; an action is one token, which is what makes the "
                "evaluation exact. Set it to 1."
            )
        if self.rollout.history != "last":
            raise ConfigError(
                f"rollout.history is {self.rollout.history!r}; a hand's state is all in its last observation, and the "
                "evaluation asks for the action in each state alone. Set it to last."
            )
        if self.sessions_each < self.rollout.group_size:
            raise ConfigError(
                f"env.max_sessions is {self.env.max_sessions}, generators {self.generators} and rollout.group_size "
                f"{self.rollout.group_size}, but a group begins together and needs a session for each of its rollouts "
                f"in one environment worker, which has {self.sessions_each}. Raise env.max_sessions."
            )
        if self.server == "openspiel" and (not self.env.url or self.rollout.same_start):
            raise ConfigError(
                f"server is openspiel, env.url {self.env.url!r} and rollout.same_start {self.rollout.same_start}, but "
                "that server is not started here, and it deals every rollout of a group another hand. Set env.url to "
                "where it runs, and rollout.same_start to false."
            )
        self._check_sizes()

    @property
    def sessions_each(self) -> int:
        """The sessions of one environment worker: of a server of ours each has them all, another's they share."""
        return self.env.max_sessions // self.generators if self.env.url else self.env.max_sessions

    def _check_sizes(self) -> None:
        """Whole deals, and whole sets of them that share their examples, in each step."""
        step, shoes, deals = self.loop.groups_per_step, self.hands.shoes_per_deal, self.hands.deals_per_examples
        if step % shoes:
            raise ConfigError(
                f"loop.groups_per_step is {step} and hands.shoes_per_deal {shoes}, which does not divide it: a deal's "
                f"shoes belong in one step. Set loop.groups_per_step to {shoes * math.ceil(step / shoes)}, or "
                f"hands.shoes_per_deal to {math.gcd(step, shoes)}."
            )
        if step % (deals * shoes) and (deals * shoes) % step:
            raise ConfigError(
                f"hands.deals_per_examples x hands.shoes_per_deal is {deals} x {shoes} = {deals * shoes}, which "
                f"neither divides loop.groups_per_step = {step} nor is a multiple of it. Set hands.deals_per_examples "
                f"to {math.gcd(step, deals * shoes) // shoes}, or loop.groups_per_step to "
                f"{deals * shoes * math.ceil(step / (deals * shoes))}."
            )


class Blackjack:
    """The task: hands, their server, and how well a policy plays."""

    name = "blackjack"
    chat = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.server_pid: int | None = None
        self._seeded = config.server == "rollforge"
        self._held_out = Hands(replace(config.hands, first_deals=0), config.seed, "held-out", self._seeded)
        self._policies: list[exact.Values] = []
        self._ids: list[list[int]] | None = None

    def prompts(self) -> RoleSpec:
        from rollforge.runtime import RoleSpec

        return RoleSpec(
            name="prompts",
            target="rollforge.envs.blackjack.hands:Hands",
            kwargs={"config": self.config.hands, "seed": self.config.seed, "seeded": self._seeded},
        )

    async def environments(self, stack: AsyncExitStack, log: Path) -> EnvironmentPool:
        env = replace(self.config.env, max_sessions=self.config.sessions_each)
        if not env.url:
            sessions = env.max_sessions * self.config.generators
            server = EnvServer("rollforge.envs.blackjack.server", sessions=sessions, log=log)
            stack.callback(server.close)
            server.launch()
            await asyncio.to_thread(server.wait)
            self.server_pid = server.pid
            env = replace(env, url=server.url)
        codec = CODECS[self.config.server]
        async with OpenEnvPool(env, codec) as pool:
            await pool.check()  # before a model is loaded
        return OpenEnvPool(env, codec)

    async def evaluate(self, served: Served, version: int) -> Metrics:
        """Exact values, averaged over held-out examples, and the mean reward of held-out hands played greedily."""
        if self._ids is None:
            words = await served.worker.vocabulary()
            self._ids = [[i for i, word in enumerate(words) if read_action(word) == action] for action in ACTIONS]
        found = [await self._policy(served, number) for number in range(self.config.eval.examples)]
        policies, greedy = (np.stack(parts) for parts in zip(*found, strict=True))
        self._policies = [*self._policies[:1], policies.mean(0)[0]]
        right = np.where(exact.best_actions(), greedy[:, 0, :, exact.HIT], greedy[:, 0, :, exact.STAND])
        metrics = {
            "eval/exact": _mean_value(greedy),
            "eval/sampled": _mean_value(policies),
            "eval/best_play_share": float(right[:, exact.clear_choices()].mean()),
            "eval/legal_mass": float(1 - policies[:, 0, :, exact.OTHER].mean()),
        }
        if self.config.eval.hands:
            metrics |= await self._play(served)
        return metrics

    async def _policy(self, served: Served, number: int) -> tuple[exact.Values, exact.Values]:
        """(probabilities, greedy choices), each [2, 280, 3]: of fresh states, and of the answer to a notice.

        A probability is the sum over all tokens that read as the action, at the temperature of the rollouts.
        """
        assert self._ids is not None
        examples = self._held_out.examples(number)
        lines = [describe(state) for state in STATES]
        prompts = [Prompt(id="", text=examples + line) for line in [*lines, *map(remind, lines)]]
        hits, stands = self._ids
        asked = Sampling(temperature=0, max_tokens=1, logprob_ids=(*hits, *stands))
        greedy = await served.worker.complete(prompts, asked)
        temperature = self.config.sampling.temperature
        at_one = temperature == 1  # then a greedy answer comes with the right chances
        sampled = greedy if at_one else await served.worker.complete(prompts, replace(asked, temperature=temperature))
        # A tokenizer may have no token that reads as an action: then no such logarithms come, and all chances are 0.
        found = [[] if answer.extra_logprobs is None else answer.extra_logprobs[0] for answer in sampled]
        chances = np.exp(np.stack(found, dtype=np.float64))
        hit, stand = chances[:, : len(hits)].sum(1), chances[:, len(hits) :].sum(1)
        probabilities = np.stack([hit, stand, np.maximum(0.0, 1 - hit - stand)], axis=1)
        probabilities /= probabilities.sum(1, keepdims=True)
        tokens = [int(answer.token_ids[0]) for answer in greedy]
        choices = [exact.HIT if t in hits else exact.STAND if t in stands else exact.OTHER for t in tokens]
        shape = (2, len(STATES), 3)
        return probabilities.reshape(shape), np.eye(3)[choices].reshape(shape)

    async def _play(self, served: Served) -> Metrics:
        """Mean reward of greedy play on held-out deals."""
        greedy = Sampling(temperature=0, max_tokens=self.config.sampling.max_tokens)
        shoes = self.config.hands.shoes_per_deal
        hands = [self._held_out.at(number * shoes) for number in range(self.config.eval.hands)]
        played, failed = await served.play(hands, greedy)
        return {"eval/played": float(np.mean([rollout.reward for rollout in played])), **failed}

    def report(self, folder: Path, evaluations: Sequence[Metrics]) -> Report:
        from rollforge.envs.blackjack.chart import save_chart, terminal_chart
        from rollforge.recipes.run import Report

        panels = list(zip(("before", "after"), self._policies, strict=False))
        save_chart(folder / CHART, panels)
        policies = {title: np.round(policy, 5).tolist() for title, policy in panels}
        write_atomic(folder / POLICIES, json.dumps(policies))
        before, after = evaluations[0], evaluations[-1]

        def row(what: str, key: str) -> tuple[str, float | None, float | None]:
            return what, before.get(f"eval/{key}"), after.get(f"eval/{key}")

        lines = exact.reference_lines()
        return Report(
            rows=[
                row("expected reward per hand, exact (greedy)", "exact"),
                row("  the same when sampling", "sampled"),
                row(f"  played, {self.config.eval.hands} {'held-out' if self._seeded else 'random'} deals", "played"),
                row("share of clear choices that are right", "best_play_share"),
                row("probability of a readable action", "legal_mass"),
                *((f"for comparison: {name}", None, value) for name, value in lines.items()),
            ],
            pictures=[CHART],
            show=terminal_chart(panels),
        )


def _mean_value(policies: exact.Values) -> float:
    """Mean expected reward over sets of examples, [sets, 2, 280, 3]."""
    return float(np.mean([exact.expected_reward(policy, after_notice) for policy, after_notice in policies]))


def run(config: Config, folder: Path) -> int:
    """Trains; returns the exit code."""
    from rollforge.recipes import run as shared

    return shared.run(Blackjack(config), folder)


def evaluate(config: Config, model: str) -> Mapping[str, float]:
    """Judges a model without training it."""
    from rollforge.recipes import run as shared

    return shared.evaluate(Blackjack(config), model)
