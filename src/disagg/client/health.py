"""gRPC's own probe of a gateway: whether it answers and takes requests. Needs no key."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from disagg.client.credentials import Credentials
from disagg.client.failures import error_of


def serving_status(address: str, timeout_s: float) -> str:
    """Answer of `Health/Check`, such as `SERVING`; raises `DisaggError` if there is none."""
    tls = Credentials(api_key="").channel(address)
    with grpc.insecure_channel(address) if tls is None else grpc.secure_channel(address, tls) as channel:
        check: Any = health_pb2_grpc.HealthStub(channel).Check
        try:
            status = check(health_pb2.HealthCheckRequest(), timeout=timeout_s).status
        except grpc.RpcError as error:
            raise error_of(error) from error
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
