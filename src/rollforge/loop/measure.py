"""What a step's rollouts look like in numbers. Knows: groups and credits. Does not know: where they came from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rollforge.types import Generator, Metrics, Scored


def batch_metrics(scored: Sequence[Scored], version: int) -> Metrics:
    """Rewards, lengths, staleness and dropped groups of one batch that `version` trains on.

    Staleness is the number of versions between sampling a token and training on it, per token; rewards are per rollout.
    """
    rollouts = [rollout for one in scored for rollout in one.group.rollouts]
    rewards = np.asarray([rollout.reward for rollout in rollouts])
    completions = [turn.completion for rollout in rollouts for turn in rollout.turns]
    staleness = version - np.concatenate([completion.versions for completion in completions])
    counts: Counter[str] = Counter()
    for rollout in rollouts:
        counts.update(rollout.counts)
    reasons = Counter(one.credit.dropped for one in scored if one.credit.dropped is not None)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/within_group_std": float(np.mean([np.std([r.reward for r in s.group.rollouts]) for s in scored])),
        "rollout/turns": float(np.mean([len(rollout.turns) for rollout in rollouts])),
        "rollout/tokens": float(staleness.size),
        "rollout/cut_share": float(np.mean([c.finish_reason == "length" for c in completions])),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        "groups/trained": float(len(scored) - sum(reasons.values())),
        **{f"groups/{reason.replace(' ', '_')}": float(count) for reason, count in reasons.items()},
        **{f"count/{name}": float(count) / len(rollouts) for name, count in counts.items()},
    }


class Throughput:
    """Tokens per second of all policy servers together, between one measurement and the next."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()
        self._since = time.perf_counter()

    async def measure(self, generators: Sequence[Generator]) -> Metrics:
        """The servers' totals since their start, added up, and `generate/tokens_per_second` since the last call."""
        total: Counter[str] = Counter()
        for generator in generators:
            total.update(dict(await generator.metrics()))
        now = time.perf_counter()
        tokens = total["generate/tokens"] - self._before["generate/tokens"]
        rate = tokens / (now - self._since)
        self._before, self._since = total, now
        return {**total, "generate/tokens_per_second": rate}
