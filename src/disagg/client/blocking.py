"""The blocking client."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Self, Unpack, cast

import grpc
from google.protobuf.message import Message as ProtoMessage

from disagg.client.credentials import Credentials
from disagg.client.failures import error_of
from disagg.client.types import (
    CHANNEL_OPTIONS,
    Answer,
    ClusterState,
    Delta,
    Explanation,
    Message,
    Model,
    Options,
    Probe,
    Prompt,
    Targets,
)
from disagg.client.wire import (
    answer_of,
    delta_of,
    first_name,
    make_request,
    sizes_request,
    target_metadata,
    tokenize_request,
)
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc


class Client:
    """A blocking client; its methods may be called from several threads. A context manager that closes the connection.

    Args:
        address: host:port of a gateway.
        api_key: sent with each call. This and the next three: `None` takes `DISAGG_API_KEY` and so on from the
            environment, see `disagg.client.credentials`.
        ca_cert: PEM file of the CA that signed the gateway's certificate, or `system` for the public ones. Turns on
            TLS.
        client_cert, client_key: PEM files, for a gateway that asks for a client certificate.
        allow_plaintext_key: send the key to other machines without TLS, too.

    Raises:
        ConfigError: if a file cannot be read, or the key would travel in clear text.
    """

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        ca_cert: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
        *,
        allow_plaintext_key: bool = False,
    ) -> None:
        credentials = Credentials(
            api_key=api_key,
            ca_cert=ca_cert,
            client_cert=client_cert,
            client_key=client_key,
            allow_plaintext_key=allow_plaintext_key,
        )
        self._credentials = credentials.metadata
        tls = credentials.channel(address)
        self._channel = (
            grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.secure_channel(address, tls, options=CHANNEL_OPTIONS)
        )
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
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        targets: Targets | None = None,
        **options: Unpack[Options],
    ) -> Generator[Delta, None, None]:
        """The answer as it is made.

        Args:
            prompt: text, token ids or chat messages.
            model: a name of `models`; the first one by default.
            timeout_s: the request's deadline, in every phase.
            targets: of its latencies.
            options: see `Options`.

        Raises:
            TypeError, ValueError: if an option or the prompt is not of the right kind.
            DisaggError: while iterating, whatever the server answered.
        """
        return self._stream(make_request(prompt, options), model, timeout_s, targets)

    def _stream(
        self, request: pb.GenerateRequest, model: str | None, timeout_s: float | None, targets: Targets | None
    ) -> Generator[Delta, None, None]:
        request.model = self._model(model, timeout_s)
        metadata = (*self._credentials, *target_metadata(targets))
        call = self._inference.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            for response in call:
                yield delta_of(response)
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        targets: Targets | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """The whole answer; one, not `n`. Arguments and errors as for `stream`."""
        request = make_request(prompt, options)
        request.model = self._model(model, timeout_s)
        once = pb.GenerateOnceRequest(request=request)
        return answer_of(self._call(self._inference.GenerateOnce, once, timeout_s, target_metadata(targets)))

    def models(self) -> list[Model]:
        """The models that can be asked for."""
        return list(self._call(self._inference.ListModels, pb.ListModelsRequest()).models)

    def tokenize(self, prompt: str | Sequence[Message], *, model: str | None = None) -> list[int]:
        """The ids that `generate` would use."""
        request = tokenize_request(prompt, self._model(model))
        return list(self._call(self._inference.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text of ids, special tokens left out."""
        request = pb.DetokenizeRequest(model=self._model(model), token_ids=token_ids)
        return str(self._call(self._inference.Detokenize, request).text)

    def cluster_state(self) -> ClusterState:
        """The pools, and the workers with their load."""
        return cast(ClusterState, self._call(self._admin.GetClusterState, pb.GetClusterStateRequest()))

    def scale(self, sizes: Mapping[str, int]) -> None:
        """Make pools larger or smaller from now on, `{"prefill": 3, "decode": 2}`: all of them, or none. Returns when
        that is noted; `cluster_state` shows how far it is. Raises `InvalidRequestError` naming the pool."""
        self._call(self._admin.SetPoolSizes, sizes_request(sizes))

    def drain(self, worker_id: str) -> None:
        """Replace a worker by a new process, after its sequences have ended. Returns when that is noted."""
        self._call(self._admin.DrainWorker, pb.DrainWorkerRequest(worker_id=worker_id))

    def explain(self, request_id: str) -> Explanation:
        """Where a recent request ran and what moved. Raises `RequestNotFoundError` if the id is not known."""
        request = pb.ExplainRequestRequest(request_id=request_id)
        return cast(Explanation, self._call(self._admin.ExplainRequest, request))

    def requests(self, limit: int = 20) -> list[Explanation]:
        """The same of the latest requests, newest first."""
        answer = self._call(self._admin.ListRequests, pb.ListRequestsRequest(limit=limit))
        return list(answer.requests)

    def watch(self, interval_s: float = 1.0) -> Generator[ClusterState, None, None]:
        """The state of the cluster, at once and then every `interval_s` seconds (at least 0.1), until it is closed."""
        request = pb.WatchClusterStateRequest(interval_ms=round(interval_s * 1000))
        call = self._admin.WatchClusterState(request, metadata=self._credentials)
        try:
            for response in call:
                yield response.state
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    def probe(self, prefill_worker: str, decode_worker: str) -> Probe:
        """Send a short random prompt through this pair of workers. Raises `UnavailableError` if it cannot run there
        now."""
        request = pb.ProbePairRequest(prefill_worker=prefill_worker, decode_worker=decode_worker)
        return cast(Probe, self._call(self._admin.ProbePair, request))

    def _model(self, model: str | None, timeout_s: float | None = None) -> str:
        if model is None and self._default_model is None:
            self._default_model = first_name(self._call(self._inference.ListModels, pb.ListModelsRequest(), timeout_s))
        return model or self._default_model or ""

    def _call(
        self,
        method: Callable[..., Any],
        request: ProtoMessage,
        timeout_s: float | None = None,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=(*self._credentials, *metadata))
        except grpc.RpcError as error:
            raise error_of(error) from error
