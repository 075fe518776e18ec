"""Lists as OpenAI's clients read them page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.gateway.http.query import read_count, read_query
from disagg.gateway.http.shell.exchange import Exchange
from disagg.proto.errors import InvalidRequestError


def page_of(exchange: Exchange, shown: Sequence[dict[str, Any]], default: int, most: int) -> dict[str, Any]:
    """The part of `shown` that `?limit` and `?after` ask for. Raises `InvalidRequestError`."""
    query = read_query(exchange.scope)
    limit = read_count(query, "limit", default, most)
    begin = 0
    if "after" in query:
        ids = [one["id"] for one in shown]
        if query["after"] not in ids:
            raise InvalidRequestError("after", "there is no such id in the list")
        begin = ids.index(query["after"]) + 1
    page = shown[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(shown),
    }
