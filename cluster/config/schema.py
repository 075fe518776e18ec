"""The structs of the cluster's YAML file, with the meaning and the default of each key.

Limits stand beside the code that applies them, with their defaults and bounds, and are sections here as they are or
with keys that only a user needs: `engine/config.py`, `router/config.py`, `gateway/config.py`, `system/logs.py`.
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
    AdapterOptions,
    EngineLimits,
    KernelOptions,
    ModelOptions,
    PairLimits,
    Scheduling,
    TierOptions,
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
"""Largest number of models in one cluster: the tokenizer of each is in every gateway."""


class ModelSection(ModelOptions, frozen=True, kw_only=True):
    """The section `model`: the served model and its form."""

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
    """The section `gateway`: the server for clients."""

    port: Port = 8470
    """Port of the gRPC server; 0 takes any free port."""
    http_port: Port | Literal["auto"] | None = "auto"
    """Port of the OpenAI-compatible HTTP server and of `/metrics`. `auto` is the one after `port`, or any free one
    where `port` is 0; 0 takes any free port; `null` serves no HTTP."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_GATEWAYS)] = 1
    """Number of gateway processes. They listen at the same ports, and the kernel divides connections among them; each
    places requests by itself. Limits apply to each process, including `max_queued` and limits of keys."""
    replica_http_port: Port | None = None
    """First port of the HTTP servers of single gateways, where there are several: each listens at a port of its own,
    too, so that its metrics can be read. The others have the following ports; `null` takes any free ones, which `disagg
    status` shows."""
    max_queued: Count = MAX_QUEUED
    """Largest number of requests that wait for a worker; further ones are refused as overload."""
    token_interval_ms: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    """Interval in which tokens of an answer are collected and sent together, after the first one; 0 sends each at once.
    Some milliseconds save processor time where gateway, clients and workers share cores and steps are short."""
    record_events: RecordingOptions | None = None
    """`{folder, max_bytes}`: record the router's events for `disagg replay`. Recordings contain no prompts and answers,
    but their lengths, times and tenants."""
    insecure: bool = False
    """Whether to allow a `host` that other machines reach without TLS, or without keys and client certificates. Clients
    without keys may then read everything and change nothing."""

    @property
    def chosen_http_port(self) -> int | None:
        """The port that `http_port` stands for; None for no HTTP."""
        if self.http_port != "auto":
            return self.http_port
        return self.port + 1 if self.port else 0


class PoolConfig(EngineLimits, frozen=True, kw_only=True):
    """A section of `pools`: workers of one kind."""

    size: Count = 1
    """Number of workers in the pool."""
    min_size: NonNegativeInt = 1
    """Least number of workers that the autoscaler keeps. With 0 it empties the pool when no requests arrive; the first
    requests after that are refused, with a time to retry after, until a worker has started."""
    max_size: Count | None = None
    """Largest number of workers that the autoscaler starts; required where it is enabled."""
    cores: Literal["auto", "none"] | tuple[NonNegativeInt, ...] = "auto"
    """CPU cores that each worker is pinned to: `auto` gives each rank its own, `none` does not pin, a list is divided
    among the ranks of each worker."""
    block_size: Count | Literal["auto"] = "auto"
    """Tokens of a KV block; a multiple of 16. `auto` is 16, and 64 on a GPU, whose prefill kernel fetches rows of a
    block together if there are 64 of them."""
    token_budget: Count | Literal["auto"] = "auto"
    """Tokens of one step, decodes first, prefill chunks with what is left. `auto` is 512, and 4096 on a GPU."""
    swap_bytes: NonNegativeInt | None = None
    """Host memory of each worker for the KV of preempted sequences; KV that does not fit is computed again. Unset, it
    is 256 MiB; on a GPU nothing, because it would be the GPU's own memory."""
    decode_reserve_tokens: Count = KvReserve().decode_reserve_tokens
    """Output tokens to reserve for each sequence, see `KvReserve`. At least 1 here; the engine and the router accept 0,
    too, for tests of preemption."""
    node_labels: dict[Name, Name] = msgspec.field(default_factory=dict)
    """Labels of the Ray nodes that this pool's workers may run on, such as `disagg.role: prefill`; a node must have all
    of them."""

    @property
    def tokens_per_block(self) -> int:
        """The block size, with `auto` resolved."""
        return device_defaults(self.device).block_size if self.block_size == "auto" else self.block_size

    @property
    def tokens_per_step(self) -> int:
        """The token budget, with `auto` resolved."""
        return device_defaults(self.device).token_budget if self.token_budget == "auto" else self.token_budget


