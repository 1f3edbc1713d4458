"""Strict loading: precedence, types, unknown keys, and the round trip through YAML."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from rollforge.config import ConfigError, dump, keys, load, option


@dataclass(frozen=True, kw_only=True)
class Schedule:
    start: float = option(1.0, help="value at the first step")
    end: float = option(0.0, help="value at the last step")


@dataclass(frozen=True, kw_only=True)
class Loss:
    kind: Literal["grpo", "reinforce"] = option("grpo", help="which loss")
    clip: tuple[float, float] = option((0.2, 0.2), help="clip range, low and high")
    kl: float | Schedule = option(0.0, help="KL coefficient")

    def __post_init__(self) -> None:
        if self.clip[0] < 0:
            raise ConfigError(f"loss.clip is {self.clip}: the low side is negative; give a share between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = option(10, help="optimizer steps")
    lr: float = option(1e-6, help="learning rate")
    name: str = option("sums", help="name of the run")
    note: str | None = option(None, help="free text")
    in_process: bool = option(False, help="all roles in one process")
    stop: tuple[str, ...] = option((), help="stop strings")
    limit: int | str = option("auto", help="a number, or auto")
    ids: tuple[int, ...] | None = option(None, help="token ids")
    level: Literal[1, 2] | None = option(None, help="level")
    loss: Loss = option(Loss(clip=(0.1, 0.3)), help="the loss")


@dataclass(frozen=True, kw_only=True)
class Needs:
    model: str = option(help="which model")
    loss: Loss = option(Loss(), help="the loss")


def from_yaml(folder: Path, text: str, *overrides: tuple[str, str], cls: type = Config) -> Any:
    file = folder / "conf.yaml"
    file.write_text(text, encoding="utf-8")
    return load(cls, file, overrides)


def test_defaults_then_file_then_options(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, "steps: 3\nlr: 5e-7\n", ("steps", "4"))
    assert (config.steps, config.lr, config.name) == (4, 5e-7, "sums")
    assert load(Config, None, ()) == Config()


def test_a_section_keeps_what_its_parent_set(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, "loss:\n  kind: reinforce\n")
    assert config.loss == Loss(kind="reinforce", clip=(0.1, 0.3))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "1_000", 1000),
        ("steps", "-3", -3),
        ("lr", "1e-6", 1e-6),
        ("lr", "5E-7", 5e-7),
        ("lr", "3", 3.0),
        ("lr", ".5", 0.5),
        ("lr", "-inf", -math.inf),
        ("name", "on", "on"),
        ("name", "010", "010"),
        ("name", "null", "null"),
        ("name", "1e-6", "1e-6"),
        ("name", "[a", "[a"),
        ("note", "null", None),
        ("note", "on", "on"),
        ("in_process", "true", True),
        ("in-process", "False", False),
        ("stop", "a, b", ("a", "b")),
        ("stop", "", ()),
        ("stop", "{a: b}", ("{a: b}",)),
        ("stop", '["a, b", "\\n"]', ("a, b", "\n")),
        ("ids", "1,2", (1, 2)),
        ("ids", "null", None),
        ("limit", "7", 7),
        ("limit", "auto", "auto"),
        ("level", "2", 2),
        ("loss.clip", "0.1,0.4", (0.1, 0.4)),
        ("loss.kl", "0.1", 0.1),
        ("loss.kl.start", "0.3", Schedule(start=0.3)),
        ("loss.kl", "{start: 2, end: 1}", Schedule(start=2.0, end=1.0)),
    ],
)
def test_a_text_becomes_the_type_of_its_field(key: str, text: str, value: Any) -> None:
    config: Any = load(Config, None, [(key, text)])
    for part in key.replace("-", "_").removesuffix(".start").split("."):
        config = getattr(config, part)
    assert config == value
    assert type(config) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("steps", "1.5", "int"),
        ("steps", "true", "int"),
        ("steps", "010", "int"),
        ("steps", "", "int"),
        ("steps", "1e3", "int"),
        ("lr", "fast", "float"),
        ("lr", "010", "float"),
        ("lr", "1e", "float"),
        ("in_process", "1", "true|false"),
        ("in_process", "yes", "true|false"),
        ("ids", "1,x", "int"),
        ("level", "3", "1|2 or null"),
        ("loss", "grpo", "a section of kind, clip, kl"),
        ("loss.kind", "ppo", "grpo|reinforce"),
        ("loss.clip", "0.1", "float,float"),
        ("loss.kl", "high", "float or a section of start, end"),
    ],
)
def test_a_wrong_type_names_key_value_and_expected_type(key: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Config, None, [(key, text)])
    message = str(caught.value)
    assert key in message
    assert f"--{key}" in message
    assert expected in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("stesp: 3", ["stesp", "conf.yaml, line 1", "steps"]),
        ("lr: 1\nloss:\n  klip: 0.1", ["loss.klip", "line 3", "loss.clip"]),
        ("los:\n  kind: grpo", ["los.kind", "loss.kind"]),
        ("loss:\n  kl:\n    begin: 1", ["loss.kl.begin", "line 3"]),
        ("clip: [1, 2]", ["clip", "loss.clip"]),
        ("steps:\n  more: 1", ["steps.more", "steps"]),
        ("<<: {steps: 3}", ["<<"]),
        ("steps: 3\nlr: 1\nsteps: 4", ["steps", "twice", "line 1", "line 3"]),
        ("in-process: true\nin_process: true", ["in_process", "twice"]),
        ("steps: '3'", ["steps", "in quotes", "int"]),
        ("steps: [3]", ["steps", "a list", "int"]),
        ("steps: null", ["steps", "null", "int"]),
        ("name:", ["name", "str"]),
        ("stop: a", ["stop", "[a, b]"]),
        ("loss: [1]", ["loss", "a list", "a section"]),
        ("loss:\n  clip: [0.1, 0.2, 0.3]", ["loss.clip", "3 elements", "takes 2"]),
        ("ids: [1, a]", ["ids[1]", "'a'", "int"]),
        ("- steps", ["a list at its top"]),
        ("steps: [", ["conf.yaml is not valid YAML"]),
        ("steps: 1\n---\nsteps: 2", ["conf.yaml is not valid YAML"]),
        ("? [a]\n: 1", ["is not text"]),
        ("loss: {clip: [-1, 0]}", ["the low side is negative"]),
        ("a: &a [*a]", ["refers to itself"]),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, text)
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_option_names_itself_and_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"loss\.klip \(option --loss\.klip\); did you mean loss\.clip\?"):
        load(Config, None, [("loss.klip", "0.1")])
    with pytest.raises(ConfigError, match="no valid key is like it"):
        load(Config, None, [("zzzzqqqq", "0.1")])


def test_an_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Config, tmp_path / "absent.yaml", ())
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Config, tmp_path / "latin.yaml", ())


def test_a_required_key_must_be_given() -> None:
    with pytest.raises(ConfigError, match="model must be given: str"):
        load(Needs, None, ())
    assert load(Needs, None, [("model", "tiny")]).model == "tiny"


def test_empty_files_and_sections_mean_the_defaults(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "") == Config()
    assert from_yaml(tmp_path, "# nothing\nloss:\n") == Config()
    assert from_yaml(tmp_path, "note:\n").note is None


def test_an_option_fills_a_section_that_the_file_began(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, "loss: {kl: {start: 0.5}}", ("loss.kl.end", "0.1"))
    assert config.loss.kl == Schedule(start=0.5, end=0.1)


def test_quotes_keep_text_where_null_or_a_number_could_be_meant(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, "note: 'null'\nlimit: '7'\n")
    assert (config.note, config.limit) == ("null", "7")


def test_a_bug_in_validation_is_not_dressed_as_bad_input() -> None:
    with pytest.raises(TypeError, match="one dataclass"):
        load(Ambiguous, None, [("x", "1")])


@dataclass(frozen=True, kw_only=True)
class Ambiguous:
    x: Schedule | Loss = option(Schedule(), help="two dataclasses")


ODD_TEXTS = [
    "", " ", "null", "~", "true", "on", "no", "010", "1e-6", ".5", "0x1f", "1_000", ".inf", "nan", "-", "- a", "a: b",
    "#c", "a #c", "'", '"', "\\", "\n", "a\nb\n", "\t", "\r\n", "é", "\u2028", "\x85", "\x00", "\x07", "\ufeff", "😀",
    "[", "{a: 1}", "]", "a,b", "&x", "*x", "!t", "%", "@", "`", "|", ">", "?", ":", "---", "...", "<<", "=",
    "2001-01-01", "x" * 300, "a b " * 60, "\ud800",
]  # fmt: skip
ODD_FLOATS = [0.0, -0.0, 1e-6, 5e-7, 1e300, -1e-300, 0.1, 3.0, math.inf, -math.inf, 1e16, 123456789.125, 5e-324]


@pytest.mark.parametrize("seed", range(40))
def test_dump_is_read_back_to_an_equal_object(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)

    def number() -> float:
        return draw.choice([*ODD_FLOATS, draw.uniform(-1, 1), draw.random() * 10.0 ** draw.randint(-30, 30)])

    def text() -> str:
        return draw.choice([*ODD_TEXTS, "".join(map(chr, draw.choices(range(0x3000), k=8)))])

    limit: int | str = text() if draw.random() < 0.5 else draw.randint(-9, 9)
    kl: float | Schedule = number() if draw.random() < 0.5 else Schedule(start=number(), end=number())
    config = Config(
        steps=draw.randint(-(10**20), 10**20),
        lr=number(),
        name=text(),
        note=draw.choice([None, text()]),
        in_process=draw.choice([True, False]),
        stop=tuple(text() for _ in range(draw.randint(0, 9))),
        limit=limit,
        ids=draw.choice([None, (), (1,), (0, -5, 7)]),
        level=draw.choice([None, 1, 2]),
        loss=Loss(
            kind=draw.choice(["grpo", "reinforce"]),
            clip=(abs(number()), number()),
            kl=kl,
        ),
    )
    back = from_yaml(tmp_path, dump(config))
    assert back == config
    assert type(back.limit) is type(config.limit)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_every_odd_text_survives_in_every_kind_of_field(tmp_path: Path, text: str) -> None:
    config = Config(name=text, note=text, limit=text, stop=(text, text))
    assert from_yaml(tmp_path, dump(config)) == config


def test_dump_is_readable_by_other_yaml_readers() -> None:
    import yaml

    read = yaml.safe_load(dump(Config(name="on", note="010", lr=1e-6, stop=("x",))))
    assert (read["name"], read["note"], read["lr"], read["stop"]) == ("on", "010", 1e-6, ["x"])


def test_keys_list_types_defaults_and_help() -> None:
    listed = {item.key: item for item in keys(Config)}
    assert listed["lr"] == ("lr", "float", "1.0e-06", "learning rate")
    assert listed["loss.clip"] == ("loss.clip", "float,float", "0.1,0.3", "clip range, low and high")
    assert listed["loss.kl"].type == "float or a section of start, end"
    assert "loss.kl.start" in listed
    assert "loss" not in listed
    assert {item.key: item.default for item in keys(Needs)}["model"] == "required"


def test_each_listed_default_can_be_given_as_an_option() -> None:
    for item in keys(Config):
        if not item.key.startswith("loss.kl."):
            assert load(Config, None, [(item.key, item.default)]) == Config()


def test_importing_config_is_light() -> None:
    import subprocess

    code = "import sys, rollforge.config; print(sorted({'yaml', 'torch', 'difflib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
