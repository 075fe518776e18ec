"""Lists as OpenAI's clients read them page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from disagg.gateway.http.shell.exchange import Exchange
from disagg.proto.errors import InvalidRequestError


def page_of(exchange: Exchange, shown: Sequence[dict[str, Any]], default: int, most: int) -> dict[str, Any]:
    """The part of `shown` that `?limit` and `?after` ask for. Raises `InvalidRequestError`."""
    query = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"), max_num_fields=8)
    limit = query.get("limit", [str(default)])[0]
    if not limit.isdecimal() or len(limit) > len(str(most)) or not 1 <= int(limit) <= most:
        raise InvalidRequestError("limit", f"must be from 1 to {most}")
    begin = 0
    if "after" in query:
        ids = [one["id"] for one in shown]
        if query["after"][0] not in ids:
            raise InvalidRequestError("after", "there is no such id in the list")
        begin = ids.index(query["after"][0]) + 1
    page = shown[begin : begin + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(shown),
    }
