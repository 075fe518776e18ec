"""The part that both clients share, without I/O: which call a method makes, with which request, when it is made again,
and its result.

    flow = calls.generate(...)      a generator: yields each `Call` and is sent its response or thrown its error,
                                    yields each `Pause`, returns the result
    Client       _run(flow)         makes the calls and blocks
    AsyncClient  await _run(flow)   makes the calls and awaits

The calls of a stream are the exception: the flow of `stream` returns a `StreamedAnswer`, which makes the call of each
attempt; the client reads its responses. The flow of `watch` returns the `Call` to begin.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message as ProtoMessage

from disagg.client.credentials import Credentials
from disagg.client.failures import error_of, was_taken
from disagg.client.resuming import RESUME_S, START_S, Attempts, Resumption
from disagg.client.types import (
    Adapter,
    Answer,
    Applied,
    ClusterState,
    Delta,
    Explanation,
    Message,
    Model,
    Options,
    Probe,
    Prompt,
    RecentLoad,
    Shape,
    ShapeComparison,
    Targets,
    UsageByDay,
)
from disagg.client.wire import (
    answer_of,
    delta_of,
    make_request,
    only_name,
    sizes_request,
    target_metadata,
    tokenize_request,
)
from disagg.proto.errors import DisaggError
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

T = TypeVar("T")
APPLY_TIMEOUT_S = 30.0
"""Time limit of `apply`, in seconds: the controller checks the model's folder before it answers."""
LOAD_TIMEOUT_S = 30.0
"""Time limit of the calls of a twin, in seconds, so that it does not wait for ever."""
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A gRPC call to be made."""

    method: Callable[..., Any]
    """The method of a blocking or asyncio stub."""
    request: ProtoMessage
    timeout_s: float | None
    metadata: Metadata

    def begin(self) -> Any:
        """Start the call; returns what gRPC returns: a response, an awaitable of one, or a stream of them."""
        return self.method(self.request, timeout=self.timeout_s, metadata=self.metadata)


@dataclass(frozen=True, slots=True)
class Pause:
    """The time before the next attempt of a call."""

    seconds: float


Flow = Generator[Call | Pause, Any, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a client tries; see `ClientBase`."""

    resume_s: float = RESUME_S
    start_s: float = START_S


