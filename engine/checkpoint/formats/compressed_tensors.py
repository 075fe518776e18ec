"""compressed-tensors: the formats of llm-compressor, each group of modules with its own. Pure.

    pack-quantized    x.weight_packed I32 [out, in / n] of 4 or 8 bits, x.weight_scale, x.weight_shape; without symmetry
                      x.weight_zero_point I32 [out / n, groups]; with `actorder` x.weight_g_idx I32 [in]
    int-quantized     x.weight I8 [out, in], x.weight_scale; without symmetry x.weight_zero_point I8
    float-quantized   x.weight F8_E4M3 [out, in], x.weight_scale

Scales are one for the tensor, for each row (`channel`), for a group of input channels of a row, or for a block. A
packed number is stored with half its range added. Quantization of activations is left aside: they are computed in the
compute dtype. Source: compressed-tensors, `compressors/` and `quantization/quant_args.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from disagg.engine.checkpoint.formats.config_fields import leave_aside, one_of, refuse_unread, sizes
from disagg.engine.checkpoint.formats.fp8 import FLOAT8, float8_tensor, scale_shapes
from disagg.engine.checkpoint.formats.names import ModuleTargets, module_targets
from disagg.engine.checkpoint.formats.stored import (
    SCALE_TYPES,
    Entries,
    Quantized,
    StoredTensor,
    check_multiple,
    check_part,
    check_rank,
    check_type,
    in_order,
)
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.proto.errors import ConfigError

Strategy = Literal["tensor", "channel", "group", "block"]
PACKED = ".weight_packed"
LINEAR = "Linear"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_UNUSED_FIELDS = ("global_compression_ratio", "kv_cache_scheme", "version")
_UNUSED_WEIGHT_FIELDS = ("group_size", "block_structure", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Size and block are read where the strategy has them."""
_UNUSED_GROUP_FIELDS = ("input_activations", "output_activations")


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Modules of one entry of `config_groups`, and how their weights are stored."""

    targets: ModuleTargets
    is_for_linear: bool
    """It is for all linear layers that no other group names."""
    type: Literal["int", "float"]
    bits: int
    is_packed: bool
    strategy: Strategy
    group_size: int | None
    block: tuple[int, int] | None
    is_symmetric: bool
    has_order: bool

    def scales(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        """Shapes that the scales of a weight may have."""
        if self.strategy == "channel":
            return ((shape[0], 1),)
        if self.strategy == "group":
            assert self.group_size is not None, "a group has a size"
            return ((shape[0], shape[1] // self.group_size),)
        return scale_shapes(shape, self.block)[:3]

    def group(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that have one scale in common."""
        by_strategy = {
            "tensor": shape,
            "channel": (1, shape[1]),
            "group": (1, self.group_size or 0),
            "block": self.block or (0, 0),
        }
        return by_strategy[self.strategy]


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """`quant_method: compressed-tensors`."""

    groups: tuple[WeightGroup, ...]
    ignored: ModuleTargets

    def tensor(self, name: str, entries: Entries) -> tuple[str, StoredTensor] | None:
        """The tensor whose numbers are a `weight_packed`, or a `weight` of 8 bits."""
        entry = entries[name]
        is_packed = name.endswith(PACKED)
        if not is_packed and not (name.endswith(".weight") and entry.dtype in ("I8", FLOAT8)):
            return None
        module = name.removesuffix(PACKED if is_packed else ".weight")
        group = self._group_of(module)
        if group is None:
            raise ConfigError(f"{entry.file}: tensor {name} is quantized, but no group of `config_groups` is for it")
        check_rank(entry, name, 2)
        wanted = "I32" if group.is_packed else "I8" if group.type == "int" else FLOAT8
        if group.is_packed != is_packed:
            raise ConfigError(f"{entry.file}: tensor {name} is not stored as `format` of its group has it")
        check_type(entry, name, (wanted,))
        if group.type == "float":
            return name, _float_tensor(name, module, group, entries)
        return f"{module}.weight", _integer_tensor(name, module, group, entries)

    def _group_of(self, module: str) -> WeightGroup | None:
        named = next((group for group in self.groups if module in group.targets), None)
        return named or next((group for group in self.groups if group.is_for_linear), None)


def _float_tensor(name: str, module: str, group: WeightGroup, entries: Entries) -> StoredTensor:
    scale, (rows, columns) = f"{module}.weight_scale", entries[name].shape
    check_part(entries, scale, name, SCALE_TYPES, *group.scales((rows, columns)))
    return float8_tensor(name, scale, group.block, entries)


