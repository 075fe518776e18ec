"""The cluster's configuration: a YAML file, or nothing at all, becomes frozen structs.

    load_config(file) -> override (command line) -> `control/plan.py` makes the configurations of the processes

Limits stand beside what applies them, with their defaults and bounds, and are sections here as they are or with keys
that only a user needs: `engine/config.py`, `router/config.py`, `router/gateway/config.py`, `system/logs.py`.

Every key has a default, so that an empty file is a working cluster: one prefill and one decode worker on this
machine's CPU. Any mistake is a `ConfigError` that names the key's path and what is allowed there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from typing_extensions import override as overrides

from disagg.autoscaler.config import AutoscalerOptions
from disagg.cluster.config.reader import parse_yaml, read_struct
from disagg.cluster.models.catalog import DEFAULT_MODEL
from disagg.cluster.system.logs import LoggingConfig
from disagg.engine.config import (
    EngineLimits,
    KernelOptions,
    ModelOptions,
    PairLimits,
    Scheduling,
    TransferLimits,
    TransportName,
    check_attention,
    check_quantization,
    check_share_weights,
    check_transfer,
    device_defaults,
)
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.cluster_secret import CertificateFiles
from disagg.proto.config import MAX_PORT, Bytes, Count, KvReserve, Millis, Name, NonNegativeInt, Port, Seconds
from disagg.proto.control import MAX_POOL_SIZE, PoolName
from disagg.proto.errors import ConfigError
from disagg.router.config import MAX_QUEUED, FailureTimeouts, MetricsOptions, PlacementOptions, RecordingOptions
from disagg.router.gateway.config import GatewayOptions, is_loopback, serves_page

Mode = Literal["disaggregated", "colocated", "elastic"]

LEAST_TRACES = 40
"""As many requests as a twin compares at least (`LEAST` in `simulator/twin/twin.py`)."""
MAX_GATEWAYS = 64
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


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
    tpot_ms: Millis | None = None


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


def load_config(file: Path | None) -> ClusterConfig:
    """Read and check a configuration file; the defaults without one.

    Raises:
        ConfigError: if the file cannot be read, is no YAML, or has a value that cannot work.
    """
    if file is None:
        return ClusterConfig()
    try:
        raw = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML ({' '.join(str(error).split())})") from None
    return _in_folder(parse_config(raw), file.absolute().parent)


def _in_folder(config: ClusterConfig, folder: Path) -> ClusterConfig:
    """The files of gateway and network as absolute paths: a process elsewhere has another working directory."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(folder / Path(path).expanduser())

    gateway = config.gateway
    tls = gateway.tls
    if tls is not None:
        paths = {name: absolute(getattr(tls, name)) for name in ("cert", "key", "client_ca")}
        tls = msgspec.structs.replace(tls, **paths)
    recording = gateway.record_events
    if recording is not None:
        recording = msgspec.structs.replace(recording, folder=absolute(recording.folder))
    batches = gateway.batches
    if batches is not None:
        batches = msgspec.structs.replace(batches, folder=absolute(batches.folder))
    gateway = msgspec.structs.replace(
        gateway, tls=tls, api_keys=absolute(gateway.api_keys), record_events=recording, batches=batches
    )
    network = config.network
    if network.certificates is not None:
        given = {name: absolute(getattr(network.certificates, name)) for name in ("ca", "cert", "key")}
        network = msgspec.structs.replace(network, certificates=msgspec.structs.replace(network.certificates, **given))
    return msgspec.structs.replace(config, gateway=gateway, network=network)


def parse_config(raw: object) -> ClusterConfig:
    """A checked configuration from parsed YAML; raises `ConfigError`."""
    config = read_struct(ClusterConfig, raw)
    check(config)
    return config


