"""Reading JSON files that others wrote: typed fields, and errors that name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from disagg.proto.errors import ConfigError


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: the file is missing, unreadable or holds something else; names the file.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{file}: the file is missing") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: must hold a JSON object")
    return value


_MOST: Final[Mapping[str, int]] = {
    "num_hidden_layers": 4096,
    "num_nextn_predict_layers": 64,
    "num_mtp_layers": 64,
}
"""Largest values of fields that say how many descriptions are made."""
_MOST_OF_OTHERS: Final = 2**31 - 1


class JsonFields:
    """Typed access to one JSON object; the error names the file and the field. A null counts as missing.

    It keeps which fields were asked for, so that a reader can refuse the others (`unread`).
    """

    def __init__(self, file: Path, values: dict[str, Any], inside: str = "") -> None:
        """`inside` is the field of the file that holds the object, if it is not the whole."""
        self.file = file
        self._inside = f"{inside}: " if inside else ""
        self._values = values
        self._read: set[str] = set()

    def error(self, message: str) -> ConfigError:
        """A `ConfigError` that names the file."""
        return ConfigError(f"{self.file}: {self._inside}{message}")

    def value(self, name: str) -> Any:
        """Whatever the field holds; None where it is missing."""
        self._read.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.value(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is present and null, which families mean otherwise than a missing one."""
        return self.value(name) is None and name in self._values

    def unread(self) -> dict[str, Any]:
        """Fields that nobody asked for. A null, a false and an empty value say that there is nothing, and count as
        missing."""
        return {
            name: value
            for name, value in self._values.items()
            if name not in self._read and value is not None and value is not False and value not in ("", [], {})
        }

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`, and at most what any model has."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"`{name}` must be a whole number of at least {minimum}, not {value!r}")
        if value > (most := _MOST.get(name, _MOST_OF_OTHERS)):
            raise self.error(f"`{name}` must be at most {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise self.error(f"`{name}` must be a positive number, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Value of a field that must be true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(f"`{name}` must be true or false, not {value!r}")
        return value

    def part(self, name: str, defaults: Mapping[str, Any]) -> JsonFields:
        """The object that the field holds, with `defaults` for what is missing in it."""
        value = self._value(name, None)
        if not isinstance(value, dict):
            raise self.error(f"`{name}` must be an object, not {value!r}")
        return JsonFields(self.file, {**defaults, **value}, name)

    def _value(self, name: str, default: Any) -> Any:
        value = self.value(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"`{name}` is missing")
        return value
