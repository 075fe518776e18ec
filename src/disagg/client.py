"""The Python client of a disagg gateway, blocking and asyncio.

    from disagg.client import Client

    with Client("127.0.0.1:8470") as client:
        print(client.generate("The capital of France is", max_tokens=16).text)
        for delta in client.stream([{"role": "user", "content": "What is a cache?"}]):
            print(delta.text, end="", flush=True)

A prompt is a text, a list of token ids, or a list of chat messages. A stream starts when it is first asked for a delta,
and closing it early cancels the request. Failed calls raise the errors of `disagg.proto.errors`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, Unpack, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from disagg.proto.errors import (
    ContextLengthError,
    DeadlineError,
    DisaggError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestCancelledError,
    RequestNotFoundError,
    UnavailableError,
)
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

Message = Mapping[str, str]
"""One turn of a chat: `{"role": "user", "content": "..."}`."""
Prompt = str | Sequence[int] | Sequence[Message]
FinishReason = Literal["stop", "length"]

Model = pb.Model
ClusterState = pb.GetClusterStateResponse
Explanation = pb.ExplainRequestResponse

_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20),)


class Options(TypedDict, total=False):
    """How to generate; what is left out takes the server's default. Ranges: see `proto/disagg/v1/inference.proto`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    stop: str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that no worker had to compute."""
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """How an answer ended."""

    reason: FinishReason
    usage: Usage
    request_id: str
    """For `explain`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer: the text and token ids that are new."""

    text: str
    token_ids: tuple[int, ...] = ()
    finished: Finished | None = None
    """Set on the last delta, which has neither text nor ids."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    usage: Usage
    request_id: str
    """For `explain`."""


class Client:
    """A blocking client; its methods may be called from several threads. A context manager that closes the connection.

    Args:
        address: host:port of a gateway.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._inference = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin = pb_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._default_model: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls end as cancelled."""
        self._channel.close()

    def stream(
        self, prompt: Prompt, *, model: str | None = None, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Generator[Delta, None, None]:
        """The answer as it is made.

        Args:
            prompt: text, token ids or chat messages.
            model: a name of `models`; the first one by default.
            timeout_s: the request's deadline, in every phase.
            options: see `Options`.

        Raises:
            TypeError, ValueError: if an option or the prompt is not of the right kind.
            DisaggError: while iterating, whatever the server answered.
        """
        return self._stream(make_request(prompt, options), model, timeout_s)

    def _stream(
        self, request: pb.GenerateRequest, model: str | None, timeout_s: float | None
    ) -> Generator[Delta, None, None]:
        request.model = self._model(model, timeout_s)
        call = self._inference.Generate(request, timeout=timeout_s)
        try:
            for response in call:
                yield _delta(response)
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    def generate(
        self, prompt: Prompt, *, model: str | None = None, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """The whole answer. Arguments and errors as for `stream`."""
        request = make_request(prompt, options)
        request.model = self._model(model, timeout_s)
        return _answer(self._call(self._inference.GenerateOnce, pb.GenerateOnceRequest(request=request), timeout_s))

    def models(self) -> list[Model]:
        """The models that can be asked for."""
        return list(self._call(self._inference.ListModels, pb.ListModelsRequest()).models)

    def tokenize(self, prompt: str | Sequence[Message], *, model: str | None = None) -> list[int]:
        """The ids that `generate` would use."""
        request = _tokenize_request(prompt, self._model(model))
        return list(self._call(self._inference.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text of ids, special tokens left out."""
        request = pb.DetokenizeRequest(model=self._model(model), token_ids=token_ids)
        return str(self._call(self._inference.Detokenize, request).text)

    def cluster_state(self) -> ClusterState:
        """The workers and their load."""
        return cast(ClusterState, self._call(self._admin.GetClusterState, pb.GetClusterStateRequest()))

    def explain(self, request_id: str) -> Explanation:
        """Where a recent request ran and what moved. Raises `RequestNotFoundError` if the id is not known."""
        request = pb.ExplainRequestRequest(request_id=request_id)
        return cast(Explanation, self._call(self._admin.ExplainRequest, request))

    def _model(self, model: str | None, timeout_s: float | None = None) -> str:
        if model is None and self._default_model is None:
            self._default_model = _first_name(self._call(self._inference.ListModels, pb.ListModelsRequest(), timeout_s))
        return model or self._default_model or ""

    def _call(self, method: Callable[..., Any], request: ProtoMessage, timeout_s: float | None = None) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error) from error


