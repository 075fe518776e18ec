"""`/v1/chat/completions` and `/v1/completions`: a body becomes a call, the events of its answers become JSON.

    body ──> ParsedCall ──> CallScope ──> a stream of chunks, or one answer

A stream's status waits for the first event, so that whatever is wrong before has a status of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import msgspec

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import CALLER
from disagg.gateway.calls import Calls, CallScope, Events, Origin, Times
from disagg.gateway.http.quota_headers import quota_headers
from disagg.gateway.http.shell.exchange import BodyLimits, Exchange
from disagg.gateway.openai.chunks import (
    AnswerWriter,
    ChatChoices,
    Choices,
    StreamWriter,
    Style,
    TextChoices,
    UsageCount,
)
from disagg.gateway.openai.order import tier_of
from disagg.gateway.openai.resume import BEGINNING, HEADER, Position, read_position, rest_after
from disagg.gateway.openai.schema import ChatBody, CompletionBody, decoded
from disagg.gateway.openai.to_input import ParsedCall, read_chat, read_completion
from disagg.gateway.openai.tool_choices import ToolChoices
from disagg.gateway.requests.answer_events import Finish
from disagg.gateway.requests.headers import SESSION, TIMEOUT
from disagg.gateway.requests.part_counts import Cooperative
from disagg.gateway.requests.request import GenerationInput, IdsPrompt, TextPrompt
from disagg.gateway.requests.validate import check_millis, check_session, check_targets
from disagg.gateway.text.tokenizer import Tokenizer
from disagg.proto.errors import DisaggError, InvalidRequestError
from disagg.proto.ids import RequestId

_CHAT: Final = msgspec.json.Decoder(ChatBody)
_TEXT: Final = msgspec.json.Decoder(CompletionBody)

P = TypeVar("P", bound=ParsedCall)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the two ways to generate."""

    read: Callable[[bytes], Cooperative[ParsedCall]]
    """Yields between pieces of work."""
    choices: Callable[[Tokenizer], Choices]
    id_prefix: str


_KINDS: Final = {
    "chat": _Kind(lambda raw: decoded(raw, _CHAT, read_chat), ChatChoices, "chatcmpl-"),
    "text": _Kind(lambda raw: decoded(raw, _TEXT, read_completion), TextChoices, "cmpl-"),
}


