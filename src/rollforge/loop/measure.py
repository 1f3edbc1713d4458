"""What a step's rollouts look like in numbers. Knows: groups and credits. Does not know: where they came from."""

from __future__ import annotations

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


async def throughput(generators: Sequence[Generator]) -> Metrics:
    """Totals of the policy servers since the start, added up over replicas."""
    total: Counter[str] = Counter()
    for generator in generators:
        total.update(await generator.metrics())
    return dict(total)
