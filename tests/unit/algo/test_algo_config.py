"""Configuration and schedules of the algorithm."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from rollforge.algo.config import GRPOConfig
from rollforge.algo.schedule import Schedule
from rollforge.config import ConfigError, dump, load


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("advantage", "group_mean"),
        ("baseline", "critic"),
        ("kl_estimator", "k4"),
        ("loss_norm", "batch"),
        ("clip_low", 0.0),
        ("clip_low", 1.5),
        ("clip_low", math.nan),
        ("clip_high", -0.1),
        ("clip_high", math.nan),
        ("std_eps", -1e-6),
        ("zero_variance_tolerance", math.inf),
        ("kl_coef", -0.1),
        ("kl_coef", math.nan),
        ("entropy_coef", math.inf),
        ("legal_coef", Schedule(start=0.1, end=-0.1)),
        ("constant_tokens", 16),
    ],
)
def test_bad_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} is"):
        GRPOConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [None, 0])
def test_constant_norm_needs_its_constant(tokens: int | None) -> None:
    with pytest.raises(ConfigError, match=r"^constant_tokens is"):
        GRPOConfig(loss_norm="constant", constant_tokens=tokens)


def test_coefficients_load_from_numbers_and_mappings() -> None:
    config = load(GRPOConfig, None, [("kl_coef", "1e-3"), ("legal_coef.start", "0.05"), ("legal_coef.share", "0.5")])
    assert config.kl_coef == 1e-3
    assert config.legal_coef == Schedule(start=0.05, end=0.0, share=0.5)
    assert "shape: linear" in dump(config)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Schedule(start=1.0, end=0.0), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (Schedule(start=0.0, end=1.0, share=0.5), [0.0, 0.5, 1.0, 1.0, 1.0]),
        (Schedule(start=1.0, end=0.0, shape="cosine"), [1.0, 0.5 + 0.125 * 2**1.5, 0.5, 0.5 - 0.125 * 2**1.5, 0.0]),
        (Schedule.of(0.3), [0.3] * 5),
    ],
)
def test_schedule_over_five_steps(schedule: Schedule, values: list[float]) -> None:
    assert [schedule.at(step, 5) for step in range(5)] == pytest.approx(values)
    assert schedule.at(9, 5) == pytest.approx(values[-1])


def test_schedule_of_one_step_is_at_its_start() -> None:
    assert Schedule(start=0.2, end=0.1).at(0, 1) == 0.2


def test_schedule_is_off_only_when_it_is_zero_throughout() -> None:
    assert Schedule.of(0).is_off
    assert not Schedule(start=0.1, end=0.0).is_off
    assert not Schedule(start=0.0, end=0.1).is_off


@pytest.mark.parametrize(
    ("field", "values"),
    [("start", {"start": math.nan}), ("shape", {"start": 1, "shape": "step"}), ("share", {"start": 1, "share": 0.0})],
)
def test_bad_schedule_is_named(field: str, values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"^schedule {field} is"):
        Schedule(**values)  # type: ignore[arg-type]


def test_configuration_is_read_without_torch() -> None:
    code = "import sys, rollforge.algo.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
