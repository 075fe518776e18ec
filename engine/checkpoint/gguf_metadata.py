"""Typed access to the metadata of a GGUF file; an error names the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.proto.errors import ConfigError


class GgufMetadata:
    """The keys of the architecture of one file, without its name before them. It keeps which keys were asked for."""

    def __init__(self, file: Path, architecture: str, values: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        prefix = f"{architecture}."
        self.file = file
        self.architecture = architecture
        self.tensors = tensors
        """Tensors by name; those of rope have the factors of their frequencies."""
        self._values = {key.removeprefix(prefix): each for key, each in values.items() if key.startswith(prefix)}
        self._read: set[str] = set()

    def error(self, message: str) -> ConfigError:
        """A `ConfigError` that names the file."""
        return ConfigError(f"{self.file.name}: {message}")

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return key in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number that is not negative.

        Raises:
            ConfigError: it is something else, such as a list, or missing without a default.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(f"`{self.architecture}.{key}` must be a whole number, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            ConfigError: it is something else, or missing without a default.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"`{self.architecture}.{key}` must be a number, not {value!r}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """A text.

        Raises:
            ConfigError: it is something else.
        """
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(f"`{self.architecture}.{key}` must be a text, not {value!r}")
        return value

    def leave_aside(self, *keys: str) -> None:
        """Keys that say nothing about what the model computes."""
        self._read.update(keys)

    def refuse_unread(self) -> None:
        """Refuse keys whose meaning is not known.

        Raises:
            ConfigError: there is one.
        """
        for key, value in self._values.items():
            if key not in self._read:
                shown = value if len(repr(value)) < 80 else "..."
                raise self.error(
                    f"`{self.architecture}.{key}` = {shown!r} is not known; import the safetensors version"
                )

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise self.error(f"`{self.architecture}.{key}` is missing")
        return value
