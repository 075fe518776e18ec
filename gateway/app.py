"""The HTTP application: authentication, routes, errors.

authenticate (but for probes) ──> route ──> endpoint ──> response
     └──────────── any error ────────┴───────────┴──> {"error": ...}, or an event of the stream that began; in the form
                                                      of the API whose path it is
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.routing import Match, Route

from disagg.gateway.auth.audit import Audit
from disagg.gateway.auth.auth import CALLER, UNAUTHENTICATED, Authenticator, RefusedError
from disagg.gateway.auth.shell.rights import require_inference
from disagg.gateway.batches.batch_handlers import Batches
from disagg.gateway.batches.file_handlers import Files
from disagg.gateway.event_loop.shell.loop_watch import name_task
from disagg.gateway.http.errors import (
    Headers,
    MethodNotAllowedError,
    UnknownUrlError,
    error_headers,
)
from disagg.gateway.http.shell.exchange import Exchange, Receive, Scope, Send
from disagg.gateway.http.sites import Sites, preflight_headers
from disagg.gateway.openai.shell.completions import Completions
from disagg.gateway.openai.shell.information import Information
from disagg.gateway.openai.shell.vectors import Vectors
from disagg.gateway.openapi import operations
from disagg.gateway.openapi.operation import Operation
from disagg.gateway.openapi.shell.handlers import OpenApi
from disagg.gateway.operators.shell.adapters import AdapterHandlers
from disagg.gateway.operators.shell.page import Page
from disagg.gateway.operators.shell.probes import Probes
from disagg.gateway.other_apis.shell.message_models import ModelList, is_asked
from disagg.gateway.other_apis.shell.messages import MESSAGES, Messages, answer_as_anthropic
from disagg.gateway.other_apis.shell.responses import Responses
from disagg.gateway.readiness import STOPPING, Readiness
from disagg.gateway.requests.headers import HEADER as TRACE_HEADER
from disagg.gateway.requests.headers import LABEL, REQUEST_ID, child_of, parent_span, read_label
from disagg.gateway.usage.handler import UsageHandler
from disagg.proto.errors import DisaggError, InternalError, UnavailableError
from disagg.proto.ids import RequestId

logger = logging.getLogger(__name__)

_MAX_SHOWN_CHARS: Final = 256
"""Number of characters of an unknown path that an error repeats."""
_PROBED_PATHS: Final = tuple(
    each.path for each in (operations.LIVE, operations.READY, operations.HEALTH, operations.PING)
)
"""Answered under any name of the host, as probes use them. `/metrics` is not: it shows the use of others, and its
readers on this machine can use a name of loopback."""
_NO_SNIFF: Final = (b"x-content-type-options", b"nosniff")
"""A browser must not guess another type than the response names: answers hold text that clients chose."""

_API_KEY: Final = "x-api-key"

Handler = Callable[[Exchange, RequestId], Awaitable[None]]
Served = tuple[Operation, Handler]


class HttpApp:
    """An ASGI application.

    Args:
        completions: answers prompts.
        information: answers what needs a model but no answer.
        probes: answer whether the gateway is alive and ready, and with its metrics.
        authenticator: of the callers.
        mint_id: a request id that was never used.
        mint_trace_bits: 192 random bits, see `traceparent`.
        audit: logs refused calls.
        sites: which web sites' pages may call.
        readiness: whether new requests are taken; once they are not, connections close with their answer.
        page: for operators; `None` serves none.
        files, batches: answer OpenAI's files and batches; None where none are served.
        usage: shows what was used; None has no such path.
        adapters: adds and removes adapters; None has no such paths.
    """

    def __init__(
        self,
        completions: Completions,
        information: Information,
        probes: Probes,
        authenticator: Authenticator,
        mint_id: Callable[[], RequestId],
        mint_trace_bits: Callable[[], int],
        audit: Audit,
        sites: Sites,
        readiness: Readiness,
        page: Page | None = None,
        files: Files | None = None,
        batches: Batches | None = None,
        usage: UsageHandler | None = None,
        adapters: AdapterHandlers | None = None,
    ) -> None:
        self._audit = audit
        self._sites = sites
        self._readiness = readiness
        self.stopping = False
        """Set by the server before it cancels what still runs."""
        self._authenticator = authenticator
        self._mint_id = mint_id
        self._mint_trace_bits = mint_trace_bits
        self.served = _with_document(
            (
                *_served(completions, information, probes),
                *_of_models(information, ModelList(completions.models, information.created)),
                *_of_page(page),
                *_of_batches(files, batches),
                *(() if usage is None else ((operations.USAGE, usage.list),)),
                *_of_adapters(adapters),
            )
        )
        """Every operation with its handler: routes and document are made of them."""
        self._routes = [Route(each.path, handler, methods=[each.method]) for each, handler in self.served]
        self._open_paths = frozenset(operation.path for operation, _ in self.served if operation.is_open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request; every error, also one of our own code, is answered as the API of its path does."""
        if scope["type"] != "http":
            return
        request_id = self._mint_id()
        name_task(request_id)
        exchange = Exchange(scope, receive, send, [(REQUEST_ID.encode(), request_id.encode()), _NO_SNIFF])
        if scope["path"].startswith(MESSAGES) or is_asked(exchange.headers, scope["path"]):
            answer_as_anthropic(exchange, request_id)
        try:
            if self._readiness.is_draining:
                exchange.add_header(b"connection", b"close")
            self._label(exchange, request_id)
            origin = exchange.headers.get("origin")
            for name, value in self._sites.headers(origin):
                exchange.add_header(name, value)
            if scope["path"] not in _PROBED_PATHS:
                self._sites.check(exchange.headers.get("host"), origin)
            if self._sites.is_preflight(scope["method"], exchange.headers):
                await self._answer_preflight(exchange)
                return
            self._authenticate(exchange)
            handler = self._find(scope)
            if _is_inference(scope["method"], scope["path"]):
                require_inference(CALLER.get())
            await handler(exchange, request_id)
        except DisaggError as error:
            await _fail(exchange, error)
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            await _fail(exchange, UnavailableError("the gateway stops", STOPPING))
        except Exception:
            logger.exception("request %s: failed by a bug; the client gets an internal error", request_id)
            await _fail(exchange, InternalError("the gateway failed; its log has the reason"))

    def _label(self, exchange: Exchange, request_id: RequestId) -> None:
        """What every response carries."""
        label = read_label(exchange.headers.get(LABEL)) or request_id
        exchange.add_header(LABEL.encode(), label.encode())
        given = exchange.headers.get(TRACE_HEADER)
        if given is not None:
            exchange.trace_parent = child_of(given, self._mint_trace_bits())
            exchange.parent_span = parent_span(given)
            exchange.add_header(TRACE_HEADER.encode(), exchange.trace_parent.encode())

    def _authenticate(self, exchange: Exchange) -> None:
        if exchange.scope["path"] in self._open_paths:
            CALLER.set(UNAUTHENTICATED)
            return
        try:
            caller = self._authenticator.authenticate(_authorization(exchange), exchange.certificate)
        except RefusedError as error:
            self._audit.refused("http", error.reason, exchange.peer)
            raise
        CALLER.set(caller)
        exchange.mark_known()

    async def _answer_preflight(self, exchange: Exchange) -> None:
        """Say which methods a page may use at a path. A browser sends no key with the question. Raises
        `UnknownUrlError`."""
        try:
            self._find(exchange.scope)
        except MethodNotAllowedError as error:
            asked = exchange.headers.get("access-control-request-headers")
            await exchange.respond_empty(preflight_headers(error.allowed, asked))

    def _find(self, scope: Scope) -> Handler:
        """The handler of a path and method. Raises `UnknownUrlError` or `MethodNotAllowedError`."""
        allowed: set[str] = set()
        for route in self._routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                scope.update(found)
                handler: Handler = route.endpoint
                return handler
            if match is Match.PARTIAL:
                allowed |= route.methods or set()
        where = f"{scope['method']} {scope['path']}"[:_MAX_SHOWN_CHARS]
        if allowed:
            names = ", ".join(sorted(allowed))
            raise MethodNotAllowedError(f"there is no {where}; this path takes {names}", names)
        raise UnknownUrlError(f"there is no {where}")


