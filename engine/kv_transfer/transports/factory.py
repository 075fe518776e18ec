"""The ends of a transport, by its name."""

from __future__ import annotations

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.config import TransportName
from disagg.engine.kv_transfer.transport import Connector, Rendezvous
from disagg.engine.kv_transfer.transports.settings import TransportSettings
from disagg.proto.handover import Side


def make_rendezvous(name: TransportName, host: str, secret: ClusterSecret) -> Rendezvous:
    """D's end of a transport. It listens on `host` only, and takes processes that have `secret`; where memory is shared
    (`shm`), those of its own user.

    Raises:
        ValueError: if there is no such transport.
        OSError: if it cannot listen on `host`.
        RuntimeError: if this machine lacks what the transport needs.
    """
    settings = TransportSettings(host, secret)
    # Imported here, because each brings its own heavy dependency and a worker uses one.
    match name:
        case "auto":
            from disagg.engine.kv_transfer.transports.auto import AutoRendezvous

            return AutoRendezvous(settings)
        case "local":
            from disagg.engine.kv_transfer.transports.local import LocalRendezvous

            return LocalRendezvous(secret)
        case "gloo":
            from disagg.engine.kv_transfer.transports.gloo import GlooRendezvous

            return GlooRendezvous(settings)
        case "shm":
            from disagg.engine.kv_transfer.transports.shm import ShmRendezvous

            return ShmRendezvous(settings)
        case "nixl":
            from disagg.engine.kv_transfer.transports.nixl import NixlRendezvous

            return NixlRendezvous(settings)
        case "nccl":
            from disagg.engine.kv_transfer.transports.nccl import NcclRendezvous

            return NcclRendezvous(settings)
    raise ValueError(f"transport must be auto, gloo, shm, nixl, nccl or local, not {name!r}")


def make_connector(name: str, host: str, secret: ClusterSecret, side: Side = "sender") -> Connector:
    """P's end of the transport that D named; as `receiver`, the end of a rank of D that is not the one with the
    rendezvous. It binds to `host` only.

    Raises:
        ValueError: if there is no such transport, or it has no such end.
        RuntimeError: if this machine lacks what the transport needs.
    """
    settings = TransportSettings(host, secret)
    match name:
        case "auto":
            from disagg.engine.kv_transfer.transports.auto import AutoConnector

            return AutoConnector(settings, side)
        case "local":
            from disagg.engine.kv_transfer.transports.local import local_connector

            return local_connector(secret, side)
        case "gloo":
            from disagg.engine.kv_transfer.transports.gloo import GlooConnector

            return GlooConnector(settings, side)
        case "shm":
            from disagg.engine.kv_transfer.transports.shm import ShmConnector

            return ShmConnector(settings, side)
        case "nixl":
            from disagg.engine.kv_transfer.transports.nixl import NixlConnector

            return NixlConnector(settings, side)
        case "nccl":
            from disagg.engine.kv_transfer.transports.nccl import NcclConnector

            return NcclConnector(settings, side)
    raise ValueError(f"transport must be auto, gloo, shm, nixl, nccl or local, not {name!r}")
