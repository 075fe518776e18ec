"""EXAONE 4: norms of the outputs of attention and MLP, norms of heads; in models with windows, layers without a window
have no rope."""

from __future__ import annotations

from disagg.engine.checkpoint.families.family import Family, check_silu, layer_windows, read_model, read_sizes
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.rope_fields import max_positions, read_rope


def _read(fields: JsonFields) -> ModelConfig:
    sizes = read_sizes(fields)
    rope = read_rope(fields, sizes.head_dim)
    check_silu(fields)
    ffn = DenseConfig(intermediate_size=fields.integer("intermediate_size"))
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
    pattern = fields.value("sliding_window_pattern")  # of letters beside `layer_types`, which then counts
    every = 4 if fields.has("layer_types") or pattern is None else fields.integer("sliding_window_pattern")
    slides = tuple(window is not None and (layer + 1) % every != 0 for layer in range(sizes.num_layers))
    layers = tuple(
        LayerConfig(
            attention=AttentionConfig(
                scale=sizes.head_dim**-0.5,
                rope=rope if window is None or layer_window is not None else None,
                window=layer_window,
                qk_norm="head",
            ),
            ffn=ffn,
            norms="after",
        )
        for layer_window in layer_windows(fields, sizes.num_layers, window, slides)
    )
    return read_model(fields, sizes, layers, max_positions=max_positions(fields, rope), eps=1e-5)


EXAONE_4 = Family(models="EXAONE 4", architectures=("Exaone4ForCausalLM",), model_types=("exaone4",), read=_read)