def _served(completions: Completions, information: Information, probes: Probes) -> Sequence[Served]:
    responses, messages, vectors = Responses(completions), Messages(completions), Vectors(completions)
    return (
        (operations.CHAT, completions.chat),
        (operations.COMPLETION, completions.text),
        (operations.RESPONSE, responses.create),
        (operations.MESSAGE, messages.create),
        (operations.COUNT_TOKENS, messages.count_tokens),
        (operations.EMBEDDINGS, vectors.embeddings),
        (operations.RERANK, vectors.rerank),
        (operations.SHORT_RERANK, vectors.rerank),
        (operations.SCORE, vectors.score),
        (operations.SHORT_SCORE, vectors.score),
        (operations.TOKENIZE, information.tokenize),
        (operations.DETOKENIZE, information.detokenize),
        (operations.HEALTH, probes.health),
        (operations.PING, probes.health),
        (operations.LIVE, probes.alive),
        (operations.READY, probes.ready),
        (operations.METRICS, probes.metrics),
        (operations.VERSION, probes.version),
    )


def _of_models(information: Information, messages: ModelList) -> Sequence[Served]:
    async def models(exchange: Exchange, request_id: RequestId) -> None:
        is_theirs = is_asked(exchange.headers, exchange.scope["path"])
        await (messages.list if is_theirs else information.models)(exchange, request_id)

    async def model(exchange: Exchange, request_id: RequestId) -> None:
        is_theirs = is_asked(exchange.headers, exchange.scope["path"])
        await (messages.one if is_theirs else information.model)(exchange, request_id)

    return (
        (operations.MODELS, models),
        (operations.MODEL, model),
        (operations.TOKENIZER, information.tokenizer),
    )


