"""The configuration of a worker process, in the parts that the user's YAML has too, and what does not go together.

ModelOptions     `model`, but for its name and path
KernelOptions    `kernels`
EngineLimits     `pools.<name>`, but for its size and place
PairLimits       `transfer`, but for the transport and the sizes of its memory
DeviceDefaults   what a setting is, on each kind of device, that is `auto` or left out
WorkerConfig     one process: complete and plain, made by `cluster/control/plan.py`
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

import msgspec

from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.config import Bytes, Count, Fraction, KvReserve, Name, NonNegative, NonNegativeInt, Positive, Seconds
from disagg.proto.errors import ConfigError
from disagg.proto.messages import MAX_DRAFT, RoleName

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "stored", "stored_sums", "int8", "int4", "fp8"]
KvCacheDtype = Literal["auto", "int8", "fp8"]
TransportName = Literal["auto", "gloo", "shm", "nixl", "nccl", "local"]
"""Transports of KV. With `auto`, a worker chooses when a pair is formed: nixl where it works, else shm or gloo
(`transports/auto.py`)."""
STAGED_ON_DEVICE: frozenset[TransportName] = frozenset({"nccl", "nixl"})
"""Transports whose staging memory is the device's, where the KV is; all others use the host's."""
AttentionName = Literal["auto", "triton", "flashinfer"]
Scheduling = Literal["decode_first", "slack", "prefill_first", "static"]


class DeviceDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What settings are that are `auto` or left out; the one place for what depends on the device."""

    block_size: int
    token_budget: int
    """On a GPU, a step of so many tokens of an 8B model computes for a tenth of a second or less, and has activations
    of about half a gibibyte."""
    kv_cache_bytes: int | Literal["auto"]
    """`auto` is measured (`engine/runner/cache_size.py`)."""
    swap_bytes: int
    """On a GPU nothing: it would be the GPU's own memory."""
    chunk_bytes: int
    """On a GPU 512 tokens of an 8B model in bf16: one message, checksum and scatter for each."""
    staging_bytes: int
    tail_tokens: int
    """Not measured on GPUs, and off there."""


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults(
        block_size=HASH_BLOCK_TOKENS,
        token_budget=512,
        kv_cache_bytes=1 << 30,
        swap_bytes=256 << 20,
        chunk_bytes=4 << 20,
        staging_bytes=64 << 20,
        tail_tokens=32,
    ),
    "cuda": DeviceDefaults(
        block_size=64,
        token_budget=4096,
        kv_cache_bytes="auto",
        swap_bytes=0,
        chunk_bytes=64 << 20,
        staging_bytes=512 << 20,
        tail_tokens=0,
    ),
}
"""Defaults by the kind of device."""
_CPU = DEVICE_DEFAULTS["cpu"]


def device_defaults(device: str) -> DeviceDefaults:
    """Defaults of `cpu`, `cuda` or `cuda:<index>`."""
    return DEVICE_DEFAULTS["cpu" if device == "cpu" else "cuda"]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Form in which a model is kept and computed."""

    dtype: Dtype | Literal["auto"] = "auto"
    """Type of weights, activations and KV. `auto` is bfloat16; on CPUs that are slow at bfloat16 it is float32, for the
    whole cluster."""
    quantization: Quantization = "none"
    """Quantization of the weights of linear layers and of the LM head, done at load: `int8` or `int4` (groups of 32
    inputs) for faster decoding on CPU, with dtype bfloat16; `fp8` on GPU. `stored` rounds nothing: weights that the
    checkpoint has in groups of 4 or 8 bits, and experts in MXFP4, stay so in memory, and results are those of `none`.
    `stored_sums` keeps the former and multiplies them as sums of codes: quicker with few sequences, in other bits. See
    `check_quantization`."""
    share_weights: bool = False
    """Keep the packed weights once for all workers of a host, in a file of the cache folder that they map: less memory,
    and a quicker start of all but the first. Steps of few sequences take up to a tenth longer, because a file has small
    pages on most systems. For dtype bfloat16 and workers of one rank on CPU; see `shared_weights.py`."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """`auto` is `dtype`. `int8` takes half of bf16's memory, on CPU: a scale for each head of a token, K and V. `fp8`
    (e4m3, values as they are) takes half of it on GPU. Not for latent attention."""
    max_model_len: Count | None = None
    """Longest prompt plus answer, in tokens; the checkpoint's own limit when unset."""


class KernelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Libraries with which workers compute."""

    attention: AttentionName = "auto"
    """Kernels for the attention of prompts on a GPU: `triton`, our own, or `flashinfer`, if that is installed. A worker
    tries the named one before it loads the model, and does not start if that fails. `auto` is `triton` until both were
    measured. `disagg doctor` names what can be used."""


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: tokens that may come next are computed beside the last known one, and kept as far as they
    are what is sampled. They change no token, whatever the sampling parameters."""

    method: Literal["auto", "lookup", "draft", "off"] = "auto"
    """What proposes drafts. `lookup` takes what followed the end of the text where it occurred before, in the prompt or
    in the answer (prompt lookup, n-gram speculation); `draft` asks a smaller model. `auto` is `lookup` on a CPU, and
    `off` on a GPU until it was measured under load there."""
    model: Name | None = None
    """Draft model of method `draft`: a checkpoint folder, or the name of an imported model. It has the vocabulary of
    the model it drafts for. Its KV is part of `kv_cache_bytes`."""
    max_draft: Annotated[int, msgspec.Meta(ge=1, le=MAX_DRAFT)] = 8
    """Most drafts of a sequence in a step. How many there are is decided in each step, by measured step times and by
    how many were accepted before."""


SPECULATION_DEFAULTS = SpeculationOptions()
NO_SPECULATION = SpeculationOptions(method="off")


def resolved_speculation(options: SpeculationOptions, device: str, *, is_fake: bool) -> SpeculationOptions:
    """With a method in place of `auto`: none for the model without weights, whose tokens never come again."""
    if options.method != "auto":
        return options
    is_off = is_fake or device.partition(":")[0] != "cpu"
    return msgspec.structs.replace(options, method="off" if is_off else "lookup")


class DiskTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder with KV."""

    path: Name
    """Folder. Each worker has a folder of its own below it, named like the worker, unless it is `shared`. Only the
    user of the workers may read it: texts can be guessed from KV."""
    bytes: Bytes
    """Most that a worker keeps there; most that all workers of a model keep in a shared folder, with what they write in
    a minute beyond that."""
    shared: bool = False
    """Whether all workers of a model use the same files."""


class TierOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a worker that computes prompts keeps KV that its device cache has no room for."""

    host_bytes: NonNegativeInt = 0
    """Host memory of each worker, beside `swap_bytes`; 0 for none."""
    disk: DiskTier | None = None
    """`{path, bytes, shared}`: files, which the next process of the worker finds again. `null` for none."""
    min_tokens: Count = 1024
    """Prompts with more tokens are kept at their first use, others at their second, or at once with an answer that ends
    on the same worker."""
    write_mb_per_s: Positive = 200.0
    """Most megabytes that a worker writes in a second."""
    max_loading: Count = 4
    """Sequences of a worker whose KV is loaded at a time."""


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters that workers of a model load while they serve."""

    folder: Name
    """Folder of adapters in PEFT's format, each in a folder below it. Nothing outside of it is read."""
    max_loaded: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    """Adapters that each worker has loaded at most: the one that was not used for longest makes room. Memory for all of
    them is allocated at start."""
    max_rank: Annotated[int, msgspec.Meta(ge=1, le=512)] = 64
    """Largest rank of an adapter."""