class WorkersConfig(PoolConfig, frozen=True, kw_only=True):
    """The section `pools.workers`: a pool with the defaults of mode `elastic`."""

    size: Count = 2
    scheduling: Scheduling = "slack"

    @property
    @overrides
    def tokens_per_step(self) -> int:
        """The token budget; with `auto` at least 1024: the slack policy makes steps shorter where targets ask for
        it."""
        return max(1024, super().tokens_per_step) if self.token_budget == "auto" else self.token_budget


class PoolsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section `pools`: `prefill` and `decode` are used in mode `disaggregated`, `colocated` in mode `colocated`,
    `workers` in mode `elastic`."""

    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    colocated: PoolConfig = PoolConfig()
    workers: WorkersConfig = WorkersConfig()


class SloConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section `slo`: targets of requests that do not bring their own."""

    ttft_ms: Millis | None = None
    tpot_ms: TpotMillis | None = None


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section `network`: connections between our own processes."""

    bind: Literal["loopback", "node"] = "loopback"
    """Addresses of workers and controller. `loopback`: all on one machine. `node`: they listen on their Ray node's
    address, which must not be reachable from other networks."""
    encryption: Literal["auto", "on", "off"] = "auto"
    """TLS with certificates at both ends for the gRPC connections between workers, gateway and controller. `auto`: on
    with `bind: node` or `certificates`. KV goes over channels of its own, see `plaintext_kv`."""
    certificates: CertificateFiles | None = None
    """`{ca, cert, key}`: PEM files for TLS, which every host has at these paths. `null`: certificates are made from the
    cluster's secret, in memory."""
    plaintext_kv: bool = False
    """Whether KV and what ranks exchange (gloo, nixl, nccl) may be sent authenticated but not encrypted. With `bind:
    node` workers that hand over refuse to start without this, unless `transfer.transport` is `shm`. For a network whose
    every machine may read prompts: a private one, or one that encrypts by itself."""

    @property
    def is_encrypted(self) -> bool:
        """Whether our gRPC connections use TLS."""
        return self.encryption == "on" or (
            self.encryption == "auto" and (self.bind == "node" or self.certificates is not None)
        )


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section `controller`: the process that holds the desired and the observed state of the cluster."""

    port: Port = 0
    """Port of the controller; 0 takes any free port."""
    drain_timeout_s: Seconds = 300.0
    """Seconds that a draining worker may take to finish its sequences; those that still run continue on other
    workers."""
    twin: Literal["auto", "on", "off"] = "auto"
    """Whether the controller keeps a twin running, as a process of lowest priority, if `placement.decodes` is auto.
    `auto`: if its machine has two cores or more. `off`: `disagg twin` is started by hand."""
    templates: bool = True
    """Whether processes are forked from ones that have loaded code and weights already (without Ray, on Linux), so that
    they start and restart sooner and share the weights; see `templates.py`. This costs one more process for each kind,
    whose memory they share."""
    probes: bool = True
    """Whether a new worker counts as ready only once a tiny request went through prefill, hand-over and decode with it;
    see `cluster/core/probes.py`."""


class KvCacheSection(msgspec.Struct, frozen=True, kw_only=True):
    """The section `kv_cache`: KV beside the device caches of workers, and of other workers."""

    tiers: TierOptions | None = None
    """`{host_bytes, disk: {path, bytes, shared}}`: host memory and a folder in which workers that compute prompts keep
    KV that their device cache has no room for; `null` for none. On CPUs, for models without windows."""
    fetch: bool = False
    """Whether a worker may get the KV of a prompt's beginning from another worker that has it, where that is quicker
    than computing it. For models without windows; independent of `tiers`."""


class TransferSection(PairLimits, frozen=True, kw_only=True):
    """The section `transfer`: the hand-over of KV from prefill to decode workers."""

    transport: TransportName = "auto"
    """`shm` is memory that processes of one user share: faster than gloo, and no other user of the host can join; for
    workers on one host. With `nixl` the decode worker reads the prefill worker's memory, between hosts by RDMA; it
    needs the extra `nixl`. `nccl` is for GPUs only. KV on GPUs goes by `gloo` and `shm` through pinned host memory, by
    `nixl` and `nccl` from GPU to GPU. `auto` on CPU is shm with `network.bind: loopback`, else gloo; on CUDA each pair
    takes nixl, from host memory, if a test transfer succeeds while the pair is formed, else shm or gloo in the same
    way."""
    chunk_bytes: Bytes | Literal["auto"] = "auto"
    """Largest payload of one KV message, and size of a staging slot. `auto` is 4 MiB, and 64 MiB with GPUs."""
    staging_bytes: Bytes | Literal["auto"] = "auto"
    """Largest staging memory of each pair of workers, on each side; slots are allocated when first used. `auto` is 64
    MiB, and 512 MiB with GPUs."""

    def limits(self, device: str) -> TransferLimits:
        """The limits for workers on this device, with `auto` resolved."""
        defaults = device_defaults(device)
        shared = {name: getattr(self, name) for name in PairLimits.__struct_fields__}
        return TransferLimits(
            **shared,
            chunk_bytes=defaults.chunk_bytes if self.chunk_bytes == "auto" else self.chunk_bytes,
            staging_bytes=defaults.staging_bytes if self.staging_bytes == "auto" else self.staging_bytes,
        )


class RecoveryConfig(FailureTimeouts, frozen=True, kw_only=True):
    """The section `recovery`: times after which a process counts as unresponsive although its connections stand. `null`
    is never."""

    kill_after_s: Seconds | None = 4.0
    """Seconds without a heartbeat of a worker or the gateway, after which it is killed and restarted."""
    gateway_stuck_after_s: Seconds | None = 30.0
    """Seconds for which a gateway's event loop is blocked, although its process sends heartbeats, after which it is
    killed and restarted. A loop that is blocked for less is busy, not hung."""
    failpoints: bool = False
    """Whether to inject faults into workers as their environment (`DISAGG_FAILPOINTS`) lists: for tests only."""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section `ray`: options of the Ray launcher."""

    address: Name = "local"
    """Address of the Ray cluster. `local` starts a private Ray on this machine; any other value joins that cluster,
    whose nodes need a `disagg_slot` resource."""
    temp_dir: str | None = None
    """Folder in which a private Ray keeps sockets and logs; a short path. Unset, it is a fresh private folder, which is
    removed at the end."""