def _of_page(page: Page | None) -> Sequence[Served]:
    if page is None:
        return ()
    return (
        *((operations.page_file(path, page.content_type(path)), page.file) for path in page.paths),
        (operations.STATE, page.state),
        (operations.REQUEST, page.request),
        (operations.PAGE_USAGE, page.usage),
    )


def _authorization(exchange: Exchange) -> str | None:
    """The header, or what Anthropic's clients send instead."""
    given = exchange.headers.get("authorization")
    key = exchange.headers.get(_API_KEY)
    return given if given is not None or key is None else f"Bearer {key}"


def _is_inference(method: str, path: str) -> bool:
    """Whether a call is for prompts, or what was made of them: all but facts about the gateway, and adapters."""
    if path in (operations.LOAD_ADAPTER.path, operations.UNLOAD_ADAPTER.path):
        return False
    if method not in ("GET", "HEAD"):
        return True
    return path.startswith("/v1/") and not path.startswith(operations.MODELS.path) and path != operations.USAGE.path


def _of_batches(files: Files | None, batches: Batches | None) -> Sequence[Served]:
    if files is None or batches is None:
        return ()
    return (
        (operations.FILES, files.list),
        (operations.UPLOAD, files.upload),
        (operations.FILE, files.one),
        (operations.DELETE_FILE, files.delete),
        (operations.FILE_CONTENT, files.content),
        (operations.BATCHES, batches.list),
        (operations.CREATE_BATCH, batches.create),
        (operations.BATCH, batches.one),
        (operations.CANCEL_BATCH, batches.cancel),
    )


def _of_adapters(adapters: AdapterHandlers | None) -> Sequence[Served]:
    if adapters is None:
        return ()
    return ((operations.LOAD_ADAPTER, adapters.load), (operations.UNLOAD_ADAPTER, adapters.unload))


def _with_document(served: Sequence[Served]) -> tuple[Served, ...]:
    """What is served, and the document of it."""
    described = OpenApi([*(operation for operation, _ in served), operations.DOCUMENT, operations.DOCS])
    return (*served, (operations.DOCUMENT, described.json), (operations.DOCS, described.html))


async def _fail(exchange: Exchange, error: DisaggError) -> None:
    """Send the error in the form that is still possible. Nothing is sent to a client that is gone, and a complete
    answer that has begun can only be cut off."""
    if exchange.ended:
        return
    if exchange.is_stream:
        await exchange.end(exchange.error_event(error))
    elif not exchange.started:
        headers: Headers = error_headers(error)
        await exchange.respond(error.http_status, exchange.error_body(error), headers=headers)
