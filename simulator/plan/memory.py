"""The memory that a model takes on a device, and the number of sequences that fit into the rest."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.proto.errors import ConfigError
from disagg.simulator.durations.devices import Device
from disagg.simulator.durations.model_shapes import DTYPE_BYTES, ModelShape

MEMORY_SHARE = 0.9
"""Share of a device's memory that a worker uses; vLLM's default `gpu_memory_utilization`."""
RESERVE_BYTES = 2e9
"""Bytes of each device that are assumed for activations, captured steps and libraries; at most a twentieth of its
memory."""
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a model's numbers. `dtype` is that of activations."""

    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    """Dtype of the matrices, including the LM head; embedding and norms have `dtype`."""
    kv_dtype: str = "bfloat16"


BF16 = Precision()


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Memory of each device of one worker, in bytes."""

    weight_bytes: float
    kv_bytes: float
    """Bytes that are left for KV."""
    kv_bytes_per_token: float
    """Bytes of one token's KV on this device, which holds a part of the heads."""

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose KV fits into the worker."""
        return int(self.kv_bytes // self.kv_bytes_per_token)

    def sequences(self, num_tokens: int) -> int:
        """Number of sequences of `num_tokens` tokens that fit at once."""
        return self.kv_tokens // num_tokens


def weight_bytes(model: ModelShape, precision: Precision = BF16) -> float:
    """Bytes of all weights of the model."""
    head = model.vocab_size * model.hidden_size
    matrices = model.matrix_parameters + head
    others = model.num_parameters - matrices
    if model.tied_embeddings and precision.weight_dtype != precision.dtype:
        others += head  # a copy of the embedding in the other dtype
    return matrices * DTYPE_BYTES[precision.weight_dtype] + others * DTYPE_BYTES[precision.dtype]


def worker_memory(model: ModelShape, device: Device, tp: int = 1, precision: Precision = BF16) -> WorkerMemory:
    """The use of the memory of each of a worker's `tp` devices.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    model.check_tp(tp)
    weights = weight_bytes(model, precision) / tp
    reserve = min(RESERVE_BYTES, device.memory_bytes / 20)
    shared = model.kv_heads_per_rank(tp) / model.num_kv_heads
    return WorkerMemory(
        weight_bytes=weights,
        kv_bytes=max(0.0, MEMORY_SHARE * device.memory_bytes - weights - reserve),
        kv_bytes_per_token=model.kv_bytes_per_token(precision.kv_dtype) * shared,
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
    model: ModelShape, device: Device, tps: list[int], num_tokens: int, precision: Precision = BF16
) -> list[int]:
    """The widths in which a sequence of `num_tokens` fits beside the weights.

    Raises:
        ConfigError: none; says what is needed and what there is.
    """
    fitting = [tp for tp in tps if worker_memory(model, device, tp, precision).sequences(num_tokens) >= 1]
    if fitting:
        return fitting
    if not tps:
        raise ConfigError(f"--tp: {model.name} cannot be divided among the {device.max_tp} devices of a node")
    widest = max(tps)
    needed = weight_bytes(model, precision) / GB
    there = widest * MEMORY_SHARE * device.memory_bytes / GB
    kv = model.kv_layout(precision.kv_dtype).bytes_of(num_tokens) / GB
    raise ConfigError(
        f"--device: {model.name} takes {needed:.1f} GB of weights and {kv:.1f} GB of KV for one sequence of "
        f"{num_tokens} tokens; {widest} x {device.name} have {there:.1f} GB for both. Try a larger device, "
        f"--weight-dtype fp8, or a wider --tp"
    )