class Completions:
    """Handlers.

    Args:
        calls: answer prompts.
        limits: of bodies.
        clock: the generators'.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self, calls: Calls, limits: BodyLimits, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._calls = calls
        self.models = calls.models
        self.limits = limits
        self._clock = clock
        self.wall_clock = wall_clock

    async def chat(self, exchange: Exchange, request_id: RequestId) -> None:
        """`POST /v1/chat/completions`."""
        await self._answer(exchange, request_id, _KINDS["chat"])

    async def text(self, exchange: Exchange, request_id: RequestId) -> None:
        """`POST /v1/completions`."""
        await self._answer(exchange, request_id, _KINDS["text"])

    async def run(
        self,
        exchange: Exchange,
        request_id: RequestId,
        read: Callable[[bytes], Cooperative[P]],
        write: Callable[[Exchange, CallScope, P, Events], Awaitable[None]],
        id_prefix: str,
    ) -> None:
        """Answer a call of another API, with one prompt and one answer: `read` has its body, `write` its answer, whose
        id begins with `id_prefix`. Raises whatever is wrong with it."""
        async with self.opened(exchange, request_id, id_prefix) as (scope, times):
            if exchange.headers.get(HEADER):
                raise InvalidRequestError(HEADER, "streams of this API cannot be resumed")
            parsed = await self._read(exchange, scope, read)
            async with exchange.until_disconnect():
                admitted = await scope.admit(parsed.inputs, parsed.names, times)
                await write(exchange, scope, parsed, scope.events(admitted))

    async def line(self, endpoint: str, body: bytes, origin: Origin) -> bytes:
        """The answer to a line of a batch: the body that a request to `endpoint` would get. Raises as that."""
        kind = _KINDS["chat" if endpoint == "/v1/chat/completions" else "text"]

        async def whole(scope: CallScope, parsed: ParsedCall, events: Events) -> bytes:
            return await self._whole(scope, parsed, kind, events)

        return await self.run_line(body, replace(origin, id_prefix=kind.id_prefix), kind.read, whole)

    async def run_line(
        self,
        body: bytes,
        origin: Origin,
        read: Callable[[bytes], Cooperative[P]],
        whole: Callable[[CallScope, P, Events], Awaitable[bytes]],
    ) -> bytes:
        """As `line`, of an API whose bodies `read` reads and whose answers `whole` makes."""
        if len(body) > self.limits.max_bytes:
            raise InvalidRequestError("body", f"must have at most {self.limits.max_bytes} bytes")
        async with self._calls.open(origin) as scope:
            parsed = _for_model(scope, await self.limits.decode(body, read))
            if parsed.stream:
                raise InvalidRequestError("stream", "a line of a batch is answered whole")
            admitted = await scope.admit(parsed.inputs, parsed.names, priority=parsed.priority)
            return await whole(scope, parsed, scope.events(admitted))

    async def _answer(self, exchange: Exchange, request_id: RequestId, kind: _Kind) -> None:
        async with self.opened(exchange, request_id, kind.id_prefix) as (scope, times):
            parsed = await self._read(exchange, scope, kind.read)
            position = _position(scope.generator, exchange, parsed)
            if position is not None:
                given = replace(parsed.inputs[0], seed=position.seed, model_version=position.model_version)
                parsed = replace(parsed, inputs=(given,))
            async with exchange.until_disconnect():
                admitted = await scope.admit(parsed.inputs, parsed.names, times, parsed.priority)
                events = scope.events(admitted)
                if position is not None and (position.num_tokens or position.num_chars):
                    use = scope.call.use
                    use.continues = True
                    events = rest_after(events, replace(position), use.note_had)
                async with aclosing(events):
                    await self._write(exchange, scope, parsed, kind, events, position)

    @asynccontextmanager
    async def opened(
        self, exchange: Exchange, request_id: RequestId, id_prefix: str
    ) -> AsyncGenerator[tuple[CallScope, Times], None]:
        """The scope of a call over HTTP, and what its headers say of its times. Raises `InvalidRequestError` for wrong
        ones."""
        caller = CALLER.get()
        origin = Origin(
            request_id=request_id,
            caller=caller,
            protocol="http",
            max_priority=caller.limits.max_priority,
            trace_parent=exchange.trace_parent,
            parent_span=exchange.parent_span,
            id_prefix=id_prefix,
        )
        async with self._calls.open(origin) as scope:
            times = self._times(exchange)
            if (only := self.models.only) is not None:
                exchange.late_headers = lambda: quota_headers(only.remaining_quota(caller))
            yield scope, times

    def _times(self, exchange: Exchange) -> Times:
        headers = exchange.headers
        timeout_ms = headers.get(TIMEOUT)
        return Times(
            deadline=None if timeout_ms is None else self._clock() + check_millis(TIMEOUT, timeout_ms) / 1000,
            targets=check_targets(headers.items()),
            in_session=check_session(headers.get(SESSION, ""), SESSION),
        )

    async def _read(self, exchange: Exchange, scope: CallScope, read: Callable[[bytes], Cooperative[P]]) -> P:
        """As `_for_model`, of the body; from here on headers have what is left at that model."""
        parsed = _for_model(scope, await self.limits.read(exchange, read))
        exchange.late_headers = lambda: quota_headers(scope.generator.remaining_quota(scope.call.caller))
        return parsed

    async def _write(
        self,
        exchange: Exchange,
        scope: CallScope,
        parsed: ParsedCall,
        kind: _Kind,
        events: Events,
        position: Position | None,
    ) -> None:
        if not parsed.stream:
            body = await self._whole(scope, parsed, kind, events)
            await scope.finished()
            await exchange.respond(200, body)
            return
        style, choices, usage, echoes = await self._form(scope, parsed, kind)
        most = parsed.inputs[0].max_tokens
        writer = StreamWriter(style, choices, usage, most, echoes, position)
        await _stream(exchange, events, writer, scope.finished)

    async def _whole(self, scope: CallScope, parsed: ParsedCall, kind: _Kind, events: Events) -> bytes:
        """A complete answer as JSON."""
        answer = AnswerWriter(*await self._form(scope, parsed, kind), parsed.num_shown)
        async for event in events:
            answer.add(event)
        if answer.num_prompt_bytes:
            return await scope.generator.offload(answer.num_prompt_bytes, answer.encode)
        return answer.encode()

    async def _form(
        self, scope: CallScope, parsed: ParsedCall, kind: _Kind
    ) -> tuple[Style, Choices, UsageCount, tuple[str, ...]]:
        """How an answer is written, and the texts of the prompts before it."""
        generator, call = scope.generator, scope.call
        echoes = tuple([await _text_of(generator, given) for given in parsed.inputs]) if parsed.echo else ()
        given, tokenizer = parsed.inputs[0], generator.model.tokenizer
        style = Style(
            call_id=call.response_id,
            created=int(self.wall_clock()),
            model=given.model,
            tokenizer=tokenizer,
            with_logprobs=parsed.shows_logprobs,
            shows_reasoning=parsed.shows_reasoning,
            shows_prompt_logprobs=parsed.shows_prompt_logprobs,
            tier=tier_of(call.priority) if parsed.shows_tier else "",
            include_usage=parsed.include_usage,
            continuous_usage=parsed.continuous_usage,
        )
        choices = kind.choices(tokenizer)
        if parsed.tools is not None:
            choices = ToolChoices(tokenizer, parsed.tools.parallel, call.request_id)
        usage = UsageCount(max(1, parsed.answers_each))
        if given.split_reasoning and tokenizer.reasoning_format != "none":
            usage.reasoning_tokens = {}
        return style, choices, usage, echoes


def _for_model(scope: CallScope, parsed: P) -> P:
    """Find the model of a call. The call with the functions that may be called, and the grammar of calls where there
    must be some: the model's format is known here. Raises as `CallScope.find`."""
    generator = scope.find(parsed.inputs[0].model)
    tools = parsed.tools
    if tools is None:
        return parsed
    structure = tools.structure(generator.model.tokenizer.tool_format)
    inputs = tuple(
        replace(given, functions=tools.names, structured=structure or given.structured) for given in parsed.inputs
    )
    return replace(parsed, inputs=inputs)


