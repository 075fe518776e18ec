"""The cluster's configuration: a YAML file, or nothing at all, becomes frozen structs.

    load_config(file) -> override (command line) -> layout.py makes the configs of workers, router and gateway

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

from disagg.cluster.config.reader import parse_yaml, read_struct
from disagg.cluster.models.catalog import DEFAULT_MODEL
from disagg.engine.config import (
    Dtype,
    KvCacheDtype,
    Quantization,
    Scheduling,
    TransportName,
    check_quantization,
    check_share_weights,
)
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.control import PoolName
from disagg.proto.errors import ConfigError
from disagg.router.config import PolicyName
from disagg.router.gateway.config import TlsFiles, is_loopback

Mode = Literal["disaggregated", "colocated"]

GPU_BLOCK_TOKENS = 64
"""What `block_size: auto` is there."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=1)]
Millis = Annotated[float, msgspec.Meta(gt=0, le=86_400_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
MAX_PORT = 65_535
Port = Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)]
Core = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`model`: what is served."""

    name: Name | None = None
    """The name that requests use and, without `path`, the model's name in the cache (`disagg model list`). Left out,
    it is the default model's or, with `path`, the folder's."""
    path: Name | None = None
    """A checkpoint folder; `fake` runs the deterministic model without weights."""
    dtype: Dtype = "bfloat16"
    """Of weights, activations and KV."""
    quantization: Quantization = "none"
    """`int8` keeps the weights of linear layers in 8 bits: faster decoding on CPU, for dtype bfloat16; `fp8` on GPU."""
    share_weights: bool = False
    """Keep the packed weights once for all workers of a host, in a file of the cache folder that they map: less memory,
    and a quicker start of all but the first. Steps of few sequences take up to a tenth longer, because a file has small
    pages on most systems. For dtype bfloat16 and workers of one rank on CPU."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """`auto` is `dtype`; `fp8` keeps KV in 8-bit floats, on GPU."""
    max_model_len: Count | None = None
    """Longest prompt plus answer, in tokens; the checkpoint's own limit when unset."""

    @property
    def served_name(self) -> str:
        """The name that requests use."""
        if self.name is not None:
            return self.name
        return DEFAULT_MODEL if self.path is None else Path(self.path).name


