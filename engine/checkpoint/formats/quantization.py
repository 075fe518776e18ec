"""`quantization_config` of a config.json: in which format the weights are. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from disagg.engine.checkpoint.formats.awq import Awq, read_awq
from disagg.engine.checkpoint.formats.compressed_tensors import CompressedTensors, read_compressed_tensors
from disagg.engine.checkpoint.formats.config_fields import one_of, refuse_unread
from disagg.engine.checkpoint.formats.fp8 import Fp8, read_fp8
from disagg.engine.checkpoint.formats.gptq import Gptq, read_gptq
from disagg.engine.checkpoint.formats.mxfp4 import Mxfp4, read_mxfp4
from disagg.engine.checkpoint.json_fields import JsonFields

WeightFormat = Fp8 | Mxfp4 | CompressedTensors | Gptq | Awq

READERS: Mapping[str, Callable[[JsonFields], WeightFormat]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}
"""Readers of configurations, by `quant_method`."""


def read_weight_format(fields: JsonFields) -> WeightFormat | None:
    """The format of the weights by a config.json; None where they are stored as they are.

    Raises:
        ConfigError: `quantization_config` asks for what is not supported; names the field and its value.
    """
    if not fields.has("quantization_config"):
        return None
    config = fields.part("quantization_config", {})
    weight_format = READERS[one_of(config, "quant_method", *READERS, required=True)](config)
    refuse_unread(config)
    return weight_format
