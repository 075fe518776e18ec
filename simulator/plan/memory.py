"""The memory that a model takes on a device, and the number of sequences that fit into the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.engine.cache_groups import PoolLimits, most_blocks, most_held, window_pools
from disagg.engine.config import max_prompt_steps
from disagg.proto.errors import ConfigError
from disagg.proto.messages import CacheGroup, KvLayout
from disagg.simulator.durations.devices import Device
from disagg.simulator.durations.model_shapes import DTYPE_BYTES, MXFP4, WEIGHT_DTYPE_BYTES, ModelShape
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.durations.stages import stage_layers, stage_shapes

MEMORY_SHARE = 0.9
"""Share of a device's memory that a worker uses; vLLM's default `gpu_memory_utilization`."""
RESERVE_BYTES = 2e9
"""Bytes of each device that are assumed for activations, captured steps and libraries; at most a twentieth of its
memory."""
GB = 1e9
BLOCK_TOKENS = 16
LARGEST = PoolLimits(max_num_seqs=256, token_budget=8192)
"""The largest batch and step of a worker, where none are given."""
MAX_STAGES = 8
"""Most stages of a worker that are tried without `--pp`."""
MAX_NODES = 4
"""Most nodes over which the stages of one worker are tried."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a model's numbers. `dtype` is that of activations."""

    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    """Dtype of the matrices, including the LM head; embedding and norms have `dtype`. `mxfp4` is that of experts alone,
    beside which other matrices have `dtype`."""
    kv_dtype: str = "bfloat16"

    @property
    def matrix_dtype(self) -> str:
        """Dtype of the matrices beside experts, and of all products."""
        return self.dtype if self.weight_dtype == MXFP4 else self.weight_dtype

    def matrix_bytes(self, num_weights: float, of_experts: float) -> float:
        """Bytes of so many weights of matrices, a part of which are of experts."""
        others = (num_weights - of_experts) * DTYPE_BYTES[self.matrix_dtype]
        return others + of_experts * WEIGHT_DTYPE_BYTES[self.weight_dtype]