def override(config: ClusterConfig, values: Mapping[str, object]) -> ClusterConfig:
    """The configuration with some values replaced, named by path: `{"gateway.port": 0}`.

    Raises:
        ConfigError: for a value that is not allowed, as in the file.
    """
    raw: dict[str, Any] = msgspec.to_builtins(config)
    for path, value in values.items():
        *sections, key = path.split(".")
        target = raw
        for section in sections:
            target = target[section]
        target[key] = value
    return parse_config(raw)


def active_pools(config: ClusterConfig) -> list[tuple[PoolName, PoolConfig]]:
    """The pools that the mode uses, prefill first."""
    if config.mode == "colocated":
        return [("colocated", config.pools.colocated)]
    if config.mode == "elastic":
        return [("workers", config.pools.workers)]
    return [("prefill", config.pools.prefill), ("decode", config.pools.decode)]


def unused_pools(config: ClusterConfig) -> tuple[str, ...]:
    """A note where pools are configured that the mode does not use: no error, because `--elastic` and `--colocated` may
    be given on top of a file."""
    used = [name for name, _ in active_pools(config)]
    default = PoolsConfig()
    unused = [
        f"pools.{name}"
        for name in PoolsConfig.__struct_fields__
        if name not in used and getattr(config.pools, name) != getattr(default, name)
    ]
    if not unused:
        return ()
    of_mode = " and ".join(f"pools.{name}" for name in used)
    return (f"{', '.join(unused)}: not used in mode {config.mode}, which has {of_mode}",)


def check(config: ClusterConfig) -> None:
    """Values that contradict each other; raises `ConfigError`."""
    model = config.model
    for name, pool in active_pools(config):
        _check_pool(f"pools.{name}", pool)
        _check_sizes(f"pools.{name}", pool, config.autoscaler)
        check_attention(config.kernels.attention, pool.device, "kernels.")
        check_quantization(model.quantization, model.dtype, pool.device, pool.tp, model.kv_cache_dtype, "model.")
        check_share_weights(model.share_weights, pool.device, pool.tp, "model.")
        if name != "colocated" and pool.scheduling not in ("decode_first", "slack"):
            raise ConfigError(
                f"pools.{name}.scheduling: {pool.scheduling} is for mode colocated; choose decode_first or slack"
            )
        if pool.max_itl_ms is not None and pool.scheduling != "slack":
            raise ConfigError(f"pools.{name}.max_itl_ms: is for scheduling slack only, not {pool.scheduling}")
    devices = {pool.device.partition(":")[0] for _, pool in active_pools(config)}
    if len(devices) > 1:
        raise ConfigError(
            f"pools.decode.device: all pools need the same kind of device; got {', '.join(sorted(devices))}"
        )
    placement = config.placement
    if placement.decodes != "spread" and (config.mode != "elastic" or placement.policy not in ("auto", "elastic")):
        raise ConfigError(
            f"placement.decodes: {placement.decodes} is for mode elastic with policy auto or elastic; got mode "
            f"{config.mode}, policy {placement.policy}"
        )
    if placement.decodes == "auto" and config.metrics.num_traces < LEAST_TRACES:
        raise ConfigError(
            f"metrics.num_traces: placement.decodes auto compares settings on {LEAST_TRACES} requests or more; got "
            f"{config.metrics.num_traces}"
        )
    if config.controller.twin == "on" and placement.decodes != "auto":
        raise ConfigError(f"controller.twin: on is for placement.decodes auto, not {placement.decodes}")
    transfer = config.transfer
    if transfer.transport == "nccl" and "cpu" in devices:
        raise ConfigError(
            "transfer.transport: nccl moves KV between CUDA devices only; use gloo or auto with device cpu"
        )
    check_transfer(transfer.limits(devices.pop()))
    if config.network.certificates is not None and config.network.encryption == "off":
        raise ConfigError("network.certificates: are not used with network.encryption off; remove one of them")
    _check_ports(config.gateway)
    _check_replicas(config)
    _check_exposure(config.gateway)


