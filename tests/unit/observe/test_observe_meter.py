"""Means by weight, abstaining values, merging of partial results, spans."""

from __future__ import annotations

import math
import pickle
import random
import threading

import numpy as np
import pytest

from rollforge.observe.meter import Meter, mean_over_steps, merge, values


def test_ranks_of_unequal_size_average_by_their_tokens() -> None:
    """2 clipped of 20 tokens on one rank and 3 of 5 on the other are 5 of 25, not (0.1 + 0.6) / 2."""
    ranks = [Meter(), Meter()]
    ranks[0].add("clipped", 2 / 20, weight=20)
    ranks[1].add("clipped", 3 / 5, weight=5)
    assert values(merge(rank.take() for rank in ranks)) == pytest.approx({"clipped": 0.2})


def test_each_optimizer_step_counts_once_whatever_its_number_of_micro_batches() -> None:
    meter = Meter()
    steps = []
    for window in ([1.0, 1.0, 1.0], [5.0]):
        for value in window:
            meter.add("loss", value)
        steps.append(meter.drain())
    assert steps == [{"loss": 1.0}, {"loss": 5.0}]
    assert mean_over_steps(steps) == {"loss": 3.0}


def test_values_that_abstain_do_not_count() -> None:
    assert mean_over_steps([{"r": value} for value in (0.25, math.nan, 0.75, None, 1.0)]) == pytest.approx({"r": 2 / 3})


@pytest.mark.parametrize("abstained", [None, math.nan, np.float32("nan")])
def test_a_name_nobody_gave_a_value_for_is_absent(abstained: float | None) -> None:
    meter = Meter()
    meter.add("mean", abstained)
    meter.add("weightless", 3.0, weight=0)
    meter.count("count", abstained)
    meter.max("max", abstained)
    meter.gauge("gauge", abstained)
    assert meter.drain() == {}


def test_abstaining_in_a_partial_leaves_the_others_alone() -> None:
    spoke, silent = Meter(), Meter()
    spoke.add("r", 0.5, weight=4)
    silent.add("r", math.nan, weight=100)
    assert values(merge([silent.take(), spoke.take()])) == {"r": 0.5}


def test_kinds() -> None:
    meter = Meter()
    for value in (3, -1, 2):
        meter.add("mean", value)
        meter.count("total", value)
        meter.max("max", np.int64(value))
        meter.gauge("gauge", np.float32(value))
    assert meter.drain() == {"mean": pytest.approx(4 / 3), "total": 4.0, "max": 3.0, "gauge": 2.0}
    assert meter.drain() == {}


def test_a_name_has_one_kind() -> None:
    meter = Meter()
    meter.count("tokens", 3)
    with pytest.raises(ValueError, match=r"'tokens'.*total.*mean"):
        meter.add("tokens", 3)
    assert meter.drain() == {"tokens": 3.0}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of loss"):
        Meter().add("loss", 1.0, weight=weight)


def test_any_split_over_meters_gives_the_same_values() -> None:
    """Property: however observations are dealt to meters, and merged in whatever nesting, the result is the whole's."""
    chance = random.Random(7)
    for _ in range(200):
        observed = [
            (
                chance.choice("ab"),
                chance.choice([math.nan, chance.uniform(-5, 5)]),
                chance.choice([0.0, 1.0, 17.0, 0.3]),
            )
            for _ in range(chance.randrange(1, 30))
        ]
        whole, parts = Meter(), [Meter() for _ in range(4)]
        for name, value, weight in observed:
            for meter in (whole, chance.choice(parts)):
                meter.add(name, value, weight)
                meter.count(f"{name}_total", value)
                meter.max(f"{name}_max", value)
        first, second, third, fourth = (pickle.loads(pickle.dumps(part.take())) for part in parts)
        assert values(merge([merge([third, first]), merge([fourth, second])])) == pytest.approx(whole.drain())


def test_a_span_counts_and_times_also_what_raises() -> None:
    ticks = iter([10.0, 12.5, 20.0, 21.0])
    meter = Meter(clock=lambda: next(ticks))
    with meter.span("train/forward"):
        pass
    with pytest.raises(KeyError), meter.span("train/forward"):
        raise KeyError("inside")
    assert meter.drain() == {"train/forward_seconds": 3.5, "train/forward_count": 2.0}


def test_no_observation_of_any_thread_is_lost() -> None:
    meter = Meter()
    drained: list[float] = []

    def work() -> None:
        for _ in range(2000):
            meter.count("n")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained.append(meter.drain().get("n", 0.0))
    for thread in threads:
        thread.join(timeout=30)
    assert sum(drained) + meter.drain().get("n", 0.0) == 8000
