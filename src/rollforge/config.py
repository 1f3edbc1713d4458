"""Errors a user can act on, and the strict loading of nested dataclass configurations.

Knows: how a tree of frozen `@dataclass(kw_only=True)` is filled from a YAML file and `--key.path value` options, and
how it is written back. Does not know: any field of any room; each room owns its dataclasses, which validate themselves
in `__post_init__`.

YAML is read as a tree of text and every text is converted by the type of its field, so no silent conversion of YAML
1.1 (`1e-6` -> text, `on` -> true, `010` -> 8) can happen. Types understood: bool, int, float, str, Literal, X | None,
unions, tuple[X, ...], tuple[X, Y], dataclasses, and `float | Schedule`, where a mapping or `--key.start` means the
dataclass.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Union

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")

# A leading zero (010) is refused: readers disagree whether it is octal.
_WHOLE = r"(0|[1-9][0-9]*(_[0-9]+)*)"
_INT = re.compile(rf"[+-]?{_WHOLE}")
_FLOAT = re.compile(rf"[+-]?(({_WHOLE}(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|\.?inf)|\.?nan", re.IGNORECASE)
# Text that no YAML reader takes for anything but text; all other text is dumped in quotes.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan", "infinity"}
_STR_TAG, _SEQ_TAG, _MAP_TAG = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


class UserError(Exception):
    """Bad input: one paragraph that names the field, the value and the remedy. The command line exits with code 2."""


class RunFailed(Exception):
    """What ends a run under way, told in full: what ended, why, and the remedy. The command line adds no traceback and
    exits with code 1.
    """


class ConfigError(UserError):
    """A configuration that cannot be run as written."""


def require_at_least(config: object, section: str, **bounds: int) -> None:
    """Raises ConfigError for the first of these keys below its bound. `section` is "" for keys outside any."""
    for name, least in bounds.items():
        if getattr(config, name) < least:
            key = f"{section}.{name}" if section else name
            raise ConfigError(f"{key} is {getattr(config, name)}; it must be at least {least}.")


def require_seconds(config: object, section: str, *names: str) -> None:
    """Raises ConfigError for the first of these keys that is no finite number above 0."""
    for name in names:
        seconds = getattr(config, name)
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{section}.{name} is {seconds:g}; give a finite number of seconds above 0.")


class Key(NamedTuple):
    """One settable key, as `--help` shows it."""

    key: str
    type: str
    default: str
    help: str


@dataclass(frozen=True)
class _Raw:
    """A value before its type is known: text, a list or a mapping, and where it was written.

    `quoted` text stood in quotes in YAML; `typed` text is the value of a command-line option.
    """

    value: str | list[_Raw] | dict[str, _Raw]
    origin: str
    quoted: bool = False
    typed: bool = False

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return repr(self.value)
        return "a mapping" if isinstance(self.value, dict) else "a list"


def option(default: Any = dataclasses.MISSING, *, help: str) -> Any:
    """A dataclass field with its documentation; without `default` the key must be given. Use Literal for choices."""
    return field(default=default, metadata={"help": help})


def load(cls: type[T], file: Path | None = None, overrides: Sequence[tuple[str, str]] = ()) -> T:
    """An instance of `cls`: its defaults, overridden by the YAML `file`, overridden by (dotted key, text) pairs.

    Dashes and underscores in keys are equal; of two overrides of one key the later wins. Raises ConfigError for unknown
    keys (with the nearest valid one), duplicate keys, and values that their field's type does not admit; whatever
    `__post_init__` raises passes through unchanged.
    """
    raw = _read(file) if file is not None else _Raw({}, "")
    for key, text in overrides:
        raw = _overlay(raw, key.replace("-", "_").split("."), _Raw(text, f"option --{key}", typed=True))
    return typing.cast(T, _Converter(cls).build(cls, raw, "", None))


def dump(config: Any) -> str:
    """YAML of every key of `config`, which `load` reads back to an equal object."""
    import yaml

    return yaml.serialize(_node(config), Dumper=yaml.BaseDumper, allow_unicode=True, width=2**31)


def keys(cls: type) -> list[Key]:
    """Every settable key of `cls`, in the order of its fields, nested ones dotted."""
    return list(_keys(cls, _default_of_class(cls), ""))


# ---------------------------------------------------------------------------------------------- types


def _hints(cls: type) -> dict[str, Any]:
    """The resolved type of each field that a user can set."""
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls) if item.init}


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def _section(kind: Any) -> type | None:
    """The dataclass among the members of `kind`."""
    found = [member for member in _members(kind) if dataclasses.is_dataclass(member)]
    if len(found) > 1:
        raise TypeError(f"{kind}: a mapping could mean any of {found}; a field's type may hold one dataclass")
    return typing.cast(type, found[0]) if found else None


def type_text(kind: Any) -> str:
    """A type in the words of the command line: `int`, `true|false`, `k1|k2`, `int,...`, `float or null`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if len(_members(kind)) > 1:
        return " or ".join(type_text(member) for member in _members(kind))
    if origin is Literal:
        return "|".join(_text(choice) for choice in args)
    if origin is tuple:
        return ",".join("..." if member is Ellipsis else type_text(member) for member in args)
    if dataclasses.is_dataclass(kind):
        return "a section of " + ", ".join(_hints(typing.cast(type, kind)))
    if kind in (bool, types.NoneType):
        return "true|false" if kind is bool else "null"
    if kind in (int, float, str):
        return str(kind.__name__)
    raise TypeError(f"a configuration field cannot have the type {kind!r}")


