"""AWQ: integers of 4 bits in groups of input channels. Pure.

    x.qweight  I32 [in, out / 8]            eight numbers a word, along the output channels
    x.qzeros   I32 [in / group, out / 8]    likewise
    x.scales   [in / group, out]

The eight numbers of a word are 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits.
Source: Lin et al., "AWQ" (2023), and the layout `gemm` of AutoAWQ.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engine.checkpoint.formats.config_fields import leave_aside, one_of
from disagg.engine.checkpoint.formats.grouped import grouped_layer
from disagg.engine.checkpoint.formats.names import ModulePatterns, module_patterns
from disagg.engine.checkpoint.formats.stored import Entries, Packing, Quantized, StoredTensor
from disagg.engine.checkpoint.json_fields import JsonFields

PACKING = Packing(bits=4, dim=-1, fields=(0, 4, 1, 5, 2, 6, 3, 7))
_UNUSED_FIELDS = ("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")


@dataclass(frozen=True, slots=True)
class Awq:
    """`quant_method: awq`."""

    group_size: int
    ignored: ModulePatterns

    def tensor(self, name: str, entries: Entries) -> tuple[str, StoredTensor] | None:
        """The tensor whose numbers are a `qweight`."""
        layer = grouped_layer(name, entries, PACKING, self.group_size)
        if layer is None:
            return None
        module, entry, inputs, outputs, group = layer
        quantized = Quantized(
            scale=f"{module}.scales",
            group=(group, 1),
            packing=PACKING,
            zero=f"{module}.qzeros",
            zero_packing=PACKING,
            is_transposed=True,
        )
        return f"{module}.weight", StoredTensor(name, entry, (outputs, inputs), quantized)


def read_awq(fields: JsonFields) -> Awq:
    """The scheme of a `quantization_config`. Raises `ConfigError` for a value of a field that is not supported."""
    leave_aside(fields, _UNUSED_FIELDS)
    one_of(fields, "bits" if fields.has("bits") else "w_bit", 4, required=True)
    one_of(fields, "version" if fields.has("version") else "format", "gemm", "GEMM")
    one_of(fields, "zero_point", True)
    group_size = fields.integer("group_size" if fields.has("group_size") else "q_group_size")
    return Awq(group_size, module_patterns(fields, "modules_to_not_convert"))
