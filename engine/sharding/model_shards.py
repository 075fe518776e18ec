"""The part of a model that one rank of several computes, as a smaller model of the same kind."""

from __future__ import annotations

import dataclasses

from disagg.engine.checkpoint.model_config import DenseConfig, ExpertsConfig, FfnConfig, LayerConfig, ModelConfig
from disagg.engine.sharding.shards import Shard
from disagg.engine.sharding.stages import stage_layers
from disagg.proto.errors import ConfigError


def with_whole_experts(config: ModelConfig) -> ModelConfig:
    """The same model, of whose experts each rank has some (expert parallelism) in place of a part of each.

    Raises:
        ConfigError: it has no experts.
    """
    layers = tuple(
        layer if isinstance(layer.ffn, DenseConfig) else dataclasses.replace(layer, ffn=_whole(layer.ffn))
        for layer in config.layers
    )
    if layers == config.layers:
        raise ConfigError(f"ep is true, but {config.architecture} has no experts")
    return dataclasses.replace(config, layers=layers)


def _whole(ffn: ExpertsConfig) -> ExpertsConfig:
    return dataclasses.replace(ffn, whole_experts=True)


def rank_model(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The sizes of one rank's tensors: the layers of its stage; its heads, its part of the MLP, its part of the
    vocabulary, padded to that of every other rank.

    Raises:
        ConfigError: heads or MLP cannot be divided among the ranks (names `tp` and the size), or there are more stages
            than layers.
    """
    if shard.num_ranks == 1:
        return config
    _check_divisible(config, shard.size)
    layers = stage_layers(config, shard)
    if len(layers) < config.num_layers:
        config = dataclasses.replace(config, layers=config.layers[layers.start : layers.stop])
    if shard.size == 1:
        return config
    heads, kv_heads = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads)
    group = config.num_heads // config.num_kv_heads
    assert all(head // group in kv_heads for head in heads), "query heads are with the KV heads that they read"
    return dataclasses.replace(
        config,
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        layers=tuple(_rank_layer(layer, shard) for layer in config.layers),
        vocab_size=_vocab_share(config, shard),
    )


def _rank_layer(layer: LayerConfig, shard: Shard) -> LayerConfig:
    return dataclasses.replace(layer, ffn=_rank_ffn(layer.ffn, shard))


def _rank_ffn(ffn: FfnConfig, shard: Shard) -> FfnConfig:
    if isinstance(ffn, DenseConfig):
        return dataclasses.replace(ffn, intermediate_size=len(shard.part(ffn.intermediate_size)))
    shared_size = len(shard.part(ffn.shared_size))
    if ffn.whole_experts:
        held = shard.part(ffn.routing.num_experts)
        return dataclasses.replace(ffn, shared_size=shared_size, first_expert=held.start, num_held=len(held))
    inner = len(shard.part(ffn.intermediate_size))
    return dataclasses.replace(ffn, shared_size=shared_size, intermediate_size=inner)


def vocab_part(config: ModelConfig, shard: Shard) -> range:
    """The token ids whose embedding and logit this rank has; the last ranks may have fewer than the others."""
    share, end = _vocab_share(config, shard), config.vocab_size
    return range(min(shard.rank * share, end), min((shard.rank + 1) * share, end))


def _vocab_share(config: ModelConfig, shard: Shard) -> int:
    return -(-config.vocab_size // shard.size)


def _check_divisible(config: ModelConfig, size: int) -> None:
    sizes = {("num_attention_heads", config.num_heads): None}
    for layer in config.layers:
        sizes |= dict.fromkeys(_divided_sizes(layer.ffn))
    for name, count in sizes:
        if count % size:
            raise ConfigError(f"tp is {size}, by which `{name}` of this model ({count}) cannot be divided")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        name = "`num_key_value_heads`"
        raise ConfigError(
            f"tp is {size}, neither a divisor nor a multiple of {name} of this model ({config.num_kv_heads})"
        )


def _divided_sizes(ffn: FfnConfig) -> tuple[tuple[str, int], ...]:
    """Names, as in config.json of most models, and sizes of what the ranks divide."""
    if isinstance(ffn, DenseConfig):
        return (("intermediate_size", ffn.intermediate_size),)
    divided = ("moe_intermediate_size", ffn.intermediate_size)
    if ffn.whole_experts:
        divided = ("num_experts", ffn.routing.num_experts)
    return divided, ("shared_expert_intermediate_size", ffn.shared_size)
