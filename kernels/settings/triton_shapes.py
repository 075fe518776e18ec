"""`DISAGG_TRITON_SHAPES`: other launch shapes of the attention kernels than the built-in ones. Pure, without Triton.

    {"decode": {"tile": 64, "programs": 2, "warps": 4, "stages": 7},
     "prefill": {"rows": 128, "tile": 64, "warps": 4, "stages": 2, "boxes": true}}

What is left out stays as it is. `decode` holds for every decode; `prefill` for prompts in 16 bits of which one fills a
tile of 128 rows: shorter ones and fp32 have shapes of their own. `programs` are those of a multiprocessor. `boxes` is
taken where the cache allows it (`prefill_attention`), else tiles are loaded without the copy engine.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VARIABLE = "DISAGG_TRITON_SHAPES"


@dataclass(frozen=True, slots=True)
class DecodeChange:
    """Changes of the decode kernel's launch; None leaves a value as built in."""

    tile: int | None = None
    programs: int | None = None
    warps: int | None = None
    stages: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillChange:
    """Changes of the prefill kernel's launch; None leaves a value as built in."""

    rows: int | None = None
    tile: int | None = None
    warps: int | None = None
    stages: int | None = None
    boxes: bool | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes that the variable asks for."""

    decode: DecodeChange = DecodeChange()
    prefill: PrefillChange = PrefillChange()


_CHOICES: Mapping[str, tuple[object, ...]] = {
    "rows": (16, 32, 64, 128, 256),
    "tile": (16, 32, 64, 128, 256),
    "warps": (1, 2, 4, 8, 16),
    "stages": tuple(range(1, 11)),
    "programs": tuple(range(1, 9)),
    "boxes": (True, False),
}
_KINDS = {"decode": ("tile", "programs", "warps", "stages"), "prefill": ("rows", "tile", "warps", "stages", "boxes")}


def changes(environ: Mapping[str, str]) -> Changes:
    """The changes in an environment.

    Raises:
        ValueError: the value is not such an object; the message names the key.
    """
    text = environ.get(VARIABLE, "")
    return parse(text) if text else Changes()


@functools.cache
def parse(text: str) -> Changes:
    """Parse the value of the variable; errors as in `changes`."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{VARIABLE}: not JSON: {error}") from error
    given = _object("", given, tuple(_KINDS))
    decode, prefill = (_checked(kind, given.get(kind, {})) for kind in _KINDS)
    return Changes(DecodeChange(**decode), PrefillChange(**prefill))


def _object(name: str, given: object, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{VARIABLE}: {f'{name}: ' if name else ''}not an object of {', '.join(known)}")
    for key in given:
        if key not in known:
            path = f"{name}.{key}" if name else key
            raise ValueError(f"{VARIABLE}: {path}: not known; known are {', '.join(known)}")
    return given


def _checked(kind: str, given: object) -> dict[str, Any]:
    fields = _object(kind, given, _KINDS[kind])
    for key, value in fields.items():
        if not any(type(value) is type(choice) and value == choice for choice in _CHOICES[key]):
            wanted = ", ".join(map(json.dumps, _CHOICES[key]))
            raise ValueError(f"{VARIABLE}: {kind}.{key}: {json.dumps(value)} is not one of {wanted}")
    return fields
