"""How many combinations the compiler would make of a JSON schema, counted before it begins. Pure.

`allOf`, and the keywords of one schema, hold together: the compiler multiplies the branches of `anyOf` and `oneOf` in
them, which a small text makes huge. Branches of one `anyOf`, and the schemas below different properties, only add up.
"""

from __future__ import annotations

from typing import Any, Final

MAX_COMBINATIONS: Final = 64
"""Maximum number of combinations of branches that hold together."""
_MAX_REFERENCES: Final = 64
"""Maximum number of `$ref` that lead from one into another."""
_CAP: Final = 1 << 40
_LITERAL: Final = frozenset(("enum", "const", "default", "examples"))
"""Keywords whose value is data."""


class AlternativesError(ValueError):
    """The message tells a client what is too large."""


def check_alternatives(schema: Any) -> None:
    """Raises `AlternativesError`. Each part of the schema is read once."""
    _Count(schema).of(schema, 0)


class _Count:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}
        """Combinations of a schema by its identity, which is unique while the root exists. 1 while they are being
        counted, so that a schema that refers to itself adds nothing."""

    def of(self, schema: Any, references: int) -> int:
        """Number of combinations of a schema, at least 1."""
        if isinstance(schema, list):
            return max((self.of(each, references) for each in schema), default=1)
        if not isinstance(schema, dict):
            return 1
        known = self._known.get(id(schema))
        if known is None:
            self._known[id(schema)] = 1
            known = self._known[id(schema)] = self._product(schema, references)
        return known

    def _product(self, schema: dict[str, Any], references: int) -> int:
        together, below = [], 1
        for name, value in schema.items():
            if name in ("anyOf", "oneOf") and isinstance(value, list):
                together.append(sum(self.of(each, references) for each in value))
            elif name == "allOf" and isinstance(value, list):
                together += [self.of(each, references) for each in value]
            elif name == "$ref" and isinstance(value, str):
                together.append(self._referenced(value, references))
            elif name not in _LITERAL:
                below = max(below, self.of(value, references))
        together = [count for count in (*together, below) if count > 1]
        product = 1
        for count in together:
            product = min(product * count, _CAP)
        if len(together) > 1 and product > MAX_COMBINATIONS:
            raise AlternativesError(
                f"at most {MAX_COMBINATIONS} combinations of anyOf and oneOf branches that hold together"
            )
        return product

    def _referenced(self, pointer: str, references: int) -> int:
        if references >= _MAX_REFERENCES:
            raise AlternativesError(f"at most {_MAX_REFERENCES} $ref that lead one into another")
        target = self._root
        if not pointer.startswith("#"):
            return 1
        for part in pointer[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or key not in target:
                return 1  # an array, or nothing: the compiler says so
            target = target[key]
        return self.of(target, references + 1)
