"""Structs as the document shows them. Pure.

A body's struct keeps some fields as raw JSON, which a second decoder reads, and has defaults for fields that must be
set, so that the error can name them in the API's words. The document shows the struct with these fields as they are
finally read: `Shapes` makes such structs from those that parse the bodies, and msgspec makes the schemas.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union

import msgspec

Fields = Mapping[tuple[type, str], Any]
"""Types by struct and field."""


class Shapes:
    """Structs with the types of their fields replaced.

    Args:
        types: of fields that the struct does not have in full.
        required: names of the fields that must be set, by struct, although they have a default.
        names: of structs in the document, where the class has another one.
    """

    def __init__(
        self, types: Fields, required: Mapping[type, Sequence[str]], names: Mapping[type, str] | None = None
    ) -> None:
        self._types = types
        self._required = required
        self._names = names or {}
        self._made: dict[type, type] = {}

    def of(self, kind: Any) -> Any:
        """The same type, with every struct in it replaced."""
        if kind is msgspec.Raw:
            return Any
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(kind)
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            return Annotated[self.of(args[0]), *kind.__metadata__]
        if origin in (Union, types.UnionType):
            return Union[tuple(map(self.of, args))]  # noqa: UP007  # of a number of types that is not known here
        if origin in (list, dict):
            return origin[tuple(map(self.of, args))]
        return kind

    def _struct(self, kind: type[msgspec.Struct]) -> type:
        if kind in self._made:
            return self._made[kind]
        hints = typing.get_type_hints(kind, include_extras=True)
        required = self._required.get(kind, ())
        fields: list[Any] = []
        for given in msgspec.structs.fields(kind):
            shown = self.of(self._types.get((kind, given.name), hints[given.name]))
            if given.required:
                fields.append((given.encode_name, shown))
            elif given.name in required:
                fields.append((given.encode_name, _without_none(shown)))
            else:
                default = None if isinstance(given.default, msgspec.Raw) else given.default
                fields.append((given.encode_name, shown, default))
        config = kind.__struct_config__
        made = msgspec.defstruct(
            self._names.get(kind, kind.__name__.lstrip("_")),
            fields,
            namespace={"__doc__": kind.__doc__},
            module=kind.__module__,
            kw_only=True,
            tag=config.tag,
            tag_field=config.tag_field,
            forbid_unknown_fields=config.forbid_unknown_fields,
        )
        self._made[kind] = made
        return made


def _without_none(kind: Any) -> Any:
    args = tuple(arg for arg in typing.get_args(kind) if arg is not type(None))
    return Union[args] if args and typing.get_origin(kind) in (Union, types.UnionType) else kind  # noqa: UP007
