"""Fields of a `quantization_config`, beyond what `JsonFields` has. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from disagg.engine.checkpoint.json_fields import JsonFields


def one_of(fields: JsonFields, name: str, *allowed: Any, required: bool = False) -> Any:
    """The value of a field that must have one of these; the first one without it.

    Raises:
        ConfigError: it has another value, or is missing although it is required.
    """
    value = fields.value(name)
    if value is None and not required:
        return allowed[0]
    if not any(value == each and type(value) is type(each) for each in allowed):
        supported = ", ".join(repr(each) for each in allowed)
        raise fields.error(f"`{name}` {value!r} is not supported; supported: {supported}")
    return value


def sizes(fields: JsonFields, name: str, count: int) -> tuple[int, ...]:
    """A list of `count` positive whole numbers.

    Raises:
        ConfigError: the field is something else.
    """
    value = fields.value(name)
    is_list = isinstance(value, list) and len(value) == count
    if not is_list or not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in value):
        raise fields.error(f"`{name}` must be a list of {count} positive whole numbers, not {value!r}")
    return tuple(value)


def texts(fields: JsonFields, name: str) -> tuple[str, ...]:
    """A list of texts, such as names.

    Raises:
        ConfigError: the field is something else.
    """
    value = fields.value(name)
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise fields.error(f"`{name}` must be a list of names, not {value!r}")
    return tuple(value)


def leave_aside(fields: JsonFields, names: Iterable[str]) -> None:
    """Fields that say nothing about the meaning of the weights, such as how they were made."""
    for name in names:
        fields.value(name)


def refuse_unread(fields: JsonFields) -> None:
    """Refuse fields whose meaning is not known.

    Raises:
        ConfigError: there is one.
    """
    for name, value in fields.unread().items():
        raise fields.error(f"`{name}` {value!r} is not known")
