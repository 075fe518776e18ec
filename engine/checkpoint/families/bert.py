"""BERT (arXiv 1810.04805) as models of vectors use it: an encoder whose tokens attend to all tokens of their text. It
is no family of the decoder; `runner/encoder.py` computes it.

Its config is described as that of a decoder as far as plans of memory go: layers, heads and sizes.
"""

from __future__ import annotations

from typing import Final

from disagg.engine.checkpoint.families.family import check_value, read_sizes, refuse_unread
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import (
    AttentionConfig,
    DenseConfig,
    EncoderConfig,
    LayerConfig,
    ModelConfig,
)

ARCHITECTURE: Final = "BertModel"


def is_bert(fields: JsonFields) -> bool:
    """Whether a config.json is of a BERT without a head."""
    return bool(fields.value("architectures") == [ARCHITECTURE])


def read_bert(fields: JsonFields) -> ModelConfig:
    """The model of a config.json, but for its end tokens, which it does not have.

    Raises:
        ConfigError: naming the file, the field and its value, for what is not supported.
    """
    sizes = read_sizes(fields)
    for name, supported in (
        ("model_type", "bert"),
        ("hidden_act", "gelu"),
        ("position_embedding_type", "absolute"),
        ("is_decoder", False),
        ("add_cross_attention", False),
        ("quantization_config", None),
    ):
        check_value(fields, name, supported)
    for name in ("attention_probs_dropout_prob", "hidden_dropout_prob", "tie_word_embeddings"):
        fields.value(name)  # which change nothing of the hidden states
    layer = LayerConfig(
        attention=AttentionConfig(scale=sizes.head_dim**-0.5, rope=None, qkv_bias=True, o_bias=True),
        ffn=DenseConfig(intermediate_size=fields.integer("intermediate_size"), bias=True),
    )
    model = ModelConfig(
        architecture=ARCHITECTURE,
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings"),
        layers=(layer,) * sizes.num_layers,
        rms_norm_eps=fields.number("layer_norm_eps", 1e-12),
        tied_embeddings=True,
        eos_token_ids=(),
        gives_vectors=True,
        encoder=EncoderConfig(num_token_types=fields.integer("type_vocab_size", 2)),
    )
    refuse_unread(fields, ARCHITECTURE)
    return model