class AsyncClient:
    """The same for asyncio. Belongs to the event loop that it was made on; an async context manager.

    Args:
        address: host:port of a gateway.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._inference = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin = pb_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._default_model: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end as cancelled."""
        await self._channel.close(None)

    def stream(
        self, prompt: Prompt, *, model: str | None = None, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Delta, None]:
        """See `Client.stream`. Close it with `contextlib.aclosing` when leaving it early."""
        return self._stream(make_request(prompt, options), model, timeout_s)

    async def _stream(
        self, request: pb.GenerateRequest, model: str | None, timeout_s: float | None
    ) -> AsyncGenerator[Delta, None]:
        request.model = await self._model(model, timeout_s)
        call = self._inference.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield _delta(response)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    async def generate(
        self, prompt: Prompt, *, model: str | None = None, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """See `Client.generate`."""
        request = make_request(prompt, options)
        request.model = await self._model(model, timeout_s)
        once = pb.GenerateOnceRequest(request=request)
        return _answer(await self._call(self._inference.GenerateOnce, once, timeout_s))

    async def models(self) -> list[Model]:
        """See `Client.models`."""
        return list((await self._call(self._inference.ListModels, pb.ListModelsRequest())).models)

    async def tokenize(self, prompt: str | Sequence[Message], *, model: str | None = None) -> list[int]:
        """See `Client.tokenize`."""
        request = _tokenize_request(prompt, await self._model(model))
        return list((await self._call(self._inference.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """See `Client.detokenize`."""
        request = pb.DetokenizeRequest(model=await self._model(model), token_ids=token_ids)
        return str((await self._call(self._inference.Detokenize, request)).text)

    async def cluster_state(self) -> ClusterState:
        """See `Client.cluster_state`."""
        return cast(ClusterState, await self._call(self._admin.GetClusterState, pb.GetClusterStateRequest()))

    async def explain(self, request_id: str) -> Explanation:
        """See `Client.explain`."""
        request = pb.ExplainRequestRequest(request_id=request_id)
        return cast(Explanation, await self._call(self._admin.ExplainRequest, request))

    async def _model(self, model: str | None, timeout_s: float | None = None) -> str:
        if model is None and self._default_model is None:
            answer = await self._call(self._inference.ListModels, pb.ListModelsRequest(), timeout_s)
            self._default_model = _first_name(answer)
        return model or self._default_model or ""

    async def _call(self, method: Callable[..., Any], request: ProtoMessage, timeout_s: float | None = None) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error


def make_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """The request without its model. Raises `TypeError` or `ValueError` for what cannot be written as one."""
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_chat(cast(Sequence[Message], prompt)))
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(cast(Sequence[int], prompt))
    for name, value in options.items():
        if name not in Options.__annotations__:
            raise TypeError(f"there is no option {name!r}; there are {', '.join(Options.__annotations__)}")
        try:
            _set_option(request, name, value)
        except (TypeError, ValueError) as error:
            raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}") from error
    return request


def _set_option(request: pb.GenerateRequest, name: str, value: Any) -> None:
    if name in ("stop", "stop_token_ids"):
        getattr(request.stopping, name).extend([value] if isinstance(value, str) else value)
    else:
        is_stopping = name in request.stopping.DESCRIPTOR.fields_by_name
        setattr(request.stopping if is_stopping else request.sampling, name, value)


def error_of(error: grpc.RpcError) -> DisaggError:
    """The error behind a failed call, by its status and the details that came with it."""
    call = cast(grpc.Call, error)
    code, message = call.code().name, call.details() or call.code().name
    found = _details(call)
    info = cast(error_details_pb2.ErrorInfo, found.get("ErrorInfo", error_details_pb2.ErrorInfo()))
    if code == UnavailableError.grpc_code:
        return UnavailableError(message, info.reason or "unreachable")
    if isinstance(bad := found.get("BadRequest"), error_details_pb2.BadRequest) and bad.field_violations:
        kind = ContextLengthError if info.reason == ContextLengthError.code else InvalidRequestError
        return kind(bad.field_violations[0].field, bad.field_violations[0].description)
    if isinstance(retry := found.get("RetryInfo"), error_details_pb2.RetryInfo):
        return OverloadedError(message, retry.retry_delay.ToMilliseconds() / 1000)
    if known := _BY_REASON.get(info.reason) or _BY_CODE.get(code):
        other = known.__new__(known)
        DisaggError.__init__(other, message)  # the server's words, whatever the class would make its own from
        return other
    other = DisaggError(message)
    other.grpc_code, other.code = code, info.reason or code.lower()
    return other


_BY_CODE: dict[str, type[DisaggError]] = {
    kind.grpc_code: kind for kind in (DeadlineError, RequestCancelledError, InternalError)
}
_BY_REASON: dict[str, type[DisaggError]] = {kind.code: kind for kind in (ModelNotFoundError, RequestNotFoundError)}


def _details(call: grpc.Call) -> dict[str, ProtoMessage]:
    """The `google.rpc` details that we know, by name; empty where gRPC itself or a proxy made the status."""
    try:
        status = rpc_status.from_call(call)
    except (ValueError, DecodeError):
        return {}
    found: dict[str, ProtoMessage] = {}
    for packed in status.details if status is not None else ():
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                found[kind.DESCRIPTOR.name] = kind.FromString(packed.value)
    return found


def _chat(messages: Sequence[Message]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(**message) for message in messages])


def _tokenize_request(prompt: str | Sequence[Message], model: str) -> pb.TokenizeRequest:
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, text=prompt)
    return pb.TokenizeRequest(model=model, chat=_chat(prompt))


def _first_name(answer: pb.ListModelsResponse) -> str:
    if not answer.models:
        raise UnavailableError("the gateway serves no model", "no_model")
    return answer.models[0].name


def _delta(response: pb.GenerateResponse) -> Delta:
    if response.HasField("finished"):
        return Delta("", (), _finished(response.finished))
    return Delta(response.delta.text, tuple(response.delta.token_ids))


def _answer(response: pb.GenerateOnceResponse) -> Answer:
    end = _finished(response.finished)
    return Answer(response.text, tuple(response.token_ids), end.reason, end.usage, end.request_id)


def _finished(finished: pb.Finished) -> Finished:
    usage = finished.usage
    return Finished(
        "stop" if finished.reason == pb.FINISH_REASON_STOP else "length",
        Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        finished.request_id,
    )
