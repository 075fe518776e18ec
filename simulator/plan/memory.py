"""The memory that a model takes on a device, and the number of sequences that fit into the rest."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engine.cache_groups import PoolLimits, most_blocks, most_held, window_pools
from disagg.proto.errors import ConfigError
from disagg.proto.messages import KvLayout
from disagg.simulator.durations.devices import Device
from disagg.simulator.durations.model_shapes import DTYPE_BYTES, ModelShape

MEMORY_SHARE = 0.9
"""Share of a device's memory that a worker uses; vLLM's default `gpu_memory_utilization`."""
RESERVE_BYTES = 2e9
"""Bytes of each device that are assumed for activations, captured steps and libraries; at most a twentieth of its
memory."""
GB = 1e9
BLOCK_TOKENS = 16
LARGEST = PoolLimits(max_num_seqs=256, token_budget=8192)
"""The largest batch and step of a worker, where none are given."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a model's numbers. `dtype` is that of activations."""

    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    """Dtype of the matrices, including the LM head; embedding and norms have `dtype`."""
    kv_dtype: str = "bfloat16"


BF16 = Precision()


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """The cache of one cache group on a device."""

    window: int
    """Tokens of its window; 0 where the KV of all tokens is kept."""
    num_blocks: int
    num_bytes: float
    step_blocks: int
    """Blocks that are kept apart for the tokens of one step."""
    most_held: int | None
    """Most blocks of one sequence; None where it holds those of all its tokens."""

    def sequences(self, num_tokens: int) -> int:
        """Number of sequences of `num_tokens` tokens that fit at once."""
        needed = -(-num_tokens // BLOCK_TOKENS)
        return (self.num_blocks - self.step_blocks) // min(needed, self.most_held or needed)


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Memory of each device of one worker, in bytes."""

    weight_bytes: float
    kv_bytes: float
    """Bytes that are left for KV."""
    kv_bytes_per_token: float
    """Bytes of one token's KV on this device, which holds a part of the heads."""
    expert_bytes: float = 0.0
    """The part of `weight_bytes` that experts have."""
    scratch_bytes: float = 0.0
    """Bytes that experts need beside their weights."""
    groups: tuple[GroupMemory, ...] = ()
    """The cache groups of a model with windows."""

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose KV fits into the worker; with windows, that the layers without one keep."""
        if self.groups:
            return self.groups[0].num_blocks * BLOCK_TOKENS
        return int(self.kv_bytes // self.kv_bytes_per_token)

    def sequences(self, num_tokens: int) -> int:
        """Number of sequences of `num_tokens` tokens that fit at once."""
        if self.groups:
            return min(group.sequences(num_tokens) for group in self.groups)
        return self.kv_tokens // num_tokens


def weight_bytes(model: ModelShape, precision: Precision = BF16) -> float:
    """Bytes of all weights of the model."""
    head = model.vocab_size * model.hidden_size
    matrices = model.matrix_parameters + head
    others = model.num_parameters - matrices
    if model.tied_embeddings and precision.weight_dtype != precision.dtype:
        others += head  # a copy of the embedding in the other dtype
    return matrices * DTYPE_BYTES[precision.weight_dtype] + others * DTYPE_BYTES[precision.dtype]


def worker_memory(
    model: ModelShape,
    device: Device,
    tp: int = 1,
    precision: Precision = BF16,
    limits: PoolLimits = LARGEST,
) -> WorkerMemory:
    """The use of the memory of each of a worker's `tp` devices. `limits`: what the pools of windows, and the scratch
    memory of experts, are made for.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    model.check_tp(tp)
    weights = weight_bytes(model, precision) / tp
    scratch = model.scratch_bytes(limits.token_budget, tp, precision.dtype)
    reserve = min(RESERVE_BYTES, device.memory_bytes / 20)
    shared = model.kv_heads_per_rank(tp) / model.num_kv_heads
    kv_bytes = max(0.0, MEMORY_SHARE * device.memory_bytes - weights - reserve - scratch)
    return WorkerMemory(
        weight_bytes=weights,
        kv_bytes=kv_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token(precision.kv_dtype) * shared,
        expert_bytes=model.expert_parameters * DTYPE_BYTES[precision.weight_dtype] / tp,
        scratch_bytes=scratch,
        groups=_groups(model.kv_layout(precision.kv_dtype), kv_bytes, shared, limits),
    )


def _groups(layout: KvLayout, kv_bytes: float, shared: float, limits: PoolLimits) -> tuple[GroupMemory, ...]:
    """The caches of a layout with windows, as an engine divides `kv_bytes`, of which a device has this share of the
    heads."""
    if not layout.windows:
        return ()
    block_bytes = tuple(max(1, int(group.bytes_per_token * BLOCK_TOKENS * shared)) for group in layout.groups)
    num_blocks = most_blocks(layout, BLOCK_TOKENS, limits, int(kv_bytes), block_bytes)
    pools = (num_blocks, *window_pools(layout, num_blocks, BLOCK_TOKENS, limits))
    step_blocks = -(-limits.token_budget // BLOCK_TOKENS)
    return tuple(
        GroupMemory(
            window=group.window,
            num_blocks=blocks,
            num_bytes=blocks * each,
            step_blocks=step_blocks if group.window else 0,
            most_held=most_held(group.window, BLOCK_TOKENS) if group.window else None,
        )
        for group, blocks, each in zip(layout.groups, pools, block_bytes, strict=True)
    )


def widths(model: ModelShape, device: Device) -> list[int]:
    """The tensor-parallel widths that the model allows: powers of two up to the devices of a node."""
    found = []
    tp = 1
    while tp <= device.max_tp:
        try:
            model.check_tp(tp)
            found.append(tp)
        except ConfigError:
            pass
        tp *= 2
    return found


def check_fits(
    model: ModelShape,
    device: Device,
    tps: list[int],
    num_tokens: int,
    precision: Precision = BF16,
    limits: PoolLimits = LARGEST,
) -> list[int]:
    """The widths in which a sequence of `num_tokens` fits beside the weights.

    Raises:
        ConfigError: none; says what is needed and what there is.
    """
    fitting = [tp for tp in tps if worker_memory(model, device, tp, precision, limits).sequences(num_tokens) >= 1]
    if fitting:
        return fitting
    if not tps:
        raise ConfigError(f"--tp: {model.name} cannot be divided among the {device.max_tp} devices of a node")
    widest = max(tps)
    needed = weight_bytes(model, precision) / GB
    there = widest * MEMORY_SHARE * device.memory_bytes / GB
    kv = model.kv_layout(precision.kv_dtype).bytes_of(num_tokens) / GB
    smaller = "--weight-dtype fp8, " if model.experts is None else ""  # fp8 is not supported for experts
    raise ConfigError(
        f"--device: {model.name} takes {needed:.1f} GB of weights and {kv:.1f} GB of KV for one sequence of "
        f"{num_tokens} tokens; {widest} x {device.name} have {there:.1f} GB for both. Try a larger device, "
        f"{smaller}or a wider --tp"
    )