def _position(generator: Generator, exchange: Exchange, parsed: ParsedCall) -> Position | None:
    """Where a stream begins that can be resumed; `None` for others. Raises `InvalidRequestError`."""
    if parsed.tools is not None and exchange.headers.get(HEADER):
        raise InvalidRequestError(HEADER, "a stream with tools cannot be resumed")
    event_id, seed = exchange.headers.get(HEADER), parsed.inputs[0].seed
    given = parsed.inputs[0]
    if parsed.stream and len(parsed.inputs) == 1 and (given.n or 1) == 1 and given.logprobs is None:
        if event_id == BEGINNING:
            return Position(generator.mint_seed() if seed is None else seed)
        if event_id:
            return read_position(event_id, seed)
    elif event_id:
        raise InvalidRequestError(HEADER, "continues a stream of one answer without logprobs only")
    return None


async def _text_of(generator: Generator, given: GenerationInput) -> str:
    if isinstance(given.prompt, TextPrompt):
        return given.prompt.text
    assert isinstance(given.prompt, IdsPrompt)
    return await generator.detokenize(given.prompt.token_ids)


async def _stream(
    exchange: Exchange, events: Events, writer: StreamWriter, before_end: Callable[[], Awaitable[None]]
) -> None:
    """Write the events as they come. What is written last goes with the end of the stream, after `before_end`."""
    rest = b""
    try:
        async for event in events:
            if not exchange.started:
                await exchange.start_stream()
            if isinstance(event, Finish):
                rest += writer.finish(event)
                continue
            data = rest + writer.delta(event)
            rest = b""
            if data:
                await exchange.write(data)
    except DisaggError:
        if exchange.started and not exchange.ended and (data := rest + writer.flush()):
            await exchange.write(data)
        raise
    await before_end()
    await exchange.end(rest + writer.last())
