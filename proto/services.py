"""Where our own processes meet: gRPC names of the internal services, and the channel options both ends use.

The services have no protobuf: handlers are generic and the frames are `messages.encode` bytes.

    SESSION   stream-stream  `Dispatch | Cancel` down, `SessionHello | StepUpdate` up; the hello is the first frame
    WATCH     unary-stream   `WatchRequest` down, `WorkerReport` up; the first report carries a snapshot
    AUDIT     unary-unary    `AuditRequest` down, `AuditReport` up
    LOAD_ADAPTER, UNLOAD_ADAPTER  unary-unary  `LoadAdapter` and `UnloadAdapter` down, `AdapterLoaded` and
              `AdapterUnloaded` up
    TRANSFER  stream-stream  `SenderToReceiver` down, `ReceiverToSender` up, in `frames`; P calls D
    FETCH     unary-unary    `Fetch` down, `FetchAnswer` up; a worker calls one that has the KV of a prefix
    REGISTER  stream-stream  `WorkerToController` down, `ControllerToWorker` up; a worker calls the controller
    FOLLOW    stream-stream  `GatewayToController` down, `ControllerToGateway` up; a gateway calls the controller
    CONTROL   unary-unary    `ControlRequest` down, `ControlReply` up; an operator, by way of a gateway or the launcher
"""

from __future__ import annotations

from typing import Final

from disagg.proto.messages import MAX_FRAME_BYTES

WORKER_SERVICE: Final = "disagg.internal.Worker"
TRANSFER_SERVICE: Final = "disagg.internal.Transfer"
FETCH_SERVICE: Final = "disagg.internal.Fetch"
CONTROLLER_SERVICE: Final = "disagg.internal.Controller"

SESSION: Final = f"/{WORKER_SERVICE}/Session"
WATCH: Final = f"/{WORKER_SERVICE}/Watch"
AUDIT: Final = f"/{WORKER_SERVICE}/Audit"
LOAD_ADAPTER: Final = f"/{WORKER_SERVICE}/LoadAdapter"
UNLOAD_ADAPTER: Final = f"/{WORKER_SERVICE}/UnloadAdapter"
TRANSFER: Final = f"/{TRANSFER_SERVICE}/Pair"
FETCH: Final = f"/{FETCH_SERVICE}/Fetch"
REGISTER: Final = f"/{CONTROLLER_SERVICE}/Register"
FOLLOW: Final = f"/{CONTROLLER_SERVICE}/Follow"
CONTROL: Final = f"/{CONTROLLER_SERVICE}/Control"

GATEWAY_ID_METADATA: Final = "gateway-id"
"""Metadata key of a session: which gateway opened it."""

_FRAME_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
)

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_FRAME_OPTIONS,
    # Processes of one machine must not go through an http_proxy of the environment.
    ("grpc.enable_http_proxy", 0),
    # A process that was stopped, or whose machine vanished, keeps its connections: they end after five seconds without
    # an answer. It is the ping's own timeout that ends one; keepalive's was seen to take a minute.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Channels to one address share a TCP connection by default; a second process at that address must get a new one.
    ("grpc.use_local_subchannel_pool", 1),
    # How long gRPC itself waits between connection attempts. Callers add their own pause on top.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: how long one connection attempt may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
"""Options of channels, for the calling side."""

NO_COMPRESSION: Final = ("grpc.compression_enabled_algorithms_bitset", 1)
"""Server option: of gRPC's algorithms the one that compresses nothing. A compressed message gets UNIMPLEMENTED."""

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_FRAME_OPTIONS,
    # Without this a second process could silently share the port.
    ("grpc.so_reuseport", 0),
    # A message that is marked as compressed is refused unread: 200 KB of gzip can be 200 MB.
    NO_COMPRESSION,
    # Accept the keepalive pings of idle callers as often as `CHANNEL_OPTIONS` sends them.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)
"""Options of servers, for the listening side."""


def service_and_method(path: str) -> tuple[str, str]:
    """Split `/package.Service/Method` for `grpc.method_handlers_generic_handler`.

    Raises:
        ValueError: if `path` is not of that form.
    """
    empty, separator, rest = path.partition("/")
    service, slash, method = rest.partition("/")
    if empty or not (separator and service and slash and method):
        raise ValueError(f"not a gRPC method path: {path!r}")
    return service, method
