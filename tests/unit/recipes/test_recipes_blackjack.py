"""The BlackJack recipe's evaluation and report, on policies whose worth is known; what its configuration refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rollforge.config import ConfigError
from rollforge.envs.blackjack import exact
from rollforge.envs.blackjack.game import PENALTY, STATES, Hand, State
from rollforge.envs.blackjack.hands import Hands
from rollforge.envs.config import OpenEnvConfig
from rollforge.recipes.base import SamplingConfig
from rollforge.recipes.blackjack import CHART, POLICIES, Blackjack, Config, EvalConfig
from rollforge.recipes.run import Served
from rollforge.rollout.config import RolloutConfig
from rollforge.types import Completion, Metrics, Prompt, Rollout, Sampling

WORDS = (" hit", "hit", " HIT", " stand", "Stand", " the", "<end>")
SHARES = {exact.HIT: (0.5, 0.3, 0.2), exact.STAND: (0.6, 0.4), exact.OTHER: (0.7, 0.3)}
"""How a chance is spread over the spellings of an action, in the order of WORDS."""
LINE = re.compile(r"(Say hit or stand\. )?Hand (\d+) (hard|soft), dealer (A|\d+):")
LINES = exact.reference_lines()
BEST = exact.policy_of(lambda state: float(exact.best_actions()[exact.INDEX[state]]))
STAND = exact.policy_of(lambda state: 0.0)
BELOW_17 = exact.policy_of(lambda state: float(state.total < 17))
MIXED = np.random.default_rng(0).dirichlet((3, 3, 1), len(STATES))
AFTER_NOTICE = np.random.default_rng(1).dirichlet((3, 3, 1), len(STATES))


class KnownPlay:
    """A served worker that plays `policy`, and `after_notice` in answer to a notice, whatever the examples."""

    def __init__(
        self, policy: exact.Values, after_notice: exact.Values | None = None, words: Sequence[str] = WORDS
    ) -> None:
        self.policy, self.words = policy, words
        self.after_notice = policy if after_notice is None else after_notice
        self.asked: list[tuple[int, Sampling]] = []
        self.played: list[Prompt] = []

    async def vocabulary(self) -> list[str]:
        return list(self.words)

    async def complete(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
        self.asked.append((len(prompts), sampling))
        return [self._complete(prompt.text.splitlines()[-1], sampling) for prompt in prompts]

    async def play(self, prompt: Prompt, sampling: Sampling) -> Rollout:
        assert sampling.temperature == 0
        self.played.append(prompt)
        hand = Hand.deal(prompt.task["seed"], prompt.task["shoe"])
        while hand.reward is None:
            hand.play("hit" if self.policy[exact.INDEX[hand.state], exact.HIT] > 0.5 else "stand")
        return Rollout(prompt.id, (), float(hand.reward))

    def _complete(self, line: str, sampling: Sampling) -> Completion:
        notice, total, soft, dealer = cast(re.Match[str], LINE.fullmatch(line)).groups()
        at = exact.INDEX[State(int(total), soft == "soft", 1 if dealer == "A" else int(dealer))]
        chances = words_of((self.after_notice if notice else self.policy)[at], sampling.temperature or 1.0)
        chances = chances[: len(self.words)]
        # Where tokens are drawn, the unlikeliest comes: nothing greedy may be read from it.
        token = int(chances.argmin() if sampling.temperature else chances.argmax())
        with np.errstate(divide="ignore"):
            logs = np.log(chances).astype(np.float32)
        ids = list(sampling.logprob_ids)
        return Completion(
            np.array([token], np.int32),
            logs[[token]],
            np.zeros(1, np.int32),
            self.words[token],
            "length",
            logs[None, ids] if ids else None,  # as the engine answers
        )


def words_of(actions: exact.Values, temperature: float) -> exact.Values:
    """The chances of WORDS at a temperature, from those of (hit, stand, anything else) at 1."""
    chances = np.concatenate([actions[action] * np.array(shares) for action, shares in SHARES.items()])
    chances = chances ** (1 / temperature)
    tempered: exact.Values = chances / chances.sum()
    return tempered


def actions_of(policy: exact.Values, temperature: float) -> exact.Values:
    """The chances [280, 3] of the actions at a temperature."""
    words = np.stack([words_of(row, temperature) for row in policy])
    return np.stack([words[:, :3].sum(1), words[:, 3:5].sum(1), words[:, 5:].sum(1)], axis=1)


def greedy_of(policy: exact.Values) -> exact.Values:
    """What is said where always the likeliest word is said."""
    words = np.stack([words_of(row, 1.0) for row in policy]).argmax(1)
    return cast(exact.Values, np.eye(3)[np.where(words < 3, exact.HIT, np.where(words < 5, exact.STAND, exact.OTHER))])


async def judge(worker: KnownPlay, task: Blackjack | None = None, version: int = 0) -> Metrics:
    served = Served(cast(Any, None), cast(Any, worker), 0.2)
    return await (task or Blackjack(Config(eval=EvalConfig(hands=0)))).evaluate(served, version)


@pytest.mark.parametrize(
    ("line", "policy"),
    [("always stand", STAND), ("hit below 17", BELOW_17), ("best", BEST)],
    ids=["always stand", "hit below 17", "best"],
)
async def test_known_plays_are_worth_their_reference_lines(line: str, policy: exact.Values) -> None:
    metrics = await judge(KnownPlay(policy))
    assert metrics["eval/exact"] == pytest.approx(LINES[line], abs=1e-9)
    assert metrics["eval/sampled"] == pytest.approx(LINES[line], abs=1e-6)  # the words' shares are float32
    assert metrics["eval/legal_mass"] == pytest.approx(1, abs=1e-6)
    assert (metrics["eval/best_play_share"] == 1.0) == (line == "best")


async def test_a_policy_that_wavers_is_judged_by_its_likeliest_word_and_by_its_chances() -> None:
    metrics = await judge(KnownPlay(MIXED, AFTER_NOTICE))
    said = greedy_of(MIXED)
    assert metrics["eval/exact"] == pytest.approx(exact.expected_reward(said, greedy_of(AFTER_NOTICE)), abs=1e-9)
    assert metrics["eval/sampled"] == pytest.approx(exact.expected_reward(MIXED, AFTER_NOTICE), abs=1e-6)
    assert metrics["eval/legal_mass"] == pytest.approx(1 - MIXED[:, exact.OTHER].mean(), abs=1e-6)
    right = said[np.arange(len(STATES)), np.where(exact.best_actions(), exact.HIT, exact.STAND)]
    assert metrics["eval/best_play_share"] == pytest.approx(right[exact.clear_choices()].mean())


async def test_an_evaluation_is_one_forward_pass_of_each_prompt() -> None:
    worker = KnownPlay(MIXED)
    await judge(worker)
    assert [(size, sampling.temperature, sampling.max_tokens) for size, sampling in worker.asked] == [(560, 0, 1)] * 2


@pytest.mark.parametrize("temperature", [0.5, 2.0])
async def test_the_sampled_value_is_that_of_the_temperature_of_the_rollouts(temperature: float) -> None:
    config = Config(eval=EvalConfig(hands=0), sampling=SamplingConfig(max_tokens=1, temperature=temperature))
    metrics = await judge(KnownPlay(MIXED, AFTER_NOTICE), Blackjack(config))
    policy, after_notice = actions_of(MIXED, temperature), actions_of(AFTER_NOTICE, temperature)
    assert metrics["eval/sampled"] == pytest.approx(exact.expected_reward(policy, after_notice), abs=1e-6)
    assert metrics["eval/legal_mass"] == pytest.approx(1 - policy[:, exact.OTHER].mean(), abs=1e-6)
    plain = await judge(KnownPlay(MIXED, AFTER_NOTICE))
    for name in ("eval/exact", "eval/best_play_share"):  # greedy play knows no temperature
        assert metrics[name] == plain[name]


async def test_a_tokenizer_without_readable_tokens_forfeits_every_hand() -> None:
    nothing = np.tile([0.0, 0.0, 1.0], (len(STATES), 1))
    worker = KnownPlay(nothing, words=(".",) * len(WORDS))
    metrics = await judge(worker)
    assert (metrics["eval/exact"], metrics["eval/sampled"]) == pytest.approx((PENALTY, PENALTY))
    assert (metrics["eval/legal_mass"], metrics["eval/best_play_share"]) == (0.0, 0.0)


async def test_the_same_held_out_hands_are_played_at_every_evaluation() -> None:
    config = Config(eval=EvalConfig(hands=40, examples=1))
    task, worker = Blackjack(config), KnownPlay(BELOW_17)
    values = [(await judge(worker, task, version))["eval/played"] for version in (0, 20, config.steps)]
    first, rest = worker.played[:40], worker.played[40:]
    assert rest == [*first, *first]
    assert len({hand.task["seed"] for hand in first}) == 40
    training = Hands(config.hands, config.seed)
    assert not {hand.text for hand in first} & {training.at(k).text for k in range(10_000)}
    rewards = [(await KnownPlay(BELOW_17).play(hand, Sampling(temperature=0))).reward for hand in first]
    assert values == [pytest.approx(np.mean(rewards))] * 3


async def test_the_report_sets_before_beside_after(tmp_path: Path) -> None:
    task = Blackjack(Config(eval=EvalConfig(hands=20)))
    evaluations = [await judge(KnownPlay(policy), task) for policy in (STAND, MIXED, BEST)]
    report = task.report(tmp_path, evaluations)
    rows = {what.strip(): (before, after) for what, before, after in report.rows}
    for what, name in (
        ("expected reward per hand, exact (greedy)", "exact"),
        ("the same when sampling", "sampled"),
        ("played, 20 held-out deals", "played"),
        ("share of clear choices that are right", "best_play_share"),
        ("probability of a readable action", "legal_mass"),
    ):
        assert rows[what] == (evaluations[0][f"eval/{name}"], evaluations[2][f"eval/{name}"])
    for line, value in LINES.items():
        assert rows[f"for comparison: {line}"] == (None, value)
    assert report.pictures == [CHART]
    assert (tmp_path / CHART).read_bytes().startswith(b"\x89PNG")
    policies = json.loads((tmp_path / POLICIES).read_text())
    assert list(policies) == ["before", "after"]
    np.testing.assert_allclose(policies["before"], STAND, atol=1e-5)
    np.testing.assert_allclose(policies["after"], BEST, atol=1e-5)


async def test_hands_for_a_server_that_deals_at_random_fix_no_cards() -> None:
    config = Config(
        server="openspiel",
        env=OpenEnvConfig(url="http://x:1"),
        rollout=RolloutConfig(group_size=4, same_start=False, history="last"),
    )
    source = Hands(**Blackjack(config).prompts().kwargs)
    seeded = Hands(**Blackjack(Config()).prompts().kwargs)
    assert [source.at(k) for k in range(9)] == [replace(seeded.at(k), task={}) for k in range(9)]


@pytest.mark.parametrize(
    "settings",
    [{"rollout": RolloutConfig(same_start=False, history="last")}, {"env": OpenEnvConfig(url="http://x:1")}],
    ids=["no url", "one start"],
)
def test_the_public_server_needs_its_address_and_groups_of_different_deals(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"server is openspiel.*env\.url.*rollout\.same_start"):
        Config(server="openspiel", **settings)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Config(sampling=SamplingConfig(max_tokens=2)), "sampling.max_tokens is 2"),
        (lambda: Config(env=OpenEnvConfig(max_sessions=3)), "env.max_sessions is 3"),
        (lambda: EvalConfig(examples=0), "eval.examples is 0"),
    ],
)
def test_what_cannot_be_evaluated_or_played_is_refused(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        make()
