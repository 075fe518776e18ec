"""`/v1/chat/completions` and `/v1/completions`: a body becomes calls of the generator, their events become JSON.

    body ──> ParsedCall ──> one run of the generator for each prompt, merged ──> a stream of chunks, or one answer

A stream's status waits for the first event, so that whatever is wrong before has a status of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import msgspec

from disagg.gateway.answers.generator import Delta, Finish, Generator
from disagg.gateway.answers.merge import merge
from disagg.gateway.auth.auth import CALLER, Caller
from disagg.gateway.event_loop.turns import in_pieces
from disagg.gateway.http.exchange import BodyLimits, Exchange
from disagg.gateway.http.quota_headers import quota_headers
from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.gateway.models.models import Models
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
from disagg.gateway.openai.to_input import FieldNames, ParsedCall, read_chat, read_completion
from disagg.gateway.openai.tool_choices import ToolChoices
from disagg.gateway.readiness import Readiness
from disagg.gateway.requests.charge import Charge
from disagg.gateway.requests.part_counts import Pieces
from disagg.gateway.requests.request import Call, GenerationInput, IdsPrompt, TextPrompt
from disagg.gateway.requests.validate import (
    CheckedRequest,
    check_millis,
    check_other_prompt,
    check_request,
    check_targets,
)
from disagg.gateway.text.tokenizer import Tokenizer
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.proto.errors import DisaggError, InvalidRequestError
from disagg.proto.ids import RequestId

TIMEOUT_HEADER: Final = "x-request-timeout-ms"
"""How long the complete answer may take, in milliseconds."""
_CHAT: Final = msgspec.json.Decoder(ChatBody)
_TEXT: Final = msgspec.json.Decoder(CompletionBody)

Events = AsyncGenerator[Delta | Finish, None]
P = TypeVar("P", bound=ParsedCall)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the two ways to generate."""

    read: Callable[[bytes], Pieces[ParsedCall]]
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
        models: answer prompts.
        metrics: counts the calls.
        readiness: whether new ones are taken.
        limits: of bodies.
        mint_id: a request id that was never used, for all prompts of a call but the first.
        clock: the generator's.
        wall_clock: seconds since 1970.
        usage: records what the calls use.
    """

    def __init__(
        self,
        models: Models,
        metrics: GatewayMetrics,
        readiness: Readiness,
        limits: BodyLimits,
        mint_id: Callable[[], RequestId],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        usage: UsageRecorder,
    ) -> None:
        self._usage = usage
        self.models = models
        self._metrics = metrics
        self._readiness = readiness
        self.limits = limits
        self._mint_id = mint_id
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
        read: Callable[[bytes], Pieces[P]],
        write: Callable[[Generator, Exchange, P, Call, Events], Awaitable[None]],
    ) -> None:
        """Answer a call of another API, with one prompt and one answer: `read` has its body, `write` its answer. Raises
        whatever is wrong with it."""
        async with self._counted(exchange, request_id) as call:
            if exchange.headers.get(HEADER):
                raise InvalidRequestError(HEADER, "streams of this API cannot be resumed")
            generator, parsed = await self._read(exchange, call, read)
            checked = await in_pieces(_check(generator, parsed))
            run = self._recorded(self._run(generator, parsed, call, None, checked), call)
            async with exchange.until_disconnect(), aclosing(run) as events:
                await write(generator, exchange, parsed, call, events)

    async def _recorded(self, run: Events, call: Call) -> Events:
        """The events of a call, whose use is recorded before they end."""
        async with aclosing(run) as events:
            async for event in events:
                yield event
        await self._usage.finished(call)

    async def line(self, endpoint: str, body: bytes, call: Call) -> bytes:
        """The answer to a line of a batch: the body that a request to `endpoint` would get. Raises as that."""
        kind = _KINDS["chat" if endpoint == "/v1/chat/completions" else "text"]

        async def whole(generator: Generator, parsed: ParsedCall, call: Call, events: Events) -> bytes:
            return await self._whole(generator, parsed, call, kind, events)

        return await self.run_line(body, call, kind.read, whole)

    async def run_line(
        self,
        body: bytes,
        call: Call,
        read: Callable[[bytes], Pieces[P]],
        whole: Callable[[Generator, P, Call, Events], Awaitable[bytes]],
    ) -> bytes:
        """As `line`, of an API whose bodies `read` reads and whose answers `whole` makes."""
        if len(body) > self.limits.max_bytes:
            raise InvalidRequestError("body", f"must have at most {self.limits.max_bytes} bytes")
        generator, parsed = self._accepted(await self.limits.decode(body, read), call)
        if parsed.stream:
            raise InvalidRequestError("stream", "a line of a batch is answered whole")
        call = replace(call, priority=min(call.priority, parsed.priority))
        checked = await in_pieces(_check(generator, parsed))
        call.use.model = generator.model.info.name
        with _charged(generator, parsed, call) as charge:
            checked = await _guarded(generator, parsed, checked, call)
            async with aclosing(self._run(generator, parsed, call, charge, checked)) as events:
                return await whole(generator, parsed, call, events)

    async def _answer(self, exchange: Exchange, request_id: RequestId, kind: _Kind) -> None:
        async with self._counted(exchange, request_id) as call:
            generator, parsed = await self._read(exchange, call, kind.read)
            call = replace(call, priority=_within(call.caller, parsed.priority))
            position = _position(generator, exchange, parsed)
            if position is not None:
                given = replace(parsed.inputs[0], seed=position.seed, model_version=position.model_version)
                parsed = replace(parsed, inputs=(given,))
            checked = await in_pieces(_check(generator, parsed))
            call.use.model = generator.model.info.name
            with _charged(generator, parsed, call) as charge:
                if len(checked) > 1:
                    async with exchange.until_disconnect():
                        checked = await _guarded(generator, parsed, checked, call)
                run = self._run(generator, parsed, call, charge, checked)
                if position is not None and (position.num_tokens or position.num_chars):
                    call.use.continues = True
                    run = rest_after(run, replace(position), call.use.note_had)
                async with exchange.until_disconnect(), aclosing(run) as events:
                    await self._write(generator, exchange, parsed, call, kind, events, position)

    @asynccontextmanager
    async def _counted(self, exchange: Exchange, request_id: RequestId) -> AsyncGenerator[Call, None]:
        """Inside, a call is answered; it counts, and its use is recorded."""
        with self._metrics.counted("http"), self._readiness.answering():
            call = self._call(exchange, request_id)
            if (only := self.models.only) is not None:
                exchange.late_headers = lambda: quota_headers(only.quota(call.caller))
            async with self._usage.counted(call):
                yield call

    async def _read(self, exchange: Exchange, call: Call, read: Callable[[bytes], Pieces[P]]) -> tuple[Generator, P]:
        """As `_accepted`, of the body; from here on headers have what is left at that model."""
        generator, parsed = self._accepted(await self.limits.read(exchange, read), call)
        exchange.late_headers = lambda: quota_headers(generator.quota(call.caller))
        return generator, parsed

    def _accepted(self, parsed: P, call: Call) -> tuple[Generator, P]:
        """The generator of the model, and the call of somebody who may use it; with the functions that may be called,
        and the grammar of calls where there must be some: the model's format is known here. Raises as `Models.find`."""
        generator = self.models.find(call.caller, parsed.inputs[0].model)
        tools = parsed.tools
        if tools is None:
            return generator, parsed
        structure = tools.structure(generator.model.tokenizer.tool_format)
        inputs = tuple(
            replace(given, functions=tools.names, structured=structure or given.structured) for given in parsed.inputs
        )
        return generator, replace(parsed, inputs=inputs)

    async def _write(
        self,
        generator: Generator,
        exchange: Exchange,
        parsed: ParsedCall,
        call: Call,
        kind: _Kind,
        events: Events,
        position: Position | None,
    ) -> None:
        if not parsed.stream:
            body = await self._whole(generator, parsed, call, kind, events)
            await self._usage.finished(call)
            await exchange.respond(200, body)
            return
        style, choices, usage, echoes = await self._form(generator, parsed, call, kind)
        most = parsed.inputs[0].max_tokens
        writer = StreamWriter(style, choices, usage, most, echoes, position)
        await _stream(exchange, events, writer, lambda: self._usage.finished(call))

    async def _whole(self, generator: Generator, parsed: ParsedCall, call: Call, kind: _Kind, events: Events) -> bytes:
        """A complete answer as JSON."""
        answer = AnswerWriter(*await self._form(generator, parsed, call, kind), parsed.num_shown)
        async for event in events:
            answer.add(event)
        if answer.num_prompt_bytes:
            return await generator.offload(answer.num_prompt_bytes, answer.encode)
        return answer.encode()

    async def _form(
        self, generator: Generator, parsed: ParsedCall, call: Call, kind: _Kind
    ) -> tuple[Style, Choices, UsageCount, tuple[str, ...]]:
        """How an answer is written, and the texts of the prompts before it."""
        echoes = tuple([await _text_of(generator, given) for given in parsed.inputs]) if parsed.echo else ()
        given, tokenizer = parsed.inputs[0], generator.model.tokenizer
        style = Style(
            call_id=f"{kind.id_prefix}{call.request_id}",
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

    def _call(self, exchange: Exchange, request_id: RequestId) -> Call:
        """The call's settings from its headers. Raises `InvalidRequestError`."""
        headers = exchange.headers
        timeout_ms = headers.get(TIMEOUT_HEADER)
        return Call(
            request_id=request_id,
            deadline=None if timeout_ms is None else self._clock() + check_millis(TIMEOUT_HEADER, timeout_ms) / 1000,
            targets=check_targets(headers.items()),
            caller=CALLER.get(),
            trace_parent=exchange.trace_parent,
            parent_span=exchange.parent_span,
        )

    def _run(
        self,
        generator: Generator,
        parsed: ParsedCall,
        call: Call,
        charge: Charge | None,
        checked: Sequence[CheckedRequest],
    ) -> Events:
        """The events of all prompts; choices are counted through."""
        call.use.num_prompts = len(parsed.inputs)
        prompts = zip(parsed.inputs, checked, parsed.names, strict=True)
        runs = [
            _run_one(generator, given, one, names, call if i == 0 else call.for_another(self._mint_id()), charge)
            for i, (given, one, names) in enumerate(prompts)
        ]
        if len(runs) == 1:
            return runs[0]
        return merge([_shifted(run, i * parsed.answers_each) for i, run in enumerate(runs)])


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


def _check(generator: Generator, parsed: ParsedCall) -> Pieces[list[CheckedRequest]]:
    """All prompts, which share all but themselves. Where there are several, or something is done before they run,
    one that is wrong would else end a stream that has begun. Yields between pieces of work."""
    checked: list[CheckedRequest] = []
    for given, names in zip(parsed.inputs, parsed.names, strict=True):
        try:
            if checked:
                yield
                checked.append(check_other_prompt(checked[0], given, generator.limits))
            else:
                checked.append(check_request(given, generator.limits))
        except InvalidRequestError as error:
            raise names.rename(error) from None
    return checked


async def _guarded(
    generator: Generator, parsed: ParsedCall, checked: list[CheckedRequest], call: Call
) -> list[CheckedRequest]:
    """Guardrails look at all of several prompts before one runs: one that is refused would else end a stream that has
    begun."""
    if len(checked) == 1:
        return checked  # looked at when it runs
    found = []
    for one, names in zip(checked, parsed.names, strict=True):
        try:
            found.append(await generator.guarded(one, call))
        except InvalidRequestError as error:
            raise names.rename(error) from None
    return found


@contextmanager
def _charged(generator: Generator, parsed: ParsedCall, call: Call) -> Iterator[Charge | None]:
    """Several prompts are charged together, so that they are refused together. Raises `LimitError`."""
    charge = generator.charge(parsed.inputs, call.caller) if len(parsed.inputs) > 1 else None
    try:
        yield charge
    finally:
        if charge is not None:
            charge.close()


async def _run_one(
    generator: Generator,
    given: GenerationInput,
    checked: CheckedRequest,
    names: FieldNames,
    call: Call,
    charge: Charge | None,
) -> Events:
    try:
        async with aclosing(generator.run(given, call, charge, checked)) as events:
            async for event in events:
                yield event
    except InvalidRequestError as error:
        raise names.rename(error) from None


async def _text_of(generator: Generator, given: GenerationInput) -> str:
    if isinstance(given.prompt, TextPrompt):
        return given.prompt.text
    assert isinstance(given.prompt, IdsPrompt)
    return await generator.detokenize(given.prompt.token_ids)


def _within(caller: Caller, priority: int) -> int:
    """A priority that the caller's key allows, as the router would make it."""
    limit = caller.limits.max_priority
    return priority if limit is None else min(priority, limit)


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


async def _shifted(events: Events, first_index: int) -> Events:
    """The events of one prompt among several."""
    async with aclosing(events):
        async for event in events:
            yield replace(event, answer_index=first_index + event.answer_index)
