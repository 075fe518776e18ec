"""What the configurations of all processes share: types of values with their bounds, the check of a struct against
them, and the limits that the engine and the router both apply.

A bound stands in the type of its field, once. The reader of the user's YAML (`cluster/core/config_reader.py`),
decoding, and `check_bounds` in a constructor all take it from there."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Final, get_args, get_type_hints

import msgspec

from disagg.proto.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
"""A share that must be larger than zero."""
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
MAX_TARGET_MS: Final = 86_400_000.0
"""One day in milliseconds."""
MIN_TPOT_MS: Final = 0.1
"""The smallest TPOT target: less than the duration of a step of any model."""
Millis = Annotated[float, msgspec.Meta(gt=0, le=MAX_TARGET_MS)]
TpotMillis = Annotated[float, msgspec.Meta(ge=MIN_TPOT_MS, le=MAX_TARGET_MS)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Watermark = Annotated[float, msgspec.Meta(ge=0, lt=1)]
MAX_PORT = 65_535
Port = Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class KvReserve(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks that admission keeps free. The engine applies it to its own blocks, the router to its count of them."""

    decode_reserve_tokens: NonNegativeInt = 512
    """Output tokens whose blocks are counted as reserved when a sequence is admitted (fewer if its max_tokens is
    less)."""
    watermark: Watermark = 0.01
    """Share of the blocks that admission leaves free."""


def check_bounds(config: msgspec.Struct, path: str) -> None:
    """Compare the numbers and texts of a struct with the bounds of their types; None is within any.

    Raises:
        ConfigError: `path.field: what is allowed, not the value`, for the first field that is out of bounds.
    """
    for name, bounds in _bounds(type(config)).items():
        value = getattr(config, name)
        if value is not None and (rule := _broken_rule(bounds, value)):
            got = "" if isinstance(value, str) else f", not {value}"
            raise ConfigError(f"{path}.{name}: must {rule}{got}")


@functools.cache
def _bounds(kind: type[msgspec.Struct]) -> Mapping[str, msgspec.Meta]:
    """The bounds of each field that has any, by field name; also of `Count | None`."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: bounds for name, hint in hints.items() if (bounds := _meta(hint)) is not None}


def _meta(hint: Any) -> msgspec.Meta | None:
    metas = (meta for part in (hint, *get_args(hint)) for meta in getattr(part, "__metadata__", ()))
    return next((meta for meta in metas if isinstance(meta, msgspec.Meta)), None)


def _broken_rule(bounds: msgspec.Meta, value: Any) -> str:
    """The rule that the value breaks; empty if it breaks none, or is of a kind that these bounds do not apply to. NaN
    breaks every rule."""
    if isinstance(value, str):
        if bounds.min_length and len(value) < bounds.min_length:
            return "not be empty"
        return f"have at most {bounds.max_length} characters" if len(value) > (bounds.max_length or len(value)) else ""
    if not isinstance(value, int | float):
        return ""
    is_inside = (
        (bounds.ge is None or value >= bounds.ge)
        and (bounds.gt is None or value > bounds.gt)
        and (bounds.le is None or value <= bounds.le)
        and (bounds.lt is None or value < bounds.lt)
    )
    if is_inside:
        return ""
    if bounds.le is None and bounds.lt is None:
        return "be positive" if bounds.gt == 0 else "not be negative" if bounds.ge == 0 else f"be at least {bounds.ge}"
    first = f"[{bounds.ge}" if bounds.ge is not None else f"({bounds.gt}"
    last = f"{bounds.le}]" if bounds.le is not None else f"{bounds.lt})"
    return f"be in {first}, {last}"