class AdaptersSection(AdapterOptions, frozen=True, kw_only=True):
    """The section `adapters`: LoRA adapters of a model."""

    models: dict[Name, Name] = msgspec.field(default_factory=dict)
    """Adapters that are served from the start: the name that requests use -> its folder below `folder`. `disagg adapter
    add` adds others while the cluster serves."""


class ServedModelSection(msgspec.Struct, frozen=True, kw_only=True):
    """A section of `models`: one of several models, with its pools. Names of its pools and workers begin with the
    key."""

    model: ModelSection = ModelSection()
    """The model, as in `ClusterConfig.model`; without a `name` the key is the name."""
    mode: Mode = "disaggregated"
    """Mode of this model's pools, as in `ClusterConfig`."""
    pools: PoolsConfig = PoolsConfig()
    """Pools of this model, as in `ClusterConfig`."""
    adapters: AdaptersSection | None = None
    """Adapters of this model, as in `ClusterConfig`."""
    placement: PlacementOptions | None = None
    """Placement for this model, which replaces the whole section of the cluster."""
    slo: SloConfig | None = None
    """Targets for this model, which replace the whole section of the cluster."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration file of a cluster."""

    model: ModelSection = ModelSection()
    kernels: KernelOptions = KernelOptions()
    gateway: GatewaySection = GatewaySection()
    mode: Mode = "disaggregated"
    """Division of work among workers. `disaggregated`: prefill and decode pools. `colocated`: one pool of workers that
    compute prompt and answer of a request. `elastic`: one pool of workers that do either; for each request the router
    chooses whether one worker computes both, or one hands the prompt's KV over to another."""
    pools: PoolsConfig = PoolsConfig()
    adapters: AdaptersSection | None = None
    """`{folder, max_loaded, max_rank, models}`: LoRA adapters, which workers load while they serve; `null` for none."""
    models: dict[str, ServedModelSection] = msgspec.field(default_factory=dict)
    """Several models by key, in place of `model`, `mode` and `pools`: each has its own workers, queue and limits."""
    placement: PlacementOptions = PlacementOptions()
    slo: SloConfig = SloConfig()
    network: NetworkConfig = NetworkConfig()
    controller: ControllerConfig = ControllerConfig()
    kv_cache: KvCacheSection = KvCacheSection()
    transfer: TransferSection = TransferSection()
    recovery: RecoveryConfig = RecoveryConfig()
    ray: RayConfig = RayConfig()
    autoscaler: AutoscalerOptions = AutoscalerOptions()
    metrics: MetricsOptions = MetricsOptions()
    logging: LoggingConfig = LoggingConfig()
