"""The public gRPC service for clients: it translates between protobuf and the gateway, and decides nothing.

The call's deadline is the request's deadline; a call that ends in any other way than its own closes the
generator, which cancels.
"""

# ruff: noqa: N802 - the methods are named in the proto

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from disagg.proto.errors import InvalidRequestError, RequestCancelledError
from disagg.proto.ids import RequestId
from disagg.router.gateway.generation import Delta, Finish, Generator
from disagg.router.gateway.status import answered
from disagg.router.gateway.validate import check_chat, check_ids, check_model, check_targets, check_text
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

LABEL_METADATA = "x-request-id"
"""A client's own label; it comes back as it was and means nothing here."""
REQUEST_ID_METADATA = "x-disagg-request-id"
"""Our id of the request, from the start of the answer."""
_MAX_LABEL_CHARS = 256
_BYTES_PER_ID = 4

Context = grpc.aio.ServicerContext[Any, Any]

_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class InferenceService(pb_grpc.InferenceServiceServicer):
    """`disagg.v1.InferenceService`.

    Args:
        generator: answers requests.
        mint_id: a request id that was never used.
        clock: the generator's clock.
    """

    def __init__(self, generator: Generator, mint_id: Callable[[], RequestId], clock: Callable[[], float]) -> None:
        self._generator = generator
        self._mint_id = mint_id
        self._clock = clock

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """See the proto."""
        request_id = await self._begin(context)
        async with answered(context, request_id), aclosing(self._run(request, request_id, context)) as events:
            async for event in events:
                await _write(context, _response(event))

    async def GenerateOnce(self, request: pb.GenerateOnceRequest, context: Context) -> pb.GenerateOnceResponse:
        """See the proto."""
        request_id = await self._begin(context)
        answer = pb.GenerateOnceResponse()
        texts: list[str] = []
        async with answered(context, request_id), aclosing(self._run(request.request, request_id, context)) as events:
            async for event in events:
                if isinstance(event, Finish):
                    answer.finished.CopyFrom(_finished(event))
                else:
                    answer.token_ids.extend(event.token_ids)
                    texts.append(event.text)
        answer.text = "".join(texts)
        return answer

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """See the proto."""
        info = self._generator.model.info
        model = pb.Model(name=info.name, max_model_len=info.max_model_len, vocab_size=info.vocab_size)
        return pb.ListModelsResponse(models=[model])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """See the proto."""
        async with answered(context):
            limits = self._generator.limits
            check_model(request.model, limits)
            kind = request.WhichOneof("input")
            if kind is None:
                raise InvalidRequestError("input", "one of text and chat must be set")
            prompt = check_text(request.text, "text", limits) if kind == "text" else check_chat(request.chat, limits)
            return pb.TokenizeResponse(token_ids=await self._generator.tokenize(prompt))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """See the proto."""
        async with answered(context):
            model, limits = self._generator.model, self._generator.limits
            check_model(request.model, limits)
            token_ids = check_ids(request.token_ids, "token_ids", model.info.vocab_size)
            num_bytes = _BYTES_PER_ID * len(token_ids)
            text = await self._generator.offload(num_bytes, lambda: model.tokenizer.decode(token_ids))
            return pb.DetokenizeResponse(text=text)

    async def _begin(self, context: Context) -> RequestId:
        """Mint the id and tell it, with the client's label, before anything can fail."""
        request_id = self._mint_id()
        metadata = [(REQUEST_ID_METADATA, str(request_id))]
        for key, value in context.invocation_metadata() or ():
            if key == LABEL_METADATA:
                metadata.append((LABEL_METADATA, str(value)[:_MAX_LABEL_CHARS]))
                break
        await context.send_initial_metadata(tuple(metadata))
        return request_id

    def _run(
        self, request: pb.GenerateRequest, request_id: RequestId, context: Context
    ) -> AsyncGenerator[Delta | Finish, None]:
        """The answer, under the call's deadline and targets. Raises `InvalidRequestError` for wrong targets."""
        time_left_s = context.time_remaining()
        deadline = None if time_left_s is None else self._clock() + time_left_s
        return self._generator.run(request, request_id, deadline, check_targets(context.invocation_metadata() or ()))


async def _write(context: Context, response: pb.GenerateResponse) -> None:
    """Send one message; returns when the client's flow control took it."""
    try:
        await context.write(response)
    except grpc.aio.InternalError as error:
        raise RequestCancelledError("the client is gone") from error


def _response(event: Delta | Finish) -> pb.GenerateResponse:
    if isinstance(event, Finish):
        return pb.GenerateResponse(finished=_finished(event))
    return pb.GenerateResponse(
        delta=pb.TokenDelta(first_index=event.first_index, token_ids=event.token_ids, text=event.text)
    )


def _finished(finish: Finish) -> pb.Finished:
    usage = pb.Usage(
        prompt_tokens=finish.num_prompt_tokens,
        cached_tokens=finish.num_cached_tokens,
        completion_tokens=finish.num_output_tokens,
    )
    return pb.Finished(reason=_REASONS[finish.reason], usage=usage, request_id=finish.request_id)
