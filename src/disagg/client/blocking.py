"""The blocking client."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Self, Unpack, cast

import grpc
from google.protobuf.message import Message as ProtoMessage

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
    Prompt,
)
from disagg.client.wire import answer_of, delta_of, first_name, make_request, sizes_request, tokenize_request
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc


class Client:
    """A blocking client; its methods may be called from several threads. A context manager that closes the connection.

    Args:
        address: host:port of a gateway.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
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
                yield delta_of(response)
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
        return answer_of(self._call(self._inference.GenerateOnce, pb.GenerateOnceRequest(request=request), timeout_s))

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

    def _model(self, model: str | None, timeout_s: float | None = None) -> str:
        if model is None and self._default_model is None:
            self._default_model = first_name(self._call(self._inference.ListModels, pb.ListModelsRequest(), timeout_s))
        return model or self._default_model or ""

    def _call(self, method: Callable[..., Any], request: ProtoMessage, timeout_s: float | None = None) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error) from error