BF16 = Precision()


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """The cache of one cache group on a device."""

    window: int
    """Tokens of its window; 0 where the KV of all tokens is kept."""
    num_blocks: int
    num_bytes: float
    step_blocks: int
    """Blocks that are kept apart for the tokens of the steps that are under way together."""
    most_held: int | None
    """Most blocks of one sequence; None where it holds those of all its tokens."""

    def sequences(self, num_tokens: int) -> int:
        """Number of sequences of `num_tokens` tokens that fit at once."""
        needed = -(-num_tokens // BLOCK_TOKENS)
        return (self.num_blocks - self.step_blocks) // min(needed, self.most_held or needed)


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Memory of each device of one worker, in bytes; with several stages, of the stage with room for the fewest
    tokens."""

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
    if model.tied_embeddings and precision.matrix_dtype != precision.dtype:
        others += head  # a copy of the embedding in the other dtype
    return precision.matrix_bytes(matrices, model.expert_parameters) + others * DTYPE_BYTES[precision.dtype]


def worker_memory(
    model: ModelShape,
    device: Device,
    tp: int = 1,
    precision: Precision = BF16,
    limits: PoolLimits = LARGEST,
    *,
    pp: int = 1,
    ep: bool = False,
) -> WorkerMemory:
    """The use of the memory of each of a worker's `pp` x `tp` devices. `limits`: what the pools of windows, and the
    scratch memory of experts, are made for; several stages have several steps under way, decode workers too are counted
    so. All stages have equally many blocks.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    model.check_tp(tp, ep=ep)
    scratch = model.scratch_bytes(limits.token_budget, tp, precision.dtype, ep=ep)
    shared = model.kv_heads_per_rank(tp) / model.num_kv_heads
    layout = model.kv_layout(precision.kv_dtype)
    under_way = limits._replace(token_budget=limits.token_budget * max_prompt_steps(pp))
    found = []
    for number, (layers, part) in enumerate(zip(stage_layers(model, pp), stage_shapes(model, pp), strict=True)):
        weights = _stage_weight_bytes(model, part, number, pp, precision) / tp
        reserve = min(RESERVE_BYTES, device.memory_bytes / 20)
        kv_bytes = max(0.0, MEMORY_SHARE * device.memory_bytes - weights - reserve - scratch)
        token_bytes = [_bytes_of(group, layers) * shared for group in layout.groups]
        found.append(
            WorkerMemory(
                weight_bytes=weights,
                kv_bytes=kv_bytes,
                kv_bytes_per_token=sum(token_bytes),
                expert_bytes=part.expert_parameters * WEIGHT_DTYPE_BYTES[precision.weight_dtype] / tp,
                scratch_bytes=scratch,
                groups=_groups(layout, token_bytes, kv_bytes, under_way),
            )
        )
    return min(found, key=lambda memory: memory.kv_tokens)


def _stage_weight_bytes(model: ModelShape, part: ModelShape, stage: int, pp: int, precision: Precision) -> float:
    """Bytes of the weights of one of `pp` stages, which has the layers of `part`: the first one has the embedding too,
    the last one final norm and head."""
    if pp == 1:
        return weight_bytes(model, precision)
    embedding = model.vocab_size * model.hidden_size
    vectors = part.num_parameters - part.matrix_parameters - embedding * (1 if model.tied_embeddings else 2)
    if stage < pp - 1:
        vectors -= model.hidden_size  # the final norm
    dtype_bytes = DTYPE_BYTES[precision.dtype]
    found = precision.matrix_bytes(part.matrix_parameters, part.expert_parameters) + vectors * dtype_bytes
    if stage == 0:
        found += embedding * dtype_bytes
    if stage == pp - 1:
        found += embedding * DTYPE_BYTES[precision.matrix_dtype]
    return found


def _bytes_of(group: CacheGroup, layers: range) -> float:
    """Bytes of the KV of one token in those of the group's layers that are in `layers`."""
    return group.bytes_per_token * sum(layer in layers for layer in group.layers) / len(group.layers)


def _groups(
    layout: KvLayout, token_bytes: Sequence[float], kv_bytes: float, limits: PoolLimits
) -> tuple[GroupMemory, ...]:
    """The caches of a layout with windows, as an engine divides `kv_bytes`. `token_bytes`: what a device has of a token
    of each group."""
    if not layout.windows:
        return ()
    block_bytes = tuple(max(1, int(num_bytes * BLOCK_TOKENS)) for num_bytes in token_bytes)
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
    """The tensor-parallel widths that the model allows, with its experts divided or whole: powers of two up to the
    devices of a node."""
    found = []
    tp = 1
    while tp <= device.max_tp:
        if expert_choices(model, tp):
            found.append(tp)
        tp *= 2
    return found


def expert_choices(model: ModelShape, tp: int) -> list[bool]:
    """The values of `ep` with which `tp` ranks can divide the model; without experts, or on one rank, at most False."""
    found = []
    for ep in (False, True) if model.experts is not None and tp > 1 else (False,):
        try:
            model.check_tp(tp, ep=ep)
            found.append(ep)
        except ConfigError:
            pass
    return found


def stage_counts(model: ModelShape, device: Device) -> list[int]:
    """The numbers of stages to try: powers of two up to `MAX_STAGES` and the model's layers; 1 on single processor
    cores, which share the work of a step by threads."""
    most = min(MAX_STAGES, model.num_layers) if device.max_tp > 1 else 1
    return [1 << power for power in range(most.bit_length())]


def check_fits(
    model: ModelShape,
    device: Device,
    choices: Sequence[Parallelism],
    num_tokens: int,
    precision: Precision = BF16,
    limits: PoolLimits = LARGEST,
) -> list[Parallelism]:
    """The choices with which a sequence of `num_tokens` fits beside the weights.

    Raises:
        ConfigError: none; says what is needed and what there is.
    """
    fitting = [
        each
        for each in choices
        if worker_memory(model, device, each.tp, precision, limits, pp=each.pp, ep=each.ep).sequences(num_tokens) >= 1
    ]
    if fitting:
        return fitting
    if not choices:
        raise ConfigError(f"--tp: {model.name} cannot be divided among the {device.max_tp} devices of a node")
    most = max(each.num_devices for each in choices)
    needed = weight_bytes(model, precision) / GB
    there = most * MEMORY_SHARE * device.memory_bytes / GB
    kv = model.kv_layout(precision.kv_dtype).bytes_of(num_tokens) / GB
    smaller = "--weight-dtype fp8, " if model.experts is None else ""  # fp8 is not supported for experts
    raise ConfigError(
        f"--device: {model.name} takes {needed:.1f} GB of weights and {kv:.1f} GB of KV for one sequence of "
        f"{num_tokens} tokens; {most} x {device.name} have {there:.1f} GB for both. Try a larger device, "
        f"{smaller}a wider --tp or more stages, --pp"
    )
