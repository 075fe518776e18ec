"""Arithmetic intensity: FLOP for each byte that is read. Below a device's ridge point its memory is the limit, above it
its arithmetic.

Reading the weights once serves all rows of a step; of experts, those are read that the rows are expected to choose. So
a decode step of b sequences does about b FLOP for each byte of bf16 weights (2 FLOP and 2 bytes a weight), a prompt of
n tokens about n, until the KV, which each sequence reads for itself, outweighs the weights.
"""

from __future__ import annotations

from collections.abc import Callable

from disagg.simulator.durations.devices import Device
from disagg.simulator.durations.model_shapes import ModelShape
from disagg.simulator.plan.memory import BF16, Precision

MAX_BATCH = 1 << 20


def matrix_parameters(model: ModelShape) -> int:
    """Number of weights with which every decoded token is multiplied: those of all matrices, including the LM head."""
    return model.active_parameters + model.vocab_size * model.hidden_size


def _weight_bytes(model: ModelShape, rows: float, precision: Precision) -> float:
    """Bytes of the matrices that a step of so many rows reads."""
    parameters = model.read_parameters(rows) + model.vocab_size * model.hidden_size
    return precision.matrix_bytes(parameters, model.read_expert_parameters(rows))


def attention_flops(model: ModelShape, pairs: float) -> float:
    """FLOP of `pairs` query-key pairs in all layers: QK and PV, 2 FLOP for each number."""
    return 4.0 * model.num_layers * model.q_size * pairs


def decode_flops(model: ModelShape, batch: int, context: float) -> float:
    """FLOP of one step of `batch` sequences, each of which attends to `context` tokens, or to what windows leave."""
    pairs = _mean_of_layers(model, lambda window: min(context, window or context))
    return 2.0 * matrix_parameters(model) * batch + attention_flops(model, batch * pairs)


def prefill_flops(model: ModelShape, tokens: int, before: int = 0) -> float:
    """FLOP of `tokens` prompt tokens behind `before` cached ones; only the last one needs the LM head."""
    layers = 2.0 * model.active_parameters * tokens
    pairs = _mean_of_layers(model, lambda window: _pairs(tokens, before, window))
    return layers + attention_flops(model, pairs) + 2.0 * model.vocab_size * model.hidden_size


def _mean_of_layers(model: ModelShape, of_window: Callable[[int], float]) -> float:
    """The mean over all layers of a function of their windows, 0 for none."""
    if not model.windows:
        return of_window(0)
    return sum(map(of_window, model.windows)) / len(model.windows)


def _pairs(tokens: int, before: int, window: int) -> float:
    """Query-key pairs of `tokens` tokens behind `before` others, each of which attends to at most `window`."""
    num_all = max(0, min(tokens, window - before)) if window else tokens
    return num_all * before + num_all * (num_all + 1) / 2 + (tokens - num_all) * window


def decode_intensity(model: ModelShape, batch: int, context: float, precision: Precision = BF16) -> float:
    """FLOP per byte of weights and KV."""
    weights = _weight_bytes(model, batch, precision)
    kv = batch * _read_bytes(model, context, precision)
    return decode_flops(model, batch, context) / (weights + kv)


def _read_bytes(model: ModelShape, context: float, precision: Precision) -> float:
    """Bytes of the KV that a token attends to, behind `context` tokens."""
    groups = model.kv_layout(precision.kv_dtype).groups
    return sum([min(context, group.window or context) * group.bytes_per_token for group in groups])


def prefill_intensity(model: ModelShape, tokens: int, precision: Precision = BF16) -> float:
    """FLOP per byte of weights and of the KV that is written."""
    weights = _weight_bytes(model, tokens, precision)
    return prefill_flops(model, tokens) / (weights + tokens * model.kv_bytes_per_token(precision.kv_dtype))


def critical_batch(model: ModelShape, device: Device, context: float, precision: Precision = BF16) -> int | None:
    """The least batch size from which on decode is limited by arithmetic; None where it is limited by memory at any
    batch size, because of the KV."""
    ridge = device.ridge(precision.matrix_dtype)
    if decode_intensity(model, MAX_BATCH, context, precision) < ridge:
        return None
    low, high = 0, MAX_BATCH  # intensity grows with the batch
    while high - low > 1:
        middle = (low + high) // 2
        if decode_intensity(model, middle, context, precision) >= ridge:
            high = middle
        else:
            low = middle
    return high


def critical_prompt(model: ModelShape, device: Device, precision: Precision = BF16) -> int:
    """The shortest prompt, in tokens, that is limited by arithmetic."""
    ridge = device.ridge(precision.matrix_dtype)
    tokens = 1
    while tokens < MAX_BATCH and prefill_intensity(model, tokens, precision) < ridge:
        tokens += 1
    return tokens
