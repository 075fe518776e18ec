"""The public gRPC service for clients: it translates between protobuf and the gateway, and decides nothing.

The call's deadline is the request's deadline; however a call ends, leaving its scope cancels what still runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

import grpc
from typing_extensions import override

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import CALLER
from disagg.gateway.calls import Calls, Origin, Times
from disagg.gateway.event_loop.shell.loop_watch import name_task
from disagg.gateway.event_loop.shell.stall import StalledError, StallWatch
from disagg.gateway.event_loop.shell.turns import run_cooperatively
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.requests.headers import HEADER as TRACE_METADATA
from disagg.gateway.requests.headers import LABEL, REQUEST_ID, SESSION, child_of, parent_span, read_label
from disagg.gateway.requests.request import GenerationInput, Prompt
from disagg.gateway.requests.validate import check_chat, check_session, check_targets, check_text
from disagg.gateway.requests.values import check_ids, check_length
from disagg.gateway.rpc.protobuf import read_request, read_turns, write_delta, write_finish, write_logprobs
from disagg.gateway.status import abort_on_error
from disagg.proto.errors import InvalidRequestError, RequestCancelledError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class _Begun(NamedTuple):
    """A call whose initial metadata is sent; see `Origin`."""

    request_id: RequestId
    trace_parent: str
    parent_span: str


class InferenceService(pb_grpc.InferenceServiceServicer):
    """`disagg.v1.InferenceService`.

    Args:
        calls: answer requests.
        mint_id: a request id that was never used.
        clock: the generators' clock.
        mint_trace_bits: 192 random bits, see `child_of`.
        write_timeout_s: how long a client may leave a message unread.
    """

    def __init__(
        self,
        calls: Calls,
        mint_id: Callable[[], RequestId],
        clock: Callable[[], float],
        mint_trace_bits: Callable[[], int],
        *,
        write_timeout_s: float,
    ) -> None:
        self._calls = calls
        self._models = calls.models
        self._mint_id = mint_id
        self._clock = clock
        self._mint_trace_bits = mint_trace_bits
        self._write_timeout_s = write_timeout_s

    @override
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        begun = await self._begin(context)
        async with abort_on_error(context, begun.request_id), self._calls.open(_origin(begun)) as scope:
            given = await _read(scope.find(request.model), request)
            times = self._times(context)
            async with StallWatch(self._write_timeout_s) as watch:
                last, num_left = None, given.n or 1
                async for event in scope.events(await scope.admit([given], times=times)):
                    num_left -= isinstance(event, Finish)
                    if num_left <= 0:
                        last = _response(event)
                    else:
                        await self._write(context, _response(event), watch)
                await scope.finished()
                if last is not None:
                    await self._write(context, last, watch)

    @override
    async def GenerateOnce(self, request: pb.GenerateOnceRequest, context: Context) -> pb.GenerateOnceResponse:
        begun = await self._begin(context)
        answer = pb.GenerateOnceResponse()
        async with abort_on_error(context, begun.request_id), self._calls.open(_origin(begun)) as scope:
            given = await _read(scope.find(request.request.model), request.request)
            if given.n is not None and given.n > 1:
                raise InvalidRequestError("n", "GenerateOnce gives one answer; Generate gives several")
            if given.resumed is not None:
                raise InvalidRequestError("resume", "GenerateOnce gives whole answers; Generate continues one")
            await _gather(scope.events(await scope.admit([given], times=self._times(context))), answer)
            await scope.finished()
        return answer

    @override
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        infos = (generator.model.info for generator in self._models.allowed(CALLER.get()))
        return pb.ListModelsResponse(
            models=[
                pb.Model(name=info.name, max_model_len=info.max_model_len, vocab_size=info.vocab_size) for info in infos
            ]
        )

    @override
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with abort_on_error(context):
            generator = self._models.find(CALLER.get(), request.model)
            limits = generator.limits
            kind = request.WhichOneof("input")
            if kind is None:
                raise InvalidRequestError("input", "one of text and chat must be set")
            prompt: Prompt
            if kind == "text":
                prompt = check_text(request.text, "text", limits)
            else:
                prompt = check_chat(await run_cooperatively(read_turns(request.chat)), limits)
            return pb.TokenizeResponse(token_ids=await generator.tokenize(prompt))

    @override
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with abort_on_error(context):
            generator = self._models.find(CALLER.get(), request.model)
            limits = generator.limits
            check_length(len(request.token_ids), "token_ids", generator.max_listed_ids)
            token_ids = check_ids(request.token_ids, "token_ids", limits.model.vocab_size)
            return pb.DetokenizeResponse(text=await generator.detokenize(token_ids))

    async def _begin(self, context: Context) -> _Begun:
        """Mint the id, and a span where the caller has one; send them, with the client's label, before anything can
        fail."""
        request_id, trace_parent, parent = self._mint_id(), "", ""
        name_task(request_id)
        metadata = [(REQUEST_ID, str(request_id))]
        given = _firsts(context, LABEL, TRACE_METADATA)
        if label := read_label(given.get(LABEL)):
            metadata.append((LABEL, label))
        if TRACE_METADATA in given:
            trace_parent = child_of(given[TRACE_METADATA], self._mint_trace_bits())
            parent = parent_span(given[TRACE_METADATA])
            metadata.append((TRACE_METADATA, trace_parent))
        await context.send_initial_metadata(tuple(metadata))
        return _Begun(request_id, trace_parent, parent)

    def _times(self, context: Context) -> Times:
        """Deadline and targets of the call's metadata. Raises `InvalidRequestError` for wrong targets."""
        time_left_s = context.time_remaining()
        return Times(
            deadline=None if time_left_s is None else self._clock() + time_left_s,
            targets=check_targets(context.invocation_metadata() or ()),
            in_session=check_session(_firsts(context, SESSION).get(SESSION, ""), SESSION),
        )

    async def _write(self, context: Context, response: pb.GenerateResponse, watch: StallWatch) -> None:
        """Send one message; returns when the client's flow control took it. Raises `UnavailableError` where that takes
        too long."""
        try:
            with watch:
                await context.write(response)
        except grpc.aio.InternalError as error:
            raise RequestCancelledError("the client is gone") from error
        except StalledError:
            raise UnavailableError(f"nothing was read for {self._write_timeout_s:g} s", "stream_lost") from None


