"""`GET /v1/usage`: what a key used by day; an admin reads what all used."""

from __future__ import annotations

from typing import Any, Final

from disagg.gateway.auth.auth import CALLER
from disagg.gateway.auth.shell.rights import usage_of
from disagg.gateway.http.query import read_count, read_query
from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.usage.counts import DEFAULT_DAYS, MAX_DAYS, MAX_ROWS, Page, Row, UsageView, date_of
from disagg.proto.errors import InvalidRequestError
from disagg.proto.ids import RequestId

_DEFAULT_ROWS: Final = 1000
_MAX_KEY_CHARS: Final = 64


class UsageHandler:
    """Handlers.

    Args:
        usage: what is shown.
    """

    def __init__(self, usage: UsageView) -> None:
        self._usage = usage

    async def list(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `GET /v1/usage` with `days`, `key` (the name of a tenant) and `limit` of rows. Raises
        `InvalidRequestError`, and `PermissionDeniedError` for another tenant's usage."""
        query = read_query(exchange.scope)
        days = read_count(query, "days", DEFAULT_DAYS, MAX_DAYS)
        limit = read_count(query, "limit", _DEFAULT_ROWS, MAX_ROWS)
        key = query.get("key", "")
        if len(key) > _MAX_KEY_CHARS:
            raise InvalidRequestError("key", f"has at most {_MAX_KEY_CHARS} characters")
        page = await self._usage.read(days, usage_of(CALLER.get(), key), limit)
        await exchange.respond_json(usage_json(page))


def usage_json(page: Page) -> dict[str, Any]:
    """The JSON of a page of usage."""
    return {
        "object": "list",
        "data": [_shown(row) for row in page.rows],
        "first_date": date_of(page.first_day),
        "last_date": date_of(page.last_day),
        "has_more": page.has_more,
    }


def _shown(row: Row) -> dict[str, Any]:
    key, counts = row
    return {
        "object": "usage",
        "date": date_of(key.day),
        "key": key.tenant,
        "model": key.model,
        "num_requests": counts.requests,
        "num_failed": counts.failed,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "completion_tokens": counts.completion_tokens,
    }
