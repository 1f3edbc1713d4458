"""Faults that users of other frameworks reported about configuration, with their whole kind.

P30 (NVIDIA NeMo-RL PR 3595): a key that nothing reads is accepted. P32 (TRL PR 1450, LLaMA-Factory issue 4014): a YAML
1.1 reader silently changes the type of a value. P18 (TRL issue 4159): rollouts are sampled from the survivors of a
filter that the trainer's log-probabilities do not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rollforge.cli.recipe import available
from rollforge.config import ConfigError, dump, keys, load, option


@dataclass(frozen=True, kw_only=True)
class Data:
    max_input_seq_length: int = option(512, help="longest prompt in tokens")
    filter_overlong_prompts: bool = option(False, help="leave longer prompts out")


@dataclass(frozen=True, kw_only=True)
class Run:
    data: Data = option(Data(), help="data")
    learning_rate: float = option(1e-5, help="learning rate")
    run_name: str = option("run", help="name")
    job_id: str = option("0", help="job")
    steps: int = option(1, help="steps")
    debug: bool = option(False, help="debug")


def both_ways(folder: Path, key: str, text: str) -> list[Run | ConfigError]:
    """What the value gives when it stands in a file, and when it is given as an option."""
    section, _, name = key.rpartition(".")
    file = folder / "config.yaml"
    file.write_text(f"{section}:\n  {name}: {text}\n" if section else f"{name}: {text}\n")
    results: list[Run | ConfigError] = []
    for source, overrides in ((file, []), (None, [(key, text)])):
        try:
            results.append(load(Run, source, overrides))
        except ConfigError as error:
            results.append(error)
    return results


def test_p30_a_misspelt_key_is_refused_both_ways(tmp_path: Path) -> None:
    for result in both_ways(tmp_path, "data.filter_overlong_promts", "true"):
        assert isinstance(result, ConfigError)
        assert "data.filter_overlong_promts" in str(result)
        assert "did you mean data.filter_overlong_prompts?" in str(result)


def test_p30_the_right_keys_beside_it_do_not_hide_it(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("data:\n  max_input_seq_length: 1024\n  filter_overlong_promts: true\n")
    with pytest.raises(ConfigError, match=r"data\.filter_overlong_promts"):
        load(Run, file, ())


@pytest.mark.parametrize("key", [item.key for item in keys(Run)])
@pytest.mark.parametrize("change", ["doubled", "dropped", "swapped", "raised"])
def test_p30_any_slip_in_any_key_is_refused_and_the_key_is_named(tmp_path: Path, key: str, change: str) -> None:
    head, last = key[:-3], key[-3:]
    slips = {"doubled": head + last[0] + last, "dropped": head + last[1:], "swapped": head + last[::-1]}
    slip = slips.get(change, key + ".more")
    for result in both_ways(tmp_path, slip, "1"):
        assert isinstance(result, ConfigError)
        assert slip in str(result)
        assert key in str(result).split("did you mean")[1]


def test_p30_a_key_in_the_wrong_section_is_refused(tmp_path: Path) -> None:
    for result in both_ways(tmp_path, "data.learning_rate", "1e-6"):
        assert "data.learning_rate" in str(result)
        assert "did you mean learning_rate?" in str(result)
    for result in both_ways(tmp_path, "filter_overlong_prompts", "true"):
        assert "did you mean data.filter_overlong_prompts?" in str(result)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learning_rate", "1e-6", 1e-6),
        ("learning_rate", "5e-7", 5e-7),
        ("learning_rate", "1E-6", 1e-6),
        ("learning_rate", "1", 1.0),
        ("run_name", "on", "on"),
        ("run_name", "no", "no"),
        ("run_name", "null", "null"),
        ("run_name", "2024-01-01", "2024-01-01"),
        ("run_name", "1e-6", "1e-6"),
        ("run_name", "12:30:45", "12:30:45"),
        ("job_id", "010", "010"),
        ("job_id", "0x1F", "0x1F"),
        ("job_id", "1_000", "1_000"),
        ("job_id", "1.10", "1.10"),
    ],
)
def test_p32_a_value_has_the_type_of_its_field_both_ways(
    tmp_path: Path, key: str, text: str, value: float | str
) -> None:
    for result in both_ways(tmp_path, key, text):
        assert isinstance(result, Run)
        found = getattr(result, key)
        assert (found, type(found)) == (value, type(value))
        file = tmp_path / "again.yaml"
        file.write_text(dump(result))
        assert load(Run, file, ()) == result


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("steps", "010", "int"),
        ("steps", "0x10", "int"),
        ("steps", "1:30", "int"),
        ("steps", "1.0", "int"),
        ("steps", "1e3", "int"),
        ("steps", "on", "int"),
        ("learning_rate", "on", "float"),
        ("learning_rate", "1e-6f", "float"),
        ("learning_rate", "010", "float"),
        ("debug", "on", "true|false"),
        ("debug", "1", "true|false"),
    ],
)
def test_p32_what_could_be_read_in_two_ways_is_refused(tmp_path: Path, key: str, text: str, expected: str) -> None:
    for result in both_ways(tmp_path, key, text):
        assert isinstance(result, ConfigError)
        for part in (key, text, expected):
            assert part in str(result)


@pytest.mark.parametrize(("name", "value"), [("top_p", "0.8"), ("top_k", "20"), ("min_p", "0.1")])
def test_p18_filters_that_the_trainer_does_not_know_are_refused_in_training(name: str, value: str) -> None:
    for recipe in available():
        with pytest.raises(ConfigError, match=rf"sampling\.{name}"):
            load(recipe.config, None, [(f"sampling.{name}", value)])
