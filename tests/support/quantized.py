"""Checkpoints in the formats in which quantized models are published, made from plain ones by the formats' definitions.

    values = quantize_checkpoint("awq", folder)

Each tensor is rounded to numbers, scales and zeros; `values` is (number - zero) * scale of these in fp32, before they
are packed. Nothing here is shared with the reader: words are put together number by number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
BLOCK = (32, 40)
"""Rows and columns of a block of fp8; the tiny models' sizes are no multiples of it."""

Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors of the file by what stands behind the module's name, and the values."""


@dataclass(frozen=True)
class Format:
    """A way to store a linear layer, or the experts of one, and what config.json says of it."""

    store: Callable[[Tensor], Stored]
    config: dict[str, Any] = field(default_factory=dict)
    tensors: str = r"(_proj|_with_mqa|\.w[123])\.weight$"
    """The tensors that are stored so."""
    ending: str = "weight"
    """What their names lose before the names of the parts are put behind."""


def quantize_checkpoint(name: str, folder: Path) -> dict[str, Tensor]:
    """Rewrite the linear layers of a plain checkpoint, its head left out; returns all values in fp32 by name."""
    file, config_file = folder / "model.safetensors", folder / "config.json"
    tensors: dict[str, Tensor] = load_file(file)
    written: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if re.search(FORMATS[name].tensors, key):
            stored, values[key] = FORMATS[name].store(tensor.float())
            beginning = key.removesuffix(FORMATS[name].ending)
            written |= {beginning + part: each.contiguous() for part, each in stored.items()}
        else:
            written[key], values[key] = tensor, tensor.float()
    save_file(written, file)
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"quantization_config": FORMATS[name].config}))
    return values


