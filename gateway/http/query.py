"""The parameters of a URL's query. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qs

from disagg.proto.errors import InvalidRequestError

MAX_PARAMETERS: Final = 8


def read_query(scope: Mapping[str, Any]) -> dict[str, str]:
    """The first value of each parameter; empty values are left out.

    Args:
        scope: of an ASGI call.

    Raises:
        InvalidRequestError: for more than `MAX_PARAMETERS`.
    """
    raw = scope.get("query_string", b"").decode("latin-1")
    try:
        query = parse_qs(raw, max_num_fields=MAX_PARAMETERS)
    except ValueError:
        raise InvalidRequestError("query", f"has at most {MAX_PARAMETERS} parameters") from None
    return {name: values[0] for name, values in query.items()}


def read_count(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A number from 1 to `most`. Raises `InvalidRequestError`."""
    given = query.get(name, str(default))
    if not (given.isascii() and given.isdecimal()) or len(given) > len(str(most)) or not 1 <= int(given) <= most:
        raise InvalidRequestError(name, f"must be from 1 to {most}")
    return int(given)