class StreamedAnswer:
    """One answer that is streamed, over all attempts: a message of the gateway in, a delta for the caller out.

        begin() ──> responses ──take──> deltas
          ^            └── RpcError ──pause_s──> seconds to wait, None if the answer had ended, or the error is raised
          └──────────────────────────────┘

    Args:
        call: the call of the first attempt.
        patience: how long it is tried again.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, call: Call, patience: Patience, clock: Callable[[], float]) -> None:
        self._call = call
        self._clock = clock
        self._deadline = deadline_after(call.timeout_s, clock)
        request = cast(pb.GenerateRequest, call.request)
        self._resumption = Resumption(request, patience.resume_s, patience.start_s)

    def begin(self) -> Any:
        """Start the next attempt, with the time that is left; returns the stream of gRPC."""
        left_s = left_until(self._deadline, self._clock)
        return replace(self._call, request=self._resumption.request(), timeout_s=left_s).begin()

    def take(self, response: pb.GenerateResponse) -> Delta | None:
        """Convert a message; None if an earlier attempt brought it. Raises `UnavailableError` if it does not continue
        the earlier ones."""
        return delta_of(response) if self._resumption.took(response) else None

    def pause_s(self, error: grpc.RpcError) -> float | None:
        """Seconds until the next attempt after an attempt failed; None if the answer was complete. Raises the
        `DisaggError` of the failure if no attempt follows."""
        if self._resumption.is_finished:
            return None
        failure = error_of(error)
        pause_s = self._resumption.pause_s(failure, was_taken(error), self._clock())
        if pause_s is None:
            raise failure from error
        return pause_s


def deadline_after(timeout_s: float | None, clock: Callable[[], float]) -> float | None:
    """The time on `clock` at which `timeout_s` seconds from now have passed; None for no limit."""
    return None if timeout_s is None else clock() + timeout_s


def left_until(deadline: float | None, clock: Callable[[], float]) -> float | None:
    """Seconds until `deadline`, at least 0; None for no limit."""
    return None if deadline is None else max(0.0, deadline - clock())


class Calls:
    """The calls of one client.

    Args:
        channel: gRPC channel, blocking or asyncio.
        credentials: sent with each call.
        patience: how long failed calls are made again.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        channel: Any,
        credentials: Credentials,
        patience: Patience = Patience(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience = patience
        self._clock = clock
        self._inference = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        self._admin = pb_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        self._credentials = credentials.metadata
        self._default_model: str | None = None
        """The only model of the gateway, cached once it was needed."""

    def stream(
        self, prompt: Prompt, options: Options, model: str | None, timeout_s: float | None, targets: Targets | None
    ) -> Flow[StreamedAnswer]:
        """Prepare an answer that is streamed. Raises at once what `make_request` raises."""
        return self._stream(make_request(prompt, options), model, timeout_s, targets)

    def _stream(
        self, request: pb.GenerateRequest, model: str | None, timeout_s: float | None, targets: Targets | None
    ) -> Flow[StreamedAnswer]:
        request.model = yield from self._model(model, timeout_s)
        call = self._call(self._inference.Generate, request, timeout_s, target_metadata(targets))
        return StreamedAnswer(call, self._patience, self._clock)

    def generate(
        self, prompt: Prompt, options: Options, model: str | None, timeout_s: float | None, targets: Targets | None
    ) -> Flow[Answer]:
        """Generate a whole answer, in as many attempts as `Patience` allows."""
        attempts = Attempts(self._patience.resume_s, self._patience.start_s)
        deadline = deadline_after(timeout_s, self._clock)
        while True:
            left_s = left_until(deadline, self._clock)
            try:
                return (yield from self._generate(prompt, options, model, left_s, targets))
            except DisaggError as error:
                taken = isinstance(error.__cause__, grpc.RpcError) and was_taken(error.__cause__)
                pause_s = attempts.pause_s(error, taken, self._clock())
                if pause_s is None:
                    raise
            yield Pause(pause_s)

    def _generate(
        self, prompt: Prompt, options: Options, model: str | None, timeout_s: float | None, targets: Targets | None
    ) -> Flow[Answer]:
        request = make_request(prompt, options)
        request.model = yield from self._model(model, timeout_s)
        once = pb.GenerateOnceRequest(request=request)
        response = yield self._call(self._inference.GenerateOnce, once, timeout_s, target_metadata(targets))
        return answer_of(response)

    def models(self) -> Flow[list[Model]]:
        """List the models of the gateway."""
        response = yield self._call(self._inference.ListModels, pb.ListModelsRequest())
        return list(response.models)

    def tokenize(self, prompt: str | Sequence[Message], model: str | None) -> Flow[list[int]]:
        """Tokenize a text or a chat."""
        request = tokenize_request(prompt, (yield from self._model(model)))
        response = yield self._call(self._inference.Tokenize, request)
        return list(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], model: str | None) -> Flow[str]:
        """Convert token ids to text."""
        request = pb.DetokenizeRequest(model=(yield from self._model(model)), token_ids=token_ids)
        response = yield self._call(self._inference.Detokenize, request)
        return str(response.text)

    def cluster_state(self) -> Flow[ClusterState]:
        """Get the pools, and the workers with their load."""
        response: ClusterState = yield self._call(self._admin.GetClusterState, pb.GetClusterStateRequest())
        return response

    def scale(self, sizes: Mapping[str, int]) -> Flow[None]:
        """Set new sizes of pools."""
        yield self._call(self._admin.SetPoolSizes, sizes_request(sizes))

    def drain(self, worker_id: str, deadline_s: float | None) -> Flow[None]:
        """Replace a worker after it was drained."""
        request = pb.DrainWorkerRequest(worker_id=worker_id, deadline_s=deadline_s)
        yield self._call(self._admin.DrainWorker, request)

    def forget(self, tenant: str) -> Flow[tuple[list[str], list[str]]]:
        """Have all workers drop a tenant's KV: those that were told, and those that were not reached, which do so
        when they register with the controller."""
        response = yield self._call(self._admin.ForgetTenant, pb.ForgetTenantRequest(tenant=tenant))
        return list(response.workers), list(response.missed)

    def add_adapter(self, name: str, path: str, base: str) -> Flow[tuple[Adapter, list[str]]]:
        """Serve an adapter: how it is served, and notes."""
        response = yield self._call(self._admin.AddAdapter, pb.AddAdapterRequest(name=name, path=path, base=base))
        return response.adapter, list(response.notes)

    def remove_adapter(self, name: str) -> Flow[list[str]]:
        """Serve an adapter no more; returns notes."""
        response = yield self._call(self._admin.RemoveAdapter, pb.RemoveAdapterRequest(name=name))
        return list(response.notes)

    def adapters(self) -> Flow[list[Adapter]]:
        """Get what is registered, by name."""
        response = yield self._call(self._admin.ListAdapters, pb.ListAdaptersRequest())
        return list(response.adapters)

    def apply(
        self,
        config: Mapping[str, object],
        *,
        dry_run: bool,
        surge: bool,
        restart: bool,
        ready_timeout_s: float | None,
    ) -> Flow[Applied]:
        """Apply another configuration to the cluster."""
        request = pb.ApplyConfigRequest(
            config_json=json.dumps(config).encode(),
            dry_run=dry_run,
            no_surge=not surge,
            restart=restart,
            ready_timeout_s=ready_timeout_s,
        )
        response: Applied = yield self._call(self._admin.ApplyConfig, request, APPLY_TIMEOUT_S)
        return response

    def explain(self, request_id: str) -> Flow[Explanation]:
        """Get the record of one request."""
        response: Explanation = yield self._call(
            self._admin.ExplainRequest, pb.ExplainRequestRequest(request_id=request_id)
        )
        return response

    def requests(self, limit: int) -> Flow[list[Explanation]]:
        """Get the records of the latest requests."""
        response = yield self._call(self._admin.ListRequests, pb.ListRequestsRequest(limit=limit))
        return list(response.requests)

    def load(self, limit: int) -> Flow[RecentLoad]:
        """Get the recent load of the gateway."""
        response: RecentLoad = yield self._call(self._admin.GetLoad, pb.GetLoadRequest(limit=limit), LOAD_TIMEOUT_S)
        return response

    def shape(self) -> Flow[Shape]:
        """Get where answers decode, and the latest comparisons."""
        response: Shape = yield self._call(self._admin.GetShape, pb.GetShapeRequest())
        return response

    def usage(self, days: int, key: str, limit: int) -> Flow[UsageByDay]:
        """Get the use of keys by day and model."""
        request = pb.GetUsageRequest(days=days, key=key, limit=limit)
        response: UsageByDay = yield self._call(self._admin.GetUsage, request, LOAD_TIMEOUT_S)
        return response

    def set_decodes(self, decodes: str, comparison: ShapeComparison | None) -> Flow[None]:
        """Set where new answers decode."""
        request = pb.SetDecodesRequest(decodes=decodes, comparison=comparison)
        yield self._call(self._admin.SetDecodes, request, LOAD_TIMEOUT_S)

    def watch(self, interval_s: float) -> Flow[Call]:
        """Make the call whose responses are states of the cluster."""
        yield from ()  # no call comes before it
        request = pb.WatchClusterStateRequest(interval_ms=round(interval_s * 1000))
        return self._call(self._admin.WatchClusterState, request)

    def probe(self, prefill_worker: str, decode_worker: str) -> Flow[Probe]:
        """Send one short prompt through a pair of workers."""
        request = pb.ProbePairRequest(prefill_worker=prefill_worker, decode_worker=decode_worker)
        response: Probe = yield self._call(self._admin.ProbePair, request)
        return response

    def _model(self, model: str | None, timeout_s: float | None = None) -> Flow[str]:
        if model is None and self._default_model is None:
            response = yield self._call(self._inference.ListModels, pb.ListModelsRequest(), timeout_s)
            self._default_model = only_name(response)
        return model or self._default_model or ""

    def _call(
        self,
        method: Callable[..., Any],
        request: ProtoMessage,
        timeout_s: float | None = None,
        metadata: Metadata = (),
    ) -> Call:
        return Call(method, request, timeout_s, (*self._credentials, *metadata))