def _default(item: dataclasses.Field[Any]) -> Any:
    """The default of a field, MISSING where it has none."""
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def _default_of_class(cls: Any) -> dict[str, Any]:
    return {item.name: _default(item) for item in dataclasses.fields(cls)}


def _keys(cls: Any, defaults: dict[str, Any], prefix: str) -> Iterator[Key]:
    helps = {item.name: item.metadata.get("help", "") for item in dataclasses.fields(cls)}
    for name, kind in _hints(cls).items():
        section, default = _section(kind), defaults[name]
        inside = section is not None and isinstance(default, section)
        if kind is not section:
            shown = "required" if default is dataclasses.MISSING else "see below" if inside else _text(default)
            yield Key(prefix + name, type_text(kind), shown, helps[name])
        if section is not None:
            below = _values(default) if inside else _default_of_class(section)
            yield from _keys(section, below, f"{prefix}{name}.")


def _values(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _hints(type(config))}


# ---------------------------------------------------------------------------------------------- reading


def _read(file: Path) -> _Raw:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {file} cannot be read: {error}.") from error
    raw = _parse(text, str(file))
    if not isinstance(raw.value, dict):
        raise ConfigError(f"The configuration file {file} holds {raw} at its top; write 'key: value' lines.")
    return raw


def _parse(text: str, source: str) -> _Raw:
    """YAML text as a tree of text; nothing in it means an empty mapping."""
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return _Raw({}, source) if node is None else _tree(node, source, "")
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply, or an alias in it refers to itself.") from error


def _tree(node: yaml.Node, source: str, prefix: str) -> _Raw:
    """The text of a YAML node and of all below it; a key written twice is an error."""
    import yaml

    origin = f"{source}, line {node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        return _Raw(node.value, origin, quoted=node.style is not None)
    if isinstance(node, yaml.SequenceNode):
        return _Raw([_tree(item, source, f"{prefix}{i}.") for i, item in enumerate(node.value)], origin)
    mapping: dict[str, _Raw] = {}
    for key_node, value_node in node.value:
        where = f"{source}, line {key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"A key in {where} is not text; write 'key: value'.")
        key = key_node.value.replace("-", "_")
        if key in mapping:
            first = mapping[key].origin
            raise ConfigError(f"The key {prefix}{key} is written twice ({first}; {where}); remove one of them.")
        mapping[key] = dataclasses.replace(_tree(value_node, source, f"{prefix}{key}."), origin=where)
    return _Raw(mapping, origin)


def _overlay(raw: _Raw, path: list[str], leaf: _Raw) -> _Raw:
    """`raw` with `leaf` at `path`; a scalar in the way gives way to a mapping."""
    if not path:
        return leaf
    mapping = raw.value if isinstance(raw.value, dict) else {}
    below = mapping.get(path[0], _Raw({}, leaf.origin))
    return _Raw({**mapping, path[0]: _overlay(below, path[1:], leaf)}, leaf.origin if not mapping else raw.origin)


# ---------------------------------------------------------------------------------------------- converting


