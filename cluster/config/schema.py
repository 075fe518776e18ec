"""The structs of the cluster's YAML file, with the meaning and the default of each key.

Limits stand beside what applies them, with their defaults and bounds, and are sections here as they are or with keys
that only a user needs: `engine/config.py`, `router/config.py`, `gateway/config.py`, `system/logs.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from typing_extensions import override as overrides

from disagg.autoscaler.config import AutoscalerOptions
from disagg.cluster.models.catalog import DEFAULT_MODEL
from disagg.cluster.system.logs import LoggingConfig
from disagg.connections.cluster_secret import CertificateFiles
from disagg.engine.config import (
    EngineLimits,
    KernelOptions,
    ModelOptions,
    PairLimits,
    Scheduling,
    TransferLimits,
    TransportName,
    device_defaults,
)
from disagg.gateway.config import GatewayOptions
from disagg.proto.config import Bytes, Count, KvReserve, Millis, Name, NonNegativeInt, Port, Seconds, TpotMillis
from disagg.router.config import MAX_QUEUED, FailureTimeouts, MetricsOptions, PlacementOptions, RecordingOptions

Mode = Literal["disaggregated", "colocated", "elastic"]

MAX_GATEWAYS = 64
MAX_MODELS = 16
"""That one cluster serves: the tokenizer of each is in every gateway."""


class ModelSection(ModelOptions, frozen=True, kw_only=True):
    """`model`: what is served, and in which form."""

    name: Name | None = None
    """The name that requests use and, without `path`, the model's name in the cache (`disagg model list`). Left out,
    it is the default model's or, with `path`, the folder's."""
    path: Name | None = None
    """A checkpoint folder; `fake` runs the deterministic model without weights."""

    @property
    def served_name(self) -> str:
        """The name that requests use."""
        if self.name is not None:
            return self.name
        return DEFAULT_MODEL if self.path is None else Path(self.path).name


class GatewaySection(GatewayOptions, frozen=True, kw_only=True):
    """`gateway`: where clients come in."""

    port: Port = 8470
    """Of gRPC. 0 takes any free port."""
    http_port: Port | Literal["auto"] | None = "auto"
    """Of the OpenAI-compatible HTTP server and of `/metrics`. `auto` is the one after `port`, or any free one where
    `port` is 0; 0 takes any free port; `null` serves no HTTP."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_GATEWAYS)] = 1
    """Gateway processes. They listen at the same ports, and the kernel divides connections among them; each places
    requests by itself. Limits, `max_queued` and limits of keys among them, are those of each."""
    replica_http_port: Port | None = None
    """With several gateways: each listens to HTTP at a port of its own, too, so that its metrics can be read. This is
    the first one's, the others' are those after it; `null` takes any free ones, which `disagg status` shows."""
    max_queued: Count = MAX_QUEUED
    """Requests that wait for a worker; one more is refused as overload."""
    token_interval_ms: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    """Tokens of an answer that come within this time are sent together, the first one at once; 0 sends each at once.
    Some milliseconds spare processor time where gateway, clients and workers share cores and steps are short."""
    record_events: RecordingOptions | None = None
    """`{folder, max_bytes}`: record the router's events, to be looked at with `disagg replay`. Without prompts and
    answers, but with their lengths, times and tenants."""
    insecure: bool = False
    """Allow a `host` that other machines reach without TLS, or without keys and client certificates. Without keys they
    may read everything and change nothing."""

    @property
    def chosen_http_port(self) -> int | None:
        """The port that `http_port` stands for; None for no HTTP."""
        if self.http_port != "auto":
            return self.http_port
        return self.port + 1 if self.port else 0


