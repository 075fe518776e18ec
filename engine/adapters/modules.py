"""The modules of a model to which adapters add something: their names, sizes and parts on a rank. Pure.

A product of the decoder may be of several modules: q, k and v, or gate and up, which are computed as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from disagg.engine.checkpoint.families.registry import family_of
from disagg.engine.checkpoint.model_config import DenseConfig, LayerConfig, ModelConfig
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.kernels.lora_ranks import aligned_rank

ProductName = Literal["qkv", "o", "gate_up", "down"]

WIDEST_BYTES = 4
"""Bytes of the widest number in an adapter's file."""


@dataclass(frozen=True, slots=True)
class Module:
    """A module that an adapter may change."""

    layer: int
    product: ProductName
    part: int
    """Number of the module in its product."""
    inputs: int
    outputs: int
    """Sizes of the whole model's."""
    rank_inputs: range
    rank_outputs: range
    """What a rank has of them. One of the two is all."""


def modules_of(config: ModelConfig, shard: Shard = WHOLE) -> dict[str, Module]:
    """The modules of the whole model `config` by the names that its checkpoint has for them. Latent attention and
    experts have none that could be changed, nor have products that a checkpoint has as one tensor."""
    names = _names(config)
    found: dict[str, Module] = {}
    for number, layer in enumerate(config.layers):
        for product, modules in _products(config, layer, shard).items():
            for part, (name, (inputs, outputs)) in enumerate(zip(names[product], modules, strict=True)):
                found[f"model.layers.{number}.{name}"] = Module(
                    number, product, part, inputs[0], outputs[0], inputs[1], outputs[1]
                )
    return found


def product_sizes(config: ModelConfig, layer: LayerConfig, shard: Shard) -> dict[ProductName, tuple[int, list[int]]]:
    """Inputs, and outputs of each part, of the products of a layer on a rank."""
    return {
        product: (len(modules[0][0][1]), [len(outputs[1]) for _, outputs in modules])
        for product, modules in _products(config, layer, shard).items()
    }


def slot_bytes(config: ModelConfig, shard: Shard, max_rank: int, number_bytes: int) -> int:
    """Bytes of a slot for an adapter on a rank."""
    total, max_rank = 0, aligned_rank(max_rank)
    for layer in config.layers:
        for inputs, outputs in product_sizes(config, layer, shard).values():
            total += max_rank * (len(outputs) * inputs + sum(outputs)) * number_bytes + 8 * len(outputs)
    return total


def largest_file(config: ModelConfig, max_rank: int) -> int:
    """Most bytes that the tensors of an adapter of this model may have."""
    return WIDEST_BYTES * max_rank * sum(module.inputs + module.outputs for module in modules_of(config).values())


def _names(config: ModelConfig) -> dict[ProductName, tuple[str, ...]]:
    """Names of the modules of each product in a layer of the checkpoint."""
    names = family_of(config.architecture).names
    return {"qkv": names.qkv, "o": (names.o,), "gate_up": names.gate_up, "down": (names.down,)}


_Dim = tuple[int, range]
"""A size of the whole model's, and what a rank has of it."""


def _products(config: ModelConfig, layer: LayerConfig, shard: Shard) -> dict[ProductName, list[tuple[_Dim, _Dim]]]:
    """Inputs and outputs of the modules of each product."""
    hidden = _all(config.hidden_size)
    found: dict[ProductName, list[tuple[_Dim, _Dim]]] = {}
    if layer.attention.latent is None:
        q = _part(config.num_heads, shard.part(config.num_heads), config.head_dim)
        kv = _part(config.num_kv_heads, shard.kv_heads(config.num_kv_heads), config.head_dim)
        found["qkv"] = [(hidden, q), (hidden, kv), (hidden, kv)]
        found["o"] = [(q, hidden)]
    if isinstance(layer.ffn, DenseConfig):
        size = layer.ffn.intermediate_size
        inner = size, shard.part(size)
        found["gate_up"] = [(hidden, inner), (hidden, inner)]
        found["down"] = [(inner, hidden)]
    names = _names(config)
    return {product: modules for product, modules in found.items() if len(names[product]) == len(modules)}


def _all(size: int) -> _Dim:
    return size, range(size)


def _part(count: int, part: range, size: int) -> _Dim:
    return count * size, range(part.start * size, part.stop * size)