class GatewaySection(msgspec.Struct, frozen=True, kw_only=True):
    """`gateway`: where clients come in."""

    host: Name = "127.0.0.1"
    """The address to bind. Anything but loopback needs `tls`, and `api_keys` or `tls.client_ca`; or `insecure: true`.
    """
    port: Port = 8470
    """Of gRPC. 0 takes any free port."""
    http_port: Port | Literal["auto"] | None = "auto"
    """Of the OpenAI-compatible HTTP server and of `/metrics`. `auto` is the one after `port`, or any free one where
    `port` is 0; 0 takes any free port; `null` serves no HTTP."""
    api_keys: Name | None = None
    """File of the keys that are let in, one list of `{tenant, sha256 or key, admin, limits}`; others must not be able
    to read it. `disagg key new` makes keys. A path in this file is relative to its folder."""
    tls: TlsFiles | None = None
    """`{cert, key, client_ca}`: PEM files for both protocols; `client_ca` turns on mutual TLS."""
    allowed_hosts: tuple[Name, ...] = ()
    """Names, without a port, under which a gateway without keys may be called over HTTP, beside those of loopback. Off
    loopback the name is looked at only where some are given here, and IP addresses are taken, too."""
    allowed_origins: tuple[Name, ...] = ()
    """Web sites, such as `https://chat.example`, whose pages may call a gateway without keys."""
    max_connections: Count = 4096
    """HTTP connections at a time. A further one takes the place of the one that has been without a request for
    longest."""
    max_grpc_connections: Count = 16_384
    """gRPC connections at a time; a further one is closed at once. The process needs as many open files beside those of
    HTTP: `ulimit -n`."""
    max_queued: Count = 1024
    """Requests that wait for a worker; one more is refused as overload."""
    token_interval_ms: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    """Tokens of an answer that come within this time are sent together, the first one at once; 0 sends each at once.
    Some milliseconds spare processor time where gateway, clients and workers share cores and steps are short."""
    insecure: bool = False
    """Let others reach `host` without TLS, or without keys and client certificates. Without keys they may ask
    everything and change nothing."""

    @property
    def chosen_http_port(self) -> int | None:
        """The port that `http_port` stands for; None for no HTTP."""
        if self.http_port != "auto":
            return self.http_port
        return self.port + 1 if self.port else 0


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`pools.<name>`: workers of one kind."""

    size: Count = 1
    """Workers."""
    tp: Count = 1
    """Ranks of each worker (tensor parallelism): processes that each have a share of the model and compute every step
    together. Pools may differ. It must divide the model's heads and the size of its MLP."""
    num_threads: Count = 1
    """Compute threads of each rank."""
    cores: Literal["auto", "none"] | tuple[Core, ...] = "auto"
    """CPU cores to pin each worker to: `auto` gives each rank its own, `none` does not pin, a list is divided among the
    ranks of each worker."""
    kv_cache_bytes: Bytes = 1 << 30
    """Memory of each rank's KV cache."""
    num_blocks: Count | None = None
    """Number of KV blocks, instead of `kv_cache_bytes`."""
    block_size: Count | Literal["auto"] = "auto"
    """Tokens of a KV block; a multiple of 16. `auto` is 16, and 64 on a GPU, whose prefill kernel fetches rows of a
    block together if there are 64 of them."""
    token_budget: Count = 512
    """Tokens of one step."""
    scheduling: Scheduling = "decode_first"
    """What a step takes first: `decode_first` (chunked prefill), or, to compare with, `prefill_first` or `static`."""
    step_ahead: bool = True
    """On a GPU, whether a decode step is queued before the last one's tokens were read."""
    max_num_seqs: Count = 256
    """Sequences in a batch."""
    decode_reserve_tokens: Count = 512
    """Output tokens counted as reserved when a sequence is admitted."""
    watermark: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.01
    """Share of the blocks that admission leaves free."""
    cached_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of a worker's blocks that the cached prefixes of each tenant keep from those of others; 0 is an equal part
    of what is cached. Without API keys there is one tenant."""
    cached_keep_s: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    """How long a tenant keeps that without a request."""
    swap_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Host memory of each worker for the KV of preempted sequences; what does not fit there is computed again. Unset,
    it is 256 MiB; on a GPU nothing, because it would be the GPU's own memory."""
    device: Name = "cpu"
    """`cpu`, `cuda` or `cuda:<index>`. Without Ray the ranks of a worker take the devices from there on; with Ray each
    rank has the one that Ray gives it."""
    node_labels: dict[Name, Name] = {}
    """Ray nodes that this pool's workers may run on: those with all of these labels, such as
    `disagg.role: prefill`."""

    @property
    def tokens_per_block(self) -> int:
        """The block size that is meant."""
        if self.block_size == "auto":
            return HASH_BLOCK_TOKENS if self.device == "cpu" else GPU_BLOCK_TOKENS
        return self.block_size


class PoolsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`pools`: `prefill` and `decode` are used in mode `disaggregated`, `colocated` in mode `colocated`."""

    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    colocated: PoolConfig = PoolConfig()


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


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    gateway: GatewaySection = GatewaySection()
    mode: Mode = "disaggregated"
    """`disaggregated`: prefill and decode pools. `colocated`: one pool of workers with both roles."""
    pools: PoolsConfig = PoolsConfig()
    placement: PlacementConfig = PlacementConfig()
    slo: SloConfig = SloConfig()
    network: NetworkConfig = NetworkConfig()
    controller: ControllerConfig = ControllerConfig()
    transfer: TransferConfig = TransferConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    ray: RayConfig = RayConfig()
    metrics: MetricsConfig = MetricsConfig()
    logging: LoggingConfig = LoggingConfig()


def load_config(file: Path | None) -> ClusterConfig:
    """Read and check a configuration file; the defaults without one.

    Raises:
        ConfigError: if the file cannot be read, is no YAML, or says something that cannot work.
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
    """The gateway's files as absolute paths: a process elsewhere has another working directory."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(folder / Path(path).expanduser())

    gateway = config.gateway
    tls = gateway.tls
    if tls is not None:
        paths = {name: absolute(getattr(tls, name)) for name in ("cert", "key", "client_ca")}
        tls = msgspec.structs.replace(tls, **paths)
    return msgspec.structs.replace(
        config, gateway=msgspec.structs.replace(gateway, tls=tls, api_keys=absolute(gateway.api_keys))
    )


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
    return [("prefill", config.pools.prefill), ("decode", config.pools.decode)]


def check(config: ClusterConfig) -> None:
    """What no single key can tell; raises `ConfigError`."""
    model = config.model
    for name, pool in active_pools(config):
        _check_pool(f"pools.{name}", pool)
        check_quantization(model.quantization, model.dtype, pool.device, pool.tp, model.kv_cache_dtype, "model.")
        check_share_weights(model.share_weights, pool.device, pool.tp, "model.")
        if name != "colocated" and pool.scheduling != "decode_first":
            raise ConfigError(
                f"pools.{name}.scheduling: {pool.scheduling} is for workers with both roles (mode colocated); "
                "choose decode_first"
            )
    devices = {pool.device.partition(":")[0] for _, pool in active_pools(config)}
    if len(devices) > 1:
        raise ConfigError(
            f"pools.decode.device: all pools need the same kind of device; got {', '.join(sorted(devices))}"
        )
    transfer = config.transfer
    if transfer.transport == "nccl" and "cpu" in devices:
        raise ConfigError(
            "transfer.transport: nccl moves KV between CUDA devices only; use gloo or auto with device cpu"
        )
    if transfer.transport in ("gloo", "shm") and "cuda" in devices:
        raise ConfigError(
            f"transfer.transport: {transfer.transport} moves KV of device cpu only; use nccl or auto with device cuda"
        )
    if transfer.chunk_bytes > transfer.staging_bytes:
        raise ConfigError(
            f"transfer.chunk_bytes: {transfer.chunk_bytes} is larger than transfer.staging_bytes "
            f"({transfer.staging_bytes})"
        )
    if transfer.heartbeat_s * 2 > transfer.lease_timeout_s:
        raise ConfigError(
            f"transfer.heartbeat_s: {transfer.heartbeat_s} must be at most half of transfer.lease_timeout_s "
            f"({transfer.lease_timeout_s}), or leases run out between heartbeats"
        )
    _check_ports(config.gateway)
    _check_exposure(config.gateway)


def _check_exposure(gateway: GatewaySection) -> None:
    if gateway.insecure or is_loopback(gateway.host):
        return
    missing = []
    if gateway.tls is None:
        missing.append("gateway.tls, because keys, prompts and answers would travel in clear text")
    if gateway.api_keys is None and (gateway.tls is None or gateway.tls.client_ca is None):
        missing.append("gateway.api_keys or gateway.tls.client_ca, because everybody would be let in")
    if missing:
        raise ConfigError(
            f"gateway.host: {gateway.host} can be reached by others; set {'; and '.join(missing)}; "
            "or bind to 127.0.0.1; or say gateway.insecure: true"
        )


def _check_ports(gateway: GatewaySection) -> None:
    http_port = gateway.chosen_http_port
    if http_port is None:
        return
    if http_port > MAX_PORT:
        raise ConfigError(f"gateway.http_port: there is no port after {gateway.port}; say which to take, or null")
    if http_port and http_port == gateway.port:
        raise ConfigError(f"gateway.http_port: {http_port} is gateway.port already; gRPC and HTTP need one each")


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