class PoolConfig(EngineLimits, frozen=True, kw_only=True):
    """`pools.<name>`: workers of one kind."""

    size: Count = 1
    """Workers."""
    min_size: NonNegativeInt = 1
    """Fewest workers that the autoscaler leaves. With 0 the pool is emptied when nothing comes; then the first requests
    are refused, with a time to retry after, until a worker has started."""
    max_size: Count | None = None
    """Most workers that the autoscaler starts; it has to be given where that is enabled."""
    cores: Literal["auto", "none"] | tuple[NonNegativeInt, ...] = "auto"
    """CPU cores to pin each worker to: `auto` gives each rank its own, `none` does not pin, a list is divided among the
    ranks of each worker."""
    block_size: Count | Literal["auto"] = "auto"
    """Tokens of a KV block; a multiple of 16. `auto` is 16, and 64 on a GPU, whose prefill kernel fetches rows of a
    block together if there are 64 of them."""
    token_budget: Count | Literal["auto"] = "auto"
    """Tokens of one step, decodes first, prefill chunks with what is left. `auto` is 512, and 4096 on a GPU."""
    swap_bytes: NonNegativeInt | None = None
    """Host memory of each worker for the KV of preempted sequences; what does not fit there is computed again. Unset,
    it is 256 MiB; on a GPU nothing, because it would be the GPU's own memory."""
    decode_reserve_tokens: Count = KvReserve().decode_reserve_tokens
    """See `KvReserve`. At least 1 here; the engine and the router take 0, too, for tests of preemption."""
    node_labels: dict[Name, Name] = msgspec.field(default_factory=dict)
    """Ray nodes that this pool's workers may run on: those with all of these labels, such as
    `disagg.role: prefill`."""

    @property
    def tokens_per_block(self) -> int:
        """The block size that is meant."""
        return device_defaults(self.device).block_size if self.block_size == "auto" else self.block_size

    @property
    def tokens_per_step(self) -> int:
        """The token budget that is meant."""
        return device_defaults(self.device).token_budget if self.token_budget == "auto" else self.token_budget


class WorkersConfig(PoolConfig, frozen=True, kw_only=True):
    """`pools.workers`: the same with the defaults of mode `elastic`."""

    size: Count = 2
    scheduling: Scheduling = "slack"

    @property
    @overrides
    def tokens_per_step(self) -> int:
        """At least 1024 with `auto`: slack makes steps shorter where targets ask for it."""
        return max(1024, super().tokens_per_step) if self.token_budget == "auto" else self.token_budget


class PoolsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`pools`: `prefill` and `decode` are used in mode `disaggregated`, `colocated` in mode `colocated`, `workers` in
    mode `elastic`."""

    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    colocated: PoolConfig = PoolConfig()
    workers: WorkersConfig = WorkersConfig()


class SloConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`slo`: targets of requests that do not bring their own."""

    ttft_ms: Millis | None = None
    tpot_ms: TpotMillis | None = None


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`network`: how our own processes reach each other."""

    bind: Literal["loopback", "node"] = "loopback"
    """`loopback`: all on one machine. `node`: workers and controller listen on their Ray node's address, which must
    not be reachable from other networks."""
    encryption: Literal["auto", "on", "off"] = "auto"
    """TLS with certificates at both ends for the gRPC connections between workers, gateway and controller. `auto`: on
    with `bind: node` or `certificates`. KV goes over channels of its own, see `plaintext_kv`."""
    certificates: CertificateFiles | None = None
    """`{ca, cert, key}`: PEM files for that, which every host has at these paths. `null`: made from the cluster's
    secret, in memory."""
    plaintext_kv: bool = False
    """KV and what ranks exchange (gloo, nixl, nccl) is authenticated but not encrypted. With `bind: node` workers that
    hand over refuse to start without this, unless `transfer.transport` is `shm`. For a network whose every machine may
    read prompts: a private one, or one that encrypts by itself."""

    @property
    def is_encrypted(self) -> bool:
        """Whether our gRPC connections are TLS."""
        return self.encryption == "on" or (
            self.encryption == "auto" and (self.bind == "node" or self.certificates is not None)
        )


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`controller`: holds the desired and the observed state of the cluster."""

    port: Port = 0
    """0 takes any free port."""
    drain_timeout_s: Seconds = 300.0
    """How long a draining worker may take to finish its sequences; what still runs then continues elsewhere."""
    twin: Literal["auto", "on", "off"] = "auto"
    """Whether the controller keeps a twin running, as a process of lowest priority, where `placement.decodes` is auto.
    `auto`: where its machine has two cores or more. `off`: `disagg twin` is started by hand."""
    templates: bool = True
    """Without Ray, on Linux: whether processes are forked from ones that have loaded code and weights already, so that
    they start and restart sooner and share the weights; see `templates.py`. The price is one process more for each
    kind, of which their memory is shared."""
    probes: bool = True
    """Whether a new worker counts as ready only once a tiny request went through prefill, hand-over and decode with it;
    see `cluster/core/probes.py`."""


