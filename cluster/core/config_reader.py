"""Conversion of parsed YAML to config structs, with errors that a user can act on: the path of the key, what is wrong,
what is allowed.

Keys that are `bytes` or end in `_bytes` may be written as `64MiB`; everything else is taken as it is, nothing is
coerced from strings.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml

from disagg.proto.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is written twice in one mapping: YAML forbids it, and PyYAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is written twice", node.start_mark)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> object:
    """Parse YAML to plain values; raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_UniqueKeyLoader)


def parse_size(text: str) -> int:
    """Bytes of `1GiB`, `64 MiB`, `1.5G` (powers of 1024) or `1GB` (powers of 1000).

    Raises:
        ValueError: for anything else.
    """
    match = _SIZE.fullmatch(text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 64MiB, 1GiB or 1000000")
    return int(float(match[1]) * _UNITS[unit])


def read_struct(kind: type[T], raw: object, path: str = "") -> T:
    """An instance of `kind` from a mapping; sections that are left out or empty take their defaults.

    Raises:
        ConfigError: naming the dotted path of the first key that is unknown or has a value that is not allowed.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path or 'the configuration'}: expected a mapping of keys to values; got {raw!r}")
    hints = _keys(kind)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise ConfigError(unknown_key(here, str(key), list(hints)))
        values[key] = _read_value(hints[key], value, here)
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in values:
            raise ConfigError(f"{path}.{field.name}: must be set where {path} is")
    return kind(**values)


def _keys(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Types with bounds by key; a section's own keys, then those that it shares with the configuration of a process."""
    hints = get_type_hints(kind, include_extras=True)
    names = (name for part in kind.__mro__ for name in inspect.get_annotations(part) if name in hints)
    return {name: hints[name] for name in names}


def unknown_key(path: str, key: str, allowed: Sequence[str]) -> str:
    """Message for a key that does not exist, with the nearest one that does."""
    return f"{path}: unknown key{suggestion(key, allowed)}; allowed here: {', '.join(allowed)}"


def suggestion(word: str, allowed: Sequence[str]) -> str:
    """Text such as `, did you mean 'size'?` if a word is near, else empty."""
    close = difflib.get_close_matches(word, allowed, n=2)
    return f", did you mean {' or '.join(map(repr, close))}?" if close else ""


def _read_value(hint: Any, value: object, path: str) -> Any:
    if get_origin(hint) is dict and (entry := _section(get_args(hint)[1])) is not None:
        if not isinstance(value, dict | None):
            raise ConfigError(f"{path}: expected a mapping of names to sections; got {value!r}")
        return {str(key): read_struct(entry, inner, f"{path}.{key}") for key, inner in (value or {}).items()}
    item = _item(hint)
    if item is not None and isinstance(value, list | tuple):
        return tuple(read_struct(item, each, f"{path}[{i}]") for i, each in enumerate(value))
    section = _section(hint)
    if section is not None and (value is not None or type(None) not in get_args(hint)):
        return read_struct(section, value, path)
    choices = _choices(hint)
    if isinstance(value, bool) and (word := "on" if value else "off") in choices:
        value = word  # YAML 1.1 has them as booleans where they are not quoted
    if path.endswith(("_bytes", ".bytes")) and isinstance(value, str) and value not in choices:
        try:
            value = parse_size(value)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}{''.join(f', or {choice}' for choice in choices)}") from None
    if choices and isinstance(value, str) and value not in choices:
        raise ConfigError(
            f"{path}: {value!r} is not allowed{suggestion(value, choices)}; choose from: {', '.join(choices)}"
        )
    try:
        return msgspec.convert(value, type=hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_expectation(str(error), choices)}; got {value!r}") from None


def _section(hint: Any) -> type[msgspec.Struct] | None:
    """The struct of a section, also of one that may be null; None for other keys."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return kind
    return None


def _item(hint: Any) -> type[msgspec.Struct] | None:
    """The struct of a list of sections; None for other keys."""
    arguments = get_args(hint)
    is_list = get_origin(hint) is tuple and arguments[1:] == (Ellipsis,)
    return (
        arguments[0]
        if is_list and isinstance(arguments[0], type) and issubclass(arguments[0], msgspec.Struct)
        else None
    )


def _choices(hint: Any) -> list[str]:
    """The strings that a type allows, where it lists them all."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    arguments = get_args(hint)
    if str in arguments:
        return []
    return [choice for argument in arguments if get_origin(argument) is Literal for choice in get_args(argument)]


def _expectation(text: str, choices: Sequence[str]) -> str:
    """`Expected `int`, got `str` - at `$[0]`` without what the message has anyway (path and value), and with the
    strings that are allowed in place of `str`."""
    text = re.sub(r", got `.*?`| - at `.*`", "", text).replace("`", "")
    if choices:
        text = re.sub(r"\bstr\b", " | ".join(choices), text)
    return text[:1].lower() + text[1:]