def pack(numbers: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Words of 32 bits of non-negative numbers along the last dimension; field f of a word has its number
    `order[f]`."""
    per_word = 32 // bits
    rows, columns = numbers.shape
    words = torch.zeros(rows, -(-columns // per_word), dtype=torch.int64)
    for column in range(columns):
        word, number = divmod(column, per_word)
        at = number if order is None else list(order).index(number)
        words[:, word] += numbers[:, column].long() << bits * at
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


# ---------------------------------------------------------------- rounding


def grouped(weight: Tensor, bits: int, size: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers from 0 to 2^bits - 1 of [out, in], and scales (fp16) and zeros of [out, in / size]."""
    top, middle = (1 << bits) - 1, 1 << bits - 1
    parts = weight.reshape(len(weight), -1, size)
    if symmetric:
        scale = (parts.abs().amax(2) / (middle - 1 or 1)).half().float()
        zero = torch.full_like(scale, middle)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scale = ((high - low) / top).half().float()
        zero = (-low / scale).round().clamp(1, top)
    numbers = (parts / scale[..., None] + zero[..., None]).round().clamp(0, top).flatten(1)
    return numbers, scale, zero


def values_of(numbers: Tensor, scale: Tensor, zero: Tensor, index: Tensor) -> Tensor:
    """(number - zero) * scale, where input channel i is of group `index[i]`."""
    return (numbers - zero[:, index]) * scale[:, index]


def in_order(columns: int, size: int) -> Tensor:
    """The group of each input channel, in order."""
    return torch.arange(columns) // size


def any_order(columns: int, size: int) -> Tensor:
    """The groups of channels in another order; the same at every call."""
    return in_order(columns, size)[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]


# ---------------------------------------------------------------- formats


def _gptq(bits: int, size: int | None, *, zero_less: int = 1, ordered: bool = True, symmetric: bool = False) -> Any:
    def store(weight: Tensor) -> Stored:
        columns = weight.shape[1]
        group = size or columns
        numbers, scale, zero = grouped(weight, bits, group, symmetric=symmetric)
        index = in_order(columns, group) if ordered else any_order(columns, group)
        parts = {
            "qweight": pack(numbers, bits).T,
            "qzeros": pack(zero.T - zero_less, bits),
            "scales": scale.T.half(),
            "g_idx": index.to(torch.int32),
        }
        return parts, values_of(numbers, scale, zero, index)

    return store


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq(weight: Tensor) -> Stored:
    numbers, scale, zero = grouped(weight, 4, GROUP, symmetric=False)
    parts = {
        "qweight": pack(numbers.T, 4, AWQ_ORDER),
        "qzeros": pack(zero.T, 4, AWQ_ORDER),
        "scales": scale.T.half(),
    }
    return parts, values_of(numbers, scale, zero, in_order(weight.shape[1], GROUP))


def _packed(bits: int, size: int | None, *, symmetric: bool = True, ordered: bool = True) -> Any:
    def store(weight: Tensor) -> Stored:
        columns = weight.shape[1]
        group = size or columns
        numbers, scale, zero = grouped(weight, bits, group, symmetric=symmetric)
        index = in_order(columns, group) if ordered else any_order(columns, group)
        parts = {
            "weight_packed": pack(numbers, bits),
            "weight_scale": scale.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(zero.T, bits).T
        if not ordered:
            parts["weight_g_idx"] = index.to(torch.int32)
        return parts, values_of(numbers, scale, zero, index)

    return store


def _int8(size: int | None, *, symmetric: bool = True) -> Any:
    def store(weight: Tensor) -> Stored:
        columns = weight.shape[1]
        numbers, scale, zero = grouped(weight, 8, size or columns, symmetric=symmetric)
        parts = {"weight": (numbers - 128).to(torch.int8), "weight_scale": scale.half()}
        if not symmetric:
            parts["weight_zero_point"] = (zero - 128).to(torch.int8)
        return parts, values_of(numbers, scale, zero, in_order(columns, size or columns))

    return store


def _float8(kind: str, scale_name: str = "weight_scale", *, exponents: bool = False, static: bool = False) -> Any:
    def store(weight: Tensor) -> Stored:
        size = {"tensor": tuple(weight.shape), "channel": (1, weight.shape[1]), "block": BLOCK}[kind]
        rows, columns = (in_order(count, each) for count, each in zip(weight.shape, size, strict=True))
        scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                scale[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
        if exponents:
            powers = scale.log2().ceil()
            scale, stored_scale = torch.pow(2.0, powers), (powers + 127).to(torch.uint8)
        else:
            stored_scale = scale
        whole = scale[rows][:, columns]
        numbers = (weight / whole).to(torch.float8_e4m3fn)
        parts = {"weight": numbers, scale_name: stored_scale.reshape(()) if kind == "tensor" else stored_scale}
        if static:
            parts["input_scale"] = torch.tensor(0.5)
        return parts, numbers.float() * whole

    return store


def _mxfp4(experts: Tensor) -> Stored:
    """`experts`: [experts, in, out], as gpt-oss has them."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    blocks = experts.transpose(1, 2).reshape(*experts.transpose(1, 2).shape[:2], -1, 32)
    powers = (blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    codes = ((blocks / 2**powers)[..., None] - table).abs().argmin(-1)
    values = (table[codes] * 2**powers).flatten(2).transpose(1, 2)
    parts = {
        "_blocks": (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8),
        "_scales": (powers.squeeze(-1) + 127).to(torch.uint8),
    }
    return parts, values.contiguous()


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": None} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*embed.*"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _fp8_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": None} | changes


def _gptq_config(bits: int, size: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False, "sym": True} | changes


_BY_GROUP = {"strategy": "group", "group_size": GROUP}
_FLOAT = {"type": "float", "num_bits": 8}

FORMATS: dict[str, Format] = {
    "fp8_block": Format(_float8("block", "weight_scale_inv"), _fp8_config(weight_block_size=list(BLOCK))),
    "fp8_exponents": Format(
        _float8("block", "weight_scale_inv", exponents=True),
        _fp8_config(weight_block_size=list(BLOCK), scale_fmt="ue8m0"),
    ),
    "fp8_tensor": Format(
        _float8("tensor", static=True), _fp8_config(activation_scheme="static", modules_to_not_convert=["lm_head"])
    ),
    "fp8_channel": Format(_float8("channel"), _fp8_config()),
    "packed_int4": Format(_packed(4, GROUP), _compressed("pack-quantized", num_bits=4, **_BY_GROUP)),
    "packed_int4_zeros": Format(
        _packed(4, GROUP, symmetric=False),
        _compressed("pack-quantized", num_bits=4, symmetric=False, **_BY_GROUP),
    ),
    "packed_int4_order": Format(
        _packed(4, GROUP, ordered=False), _compressed("pack-quantized", num_bits=4, actorder="group", **_BY_GROUP)
    ),
    "packed_int8": Format(_packed(8, None), _compressed("pack-quantized", strategy="channel")),
    "int8_channel": Format(_int8(None), _compressed("int-quantized", strategy="channel")),
    "int8_group_zeros": Format(
        _int8(GROUP, symmetric=False), _compressed("int-quantized", symmetric=False, **_BY_GROUP)
    ),
    "float8_channel": Format(_float8("channel"), _compressed("float-quantized", strategy="channel", **_FLOAT)),
    "float8_tensor": Format(_float8("tensor"), _compressed("naive-quantized", strategy="tensor", **_FLOAT)),
    "float8_block": Format(
        _float8("block"), _compressed("float-quantized", strategy="block", block_structure=list(BLOCK), **_FLOAT)
    ),
    "gptq": Format(_gptq(4, GROUP), _gptq_config(4, GROUP, checkpoint_format="gptq", sym=False)),
    "gptq_order": Format(_gptq(4, GROUP, ordered=False), _gptq_config(4, GROUP, desc_act=True, damp_percent=0.1)),
    "gptq_v2": Format(_gptq(8, GROUP, zero_less=0), _gptq_config(8, GROUP, checkpoint_format="gptq_v2")),
    "gptq_2_bits": Format(_gptq(2, 16, symmetric=True), _gptq_config(2, 16)),
    "gptq_one_group": Format(_gptq(4, None, symmetric=True), _gptq_config(4, -1)),
    "mxfp4": Format(
        _mxfp4,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        tensors=r"experts\.(gate_up|down)_proj$",
        ending="",
    ),
    "awq": Format(_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
}
