"""Frames of the gateway's own streams: bytes on the channel, decoded here.

gRPC gets no deserializers: it would end the stream at a frame that cannot be decoded.
"""

from __future__ import annotations

from typing import Final

import msgspec

from disagg.proto.errors import InternalError
from disagg.proto.ids import AttemptKey, WorkerId
from disagg.proto.messages import (
    AuditReport,
    Cancel,
    CancelMigration,
    Connect,
    Dispatch,
    ForgetTenant,
    Migrate,
    PeerRef,
    SessionHello,
    StepUpdate,
    WorkerInfo,
    WorkerReport,
    WorkerToGateway,
    decoder,
)

Outgoing = Dispatch | Connect | Cancel | Migrate | CancelMigration | ForgetTenant

_session: Final[msgspec.msgpack.Decoder[StepUpdate | SessionHello]] = msgspec.msgpack.Decoder(WorkerToGateway)
_report: Final = decoder(WorkerReport)
_audit: Final = decoder(AuditReport)


def cancel(key: AttemptKey) -> Cancel:
    """The frame that stops an attempt."""
    return Cancel(request_id=key.request_id, attempt=key.attempt)


def cancel_migration(key: AttemptKey) -> CancelMigration:
    """The frame that makes a worker keep an attempt that it was to move."""
    return CancelMigration(request_id=key.request_id, attempt=key.attempt)


def connect(peer: PeerRef) -> Connect:
    """The frame that makes a prefill worker form a pair."""
    return Connect(decode_peer=peer)


def forget(tenant_tag: bytes) -> ForgetTenant:
    """The frame that makes a worker drop the KV of a tenant."""
    return ForgetTenant(tenant_tag=tenant_tag)


def hello(frame: bytes, expected: WorkerId) -> WorkerInfo:
    """The first frame of a session. Raises `InternalError` if another worker answers at that address, or no hello came
    first, and `msgspec.MsgspecError` for an invalid frame."""
    message = _session.decode(frame)
    if not isinstance(message, SessionHello):
        raise InternalError(f"{expected} sent {type(message).__name__} before its hello")
    if message.info.worker_id != expected:
        raise InternalError(f"{message.info.worker_id} answers at the address of {expected}")
    return message.info


def step_update(frame: bytes) -> StepUpdate:
    """A later frame of a session. Raises `InternalError` for a second hello, `msgspec.MsgspecError` for an invalid
    frame."""
    message = _session.decode(frame)
    if not isinstance(message, StepUpdate):
        raise InternalError("a second hello on one session")
    return message


def report(frame: bytes) -> WorkerReport:
    """A frame of a report stream. Raises `msgspec.MsgspecError`."""
    return _report.decode(frame)


def audit_report(frame: bytes) -> AuditReport:
    """The answer to an audit. Raises `msgspec.MsgspecError`."""
    return _audit.decode(frame)