class ClientBase(ABC):
    """The connection of a client to a gateway, and its calls."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        ca_cert: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
        *,
        allow_plaintext_key: bool = False,
        resume_s: float = RESUME_S,
        start_s: float = START_S,
    ) -> None:
        """Make a connection when the first call needs it.

        Args:
            address: host:port of a gateway.
            api_key: sent with each call. This and the next three: `None` takes `DISAGG_API_KEY` and so on from the
                environment, see `disagg.client.credentials`.
            ca_cert: PEM file of the CA that signed the gateway's certificate, or `system` for the public ones. Turns on
                TLS.
            client_cert, client_key: PEM files, for a gateway that requires a client certificate.
            allow_plaintext_key: send the key to other machines without TLS, too.
            resume_s: when the connection of a running call breaks, for how many seconds the client tries to go on with
                it, at the same address; a stream then continues where it broke. 0: not at all.
            start_s: when a request is refused because its pool was emptied and a worker has to start first
                (`no_worker_yet`), for how many seconds the client sends it again. 0: not at all.

        Raises:
            ConfigError: if a file cannot be read, or the key would travel in clear text.
        """
        credentials = Credentials(
            api_key=api_key,
            ca_cert=ca_cert,
            client_cert=client_cert,
            client_key=client_key,
            allow_plaintext_key=allow_plaintext_key,
        )
        self._channel = self._open_channel(address, credentials.channel(address))
        self._calls = Calls(self._channel, credentials, Patience(resume_s=resume_s, start_s=start_s))

    @abstractmethod
    def _open_channel(self, address: str, tls: grpc.ChannelCredentials | None) -> Any:
        """Open a gRPC channel, blocking or asyncio; in clear text without `tls`."""
