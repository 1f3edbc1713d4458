"""BlackJack: the policy learns when to hit and when to stand from the outcomes of hands it plays itself.

The environment is Rollforge's own OpenEnv server, in a process of its own. One rollout is one hand; all rollouts of a
group play the same deal from the same shoe. The policy is evaluated exactly: its action in all 280 decision states,
under examples never seen in training, and the expected reward of playing so by dynamic programming.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollforge.algo.config import GRPOConfig
from rollforge.algo.schedule import Schedule
from rollforge.config import ConfigError, option
from rollforge.envs.blackjack import exact
from rollforge.envs.blackjack.codecs import BlackjackCodec
from rollforge.envs.blackjack.game import STATES, describe, read_action, remind
from rollforge.envs.blackjack.hands import Hands, HandsConfig
from rollforge.envs.config import OpenEnvConfig
from rollforge.envs.openenv import OpenEnvPool
from rollforge.envs.server import EnvServer
from rollforge.loop.config import LoopConfig
from rollforge.recipes._base import RunConfig, SamplingConfig
from rollforge.rollout.config import RolloutConfig
from rollforge.train.config import TrainConfig
from rollforge.types import EnvironmentPool, IntArray, Metrics, Sampling

if TYPE_CHECKING:
    from rollforge.recipes._run import Report, Served
    from rollforge.runtime import RoleSpec

SUMMARY = "SmolLM2 learns hit and stand from played hands (OpenEnv server, exact evaluation, chart)"
CHART, POLICIES = "chart.png", "policies.json"


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How a policy is judged."""

    examples: int = option(
        2, help="sets of example lines, none seen in training, that the exact value is averaged over"
    )
    hands: int = option(200, help="held-out hands played before and after; 0: none")

    def __post_init__(self) -> None:
        if self.examples < 1 or self.hands < 0:
            raise ConfigError(f"eval.examples is {self.examples} and eval.hands {self.hands}; give at least 1 and 0.")


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """BlackJack's keys and defaults."""

    steps: int = option(60, help="optimizer steps")
    sampling: SamplingConfig = option(SamplingConfig(max_tokens=1), help="an action is one token")
    rollout: RolloutConfig = option(RolloutConfig(group_size=8, history="last"), help="how hands are played")
    train: TrainConfig = option(
        TrainConfig(learning_rate=1e-4, final_share=0.1, micro_batch_tokens=640), help="the trainer"
    )
    algo: GRPOConfig = option(
        GRPOConfig(
            advantage="group_center",
            baseline="turn",
            filter_zero_variance=False,
            legal_coef=Schedule(start=0.05, end=0.01),
        ),
        help="GRPO with centred advantages, anchor states, and a regulariser that keeps both actions alive",
    )
    loop: LoopConfig = option(LoopConfig(groups_per_step=64, evaluate_every=10), help="batches and evaluation")
    hands: HandsConfig = option(HandsConfig(), help="which hands are dealt")
    env: OpenEnvConfig = option(OpenEnvConfig(), help="the OpenEnv server; without a url one is started")
    eval: EvalConfig = option(EvalConfig(), help="how a policy is judged")

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if self.sampling.max_tokens != 1:
            raise ConfigError(
                f"sampling.max_tokens is {self.sampling.max_tokens}; an action is one token, which is what makes the "
                "evaluation exact. Set it to 1."
            )


