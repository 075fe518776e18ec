"""Which layers each stage of a worker has (pipeline parallelism). Pure.

Consecutive layers form a stage. The cut is the one whose largest stage has the fewest weights, embedding and head
counted, because a stage's weights are what it reads for each step and what its memory has to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from disagg.engine.checkpoint.model_config import ExpertsConfig, FfnConfig, LayerConfig, ModelConfig
from disagg.engine.sharding.shards import Shard
from disagg.proto.errors import ConfigError


def stage_ends(config: ModelConfig, pp: int, path: str = "") -> tuple[int, ...]:
    """For each of `pp` stages, the number of the layer behind its last one. `path` leads to `pp` in the user's file.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if pp > config.num_layers:
        raise ConfigError(f"{path}pp is {pp}; this model has {config.num_layers} layers, and each stage needs one")
    return ends_by_weights(
        [layer_weights(config, layer) for layer in config.layers], config.vocab_size * config.hidden_size, pp
    )


def ends_by_weights(layers: Sequence[int], embedding: int, pp: int) -> tuple[int, ...]:
    """The ends of `pp` stages of layers with so many weights each. The embedding, and the head, which has as many, are
    counted with the first layer and with the last one."""
    weights = list(layers)
    weights[0] += embedding
    weights[-1] += embedding
    return even_ends(weights, pp)


def stage_ranges(ends: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, from what `stage_ends` gives."""
    return tuple(range(start, end) for start, end in pairwise((0, *ends)))


def stage_layers(config: ModelConfig, shard: Shard) -> range:
    """The layers of a rank's stage. `config` is the whole model's.

    Raises:
        ConfigError: as `stage_ends`.
    """
    if shard.stages == 1:
        return range(config.num_layers)
    return stage_ranges(stage_ends(config, shard.stages))[shard.stage]


def layer_weights(config: ModelConfig, layer: LayerConfig) -> int:
    """Number of weights of a layer's matrices; norms and biases are not counted."""
    hidden, latent = config.hidden_size, layer.attention.latent
    if latent is None:
        attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * hidden
    else:
        queries = config.num_heads * latent.query_dim
        into = hidden * queries if latent.query_rank is None else latent.query_rank * (hidden + queries)
        heads = config.num_heads * (latent.key_dim + latent.value_dim) * latent.latent_dim
        out = config.num_heads * latent.value_dim * hidden
        attention = into + hidden * latent.cache_dim + heads + out
    return attention + _ffn_weights(layer.ffn, hidden)


def _ffn_weights(ffn: FfnConfig, hidden: int) -> int:
    if not isinstance(ffn, ExpertsConfig):
        return 3 * hidden * ffn.intermediate_size
    features = len(ffn.held) * ffn.intermediate_size + ffn.shared_size
    return hidden * (3 * features + ffn.routing.num_experts)


def even_ends(weights: Sequence[int], parts: int) -> tuple[int, ...]:
    """The ends of `parts` runs, none of them empty, whose largest sum is the least; early runs are filled first."""
    sums = (0, *accumulate(weights))
    least = [[0.0] * (len(weights) + 1) for _ in range(parts + 1)]
    first_end = [[0] * (len(weights) + 1) for _ in range(parts + 1)]
    for start in range(len(weights) + 1):
        least[0][start] = 0.0 if start == len(weights) else float("inf")
    for count in range(1, parts + 1):
        for start in range(len(weights), -1, -1):
            found = float("inf"), 0
            for end in range(len(weights), start, -1):
                largest = max(sums[end] - sums[start], least[count - 1][end])
                found = min(found, (largest, -end))
            least[count][start], first_end[count][start] = found[0], -found[1]
    ends: list[int] = []
    for count in range(parts, 0, -1):
        ends.append(first_end[count][ends[-1] if ends else 0])
    return tuple(ends)
