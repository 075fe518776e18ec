"""The client for asyncio: the methods of `Client`, to be awaited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Self, Unpack, cast

import grpc
import grpc.aio
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


class AsyncClient:
    """The same for asyncio. Belongs to the event loop that it was made on; an async context manager.

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
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, tls, options=CHANNEL_OPTIONS)
        )
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
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        targets: Targets | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Delta, None]:
        """See `Client.stream`. Close it with `contextlib.aclosing` when leaving it early."""
        return self._stream(make_request(prompt, options), model, timeout_s, targets)

    async def _stream(
        self, request: pb.GenerateRequest, model: str | None, timeout_s: float | None, targets: Targets | None
    ) -> AsyncGenerator[Delta, None]:
        request.model = await self._model(model, timeout_s)
        metadata = (*self._credentials, *target_metadata(targets))
        call = self._inference.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            async for response in call:
                yield delta_of(response)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        targets: Targets | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """See `Client.generate`."""
        request = make_request(prompt, options)
        request.model = await self._model(model, timeout_s)
        once = pb.GenerateOnceRequest(request=request)
        metadata = target_metadata(targets)
        return answer_of(await self._call(self._inference.GenerateOnce, once, timeout_s, metadata))

    async def models(self) -> list[Model]:
        """See `Client.models`."""
        return list((await self._call(self._inference.ListModels, pb.ListModelsRequest())).models)

    async def tokenize(self, prompt: str | Sequence[Message], *, model: str | None = None) -> list[int]:
        """See `Client.tokenize`."""
        request = tokenize_request(prompt, await self._model(model))
        return list((await self._call(self._inference.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """See `Client.detokenize`."""
        request = pb.DetokenizeRequest(model=await self._model(model), token_ids=token_ids)
        return str((await self._call(self._inference.Detokenize, request)).text)

    async def cluster_state(self) -> ClusterState:
        """See `Client.cluster_state`."""
        return cast(ClusterState, await self._call(self._admin.GetClusterState, pb.GetClusterStateRequest()))

    async def scale(self, sizes: Mapping[str, int]) -> None:
        """See `Client.scale`."""
        await self._call(self._admin.SetPoolSizes, sizes_request(sizes))

    async def drain(self, worker_id: str) -> None:
        """See `Client.drain`."""
        await self._call(self._admin.DrainWorker, pb.DrainWorkerRequest(worker_id=worker_id))

    async def explain(self, request_id: str) -> Explanation:
        """See `Client.explain`."""
        request = pb.ExplainRequestRequest(request_id=request_id)
        return cast(Explanation, await self._call(self._admin.ExplainRequest, request))

    async def requests(self, limit: int = 20) -> list[Explanation]:
        """See `Client.requests`."""
        answer = await self._call(self._admin.ListRequests, pb.ListRequestsRequest(limit=limit))
        return list(answer.requests)

    async def watch(self, interval_s: float = 1.0) -> AsyncGenerator[ClusterState, None]:
        """See `Client.watch`. Close it with `contextlib.aclosing` when leaving it early."""
        request = pb.WatchClusterStateRequest(interval_ms=round(interval_s * 1000))
        call = self._admin.WatchClusterState(request, metadata=self._credentials)
        try:
            async for response in call:
                yield response.state
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    async def probe(self, prefill_worker: str, decode_worker: str) -> Probe:
        """See `Client.probe`."""
        request = pb.ProbePairRequest(prefill_worker=prefill_worker, decode_worker=decode_worker)
        return cast(Probe, await self._call(self._admin.ProbePair, request))

    async def _model(self, model: str | None, timeout_s: float | None = None) -> str:
        if model is None and self._default_model is None:
            answer = await self._call(self._inference.ListModels, pb.ListModelsRequest(), timeout_s)
            self._default_model = first_name(answer)
        return model or self._default_model or ""

    async def _call(
        self,
        method: Callable[..., Any],
        request: ProtoMessage,
        timeout_s: float | None = None,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        try:
            return await method(request, timeout=timeout_s, metadata=(*self._credentials, *metadata))
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
