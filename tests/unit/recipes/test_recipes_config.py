"""Every key of every recipe says what it is for, and refuses what lies outside its range by its name."""

from __future__ import annotations

import re

import pytest

from rollforge.cli.recipe import available
from rollforge.config import ConfigError, Key, keys, load

RECIPES = {recipe.name: recipe.config for recipe in available()}
EVERY_KEY = [(name, key) for name, config in RECIPES.items() for key in keys(config)]
SCHEDULES = {"algo.kl_coef", "algo.entropy_coef", "algo.legal_coef"}
"""Sections whose parts are checked by the schedule itself and by its owner; without a start they are none."""


def kinds(key: Key) -> list[str]:
    return key.type.split(" or ")


def refused_by_name(recipe: str, key: Key, value: str) -> bool:
    """Whether the value is refused with an error that names the key."""
    section, _, last = key.key.rpartition(".")
    is_part = section in SCHEDULES
    with pytest.raises(ConfigError) as error:
        load(RECIPES[recipe], None, [*([(f"{section}.start", "0")] if is_part else []), (key.key, value)])
    named = rf"{section.partition('.')[2]} is|schedule {last} is" if is_part else rf"{last} is"
    return re.search(named, str(error.value)) is not None


def test_every_key_has_its_help() -> None:
    assert [(recipe, key.key) for recipe, key in EVERY_KEY if not key.help] == []


@pytest.mark.parametrize(
    ("recipe", "key"),
    [pytest.param(r, k, id=f"{r}-{k.key}") for r, k in EVERY_KEY if {"int", "float"} & set(kinds(k))],
)
def test_no_number_may_be_negative(recipe: str, key: Key) -> None:
    assert refused_by_name(recipe, key, "-1")


@pytest.mark.parametrize(
    ("recipe", "key"), [pytest.param(r, k, id=f"{r}-{k.key}") for r, k in EVERY_KEY if "float" in kinds(k)]
)
def test_no_number_may_be_nan(recipe: str, key: Key) -> None:
    assert refused_by_name(recipe, key, "nan")


@pytest.mark.parametrize(
    "key",
    [
        "sampling.temperature",
        "rollout.time_limit_s",
        "buffer.wait_limit_s",
        "train.learning_rate",
        "train.eps",
        "train.weight_decay",
        "env.queue_timeout_s",
        "env.connect_timeout_s",
        "env.message_timeout_s",
        "env.idle_limit_s",
        "env.keepalive_s",
    ],
)
def test_no_limit_is_endless_and_no_rate_infinite(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} is inf"):
        load(RECIPES["blackjack"], None, [(key, "inf")])


@pytest.mark.parametrize(
    "key", ["max_sessions", "queue_limit", "queue_timeout_s", "connect_timeout_s", "message_timeout_s"]
)
def test_no_limit_of_the_environments_client_is_zero(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.{key} is 0"):
        load(RECIPES["blackjack"], None, [(f"env.{key}", "0")])


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.stop has an empty text"):
        load(RECIPES["sums"], None, [("sampling.stop", '["", "x"]')])