class TransferSection(PairLimits, frozen=True, kw_only=True):
    """`transfer`: the hand-over of KV from prefill to decode workers."""

    transport: TransportName = "auto"
    """`shm` is memory that processes of one user share: faster than gloo, and no other user of the host can join; for
    workers on one host. `nixl` has the decode worker read the prefill worker's memory, between hosts by RDMA; it needs
    the extra `nixl`. `nccl` is for GPUs only. KV on GPUs goes by `gloo` and `shm` through pinned host memory, by `nixl`
    and `nccl` from GPU to GPU. `auto` on CPU is shm with `network.bind: loopback`, else gloo; on CUDA each pair takes
    nixl, from host memory, if bytes come through by it as the pair is formed, else shm or gloo likewise."""
    chunk_bytes: Bytes | Literal["auto"] = "auto"
    """Largest payload of one KV message, and the size of a staging slot. `auto` is 4 MiB, and 64 MiB with GPUs."""
    staging_bytes: Bytes | Literal["auto"] = "auto"
    """Most staging memory of each pair of workers, on each side; slots are allocated when first used. `auto` is 64 MiB,
    and 512 MiB with GPUs."""

    def limits(self, device: str) -> TransferLimits:
        """What is meant for workers on this device."""
        defaults = device_defaults(device)
        shared = {name: getattr(self, name) for name in PairLimits.__struct_fields__}
        return TransferLimits(
            **shared,
            chunk_bytes=defaults.chunk_bytes if self.chunk_bytes == "auto" else self.chunk_bytes,
            staging_bytes=defaults.staging_bytes if self.staging_bytes == "auto" else self.staging_bytes,
        )


class RecoveryConfig(FailureTimeouts, frozen=True, kw_only=True):
    """`recovery`: when a process counts as unresponsive, though its connections stand. `null` is never."""

    kill_after_s: Seconds | None = 4.0
    """Seconds without a heartbeat of a worker or the gateway, after which it is killed and restarted."""
    gateway_stuck_after_s: Seconds | None = 30.0
    """Seconds that a gateway's event loop is blocked, though its process sends heartbeats, after which it is killed and
    restarted. A loop that is blocked for less is busy, not hung."""
    failpoints: bool = False
    """Whether faults are injected into workers as their environment (`DISAGG_FAILPOINTS`) lists: for tests only."""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`ray`: used by the Ray launcher."""

    address: Name = "local"
    """`local` starts a private Ray on this machine; anything else joins that cluster, whose nodes need a
    `disagg_slot` resource."""
    temp_dir: str | None = None
    """Where a private Ray keeps sockets and logs; a short path. A fresh private folder, removed at the end, when
    unset."""


class ServedModelSection(msgspec.Struct, frozen=True, kw_only=True):
    """`models.<key>`: one of several models, with its pools. Names of its pools and workers begin with the key."""

    model: ModelSection = ModelSection()
    """As `model`; without a `name` the key is the name."""
    mode: Mode = "disaggregated"
    """As `mode`."""
    pools: PoolsConfig = PoolsConfig()
    """As `pools`."""
    placement: PlacementOptions | None = None
    """As `placement`, instead of all of the cluster's."""
    slo: SloConfig | None = None
    """As `slo`, instead of all of the cluster's."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    model: ModelSection = ModelSection()
    kernels: KernelOptions = KernelOptions()
    gateway: GatewaySection = GatewaySection()
    mode: Mode = "disaggregated"
    """`disaggregated`: prefill and decode pools. `colocated`: one pool of workers that compute prompt and answer of a
    request. `elastic`: one pool of workers that do either; for each request the router chooses whether one worker
    computes both, or one hands the prompt's KV over to another."""
    pools: PoolsConfig = PoolsConfig()
    models: dict[str, ServedModelSection] = msgspec.field(default_factory=dict)
    """Several models, by key, instead of `model`, `mode` and `pools`: each has its own workers, queue and limits."""
    placement: PlacementOptions = PlacementOptions()
    slo: SloConfig = SloConfig()
    network: NetworkConfig = NetworkConfig()
    controller: ControllerConfig = ControllerConfig()
    transfer: TransferSection = TransferSection()
    recovery: RecoveryConfig = RecoveryConfig()
    ray: RayConfig = RayConfig()
    autoscaler: AutoscalerOptions = AutoscalerOptions()
    metrics: MetricsOptions = MetricsOptions()
    logging: LoggingConfig = LoggingConfig()