def _check_exposure(gateway: GatewaySection) -> None:
    serves_page(gateway)
    if gateway.insecure or is_loopback(gateway.host):
        return
    missing = []
    if gateway.tls is None:
        missing.append("gateway.tls, because keys, prompts and answers would travel in clear text")
    if gateway.api_keys is None and (gateway.tls is None or gateway.tls.client_ca is None):
        missing.append("gateway.api_keys or gateway.tls.client_ca, because every caller would be admitted")
    if missing:
        raise ConfigError(
            f"gateway.host: {gateway.host} can be reached by others; set {'; and '.join(missing)}; "
            "or bind to 127.0.0.1; or set gateway.insecure: true"
        )


def _check_replicas(config: ClusterConfig) -> None:
    gateway = config.gateway
    if gateway.replicas > 1 and config.placement.decodes == "auto":
        raise ConfigError(
            f"gateway.replicas: {gateway.replicas} gateways need placement.decodes spread or gather; auto changes the "
            "setting of one gateway only"
        )
    first = gateway.replica_http_port
    if not first:
        return
    last = first + gateway.replicas - 1
    if last > MAX_PORT:
        raise ConfigError(f"gateway.replica_http_port: {gateway.replicas} ports from {first} on end after {MAX_PORT}")
    for name, port in (("port", gateway.port), ("http_port", gateway.chosen_http_port)):
        if port and first <= port <= last:
            raise ConfigError(f"gateway.replica_http_port: {first} to {last} include gateway.{name}, {port}")


def _check_ports(gateway: GatewaySection) -> None:
    http_port = gateway.chosen_http_port
    if http_port is None:
        return
    if http_port > MAX_PORT:
        raise ConfigError(f"gateway.http_port: there is no port after {gateway.port}; set one, or null")
    if http_port and http_port == gateway.port:
        raise ConfigError(f"gateway.http_port: {http_port} is gateway.port already; gRPC and HTTP need one each")


def _check_sizes(path: str, pool: PoolConfig, autoscaler: AutoscalerOptions) -> None:
    if pool.max_size is None:
        if autoscaler.enabled:
            raise ConfigError(f"{path}.max_size: autoscaler.enabled needs the most workers that it may start")
        return
    if pool.max_size > MAX_POOL_SIZE:
        raise ConfigError(f"{path}.max_size: expected at most {MAX_POOL_SIZE} workers; got {pool.max_size}")
    if pool.min_size > pool.max_size:
        raise ConfigError(f"{path}.min_size: {pool.min_size} is more than max_size, {pool.max_size}")
    if not pool.min_size <= pool.size <= pool.max_size:
        raise ConfigError(
            f"{path}.size: expected min_size to max_size, {pool.min_size} to {pool.max_size}; got {pool.size}"
        )


def _check_pool(path: str, pool: PoolConfig) -> None:
    if not _DEVICE.fullmatch(pool.device):
        raise ConfigError(f"{path}.device: expected cpu, cuda or cuda:<index>; got {pool.device!r}")
    if pool.tokens_per_block % HASH_BLOCK_TOKENS:
        raise ConfigError(f"{path}.block_size: {pool.block_size} is not a multiple of {HASH_BLOCK_TOKENS}")
    if isinstance(pool.cores, tuple):
        if len(set(pool.cores)) != len(pool.cores) or not pool.cores:
            raise ConfigError(
                f"{path}.cores: expected auto, none, or a list of different cores; got {list(pool.cores)}"
            )
        if pool.tp > len(pool.cores):
            raise ConfigError(f"{path}.tp: {pool.tp} ranks do not fit on {len(pool.cores)} cores")
        if pool.num_threads * pool.tp > len(pool.cores):
            of_ranks = f" of {pool.tp} ranks" if pool.tp > 1 else ""
            raise ConfigError(
                f"{path}.num_threads: {pool.num_threads} threads{of_ranks} do not fit on {len(pool.cores)} cores"
            )
