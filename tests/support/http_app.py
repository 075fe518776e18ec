"""For the tests of HTTP: the application without a socket, a client of it, and what it sends taken apart."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx

from disagg.gateway.answers.generator import Generator
from disagg.gateway.app import HttpApp
from disagg.gateway.auth.audit import Audit
from disagg.gateway.auth.auth import AnonymousAccess, Authenticator
from disagg.gateway.calls import Calls
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.http.body_budget import BodyBudget
from disagg.gateway.http.shell.exchange import BodyLimits
from disagg.gateway.http.shell.unfinished import UnfinishedBodies
from disagg.gateway.http.sites import Sites
from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.gateway.models.models import Models
from disagg.gateway.openai.shell.completions import Completions
from disagg.gateway.openai.shell.information import Information
from disagg.gateway.operators.shell.adapters import AdapterHandlers
from disagg.gateway.operators.shell.admin import Control, no_controller
from disagg.gateway.operators.shell.page import Page
from disagg.gateway.operators.shell.probes import Probes
from disagg.gateway.readiness import Readiness
from disagg.gateway.requests.refusals import Refusals
from disagg.gateway.text.tokenizer import ServedModel
from disagg.gateway.usage.handler import UsageHandler
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.proto.ids import RequestId
from tests.support.gateway import FINGERPRINT, MODEL_NAME, FakeRouter, grammars_here, limits_of, make_turns
from tests.support.openapi import described

CREATED = 1_700_000_000
NOW = 1_700_000_100.5
MAX_BODY_BYTES = 8192
MAX_BODY_VALUES = 1000
TRACE_BITS = (0x22 << 64) | 0x11

CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
"""The least of a chat."""
TEXT = {"model": MODEL_NAME, "prompt": "hi"}
"""The least of a text completion."""


class TestApp:
    """An application with a router that follows a script; time stands still."""

    __test__ = False

    def __init__(
        self,
        model: ServedModel,
        router: FakeRouter | None = None,
        authenticator: Authenticator | None = None,
        sites: Sites | None = None,
        page: Page | None = None,
        usage: UsageRecorder | None = None,
        guardrails: Guardrails | None = None,
        control: Control = no_controller,
    ) -> None:
        self.router = router or FakeRouter()
        self.model = model
        self.metrics = GatewayMetrics({MODEL_NAME: self.router.view})
        self.readiness = Readiness(self.router.view)
        self._ids = (RequestId(f"r{i}") for i in itertools.count())
        limits = BodyLimits(
            max_bytes=MAX_BODY_BYTES,
            timeout_s=60.0,
            max_values=MAX_BODY_VALUES,
            turns=make_turns(),
            unfinished=UnfinishedBodies(BodyBudget(1 << 20)),
        )
        generator = Generator(
            model,
            self.router,
            limits_of(model),
            FINGERPRINT,
            clock=lambda: 1000.0,
            mint_seed=lambda: 7,
            mint_id=self._mint_id,
            guardrails=guardrails,
            grammars=grammars_here(model),
        )
        self.generator = generator
        usage = usage or UsageRecorder(None, lambda: NOW)
        models = self.models = Models([generator])
        self.refusals = Refusals(lambda: 1000.0) if guardrails is None else guardrails.refusals
        calls = Calls(models, self.metrics, self.readiness, usage, self._mint_id, self.refusals)
        self.completions = Completions(calls, limits, lambda: 1000.0, lambda: NOW)
        self.app = HttpApp(
            self.completions,
            Information(models, limits, CREATED),
            Probes(self.readiness, self.metrics),
            authenticator or AnonymousAccess(),
            self._mint_id,
            lambda: TRACE_BITS,
            audit := Audit(self.metrics.count_refusal, lambda: 1000.0),
            sites or Sites(),
            self.readiness,
            page,
            usage=UsageHandler(usage),
            adapters=AdapterHandlers(control, limits, audit),
        )
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        self.client = httpx.AsyncClient(
            transport=transport,
            base_url="http://gateway",
            headers={"content-type": "application/json"},
            event_hooks={"response": [self._compare]},
        )

    async def chat(self, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
        """A chat with some fields changed."""
        return await self.client.post("/v1/chat/completions", json={**CHAT, **changes}, headers=headers)

    async def text(self, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
        """A text completion with some fields changed."""
        return await self.client.post("/v1/completions", json={**TEXT, **changes}, headers=headers)

    async def _compare(self, response: httpx.Response) -> None:
        """Compare every answer with the document of the API."""
        request, body = response.request, await response.aread()
        content_type = response.headers.get("content-type", "")
        described(self.app).check(request.method, request.url.path, response.status_code, content_type, body)

    def outcomes(self) -> dict[str, float]:
        """How many calls over HTTP ended in which way."""
        lines = self.metrics.render()[0].decode().splitlines()
        prefix = 'disagg_calls_total{outcome="'
        counted = (line.removeprefix(prefix) for line in lines if line.startswith(prefix) and 'protocol="http"' in line)
        return {line.split('"')[0]: float(line.split()[-1]) for line in counted}

    def _mint_id(self) -> RequestId:
        return next(self._ids)


class AsgiCall:
    """One call of an application by hand: for clients that leave, or send in pieces."""

    def __init__(self, app: HttpApp, path: str, body: bytes | None, headers: dict[str, str] | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [
                (key.encode(), value.encode())
                for key, value in {"content-type": "application/json", **(headers or {})}.items()
            ],
            "state": {},
        }
        if body is not None:
            self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.task = asyncio.ensure_future(app(scope, self.incoming.get, self._send))

    def leave(self) -> None:
        """The client closes its connection."""
        self.incoming.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        """What came so far."""
        return b"".join(message.get("body", b"") for message in self.sent)

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


def events_of(response: httpx.Response | bytes) -> list[Any]:
    """The events of a stream; `[DONE]` as it is."""
    raw = response if isinstance(response, bytes) else response.content
    return list(_events(raw.decode()))


def error_of(response: httpx.Response) -> tuple[int, str | None, str]:
    """Status, `param` and `code` of an error in its only form."""
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["param"], error["code"]


def _events(text: str) -> Iterator[Any]:
    assert text.endswith("\n\n")
    for block in text.removesuffix("\n\n").split("\n\n"):
        data = block.removeprefix("data: ")
        assert data != block
        assert "\n" not in data
        yield data if data == "[DONE]" else json.loads(data)
