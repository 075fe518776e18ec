"""The Python client of a disagg gateway, blocking and asyncio.

    from disagg.client import Client

    with Client("127.0.0.1:8470") as client:
        print(client.generate("The capital of France is", max_tokens=16).text)
        for delta in client.stream([{"role": "user", "content": "What is a cache?"}]):
            print(delta.text, end="", flush=True)

A prompt is a text, a list of token ids, or a list of chat messages. A stream starts when it is first asked for a delta; closing it, or
leaving its generator behind, cancels the request. Failed calls raise the errors of `disagg.proto.errors`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack, cast

import grpc
import grpc.aio
from google.protobuf.message import Message as ProtoMessage
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from disagg.proto.errors import (
    DeadlineError,
    ContextLengthError,
    DisaggError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

Message = Mapping[str, str]
"""One turn of a chat: `{"role": "user", "content": "..."}`."""
Prompt = str | Sequence[int] | Sequence[Message]
FinishReason = Literal["stop", "length"]

_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20),)


class Options(TypedDict, total=False):
    """How to generate; what is left out takes the server's default. Meaning and range of each: `proto/disagg/v1/inference.proto`."""

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


_STOPPING = frozenset(pb.StopConditions.DESCRIPTOR.fields_by_name)
_OPTIONS = frozenset(Options.__annotations__)


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
    finished: Finished

    @property
    def reason(self) -> FinishReason:
        """Why it ended."""
        return self.finished.reason

    @property
    def usage(self) -> Usage:
        """What was counted."""
        return self.finished.usage

    @property
    def request_id(self) -> str:
        """For `explain`."""
        return self.finished.request_id


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served."""

    name: str
    max_model_len: int
    """The longest prompt plus answer, in tokens."""
    vocab_size: int


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker as the router sees it."""

    worker_id: str
    roles: tuple[str, ...]
    address: str
    incarnation: str
    pid: int
    sequences: int
    kv_blocks_total: int
    kv_blocks_active: int
    kv_blocks_cached: int
    kv_blocks_reserved: int


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster as the router sees it."""

    workers: tuple[WorkerState, ...]
    queued_requests: int
    running_requests: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a request ran and what moved. Empty names mean that there was no such part."""

    request_id: str
    prefill_worker: str
    decode_worker: str
    transport: str
    kv_bytes: int
    prefill_cached_tokens: int
    decode_cached_tokens: int
    attempts: int
    stages: dict[str, float]
    """Stage -> milliseconds from arrival to its end, in order."""


class Client:
    """A blocking client; its methods may be called from several threads. A context manager that closes the connection.

    Args:
        address: host:port of a gateway.
        credentials: for TLS; plain text without.
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        self._inference = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin = pb_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._default_model: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        request.model = self._model(model)
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
        request.model = self._model(model)
        return _answer(self._call(self._inference.GenerateOnce, pb.GenerateOnceRequest(request=request), timeout_s))

    def models(self) -> list[Model]:
        """The models that can be asked for."""
        return _models(self._call(self._inference.ListModels, pb.ListModelsRequest()))

    def tokenize(self, prompt: str | Sequence[Message], *, model: str | None = None) -> list[int]:
        """The ids that `generate` would use."""
        request = _tokenize_request(prompt)
        request.model = self._model(model)
        return list(self._call(self._inference.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text of ids, special tokens left out."""
        request = pb.DetokenizeRequest(model=self._model(model), token_ids=token_ids)
        return str(self._call(self._inference.Detokenize, request).text)

    def cluster_state(self) -> ClusterState:
        """The workers and their load."""
        return _cluster_state(self._call(self._admin.GetClusterState, pb.GetClusterStateRequest()))

    def explain(self, request_id: str) -> Explanation:
        """Where a recent request ran and what moved. Raises `DisaggError` if the id is not known."""
        request = pb.ExplainRequestRequest(request_id=request_id)
        return _explanation(self._call(self._admin.ExplainRequest, request))

    def _model(self, model: str | None) -> str:
        if model is None and self._default_model is None:
            self._default_model = _first_name(self.models())
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
        credentials: for TLS; plain text without.
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        self._inference = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin = pb_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._default_model: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end as cancelled."""
        await self._channel.close()

    def stream(
        self, prompt: Prompt, *, model: str | None = None, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Delta, None]:
        """See `Client.stream`. Close it with `contextlib.aclosing` when leaving it early."""
        return self._stream(make_request(prompt, options), model, timeout_s)

    async def _stream(
        self, request: pb.GenerateRequest, model: str | None, timeout_s: float | None
    ) -> AsyncGenerator[Delta, None]:
        request.model = await self._model(model)
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
        request.model = await self._model(model)
        once = pb.GenerateOnceRequest(request=request)
        return _answer(await self._call(self._inference.GenerateOnce, once, timeout_s))

    async def models(self) -> list[Model]:
        """See `Client.models`."""
        return _models(await self._call(self._inference.ListModels, pb.ListModelsRequest()))

    async def tokenize(self, prompt: str | Sequence[Message], *, model: str | None = None) -> list[int]:
        """See `Client.tokenize`."""
        request = _tokenize_request(prompt)
        request.model = await self._model(model)
        return list((await self._call(self._inference.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """See `Client.detokenize`."""
        request = pb.DetokenizeRequest(model=await self._model(model), token_ids=token_ids)
        return str((await self._call(self._inference.Detokenize, request)).text)

    async def cluster_state(self) -> ClusterState:
        """See `Client.cluster_state`."""
        return _cluster_state(await self._call(self._admin.GetClusterState, pb.GetClusterStateRequest()))

    async def explain(self, request_id: str) -> Explanation:
        """See `Client.explain`."""
        request = pb.ExplainRequestRequest(request_id=request_id)
        return _explanation(await self._call(self._admin.ExplainRequest, request))

    async def _model(self, model: str | None) -> str:
        if model is None and self._default_model is None:
            self._default_model = _first_name(await self.models())
        return model or self._default_model or ""

    async def _call(self, method: Callable[..., Any], request: ProtoMessage, timeout_s: float | None = None) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
