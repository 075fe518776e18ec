"""The smaller sections of the configuration, and the types of values that all sections share; see `config.py`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from disagg.engine.config import TransportName
from disagg.router.config import PolicyName

Count = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=1)]
Millis = Annotated[float, msgspec.Meta(gt=0, le=86_400_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
MAX_PORT = 65_535
Port = Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)]
Core = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class PlacementConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`placement`: how the router chooses workers."""

    local_prefill: Literal["auto", "never"] = "auto"
    """`auto`: a decode worker computes an uncached suffix itself where that is cheaper. `never`: every prompt goes
    through a prefill worker, but for an answer that has begun and outgrew all of them: a decode worker continues it
    alone."""
    policy: PolicyName = "joint"
    """`joint` takes the pair of least cost in milliseconds; the others are there to be compared with."""
    admission: bool = True
    """Refuse at once what is predicted to miss its TTFT target (requests without a target are never refused so)."""


class SloConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`slo`: targets of requests that do not bring their own."""

    ttft_ms: Millis | None = None
    tpot_ms: Millis | None = None


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`network`: how our own processes reach each other."""

    bind: Literal["loopback", "node"] = "loopback"
    """`loopback`: all on one machine. `node`: workers and controller listen on their Ray node's address, which must
    not be open to strangers."""
    encryption: Literal["auto", "on", "off"] = "auto"
    """TLS with certificates at both ends for the gRPC connections between workers, gateway and controller, made from
    the cluster's secret. `auto`: on with `bind: node`. KV goes over channels of its own, see `plaintext_kv`."""
    plaintext_kv: bool = False
    """KV and what ranks exchange (gloo, nccl) is authenticated but not encrypted. With `bind: node` workers that hand
    over refuse to start without this, unless `transfer.transport` is `shm`. For a network whose every machine may read
    prompts: a private one, or one that encrypts by itself."""

    @property
    def is_encrypted(self) -> bool:
        """Whether our gRPC connections are TLS."""
        return self.encryption == "on" or (self.encryption == "auto" and self.bind == "node")


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`controller`: holds the desired and the observed state of the cluster."""

    port: Port = 0
    """0 takes any free port."""
    drain_timeout_s: Seconds = 300.0
    """How long a worker that leaves may finish its sequences; what still runs then goes on elsewhere."""


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`transfer`: the hand-over of KV from prefill to decode workers."""

    transport: TransportName | Literal["auto"] = "auto"
    """`auto` is nccl on CUDA; on CPU shm with `network.bind: loopback`, else gloo. `shm` is memory that processes of
    one user share: faster than gloo, and no other user of the host can join; for workers on one host."""
    chunk_bytes: Bytes = 4 << 20
    """Largest payload of one KV message, and the size of a staging slot."""
    staging_bytes: Bytes = 64 << 20
    """Most staging memory of each pair of workers, on each side."""
    max_pairs: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    """Connections to workers of the other pool that a worker keeps; beyond them the one that was not used for longest
    is closed. Each takes a few threads and up to 14 descriptors on both sides."""
    lease_timeout_s: Seconds = 5.0
    """A reservation on a decode worker ends when its prefill worker was silent for this long."""
    heartbeat_s: Seconds = 0.5
    timeout_s: Seconds = 30.0
    """How long a worker that answers may owe its peer a message or bytes before it counts as stuck."""


class RecoveryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`recovery`: when a process counts as hung, though its connections stand. `null` is never."""

    suspect_after_s: Seconds | None = 2.5
    """A worker was silent for so long: gateways continue elsewhere what it had."""
    kill_after_s: Seconds | None = 4.0
    """A worker or the gateway was silent for so long: it is killed, and started again."""
    stuck_after_s: Seconds | None = 30.0
    """A worker's engine has been in one step for so long: both. Must be longer than the longest honest step."""
    failpoints: bool = False
    """Whether workers fail on purpose where their environment says so (`DISAGG_FAILPOINTS`): for tests only."""
    gateway_stuck_after_s: Seconds | None = 30.0
    """A gateway's event loop has been in one turn for so long, though its process shows that it lives: it is killed,
    and started again. A loop that is held for less is busy, not hung."""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`ray`: used by the Ray launcher."""

    address: Name = "local"
    """`local` starts a private Ray on this machine; anything else joins that cluster, whose nodes need a
    `disagg_slot` resource."""
    temp_dir: str | None = None
    """Where a private Ray keeps sockets and logs; a short path. A fresh private folder, removed at the end, when
    unset."""


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics`: what `/metrics` and `disagg explain` know."""

    vllm_aliases: bool = True
    """Show the numbers under the names of vLLM too, for dashboards that read these."""
    num_traces: Count = 1000
    """Ended requests that can still be explained."""


class LoggingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`logging`: of workers, gateway and controller, on standard error. Prompts and answers are never logged."""

    format: Literal["text", "json"] = "text"
    """`json`: one object a line."""
    level: Literal["debug", "info", "warning", "error"] = "warning"
    """The environment variable `DISAGG_LOG` goes before it. `debug` has a line for each request."""