def _integer_tensor(name: str, module: str, group: WeightGroup, entries: Entries) -> StoredTensor:
    entry = entries[name]
    packing = in_order(group.bits, -1) if group.is_packed else None
    per_word = packing.per_word if packing is not None else 1
    shape = rows, columns = entry.shape[0], entry.shape[1] * per_word
    if group.group_size is not None:
        check_multiple(entry, name, columns, group.group_size, "input channels")
    scale, zero, index = (f"{module}.weight_{part}" for part in ("scale", "zero_point", "g_idx"))
    scales = group.scales(shape)
    check_part(entries, scale, name, SCALE_TYPES, *scales)
    if not group.is_symmetric:
        zeros = ((-(-rows // per_word), scales[0][-1]),) if group.is_packed else scales
        check_part(entries, zero, name, ("I32",) if group.is_packed else ("I8",), *zeros)
    if group.has_order:
        check_part(entries, index, name, ("I32", "I64"), (columns,))
    declared = f"{module}.weight_shape"
    if group.is_packed:
        check_part(entries, declared, name, ("I32", "I64"), (2,))
    quantized = Quantized(
        scale=scale,
        group=group.group(shape),
        packing=packing,
        zero=None if group.is_symmetric else zero,
        zero_packing=None if packing is None else in_order(group.bits, -2),
        zero_offset=1 << group.bits - 1 if group.is_packed and group.is_symmetric else 0,
        group_index=index if group.has_order else None,
        declared_shape=declared if group.is_packed else None,
    )
    return StoredTensor(name, entry, shape, quantized)


# ---------------------------------------------------------------- configuration


def read_compressed_tensors(fields: JsonFields) -> CompressedTensors:
    """The scheme of a `quantization_config`. Raises `ConfigError` for a value of a field that is not supported."""
    leave_aside(fields, _UNUSED_FIELDS)
    one_of(fields, "quantization_status", "compressed", "frozen")
    one_of(fields, "transform_config", {})
    if fields.has("sparsity_config"):
        sparsity = fields.part("sparsity_config", {})
        leave_aside(
            sparsity, ("global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets")
        )
        one_of(sparsity, "format", "dense")
        refuse_unread(sparsity)
    layout, groups = fields.value("format"), fields.part("config_groups", {})
    found = tuple(_read_group(groups.part(name, {}), layout) for name in fields.value("config_groups"))
    if not found:
        raise fields.error("`config_groups` is empty")
    return CompressedTensors(found, module_targets(fields, "ignore"))


def _read_group(fields: JsonFields, layout: object) -> WeightGroup:
    leave_aside(fields, _UNUSED_GROUP_FIELDS)
    own = one_of(fields, "format", *_FORMATS) if fields.has("format") else layout
    if own not in _FORMATS:
        raise fields.error(f"`format` {own!r} is not supported; supported: {', '.join(_FORMATS)}")
    targets = module_targets(fields, "targets")
    group = _read_weights(fields.part("weights", {}), str(own), targets)
    refuse_unread(fields)
    return group


def _read_weights(weights: JsonFields, layout: str, targets: ModuleTargets) -> WeightGroup:
    leave_aside(weights, _UNUSED_WEIGHT_FIELDS)
    by_layout = {"float-quantized": ("float",), "naive-quantized": ("int", "float")}
    kind = one_of(weights, "type", *by_layout.get(layout, ("int",)), required=True)
    is_packed = layout == "pack-quantized"
    bits = one_of(weights, "num_bits", *((4, 8) if is_packed else (8,)), required=True)
    one_of(weights, "dynamic", False)
    order = one_of(weights, "actorder", None, False, "static", "weight", "group", "dynamic", True)
    strategies = ("channel", "group") if is_packed else ("tensor", "channel", "block" if kind == "float" else "group")
    strategy = one_of(weights, "strategy", *strategies, required=True)
    is_symmetric = weights.boolean("symmetric", True)
    if kind == "float" and not is_symmetric:
        raise weights.error("`symmetric` must be true for weights of `type` 'float'")
    block = sizes(weights, "block_structure", 2) if strategy == "block" else None
    size = weights.integer("group_size") if strategy == "group" else None
    refuse_unread(weights)
    return WeightGroup(
        targets=ModuleTargets(tuple(each for each in targets.targets if each != LINEAR)),
        is_for_linear=LINEAR in targets.targets,
        type=kind,
        bits=bits,
        is_packed=is_packed,
        strategy=strategy,
        group_size=size,
        block=(block[0], block[1]) if block else None,
        is_symmetric=is_symmetric,
        has_order=order in ("group", "dynamic", True),
    )
