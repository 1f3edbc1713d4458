"""The numbers of a step, and the bounds of the loop's configuration."""

from __future__ import annotations

import numpy as np
import pytest

from rollforge.config import ConfigError
from rollforge.loop.config import LoopConfig
from rollforge.loop.measure import Throughput, batch_metrics
from rollforge.types import Completion, Credit, FinishReason, Group, Metrics, Observation, Prompt, Rollout, Scored, Turn


def rollout(reward: float, versions: list[int], reason: FinishReason = "stop", **counts: float) -> Rollout:
    size = len(versions)
    sampled = Completion(
        np.zeros(size, np.int32), np.zeros(size, np.float32), np.asarray(versions, np.int32), "", reason
    )
    return Rollout("r", (Turn(np.zeros(1, np.int32), sampled, Observation("", reward, True)),), reward, counts)


def scored(*rollouts: Rollout, dropped: str | None = None) -> Scored:
    return Scored(Group(0, Prompt("p"), rollouts), Credit((), dropped), ())


def test_a_steps_numbers() -> None:
    metrics = batch_metrics(
        [
            scored(rollout(1.0, [2, 2, 3], illegal=2.0), rollout(0.0, [3], "length")),
            scored(rollout(1.0, [1, 3]), rollout(1.0, [3, 3], forfeit=1.0), dropped="zero variance"),
        ],
        version=3,
    )
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == pytest.approx(0.4330127)
    assert metrics["reward/within_group_std"] == 0.25
    assert metrics["rollout/tokens"] == 8
    assert metrics["rollout/cut_share"] == 0.25
    assert metrics["staleness/mean"] == 0.5
    assert metrics["staleness/max"] == 2
    assert metrics["groups/trained"] == 1
    assert metrics["groups/zero_variance"] == 1
    assert metrics["count/illegal"] == 0.5
    assert metrics["count/forfeit"] == 0.25


class Counting:
    def __init__(self) -> None:
        self.tokens = 0.0

    async def metrics(self) -> Metrics:
        self.tokens += 100.0
        return {"generate/tokens": self.tokens}


async def test_throughput_adds_up_the_servers_and_counts_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("rollforge.loop.measure.time.perf_counter", lambda: now[0])
    throughput = Throughput()
    servers = [Counting(), Counting()]
    now[0] = 12.0
    assert (await throughput.measure(servers))["generate/tokens_per_second"] == 100.0  # type: ignore[arg-type]
    now[0] = 16.0
    found = await throughput.measure(servers)  # type: ignore[arg-type]
    assert (found["generate/tokens"], found["generate/tokens_per_second"]) == (400.0, 50.0)


@pytest.mark.parametrize(
    "key, value",
    [("groups_per_step", 0), ("evaluate_every", -1), ("max_failed_share", 1.5), ("max_failed_share", -0.1)],
)
def test_numbers_that_mean_nothing_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"loop.{key} is {value}"):
        LoopConfig(**{key: value})  # type: ignore[arg-type]
