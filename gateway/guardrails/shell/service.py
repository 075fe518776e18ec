"""A guardrail that is a service: a JSON question by POST, a JSON verdict. Connections are kept and used again.

{"subject": "prompt" | "answer", "texts": [{"role": "user", "text": "..."}], "before": "", "ended": true,
 "request_id": "...", "model": "...", "tenant": "..."}
{"action": "allow" | "stop" | "replace", "texts": ["..."], "reason": "..."}
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import httptools
import msgspec
from typing_extensions import override

from disagg.gateway.guardrails.shell.judges import Judge, JudgeError
from disagg.gateway.requests.verdicts import ALLOW, Question, Replace, Stop, Verdict

MAX_ANSWER_BYTES: Final = 4 << 20
_OK: Final = 200
_REFUSALS: Final = (400, 413, 422)
"""Statuses for a question that is wrong or too large, from a service that works."""
_PORTS: Final = {"http": 80, "https": 443}


class _Text(msgspec.Struct, frozen=True):
    role: str
    text: str


class _Body(msgspec.Struct, frozen=True):
    subject: str
    texts: list[_Text]
    before: str
    ended: bool
    request_id: str
    model: str
    tenant: str


class _Reply(msgspec.Struct, frozen=True):
    action: Literal["allow", "stop", "replace"]
    texts: list[str] = []
    reason: str = ""


_REPLY: Final = msgspec.json.Decoder(_Reply)


class ServiceJudge(Judge):
    """Asks a service.

    Args:
        url: checked, see `ServiceOptions`.
        max_idle: connections that are kept.
    """

    def __init__(self, url: str, max_idle: int) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or _PORTS[parts.scheme]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
            "accept: application/json\r\ncontent-length: "
        ).encode()
        self._max_idle = max_idle
        self._idle: list[_Connection] = []

    @override
    async def judge(self, question: Question) -> Verdict:
        roles = question.roles or ("",) * len(question.texts)
        body = msgspec.json.encode(
            _Body(
                subject=question.subject,
                texts=[_Text(role, text) for role, text in zip(roles, question.texts, strict=True)],
                before=question.before,
                ended=question.ended,
                request_id=question.request_id,
                model=question.model,
                tenant=question.tenant,
            )
        )
        request = self._head + b"%d\r\n\r\n" % len(body) + body
        try:
            return read_verdict(await self._exchange(request))
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            raise JudgeError(f"the service cannot be reached: {error or type(error).__name__}") from None

    @override
    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    async def _exchange(self, request: bytes) -> bytes:
        """The body of the answer. A kept connection may have been closed meanwhile: then a new one is tried."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._use(connection, request)
            except (OSError, EOFError):
                continue
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return await self._use(_Connection(reader, writer), request)

    async def _use(self, connection: _Connection, request: bytes) -> bytes:
        keeps = False
        try:
            body = await connection.exchange(request)
            keeps = connection.stays_open and len(self._idle) < self._max_idle
        finally:
            if keeps:
                self._idle.append(connection)
            else:
                connection.close()
        return body


class _Connection:
    """One connection; used for one question at a time. Also what its parser calls back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser: Any = None
        self._body: list[bytes] = []
        self._num_bytes = 0
        self._is_complete = False
        self.stays_open = False

    async def exchange(self, request: bytes) -> bytes:
        """Send a request; the body of its answer. Raises `JudgeError` for another status or no HTTP."""
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._num_bytes, self._is_complete = [], 0, False
        self._writer.write(request)
        await self._writer.drain()
        try:
            while not self._is_complete:
                data = await self._reader.read(65_536)
                if not data:
                    raise EOFError("the connection was closed")
                self._parser.feed_data(data)
                if self._num_bytes > MAX_ANSWER_BYTES:
                    raise JudgeError(f"the service answered with more than {MAX_ANSWER_BYTES} bytes")
        except httptools.HttpParserError as error:
            raise JudgeError(f"the service answered with no HTTP: {error}") from None
        status = self._parser.get_status_code()
        self.stays_open = bool(self._parser.should_keep_alive())
        if status != _OK:
            raise JudgeError(f"the service answered with status {status}", is_refusal=status in _REFUSALS)
        return b"".join(self._body)

    def close(self) -> None:
        """Close it at once."""
        self._writer.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._num_bytes += len(body)
        if self._num_bytes <= MAX_ANSWER_BYTES:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._is_complete = True


def read_verdict(body: bytes) -> Verdict:
    """The verdict in the body of an answer. Raises `JudgeError`."""
    try:
        reply = _REPLY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JudgeError(f"the service answered with no verdict: {error}") from None
    if reply.action == "stop":
        return Stop(reply.reason)
    return Replace(tuple(reply.texts), reply.reason) if reply.action == "replace" else ALLOW
