"""Asks a controller, blocking: for operators' programs and for the launchers."""

from __future__ import annotations

from typing import cast

import grpc

from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.connections.channels import open_blocking_channel
from disagg.proto.control import ControlReply, ControlRequest
from disagg.proto.errors import UnavailableError
from disagg.proto.messages import decoder, encode
from disagg.proto.services import CONTROL


def ask(address: str, request: ControlRequest, secret: ClusterSecret, timeout_s: float = 5.0) -> ControlReply:
    """What the controller at `address` answers. Raises `UnavailableError` when it does not."""
    try:
        with open_blocking_channel(address, secret) as channel:
            control = channel.unary_unary(CONTROL, None, None)
            frame = control(encode(request), timeout=timeout_s, metadata=secret.metadata)
    except grpc.RpcError as error:
        details = cast(grpc.Call, error).details()
        message = f"the controller at {address} does not answer: {details}"
        raise UnavailableError(message, "controller_away") from error
    reply: ControlReply = decoder(ControlReply).decode(frame)
    return reply