class _Converter:
    """Turns raw text into the types of one configuration class."""

    def __init__(self, root: type) -> None:
        self.root = root

    def build(self, cls: type, raw: _Raw, key: str, base: Any) -> Any:
        """An instance of the dataclass `cls`: the fields of `base` (None: the class's defaults) overridden by `raw`."""
        hints, prefix = _hints(cls), f"{key}." if key else ""
        assert isinstance(raw.value, dict)
        for name, value in raw.value.items():
            if name not in hints:
                raise self._unknown(prefix + name, value)
        defaults = _default_of_class(cls) if base is None else _values(base)
        given = {
            name: self.convert(hints[name], value, prefix + name, defaults[name]) for name, value in raw.value.items()
        }
        for name in hints:
            if name not in given and defaults[name] is dataclasses.MISSING:
                raise ConfigError(f"The key {prefix}{name} must be given: {type_text(hints[name])}.")
        return cls(**given) if base is None else dataclasses.replace(base, **given)

    def convert(self, kind: Any, raw: _Raw, key: str, default: Any) -> Any:
        """The value that `raw` means for a field of type `kind`. Raises ConfigError where it means none."""
        raw = _bracketed(raw, kind)
        members, section = _members(kind), _section(kind)
        if isinstance(raw.value, str):
            for member in sorted(members, key=lambda member: member is str):
                value = _scalar(member, raw)
                if value is not dataclasses.MISSING:
                    return value
            if section is not None and raw.value == "" and not raw.quoted:
                raw = _Raw({}, raw.origin)
        if section is not None and isinstance(raw.value, dict):
            return self.build(section, raw, key, default if isinstance(default, section) else None)
        sequence = next((member for member in members if typing.get_origin(member) is tuple), None)
        if sequence is not None and not isinstance(raw.value, dict):
            return self._tuple(sequence, raw, key)
        if isinstance(raw.value, dict) and raw.value:
            raise self._unknown(key, raw)
        raise _wrong(key, raw, kind)

    def _tuple(self, kind: Any, raw: _Raw, key: str) -> tuple[Any, ...]:
        if isinstance(raw.value, str):
            if not raw.typed:
                raise _wrong(key, raw, kind, "write a YAML list: [a, b]")
            items = [_Raw(part.strip(), raw.origin, typed=True) for part in raw.value.split(",")] if raw.value else []
        else:
            assert isinstance(raw.value, list)
            items = raw.value
        args = typing.get_args(kind)
        kinds = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
        if len(kinds) != len(items):
            counts = f"{len(items)} elements and takes {len(kinds)}"
            raise ConfigError(f"{key} ({raw.origin}) has {counts}: {type_text(kind)}.")
        return tuple(
            self.convert(each, item, f"{key}[{index}]", dataclasses.MISSING)
            for index, (each, item) in enumerate(zip(kinds, items, strict=True))
        )

    def _unknown(self, key: str, raw: _Raw) -> ConfigError:
        """Names the first full key below an unknown one, and the nearest that exists."""
        while isinstance(raw.value, dict) and raw.value:
            name, raw = next(iter(raw.value.items()))
            key = f"{key}.{name}"
        near = nearest(re.sub(r"\[\d+\]", "", key), [item.key for item in keys(self.root)])
        hint = f"did you mean {near}?" if near else "no valid key is like it; see --help for all."
        return ConfigError(f"Unknown key {key} ({raw.origin}); {hint}")


def nearest(word: str, valid: Sequence[str]) -> str | None:
    """The member of `valid` most like the dotted `word`, as a whole or by its last part; None when none is like it."""
    import difflib

    whole = difflib.get_close_matches(word, valid, n=1, cutoff=0.75)
    by_last = {key.rpartition(".")[2]: key for key in reversed(valid)}
    last = difflib.get_close_matches(word.rpartition(".")[2], list(by_last), n=1, cutoff=0.75)
    loose = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return next(iter([*whole, *(by_last[name] for name in last), *loose]), None)


def _bracketed(raw: _Raw, kind: Any) -> _Raw:
    """An option's text in [brackets] or {braces} as the YAML it is, where the type admits a list or a mapping."""
    opens = {"[": any(typing.get_origin(member) is tuple for member in _members(kind)), "{": _section(kind) is not None}
    if not (isinstance(raw.value, str) and raw.typed and opens.get(raw.value[:1])):
        return raw
    return _parse(raw.value, raw.origin)


def _scalar(kind: Any, raw: _Raw) -> Any:
    """The text as a value of a scalar type, MISSING where it is none. Quoted text is a str and nothing else."""
    text, absent = str(raw.value), raw.value == "" and not raw.quoted and not raw.typed
    if kind is str and not absent:
        return text
    if typing.get_origin(kind) is Literal:
        for choice in typing.get_args(kind):
            if _text(choice) == text and (isinstance(choice, str) or not raw.quoted):
                return choice
        return dataclasses.MISSING
    if raw.quoted:
        return dataclasses.MISSING
    if kind is types.NoneType and (absent or text in ("null", "~")):
        return None
    if kind is bool and text in ("true", "True", "false", "False"):
        return text in ("true", "True")
    if kind is int and _INT.fullmatch(text):
        return int(text)
    if kind is float and _FLOAT.fullmatch(text):
        return float(re.sub(r"\.(?=[ni])", "", text.lower()))
    return dataclasses.MISSING


def _wrong(key: str, raw: _Raw, kind: Any, remedy: str = "") -> ConfigError:
    quoted = " in quotes, which makes it text" if raw.quoted else ""
    expected = f"expected {type_text(kind)}" + (f"; {remedy}" if remedy else "")
    return ConfigError(f"{key} has the wrong value {raw}{quoted} ({raw.origin}): {expected}.")


# ---------------------------------------------------------------------------------------------- writing


def _text(value: Any) -> str:
    """A value as one would type it on the command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        text = repr(value)
        return f".{text}".replace(".-", "-.") if "n" in text else re.sub(r"^(-?\d+)e", r"\1.0e", text)
    if isinstance(value, tuple):
        return ",".join(_text(item) for item in value)
    return str(value)


def _node(value: Any) -> yaml.Node:
    import yaml

    if dataclasses.is_dataclass(value):
        pairs = [(yaml.ScalarNode(_STR_TAG, name), _node(item)) for name, item in _values(value).items()]
        return yaml.MappingNode(_MAP_TAG, pairs, flow_style=False)
    if isinstance(value, tuple):
        return yaml.SequenceNode(_SEQ_TAG, [_node(item) for item in value], flow_style=True)
    plain = not isinstance(value, str) or (_PLAIN.fullmatch(value) and value.lower() not in _WORDS)
    return yaml.ScalarNode(_STR_TAG, _text(value), style=None if plain else '"')
