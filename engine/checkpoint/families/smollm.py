"""SmolLM3: Llama, where every fourth layer has no position embedding."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import Family, check_silu, layer_windows, read_model, read_sizes
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope


def _read(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields)
    rope = read_rope(fields, sizes.head_dim, 2000000.0)
    check_silu(fields)
    bias = fields.boolean("attention_bias", False)
    ffn = DenseConfig(intermediate_size=fields.integer("intermediate_size"), bias=fields.boolean("mlp_bias", False))
    ropes = _layers_with_rope(fields, sizes.num_layers)
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    if not fields.boolean("use_sliding_window", False):
        window = None
    slides = tuple(window is not None and not has_rope for has_rope in ropes)
    layers = tuple(
        LayerConfig(
            attention=AttentionConfig(
                scale=sizes.head_dim**-0.5,
                rope=rope if has_rope else None,
                window=layer_window,
                qkv_bias=bias,
                o_bias=bias,
            ),
            ffn=ffn,
        )
        for has_rope, layer_window in zip(ropes, layer_windows(fields, sizes.num_layers, window, slides), strict=True)
    )
    return read_model(fields, sizes, layers, max_positions=max_positions(fields, rope), is_tied=True)


def _layers_with_rope(fields: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """By `no_rope_layers`, which has a 1 for each layer with rope, or else all but every n-th."""
    interval, given = fields.integer("no_rope_layer_interval", 4), fields.value("no_rope_layers")
    if given is None:
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(given, list) or len(given) != num_layers or any(value not in (0, 1) for value in given):
        raise fields.error(f"`no_rope_layers` must have a 0 or a 1 for each of the {num_layers} layers, not {given!r}")
    return tuple(map(bool, given))


SMOLLM_3 = Family(models="SmolLM3", architectures=("SmolLM3ForCausalLM",), model_types=("smollm3",), read=_read)
