"""What is known of a family of models, and how the functions that read one begin and end.

    sizes = read_sizes(fields)                   hidden size, heads, layers
    layer = LayerConfig(...)                     what the family's layers do
    return read_model(fields, sizes, (layer,) * sizes.num_layers, ...)

Whoever calls them checks behind it that each field of config.json was read, or changes nothing (`refuse_unread`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import LayerConfig, ModelConfig
from disagg.proto.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names of the tensors of a layer, without `model.layers.N.` before and `.weight` or `.bias` behind. Which of them
    a model has tells its `ModelConfig`."""

    renamed: tuple[tuple[str, str], ...] = ()
    """How names begin in the files, and how they begin here. The first that fits counts."""
    unused: tuple[str, ...] = ()
    """How the names of tensors begin that are no part of the decoder."""

    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three tensors, or one that holds them one below the other."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    q_down: str = "self_attn.q_a_proj"
    """Of latent attention: the latent of the queries, its norm, and the queries."""
    q_latent_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    """The latent of keys and values, with the part of the keys that is rotated; its norm, and keys and values."""
    kv_latent_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"
    sinks: str = "self_attn.sinks"
    """The name of the tensor itself."""
    o: str = "self_attn.o_proj"
    attention_out_norm: str = "post_attention_layernorm"
    ffn_norm: str = "post_attention_layernorm"
    ffn_out_norm: str = "post_feedforward_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two tensors, or one that holds them one below the other."""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    """Whole name of the bias that counts in the choice only."""
    experts: str = "mlp.experts"
    """Followed by the number of an expert and a name of `of_expert`, or by one of these where all experts are one
    tensor."""
    of_expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    experts_are_one: bool = False
    """All experts are one tensor, gate_up_proj, whose last dim has gate and up of one feature after the other, and one,
    down_proj; in both the inputs come before the outputs. Biases are gate_up_proj_bias and down_proj_bias."""
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"

    def logical(self, name: str) -> str | None:
        """The name here of a tensor of a file; None for one that is not used."""
        if name.startswith(self.unused):
            return None
        for stored, ours in self.renamed:
            if name.startswith(stored):
                return ours + name.removeprefix(stored)
        return name


WITHOUT_PREFIX = TensorNames(
    renamed=(("embed_tokens.", "model.embed_tokens."), ("layers.", "model.layers."), ("norm.", "model.norm."))
)
"""Names of models that are also published without an LM head, for vectors: then the tensors have no `model.` before."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that one function reads."""

    models: str
    """Some that were published."""
    architectures: tuple[str, ...]
    """Names in `architectures` of config.json."""
    model_types: tuple[str, ...]
    """Names in `model_type`, where that is given."""
    read: Callable[[JsonFields], ModelConfig]
    names: TensorNames = TensorNames()


class Sizes(NamedTuple):
    """Sizes that all layers share."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_sizes(fields: JsonFields, *, needs_kv_heads: bool = False, head_dim: int | None = None) -> Sizes:
    """The sizes, which must fit each other. Without `num_key_value_heads` there are as many as query heads, unless
    `needs_kv_heads`; `head_dim` is the default of a family, else the hidden size over the heads."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", None if needs_kv_heads else num_heads)
    if head_dim is None and not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error(f"`hidden_size` ({hidden_size}) must be a multiple of `num_attention_heads` ({num_heads})")
    head_dim = fields.integer("head_dim", head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"`num_attention_heads` ({num_heads}) must be a multiple of `num_key_value_heads` ({num_kv_heads})"
        )
    if head_dim % 2:
        raise fields.error(f"the head size must be even for rotary embeddings, not {head_dim}")
    return Sizes(hidden_size, fields.integer("num_hidden_layers"), num_heads, num_kv_heads, head_dim)


