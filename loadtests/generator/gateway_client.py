"""Calls `Generate` of disagg.v1 from greenlets: blocking stubs under gevent, with as little work per token as possible.

`init_gevent` must have run before this module makes a channel (see locustfile.py). gRPC then waits for each event of a
channel in a native thread and hands it to a greenlet, which costs about 80 us a message; so nothing else may happen per
message. A message is stamped and kept as bytes where gRPC would deserialize it, which is the first Python code that
sees it; protobuf comes in when the stream has ended.

API key, certificates and TLS are those of every client of disagg: see `disagg.client.credentials`.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import grpc
from google.protobuf.message import DecodeError

from disagg.client.credentials import Credentials
from disagg.loadtests.records import PlannedRequest, Status
from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import InferenceServiceStub

Metadata = tuple[tuple[str, str], ...]
Stamped = tuple[float, bytes]
"""Arrival time of a message, and the message."""

_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
_GENERATE = f"/{_SERVICE.full_name}/{_SERVICE.methods_by_name['Generate'].name}"
_DIGEST_BYTES = 8
_REASON_TIMEOUT_S = 2.0

_STATUS: dict[grpc.StatusCode, Status] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
}
"""Status by code; every other code is `failed`."""


class Answer(NamedTuple):
    """Result of one request; times are those of `clock`."""

    status: Status
    token_ids: tuple[int, ...]
    token_times_s: tuple[float, ...]
    end_s: float
    cached_tokens: int = 0
    request_id: str = ""
    error: str = ""

    @property
    def digest(self) -> str:
        """Hash of the output token ids; empty if there are none."""
        return digest(self.token_ids)


def clock() -> float:
    """Time in seconds on the clock of all times here."""
    return time.perf_counter()


def digest(token_ids: Sequence[int]) -> str:
    """BLAKE2b, 64 bits as hex, of the ids as little-endian 32-bit words; empty without ids."""
    if not token_ids:
        return ""
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=_DIGEST_BYTES).hexdigest()


def request_bytes(planned: PlannedRequest, model: str, before: Sequence[int] = ()) -> bytes:
    """Encode a planned request: greedy, with its output length forced.

    Args:
        planned: the request.
        model: the model's name.
        before: the conversation so far.
    """
    request = pb.GenerateRequest(
        model=model,
        token_ids=pb.TokenIds(ids=[*before, *planned.prompt_token_ids]),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StopConditions(max_tokens=planned.max_tokens, ignore_eos=True),
    )
    return request.SerializeToString()


def _stamp(message: bytes) -> Stamped:
    return time.perf_counter(), message


class GatewayClient:
    """Channels to one gateway, used in turn. Call `close` at the end.

    Args:
        address: host:port.
        credentials: credentials of all calls and connections.
        num_channels: connections; each is polled by a native thread of its own.

    Raises:
        ConfigError: for credentials that cannot be used at that address.
    """

    def __init__(self, address: str, credentials: Credentials, num_channels: int = 1) -> None:
        options = (
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),  # or all channels to one address would share one connection
        )
        tls = credentials.channel(address)
        self._channels = [
            grpc.insecure_channel(address, options=options)
            if tls is None
            else grpc.secure_channel(address, tls, options=options)
            for _ in range(num_channels)
        ]
        self._metadata = credentials.metadata
        self._generate = [self._callable(channel) for channel in self._channels]
        self._next = 0

    @staticmethod
    def _callable(channel: grpc.Channel) -> Callable[..., Iterable[Stamped]]:
        call = channel.unary_stream(_GENERATE, request_serializer=None, response_deserializer=_stamp)
        return cast("Callable[..., Iterable[Stamped]]", call)

    def connect(self, timeout_s: float) -> pb.Model:
        """Wait until all channels are ready, and return the served model.

        Raises:
            ConnectionError: if that takes longer, or no model or several are served.
        """
        for channel in self._channels:
            try:
                grpc.channel_ready_future(channel).result(timeout_s)
            except grpc.FutureTimeoutError:
                why = self._why_unreachable(channel)
                raise ConnectionError(f"no gateway answers within {timeout_s:g} s{why}") from None
        try:
            response = self._list_models(self._channels[0], timeout_s)
        except grpc.RpcError as error:
            step = "; set DISAGG_API_KEY" if error.code() is grpc.StatusCode.UNAUTHENTICATED else ""
            raise ConnectionError(f"the gateway does not list its models ({_describe(error)}){step}") from None
        if not response.models:
            raise ConnectionError("the gateway serves no model")
        if len(response.models) > 1:
            names = ", ".join(model.name for model in response.models)
            raise ConnectionError(
                f"the gateway serves {names}, and a load test is of one model: set DISAGG_API_KEY to a key for one"
            )
        return response.models[0]

    def _list_models(self, channel: grpc.Channel, timeout_s: float) -> pb.ListModelsResponse:
        stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        found: pb.ListModelsResponse = stub.ListModels(
            pb.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata
        )
        return found

    def _why_unreachable(self, channel: grpc.Channel) -> str:
        """The error of a call on a channel that does not connect, such as an unknown certificate, in parentheses."""
        try:
            self._list_models(channel, _REASON_TIMEOUT_S)
        except grpc.RpcError as error:
            return f" ({_describe(error)})"
        return ""

    def generate(self, request: bytes, *, max_tokens: int, timeout_s: float | None, metadata: Metadata) -> Answer:
        """Send a request and read its answer to the end; blocks the greenlet.

        An answer with another number of tokens than `max_tokens` is `failed`.
        """
        call = self._generate[self._next]
        self._next = (self._next + 1) % len(self._generate)
        stream = call(request, timeout=timeout_s, metadata=(*metadata, *self._metadata))
        messages: list[Stamped] = []
        status: Status = "ok"
        error = ""
        try:
            messages.extend(stream)
        except grpc.RpcError as failure:
            status = _STATUS.get(failure.code(), "failed")
            error = _describe(failure)
        finally:
            stream.cancel()  # type: ignore[attr-defined]  # for a greenlet that is stopped; a stream that ended ignores it
        return answer_of(messages, status, error, clock(), max_tokens)

    def close(self) -> None:
        """Close the channels; running calls end as cancelled."""
        for channel in self._channels:
            channel.close()


def _describe(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"


def answer_of(messages: Sequence[Stamped], status: Status, error: str, end_s: float, max_tokens: int) -> Answer:
    """Answer from the messages of a stream; one of another length than `max_tokens` has failed."""
    token_ids: list[int] = []
    times_s: list[float] = []
    finished = pb.Finished()
    for time_s, message in messages:
        try:
            response = pb.GenerateResponse.FromString(message)
        except DecodeError as failure:
            return Answer("failed", tuple(token_ids), tuple(times_s), end_s, error=f"no GenerateResponse: {failure}")
        token_ids += response.delta.token_ids
        times_s += [time_s] * len(response.delta.token_ids)
        if response.HasField("finished"):
            finished = response.finished
    if status == "ok" and len(token_ids) != max_tokens:
        status, error = "failed", f"{len(token_ids)} tokens came, {max_tokens} were requested"
    return Answer(
        status=status,
        token_ids=tuple(token_ids),
        token_times_s=tuple(times_s),
        end_s=end_s,
        cached_tokens=finished.usage.cached_tokens,
        request_id=finished.request_id,
        error=error,
    )
