"""Experts in MXFP4: E2M1 floats in blocks of 32, each with a power of two as its scale. Pure.

    x_blocks  U8 [experts, out, in / 32, 16]    two numbers a byte, the first in the lower bits
    x_scales  U8 [experts, out, in / 32]        exponents (E8M0)

Published for gpt-oss (`quant_method: mxfp4`), whose model has such a tensor as `x`, [experts, in, out]. Format: OCP
Microscaling Formats 1.0. Each value is exact in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engine.checkpoint.formats.config_fields import leave_aside
from disagg.engine.checkpoint.formats.names import ModulePatterns, module_patterns
from disagg.engine.checkpoint.formats.stored import (
    Entries,
    Quantized,
    StoredTensor,
    check_part,
    check_rank,
    check_type,
    in_order,
)
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.proto.errors import ConfigError

BLOCK = 32
BLOCK_BYTES = BLOCK // 2
WEIGHT_BYTES = (BLOCK_BYTES + 1) / BLOCK
"""Bytes of a weight, its share of a scale included; also of one that is computed as it is."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """`quant_method: mxfp4`."""

    ignored: ModulePatterns

    def tensor(self, name: str, entries: Entries) -> tuple[str, StoredTensor] | None:
        """The tensor of experts whose numbers are `_blocks`."""
        if not name.endswith("_blocks"):
            return None
        entry, own_name = entries[name], name.removesuffix("_blocks")
        check_type(entry, name, ("U8",))
        check_rank(entry, name, 4)
        experts, rows, blocks, block_bytes = entry.shape
        if block_bytes != BLOCK_BYTES:
            raise ConfigError(f"{entry.file}: tensor {name} has blocks of {block_bytes} bytes, not of {BLOCK_BYTES}")
        check_part(entries, f"{own_name}_scales", name, ("U8",), (experts, rows, blocks))
        quantized = Quantized(
            scale=f"{own_name}_scales",
            group=(1, BLOCK),
            packing=in_order(4, -1, word_bits=8),
            is_fp4=True,
            scale_is_exponent=True,
            is_transposed=True,
        )
        return own_name, StoredTensor(name, entry, (experts, blocks * BLOCK, rows), quantized)


def read_mxfp4(fields: JsonFields) -> Mxfp4:
    """The scheme of a `quantization_config`."""
    leave_aside(fields, ("dequantize",))
    return Mxfp4(module_patterns(fields, "modules_to_not_convert"))
