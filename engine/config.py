"""What a worker process is told at start. Complete and plain: `cluster` makes it from the user's YAML."""

from __future__ import annotations

import ipaddress
from typing import Literal

import msgspec

from disagg.proto.errors import ConfigError
from disagg.proto.messages import RoleName

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "fp8"]
KvCacheDtype = Literal["auto", "fp8"]
TransportName = Literal["gloo", "shm", "nccl", "local"]
Scheduling = Literal["decode_first", "prefill_first", "static"]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process."""

    worker_id: str
    roles: tuple[RoleName, ...]
    model_path: str
    """Folder of a checkpoint written by `disagg model import`; `fake` runs the deterministic model without weights."""
    start_id: str = ""
    """Given back to the controller, so that it can tell this start from others; see `WorkerInfo`."""
    host: str = "127.0.0.1"
    """Address that the control server and the KV channel bind to."""
    port: int = 0
    """0 takes any free port."""
    device: str = "cpu"
    """A torch device."""
    dtype: Dtype = "bfloat16"
    quantization: Quantization = "none"
    """Of the weights of linear layers, the LM head among them, done at load; see `check_quantization`."""
    share_weights: bool = False
    """Whether workers of this host that have the same model map one file of packed weights; see `shared_weights.py`."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """`auto` is `dtype`; `fp8` (e4m3, values as they are) takes half of bf16's memory, on a GPU."""
    cores: tuple[int, ...] = ()
    """CPU cores to pin to; empty leaves the scheduler free."""
    num_threads: int = 1
    """Compute threads, of each rank."""
    tp: int = 1
    """Ranks that compute together (tensor parallelism); each is a process."""
    block_size: int = 16
    """Tokens of a KV block; a multiple of 16."""
    kv_cache_bytes: int = 1 << 30
    """Memory for the paged KV cache of each rank."""
    num_blocks: int | None = None
    """Number of KV blocks, instead of `kv_cache_bytes`."""
    max_num_seqs: int = 256
    """Sequences in a batch."""
    token_budget: int = 512
    """Tokens of one step, decodes first, prefill chunks with what is left."""
    tail_tokens: int = 0
    """A prompt that is handed over ends in a step of about as many tokens, and nothing else, behind which the KV of the
    others travels; 0 for no such step. Costs the overhead of a step, saves the stream most of the wait for its KV."""
    step_ahead: bool = True
    """On a GPU, whether a decode step is queued before the last one's tokens were read; see `steps.py`."""
    scheduling: Scheduling = "decode_first"
    """See `scheduler.py`."""
    max_model_len: int | None = None
    """Longest prompt plus answer; the checkpoint's own limit when unset."""
    decode_reserve_tokens: int = 512
    """Output tokens whose blocks are counted as reserved when a sequence is admitted (less if its max_tokens is
    less)."""
    watermark: float = 0.01
    """Share of the blocks that admission leaves free."""
    cached_share: float = 0.0
    """Part of the KV blocks that the cached prefixes of each tenant keep from those of others; 0 for an equal part of
    what is cached. See `cached_blocks.py`."""
    cached_keep_s: float = 600.0
    """How long a tenant keeps that without a request."""
    swap_bytes: int = 256 << 20
    """Host memory for the KV of preempted sequences; 0 keeps none, so that they are computed again."""
    transport: TransportName = "gloo"
    plaintext_kv: bool = False
    """Whether KV may leave this host unencrypted; see `check_kv_stays_private`."""
    chunk_bytes: int = 4 << 20
    """Largest payload of one KV message, and the size of a staging slot."""
    staging_bytes: int = 64 << 20
    """Most staging memory of a pair, on each side; slots are allocated when first used."""
    max_pairs: int = 32
    """Pairs that a worker keeps: beyond them the one that was not used for longest is closed, as soon as none of its
    attempts is left."""
    pair_idle_s: float = 90.0
    """A pair that no attempt used for so long is closed, unless a gateway asked for it ahead of time. Longer than the
    gateways' `pair_idle_s`, after which they no longer count on it."""
    lease_timeout_s: float = 5.0
    """A reservation on D ends when P was silent for this long."""
    transfer_timeout_s: float = 30.0
    """How long a peer that beats may owe an answer or bytes before it counts as stuck."""
    heartbeat_s: float = 0.5
    failpoints: bool = False
    """Whether the failpoints of the environment are on; see `faulty.py`."""
    token_interval_s: float = 0.0
    """Tokens that steps within this time make are sent together, an answer's first one at once; 0 sends each step's at
    once. See `pacing.py`."""
    report_interval_s: float = 0.02
    """Reports to the router are merged over this time."""
    report_idle_s: float = 0.25
    """A report is sent at least this often."""

    @property
    def is_fake(self) -> bool:
        """Whether it runs the deterministic model without weights."""
        return self.model_path == "fake"

    @property
    def num_places(self) -> int:
        """Sequences in a batch: never more than a step has tokens, so that every decode gets its token in each."""
        return min(self.max_num_seqs, self.token_budget)

    def watermark_blocks(self, num_blocks: int) -> int:
        """Of so many blocks those that admission leaves free."""
        return int(num_blocks * self.watermark)

    @property
    def num_staging_slots(self) -> int:
        """Staging slots of a pair on each side; on the decode side they are the pair's credits."""
        return max(1, self.staging_bytes // self.chunk_bytes)


def check_quantization(
    quantization: Quantization,
    dtype: Dtype,
    device: str,
    tp: int,
    kv_cache_dtype: KvCacheDtype = "auto",
    path: str = "",
) -> None:
    """Refuse what would make a model worse and not faster, or another on each number of ranks. `path` leads to the
    field in the user's file.

    Raises:
        ConfigError: KV in fp8 on another device than a GPU, whose kernels alone read it. Weights with another dtype
            than bfloat16, int8 on another device than a CPU, fp8 on another than a GPU, or with several ranks: the
            scale of a row whose inputs they share would not be the whole row's.
    """
    kind = device.partition(":")[0]
    if kv_cache_dtype == "fp8" and kind != "cuda":
        raise ConfigError(f"{path}kv_cache_dtype: fp8 is for device cuda, not {device}")
    if quantization == "none":
        return
    if dtype != "bfloat16":
        raise ConfigError(f"{path}quantization: {quantization} needs dtype bfloat16, not {dtype}")
    wanted = "cuda" if quantization == "fp8" else "cpu"
    if kind != wanted:
        raise ConfigError(f"{path}quantization: {quantization} is for device {wanted}, not {device}")
    if tp > 1:
        raise ConfigError(f"{path}quantization: {quantization} is for workers of one rank, not of {tp}")


def check_kv_stays_private(config: WorkerConfig) -> None:
    """Refuse to send KV in clear where other machines could read it.

    Raises:
        ConfigError: if the worker hands over (it has one role only), its address is not a loopback one, its transport
            leaves the host, and nothing allows that.
    """
    if config.plaintext_kv or len(config.roles) != 1 or config.transport in ("shm", "local"):
        return
    if not ipaddress.ip_address(config.host).is_loopback:
        raise ConfigError(
            f"network.plaintext_kv: KV would leave {config.host} unencrypted by {config.transport}; set it to true if "
            "all machines of that network may read prompts, or transfer.transport to shm if all workers are on one host"
        )


def check_share_weights(share_weights: bool, device: str, tp: int, path: str = "") -> None:
    """Refuse to share weights that are not in a host's memory, or not whole. `path` leads to the field in the user's
    file.

    Raises:
        ConfigError: for another device than a CPU, and for several ranks.
    """
    if not share_weights:
        return
    if device.partition(":")[0] != "cpu":
        raise ConfigError(f"{path}share_weights: only weights on device cpu are shared, not on {device}")
    if tp > 1:
        raise ConfigError(f"{path}share_weights: only workers of one rank share their weights, not of {tp}")