class Blackjack:
    """The task: hands, their server, and how well a policy plays."""

    name = "blackjack"

    def __init__(self, config: Config) -> None:
        self.config = config
        self._held_out = Hands(config.hands, config.seed, "held-out")
        self._policies: list[exact.Values] = []

    def prompts(self) -> RoleSpec:
        from rollforge.runtime import RoleSpec

        return RoleSpec(
            name="prompts",
            target="rollforge.envs.blackjack.hands:Hands",
            kwargs={"config": self.config.hands, "seed": self.config.seed},
        )

    async def environments(self, stack: AsyncExitStack, log: Path) -> EnvironmentPool:
        env = self.config.env
        if not env.url:
            server = EnvServer("rollforge.envs.blackjack.server", sessions=env.max_sessions, log=log)
            await asyncio.to_thread(server.start)
            stack.callback(server.close)
            env = OpenEnvConfig(url=server.url, max_sessions=env.max_sessions)
        return OpenEnvPool(env, BlackjackCodec)

    async def evaluate(self, served: Served, version: int) -> Metrics:
        """Exact values (averaged over held-out examples) and, before and after training, hands played greedily."""
        reader = _Reader(served)
        found = [await self._policy(reader, number) for number in range(self.config.eval.examples)]
        policies, greedy = (np.stack(parts) for parts in zip(*found, strict=True))
        self._policies = [*self._policies[:1], policies.mean(0)[0]]
        right = greedy[:, 0, :, exact.HIT] == exact.best_actions()
        metrics = {
            "eval/exact": _mean_value(greedy),
            "eval/sampled": _mean_value(policies),
            "eval/best_play_share": float(right[:, exact.margins() >= 0.05].mean()),
            "eval/legal_mass": float(1 - policies[:, 0, :, exact.OTHER].mean()),
        }
        if version in (0, self.config.steps) and self.config.eval.hands:
            metrics["eval/played"] = await self._play(served)
        return metrics

    async def _policy(self, reader: _Reader, number: int) -> tuple[exact.Values, exact.Values]:
        """(probabilities, greedy choices), each [2, 280, 3]: of fresh states, and of the answer to a notice."""
        examples = self._held_out.examples(number)
        lines = [describe(state) for state in STATES]
        answers = await asyncio.gather(
            *(reader.ask(examples + line) for line in [*lines, *(remind(line) for line in lines)])
        )
        probabilities, greedy = (np.stack(parts).reshape(2, len(STATES), 3) for parts in zip(*answers, strict=True))
        return probabilities, greedy

    async def _play(self, served: Served) -> float:
        """Mean reward of greedy play on held-out deals."""
        greedy = Sampling(temperature=0, max_tokens=self.config.sampling.max_tokens)
        shoes = self.config.hands.shoes_per_deal
        hands = [self._held_out.at(number * shoes) for number in range(self.config.eval.hands)]
        played = await asyncio.gather(*(served.worker.play(hand, greedy) for hand in hands))
        return float(np.mean([rollout.reward for rollout in played]))

    def report(self, folder: Path, evaluations: Sequence[Metrics]) -> Report:
        from rollforge.envs.blackjack.chart import save_chart, terminal_chart
        from rollforge.recipes._run import Report

        panels = list(zip(("before", "after"), self._policies, strict=False))
        save_chart(folder / CHART, panels)
        (folder / POLICIES).write_text(json.dumps({title: np.round(policy, 5).tolist() for title, policy in panels}))
        before, after = evaluations[0], evaluations[-1]

        def row(what: str, key: str) -> tuple[str, float | None, float | None]:
            return what, before.get(f"eval/{key}"), after.get(f"eval/{key}")

        lines = exact.reference_lines()
        return Report(
            rows=[
                row("expected reward per hand, exact (greedy)", "exact"),
                row("  the same when sampling", "sampled"),
                row(f"  played on {self.config.eval.hands} held-out deals", "played"),
                row("share of clear choices that are right", "best_play_share"),
                row("probability of a readable action", "legal_mass"),
                *((f"for comparison: {name}", None, value) for name, value in lines.items()),
            ],
            pictures=[CHART],
            show=terminal_chart(panels),
        )


class _Reader:
    """Asks the policy for its action after some text, as probabilities and as its greedy choice."""

    def __init__(self, served: Served) -> None:
        from rollforge.data.renderer import Renderer

        self._served = served
        self._renderer = Renderer(str(served.model))
        words = self._renderer.vocabulary()
        self._ids = {
            action: [i for i, word in enumerate(words) if read_action(word) == action] for action in ("hit", "stand")
        }
        self._sampling = Sampling(temperature=0, max_tokens=1, logprob_ids=(*self._ids["hit"], *self._ids["stand"]))

    async def ask(self, text: str) -> tuple[exact.Values, exact.Values]:
        """P(hit), P(stand), P(anything else) [3], summed over all tokens that read so; and the greedy choice,
        one-hot [3].
        """
        from rollforge.types import Prompt

        prompt_ids: IntArray = self._renderer.prompt_ids(Prompt(id="", text=text))
        (completion,) = await self._served.generator.generate(prompt_ids, self._sampling)
        assert completion.extra_logprobs is not None
        chances = np.exp(completion.extra_logprobs[0].astype(np.float64))
        hits = len(self._ids["hit"])
        hit, stand = chances[:hits].sum(), chances[hits:].sum()
        token = int(completion.token_ids[0])
        choice = exact.HIT if token in self._ids["hit"] else exact.STAND if token in self._ids["stand"] else exact.OTHER
        probabilities = np.asarray([hit, stand, max(0.0, 1 - hit - stand)])
        return probabilities / probabilities.sum(), np.eye(3)[choice]


def _mean_value(policies: exact.Values) -> float:
    """Mean expected reward over sets of examples, [sets, 2, 280, 3]."""
    return float(np.mean([exact.expected_reward(policy, after_notice) for policy, after_notice in policies]))


def run(config: Config, folder: Path) -> int:
    """Trains; returns the exit code."""
    from rollforge.recipes import _run as shared

    return shared.run(Blackjack(config), folder)


def evaluate(config: Config, model: str) -> Mapping[str, float]:
    """Judges a model without training it."""
    from rollforge.recipes import _run as shared

    return shared.evaluate(Blackjack(config), model)
