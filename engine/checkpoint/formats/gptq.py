"""GPTQ: integers of 2, 4 or 8 bits in groups of input channels. Pure.

    x.qweight  I32 [in / n, out]         n numbers a word, along the input channels
    x.qzeros   I32 [in / group, out / n] n numbers a word, along the output channels
    x.scales   [in / group, out]
    x.g_idx    I32 [in]                  group of each input channel; with `desc_act` in any order

`checkpoint_format: gptq` (AutoGPTQ, GPTQModel) stores each zero less one, `gptq_v2` as it is. A zero of 0 less one is
the largest number of so many bits, as AutoGPTQ reads it. Some files have biases of zeros for layers that have none.
Source: Frantar et al., "GPTQ" (2022), and the layout of AutoGPTQ.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engine.checkpoint.formats.config_fields import leave_aside, one_of
from disagg.engine.checkpoint.formats.grouped import grouped_layer
from disagg.engine.checkpoint.formats.names import ModulePatterns
from disagg.engine.checkpoint.formats.stored import (
    Entries,
    Quantized,
    StoredTensor,
    check_part,
    in_order,
)
from disagg.engine.checkpoint.json_fields import JsonFields

_UNUSED_FIELDS = (
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "hyb_act",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "offload_to_disk",
    "pad_token_id",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "use_exllama_v2",
    "v2",
)


@dataclass(frozen=True, slots=True)
class Gptq:
    """`quant_method: gptq`."""

    bits: int
    group_size: int | None
    """Input channels of a group; None for all."""
    has_order: bool
    """Groups are of any input channels, as `g_idx` has them."""
    zero_offset: int
    """Number that is added to each zero of the file."""
    ignored: ModulePatterns

    def tensor(self, name: str, entries: Entries) -> tuple[str, StoredTensor] | None:
        """The tensor whose numbers are a `qweight`."""
        packing = in_order(self.bits, -2)
        layer = grouped_layer(name, entries, packing, self.group_size)
        if layer is None:
            return None
        module, entry, inputs, outputs, group = layer
        index = f"{module}.g_idx"
        if self.has_order or index in entries:
            check_part(entries, index, name, ("I32", "I64"), (inputs,))
        quantized = Quantized(
            scale=f"{module}.scales",
            group=(group, 1),
            packing=packing,
            zero=f"{module}.qzeros",
            zero_packing=in_order(self.bits, -1),
            zero_offset=self.zero_offset,
            zero_wraps=self.zero_offset > 0,
            group_index=index if index in entries else None,
            index_is_order=not self.has_order,
            is_transposed=True,
        )
        return f"{module}.weight", StoredTensor(name, entry, (outputs, inputs), quantized)


def read_gptq(fields: JsonFields) -> Gptq:
    """The scheme of a `quantization_config`. Raises `ConfigError` for a value of a field that is not supported."""
    leave_aside(fields, _UNUSED_FIELDS)
    layout = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    one_of(fields, layout, "gptq", "gptq_v2")
    one_of(fields, "pack_dtype", "int32")
    one_of(fields, "is_marlin_format", False)
    one_of(fields, "dynamic", {})
    group_size = fields.integer("group_size", minimum=-1)
    if group_size == 0:
        raise fields.error("`group_size` must be -1 or positive, not 0")
    return Gptq(
        bits=one_of(fields, "bits", 2, 4, 8, required=True),
        group_size=None if group_size < 0 else group_size,
        has_order=fields.boolean("desc_act", False),
        zero_offset=0 if fields.value(layout) == "gptq_v2" else 1,
        ignored=ModulePatterns(),
    )