def read_model(
    fields: JsonFields,
    sizes: Sizes,
    layers: tuple[LayerConfig, ...],
    *,
    max_positions: int,
    eps: float = 1e-6,
    is_tied: bool = False,
    **changes: Any,
) -> ModelConfig:
    """The model of these layers. `eps` and `is_tied` are the family's defaults, `changes` fields of `ModelConfig` that
    most families leave as they are."""
    assert len(layers) == sizes.num_layers
    return ModelConfig(
        architecture="",
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_positions=max_positions,
        layers=layers,
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        tied_embeddings=fields.boolean("tie_word_embeddings", is_tied),
        eos_token_ids=(),
        **changes,
    )


def extra_layers(fields: JsonFields, default: int = 1) -> int:
    """Layers that predict further tokens, which transformers 5 counts under another name."""
    name = "num_nextn_predict_layers" if fields.has("num_nextn_predict_layers") else "num_mtp_layers"
    return fields.integer(name, default, minimum=0)


def check_silu(fields: JsonFields) -> None:
    """Raises `ConfigError` for another activation than silu."""
    check_value(fields, "hidden_act", "silu")


def check_value(fields: JsonFields, name: str, supported: object) -> None:
    """Raises `ConfigError` for a field that has another value than the one that is supported."""
    if (value := fields.value(name)) is not None and value != supported:
        raise fields.error(f"`{name}` {value!r} is not supported; supported is {supported!r}")


def layer_windows(
    fields: JsonFields, num_layers: int, window: int | None, slides: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """The window of each layer, where `layer_types` says which layers have one, or else `slides`.

    Raises:
        ConfigError: for a list of another length, or with another kind of layer.
    """
    kinds = fields.value("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            count = len(kinds) if isinstance(kinds, list) else repr(kinds)
            raise fields.error(f"`layer_types` must have one kind for each of the {num_layers} layers, not {count}")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise fields.error(
                    f"`layer_types` has {kind!r}; supported are 'full_attention' and 'sliding_attention'"
                )
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    if any(slides) and window is None:
        raise fields.error("there are layers with a window (`layer_types`), but it has no width (`sliding_window`)")
    return tuple(window if is_sliding else None for is_sliding in slides)


INERT = frozenset(
    {
        *("architectures", "auto_map", "dtype", "model_type", "tokenizer_class", "torch_dtype", "torchscript"),
        *("cache_implementation", "chunk_size_feed_forward", "return_dict", "use_cache"),
        *("finetuning_task", "gradient_checkpointing", "initializer_factor", "initializer_range", "pretraining_tp"),
        *("id2label", "label2id", "problem_type", "prefix", "task_specific_params"),
        *("is_llama_config", "max_window_layers"),
        *("classifier_from_token", "is_matryoshka", "is_original_qwen3_reranker", "matryoshka_dimensions"),
        *(
            "diversity_penalty",
            "encoder_no_repeat_ngram_size",
            "length_penalty",
            "no_repeat_ngram_size",
            "max_length",
            "min_length",
            "num_beam_groups",
            "num_beams",
        ),
        *("num_return_sequences", "repetition_penalty", "temperature", "top_k", "top_p", "typical_p"),
    }
)
"""Fields that change nothing of what a decoder computes: notes on training, on a library, on sampling, or on what is
made of hidden states."""

INERT_ENDS = ("_dropout", "_pdrop", "_token_id", "_token_index", "_version")
INERT_BEGINNINGS = ("_", "unsloth", "transformers")


def refuse_unread(fields: JsonFields, architecture: str) -> None:
    """Raises `ConfigError` for a field that the family's function did not read and that may change what is computed."""
    for name, value in fields.unread().items():
        if name in INERT or name.endswith(INERT_ENDS) or name.startswith(INERT_BEGINNINGS):
            continue
        raise unknown_field(fields, name, value, architecture)


def unknown_field(fields: JsonFields, name: str, value: object, architecture: str) -> ConfigError:
    """The error for a field whose meaning is not known."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return fields.error(
        f"`{name}` = {shown} is not known for {architecture}; if the model computes the same without it, remove it"
    )