class EngineLimits(KvReserve, frozen=True, kw_only=True):
    """How much a worker computes and holds at a time."""

    tp: Count = 1
    """Ranks of each worker (tensor parallelism): processes that each have a share of the model and compute every step
    together. Pools may differ. It must divide the model's heads and the size of its MLP."""
    pp: Count = 1
    """Stages of each worker (pipeline parallelism), each of `tp` ranks: a stage has some of the layers, and the KV of
    those. Pools may differ. At most the model's layers."""
    ep: bool = False
    """Whether each rank holds whole experts (expert parallelism), of a model with experts, and not a part of each. With
    `tp` of at least 2, which must divide the number of experts."""
    num_threads: Count | Literal["auto"] = 1
    """Compute threads of each rank. `auto` is an equal share of the cores that other workers leave; or one thread where
    a worker finds at its start that more are no faster, as where two cores are one that is shared."""
    kv_cache_bytes: Bytes | Literal["auto"] = "auto"
    """Memory of each rank's paged KV cache. `auto` is 1 GiB on a CPU; on a GPU 0.9 of what weights, captures and one
    full step leave free, measured at start."""
    num_blocks: Count | None = None
    """Number of KV blocks, instead of `kv_cache_bytes`."""
    scheduling: Scheduling = "decode_first"
    """What a step takes first: `decode_first` (chunked prefill); `slack`, the same with prompt chunks as long as the
    targets of the sequences that decode allow; or, to compare with, `prefill_first` or `static`. See `scheduler.py`."""
    max_itl_ms: Positive | None = None
    """Scheduling `slack`: how long a step with prompt tokens may take while sequences decode, in milliseconds, as
    predicted; where the decodes alone take longer, one block of tokens. `null` for no limit beside the targets."""
    step_ahead: bool = True
    """On a GPU, whether a decode step is queued before the last one's tokens were read; see `steps.py`."""
    skip_forced: bool = True
    """Whether tokens between which a grammar leaves no choice are computed in one step, as far as the batch has places
    free, or each in its own."""
    speculation: SpeculationOptions = SPECULATION_DEFAULTS
    """Speculative decoding, on workers that decode."""
    max_num_seqs: Count = 256
    """Sequences in a batch, and rows of a step without prompts."""
    cached_share: Fraction = 0.0
    """Share of a worker's blocks that the cached prefixes of each tenant keep from those of others; 0 is an equal part
    of what is cached. Without API keys there is one tenant. See `cached_blocks.py`."""
    cached_keep_s: NonNegative = 600.0
    """How long a tenant keeps that without a request."""
    device: Name = "cpu"
    """`cpu`, `cuda` or `cuda:<index>`. Without Ray each rank of each worker takes a device of its own: with `cuda` the
    pools divide the devices, with an index a pool takes those from there on. With Ray each rank has the one that Ray
    gives it, whatever the index."""

    def watermark_blocks(self, num_blocks: int) -> int:
        """Number of blocks that admission leaves free, out of `num_blocks`."""
        return int(num_blocks * self.watermark)

    @property
    def num_ranks(self) -> int:
        """Ranks of each worker, over all stages."""
        return self.tp * self.pp


class PairLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The hand-over of KV between two workers, but for its memory."""

    max_pairs: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    """Connections to workers of the other pool that a worker keeps; beyond them the one that was not used for longest
    is closed, as soon as none of its attempts is left. Each takes a few threads and up to 14 descriptors on both sides.
    """
    lease_timeout_s: Seconds = 5.0
    """A reservation on a decode worker ends when its prefill worker was silent for this long."""
    heartbeat_s: Seconds = 0.5
    timeout_s: Seconds = 30.0
    """How long a worker that sends heartbeats may leave its peer without a due message or bytes before it counts as
    stuck."""


class TransferLimits(PairLimits, frozen=True, kw_only=True):
    """The hand-over of KV between two workers."""

    chunk_bytes: Bytes = _CPU.chunk_bytes
    """Largest payload of one KV message, and the size of a staging slot."""
    staging_bytes: Bytes = _CPU.staging_bytes
    """Most staging memory of each pair of workers, on each side; slots are allocated when first used."""

    @property
    def num_slots(self) -> int:
        """Staging slots of a pair on each side; on the decode side they are the pair's credits."""
        return max(1, self.staging_bytes // self.chunk_bytes)


_MODEL = ModelOptions()
_KERNELS = KernelOptions()
TRANSFER_DEFAULTS = TransferLimits()


class WeightsSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of `WorkerConfig` that the weights of a whole model depend on, on a CPU."""

    model_path: str
    dtype: Dtype
    quantization: Quantization
    share_weights: bool


def max_prompt_steps(pp: int) -> int:
    """Steps of prompts that may be under way together on a worker of so many stages: one more than there are stages, so
    that each has one while the oldest is taken in (ADR 101)."""
    return 1 if pp == 1 else 1 + pp


class WorkerConfig(EngineLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process. The fields of `ModelOptions` and `KernelOptions` are its own, because a
    struct has one base."""

    worker_id: str
    roles: tuple[RoleName, ...]
    is_elastic: bool = False
    """With both roles: whether it also hands over to, and takes over from, others of its kind."""
    model_path: str
    """Folder of a checkpoint written by `disagg model import`; `fake` runs the deterministic model without weights."""
    start_id: str = ""
    """Sent back to the controller, which distinguishes starts of the same worker by it; see `WorkerInfo`."""
    config_hash: str = ""
    """The same: names this configuration, but for the worker's id."""
    restarts: int = 0
    """Counts requests to replace workers though nothing differs, as for new code."""
    host: str = "127.0.0.1"
    """Address that the control server and the KV channel bind to."""
    port: int = 0
    """0 takes any free port."""
    num_threads: Count = 1
    speculation: SpeculationOptions = NO_SPECULATION
    threads_are_open: bool = False
    """Whether it may compute with one thread instead, where that is as fast."""
    dtype: Dtype = "bfloat16"
    quantization: Quantization = _MODEL.quantization
    share_weights: bool = _MODEL.share_weights
    kv_cache_dtype: KvCacheDtype = _MODEL.kv_cache_dtype
    max_model_len: Count | None = _MODEL.max_model_len
    attention: AttentionName = _KERNELS.attention
    cores: tuple[int, ...] = ()
    """CPU cores to pin to; empty leaves the scheduler free."""
    block_size: int = _CPU.block_size
    """Tokens of a KV block; a multiple of 16."""
    token_budget: Count = _CPU.token_budget
    """Tokens of one step, decodes first, prefill chunks with what is left."""
    tail_tokens: int = 0
    """A prompt that is handed over ends in a step of about as many tokens, and nothing else, behind which the KV of the
    others travels; 0 for no such step. Costs the overhead of a step, saves the stream most of the wait for its KV."""
    swap_bytes: NonNegativeInt = _CPU.swap_bytes
    """Host memory for the KV of preempted sequences; 0 keeps none, so that they are computed again."""
    tiers: TierOptions | None = None
    """Tiers of KV beside the device cache; None without any. The path of `disk` is this worker's own folder, unless it
    is shared."""
    adapters: AdapterOptions | None = None
    """Adapters that it may load; None for none."""
    fake_layers: int = 1
    """Layers of the fake model, the same for all workers of a cluster: as many as the most stages that one has."""
    fetch: bool = False
    """Whether it gets KV of prefixes from other workers, and gives them its own, where a gateway asks for that."""
    transport: TransportName = "gloo"
    plaintext_kv: bool = False
    """Whether KV may leave this host unencrypted; see `check_kv_stays_private`."""
    transfer: TransferLimits = TRANSFER_DEFAULTS
    pair_idle_s: float = 90.0
    """A pair that no attempt used for so long is closed, unless a gateway requested it ahead of time. Longer than the
    gateways' `pair_idle_s`, after which they no longer count on it."""
    failpoints: bool = False
    """Whether the failpoints of the environment are on; see `faulty.py`."""
    token_interval_s: float = 0.0
    """Tokens that steps within this time make are sent together, an answer's first one at once; 0 sends each step's at
    once. See `TokenPacing`."""
    report_interval_s: float = 0.02
    """Reports to the router are merged over this time."""
    report_idle_s: float = 0.25
    """A report is sent at least this often."""

    @property
    def weights(self) -> WeightsSource:
        """What its weights are made of."""
        return WeightsSource(self.model_path, self.dtype, self.quantization, self.share_weights)

    @property
    def num_places(self) -> int:
        """Sequences in a batch: never more than a step has tokens, so that every decode gets its token in each."""
        return min(self.max_num_seqs, self.token_budget)

    @property
    def step_tokens(self) -> int:
        """Tokens of all steps that may be under way together."""
        return self.token_budget * (max_prompt_steps(self.pp) if "prefill" in self.roles else 1)

    @property
    def is_fake(self) -> bool:
        """Whether it runs the deterministic model without weights."""
        return self.model_path == "fake"


def check_transfer(limits: TransferLimits, path: str = "transfer.") -> None:
    """Refuse limits that contradict each other. `path` leads to the section in the user's file.

    Raises:
        ConfigError: if a chunk does not fit into the staging memory, or leases end between two heartbeats.
    """
    if limits.chunk_bytes > limits.staging_bytes:
        raise ConfigError(
            f"{path}chunk_bytes: {limits.chunk_bytes} is larger than {path}staging_bytes ({limits.staging_bytes})"
        )
    if limits.heartbeat_s * 2 > limits.lease_timeout_s:
        raise ConfigError(
            f"{path}heartbeat_s: {limits.heartbeat_s} must be at most half of {path}lease_timeout_s "
            f"({limits.lease_timeout_s}), or leases run out between heartbeats"
        )


def check_quantization(
    quantization: Quantization,
    dtype: Dtype | Literal["auto"],
    device: str,
    num_ranks: int,
    kv_cache_dtype: KvCacheDtype = "auto",
    path: str = "",
) -> None:
    """Refuse what would make a model worse and not faster, or another on each number of ranks. `path` leads to the
    field in the user's file.

    Raises:
        ConfigError: KV in fp8 on another device than a GPU, whose kernels alone read it, or in int8 on another than a
            CPU. Weights with another dtype than bfloat16, `stored`, `stored_sums`, int8 or int4 on another device than
            a CPU, fp8 on another than a GPU, or with several ranks: the scale of a row whose inputs they share would
            not be the whole row's.
    """
    kind = device.partition(":")[0]
    wanted = {"fp8": "cuda", "int8": "cpu"}.get(kv_cache_dtype, kind)
    if kind != wanted:
        raise ConfigError(f"{path}kv_cache_dtype: {kv_cache_dtype} is for device {wanted}, not {device}")
    if quantization == "none":
        return
    if dtype not in ("bfloat16", "auto"):
        raise ConfigError(f"{path}quantization: {quantization} needs dtype bfloat16, not {dtype}")
    wanted = "cuda" if quantization == "fp8" else "cpu"
    if kind != wanted:
        raise ConfigError(f"{path}quantization: {quantization} is for device {wanted}, not {device}")
    if num_ranks > 1:
        raise ConfigError(f"{path}quantization: {quantization} is for workers of one rank, not of {num_ranks}")


def check_expert_parallelism(ep: bool, tp: int, path: str = "") -> None:
    """Refuse `ep` without ranks to divide the experts among. `path` leads to the field in the user's file.

    Raises:
        ConfigError: of stages of one rank.
    """
    if ep and tp == 1:
        raise ConfigError(
            f"{path}ep: with tp 1 a rank has all experts of its layers; set tp to at least 2, or leave ep out"
        )


def resolved_dtype(model: ModelOptions, device: str, cpu_dtype: Dtype) -> Dtype:
    """Type in which workers of that model compute; `cpu_dtype` is the cluster's choice for its CPUs."""
    if model.dtype != "auto":
        return model.dtype
    needs_bf16 = device.partition(":")[0] != "cpu" or model.quantization != "none" or model.share_weights
    return "bfloat16" if needs_bf16 else cpu_dtype


def check_kv_stays_private(config: WorkerConfig) -> None:
    """Refuse to send KV, or what stages send each other of prompts, in clear where other machines could read it.

    Raises:
        ConfigError: if the worker hands over (it has one role only, is elastic, or fetches), its address is not a
            loopback one, its transport leaves the host, and nothing allows that; or if it has several stages, which
            may be on several hosts.
    """
    if config.pp > 1 and not (config.plaintext_kv or ipaddress.ip_address(config.host).is_loopback):
        raise ConfigError(
            f"network.plaintext_kv: what {config.pp} stages compute of prompts would leave {config.host} unencrypted; "
            "set it to true if all machines of that network may read prompts"
        )
    hands_over = len(config.roles) == 1 or config.is_elastic or config.fetch
    if hands_over and not kv_stays_private(config):
        raise ConfigError(
            f"network.plaintext_kv: KV would leave {config.host} unencrypted by {config.transport}; set it to true if "
            "all machines of that network may read prompts, or transfer.transport to shm if all workers are on one host"
        )


def kv_stays_private(config: WorkerConfig) -> bool:
    """Whether the worker may send KV: none leaves the host unencrypted, or that is allowed."""
    is_local = config.transport in ("shm", "local") or ipaddress.ip_address(config.host).is_loopback
    return config.plaintext_kv or is_local


def check_attention(attention: AttentionName, device: str, path: str = "") -> None:
    """Refuse a library for GPUs elsewhere. `path` leads to the field in the user's file.

    Raises:
        ConfigError: for another setting than `auto` on a CPU.
    """
    if attention != "auto" and device.partition(":")[0] != "cuda":
        raise ConfigError(f"{path}attention: {attention} is for device cuda, not {device}")


def check_speculation(
    options: SpeculationOptions, device: str, num_ranks: int, *, cache_is_set: bool, path: str = ""
) -> None:
    """Refuse a draft model where none can be. `path` leads to the section in the user's file; `cache_is_set`: the size
    of the KV cache is configured.

    Raises:
        ConfigError: method `draft` without a model, another method with one, or a draft model of a worker of several
            ranks, or of one whose cache is measured, which would not leave room for it.
    """
    if options.method != "draft":
        if options.model is not None:
            raise ConfigError(f"{path}model: is for method draft only, not {options.method}")
        return
    if options.model is None:
        raise ConfigError(f"{path}model: method draft needs a draft model: a checkpoint folder or an imported model")
    if num_ranks > 1:
        raise ConfigError(f"{path}method: draft is for workers of one rank, not of {num_ranks}")
    if device.partition(":")[0] != "cpu" and not cache_is_set:
        raise ConfigError(
            f"{path}method: draft needs kv_cache_bytes on device {device}: a measured cache leaves no room"
        )


def check_share_weights(share_weights: bool, device: str, num_ranks: int, path: str = "") -> None:
    """Refuse to share weights that are not in a host's memory, or not whole. `path` leads to the field in the user's
    file.

    Raises:
        ConfigError: for another device than a CPU, and for several ranks.
    """
    if not share_weights:
        return
    if device.partition(":")[0] != "cpu":
        raise ConfigError(f"{path}share_weights: only weights on device cpu are shared, not on {device}")
    if num_ranks > 1:
        raise ConfigError(f"{path}share_weights: only workers of one rank share their weights, not of {num_ranks}")
