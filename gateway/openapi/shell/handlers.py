"""`GET /openapi.json` and `GET /docs`.

They need a key where `/v1/models` does: they tell the version, and what this gateway serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import msgspec

from disagg import __version__
from disagg.gateway.http.errors import Headers
from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.openapi.document import make_document
from disagg.gateway.openapi.fields import body_shapes
from disagg.gateway.openapi.operation import Operation
from disagg.gateway.openapi.web_page import web_page
from disagg.proto.ids import RequestId

_HTML: Final = b"text/html; charset=utf-8"
_SECURITY_HEADERS: Final[Headers] = [
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
]


class OpenApi:
    """Handlers. The document is made at the first request, in some tens of milliseconds, and kept.

    Args:
        operations: that are served, with those of the document itself.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations

    async def json(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `GET /openapi.json`."""
        await exchange.respond(200, self._json)

    async def html(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `GET /docs`."""
        await exchange.respond(200, self._html, _HTML, _SECURITY_HEADERS)

    @cached_property
    def document(self) -> dict[str, Any]:
        """The document of the operations."""
        return make_document(self._operations, body_shapes(), __version__)

    @cached_property
    def _json(self) -> bytes:
        return msgspec.json.encode(self.document)

    @cached_property
    def _html(self) -> bytes:
        return web_page(self.document).encode()
