"""The served models in the form of Anthropic's API, whose clients ask at the same paths as OpenAI's: a header tells."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import CALLER
from disagg.gateway.http.query import read_count, read_query
from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.models.models import Models
from disagg.gateway.other_apis.messages.schema import MAX_MODELS
from disagg.proto.errors import InvalidRequestError
from disagg.proto.ids import RequestId

MODELS: Final = "/v1/models"
_VERSION: Final = "anthropic-version"
"""Header that all clients of this API send, and no others."""
_DEFAULT_LIMIT: Final = 20


class ModelList:
    """Handlers.

    Args:
        models: those that are served.
        created: when they began to be served, in seconds since 1970.
    """

    def __init__(self, models: Models, created: int) -> None:
        self._models = models
        self._created = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def list(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `GET /v1/models`: `limit`, `after_id`, `before_id`."""
        found = [self._model(generator) for generator in self._models.allowed(CALLER.get())]
        await exchange.respond_json(_page(found, read_query(exchange.scope)))

    async def one(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `GET /v1/models/{model}`."""
        await exchange.respond_json(self._model(self._models.find(CALLER.get(), exchange.path_params["model"])))

    def _model(self, generator: Generator) -> dict[str, Any]:
        name = generator.model.info.name
        return {"type": "model", "id": name, "display_name": name, "created_at": self._created}


def is_asked(headers: Mapping[str, str], path: str) -> bool:
    """Whether a request for models comes from a client of this API."""
    return _VERSION in headers and (path == MODELS or path.startswith(f"{MODELS}/"))


def _page(found: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The models after `after_id`, or the last ones before `before_id`. Raises `InvalidRequestError`."""
    limit = read_count(query, "limit", _DEFAULT_LIMIT, MAX_MODELS)
    begin = _place(found, query["after_id"], "after_id") + 1 if "after_id" in query else 0
    end = _place(found, query["before_id"], "before_id") if "before_id" in query else len(found)
    goes_back = "before_id" in query and "after_id" not in query
    page = found[begin:end][-limit:] if goes_back else found[begin:end][:limit]
    return {
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < max(0, end - begin),
    }


def _place(found: list[dict[str, Any]], name: str, field: str) -> int:
    for i, model in enumerate(found):
        if model["id"] == name:
            return i
    raise InvalidRequestError(field, "there is no such id in the list")
