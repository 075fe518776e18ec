"""The generated stub of the public gRPC API, for programs that measure: `disagg.client` would share their cores."""

from __future__ import annotations

import grpc.aio

from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import InferenceServiceStub

CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)


async def only_model(stub: InferenceServiceStub) -> pb.Model:
    """The model that the cluster serves."""
    response: pb.ListModelsResponse = await stub.ListModels(pb.ListModelsRequest())
    return response.models[0]


def channel(address: str) -> grpc.aio.Channel:
    """A channel to a gateway; not through a proxy of the environment."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def service(connection: grpc.aio.Channel) -> InferenceServiceStub:
    """The stub; the one call into generated code without types."""
    return InferenceServiceStub(connection)  # type: ignore[no-untyped-call]
