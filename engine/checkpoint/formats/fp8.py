"""Weights in FP8 (E4M3) with one scale for a tensor, a row, or a block of 128x128 numbers. Pure.

    x.weight            F8_E4M3 [out, in]
    x.weight_scale_inv  (or x.weight_scale) what a number is multiplied by: [], [1], [out, 1], or one for each block

Published by DeepSeek, Qwen, MiniMax and Mistral (`quant_method: fp8`). Scales of activations are left aside: whether
`activation_scheme` is dynamic or static, activations are computed in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engine.checkpoint.formats.config_fields import leave_aside, one_of, sizes
from disagg.engine.checkpoint.formats.names import ModulePatterns, module_patterns
from disagg.engine.checkpoint.formats.stored import (
    SCALE_TYPES,
    Entries,
    Quantized,
    StoredTensor,
    check_part,
    check_rank,
    check_type,
)
from disagg.engine.checkpoint.json_fields import JsonFields

FLOAT8 = "F8_E4M3"
_EXPONENT_TYPES = ("F8_E8M0", "U8")
_UNUSED_FIELDS = ("activation_scale_ub", "dequantize", "kv_cache_scheme", "modules_to_convert")


@dataclass(frozen=True, slots=True)
class Fp8:
    """`quant_method: fp8`."""

    block: tuple[int, int] | None
    """Rows and columns that have one scale in common; None for a scale of the tensor, or of each row."""
    ignored: ModulePatterns

    def tensor(self, name: str, entries: Entries) -> tuple[str, StoredTensor] | None:
        """The tensor whose numbers are one of FP8."""
        entry = entries[name]
        if not entry.dtype.startswith("F8_E") or name.endswith(("_scale", "_scale_inv")):
            return None
        check_type(entry, name, (FLOAT8,))
        scale = f"{name}_scale" if f"{name}_scale" in entries else f"{name}_scale_inv"
        return name, float8_tensor(name, scale, self.block, entries)


def read_fp8(fields: JsonFields) -> Fp8:
    """The scheme of a `quantization_config`. Raises `ConfigError` for a value of a field that is not supported."""
    leave_aside(fields, _UNUSED_FIELDS)
    one_of(fields, "fmt", "e4m3", "float8_e4m3fn")
    one_of(fields, "activation_scheme", "dynamic", "static")
    one_of(fields, "scale_fmt", "float", "ue8m0")
    one_of(fields, "expert_dtype", "fp8")
    block = sizes(fields, "weight_block_size", 2) if fields.has("weight_block_size") else None
    return Fp8(
        (block[0], block[1]) if block else None, module_patterns(fields, "modules_to_not_convert", "ignored_layers")
    )


def float8_tensor(name: str, scale: str, block: tuple[int, int] | None, entries: Entries) -> StoredTensor:
    """A tensor of FP8 numbers, [out, in] or [experts, out, in].

    Raises:
        ConfigError: its scale is missing, or of a shape or type that it cannot have.
    """
    entry = entries[name]
    check_rank(entry, name, 2, 3)
    shapes = scale_shapes(entry.shape, block)
    scales = check_part(entries, scale, name, (*SCALE_TYPES, *_EXPONENT_TYPES), *shapes)
    *_, rows, columns = entry.shape
    group = block or ((1, columns) if scales.shape == shapes[-1] else (rows, columns))
    quantized = Quantized(scale=scale, group=group, scale_is_exponent=scales.dtype in _EXPONENT_TYPES)
    return StoredTensor(name, entry, entry.shape, quantized)


def scale_shapes(shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[tuple[int, ...], ...]:
    """The shapes that scales may have: of blocks, or else of the tensor and, at last, of its rows."""
    *experts, rows, columns = shape
    if block is not None:
        return ((*experts, -(-rows // block[0]), -(-columns // block[1])),)
    whole = ((*experts, 1, 1), tuple(experts)) if experts else ((), (1,), (1, 1))
    return (*whole, (*experts, rows, 1))