def _origin(begun: _Begun) -> Origin:
    return Origin(
        request_id=begun.request_id,
        caller=CALLER.get(),
        protocol="grpc",
        trace_parent=begun.trace_parent,
        parent_span=begun.parent_span,
    )


async def _read(generator: Generator, request: pb.GenerateRequest) -> GenerationInput:
    return await run_cooperatively(read_request(request, generator.limits.model))


def _firsts(context: Context, *keys: str) -> dict[str, str]:
    """The first value of each of `keys` that is in the call's metadata."""
    found: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if key in keys:
            found.setdefault(key, str(value))
    return found


async def _gather(events: AsyncGenerator[Delta | Finish, None], answer: pb.GenerateOnceResponse) -> None:
    """Read the events of one answer into `answer`."""
    texts: list[str] = []
    reasoning: list[str] = []
    async for event in events:
        if isinstance(event, Finish):
            answer.finished.CopyFrom(write_finish(event))
        else:
            answer.token_ids.extend(event.token_ids)
            answer.logprobs.extend(write_logprobs(event.logprobs))
            texts.append(event.text)
            reasoning.append(event.reasoning)
    answer.text = "".join(texts)
    answer.reasoning = "".join(reasoning)


def _response(event: Delta | Finish) -> pb.GenerateResponse:
    if isinstance(event, Finish):
        return pb.GenerateResponse(finished=write_finish(event))
    return pb.GenerateResponse(delta=write_delta(event))
