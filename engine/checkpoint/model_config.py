"""What a model computes, as values: sizes, and one description of each layer. Made from config.json by the functions of
`families/`, read by the decoder, the loader, the plans and the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from disagg.engine.checkpoint.formats.quantization import WeightFormat
from disagg.kernels.routing import SILU, GatedActivation, Routing, scratch_bytes

DEFAULT_ROPE_THETA = 10000.0

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `dynamic` scaling is `default` here: both agree up to the longest context we serve."""

    kind: RopeKind = "default"
    theta: float = DEFAULT_ROPE_THETA
    share: float = 1.0
    """Share of a head's dims that are rotated, which are the first ones."""
    factor: float = 1.0
    original_max_positions: int = 0
    """Context length of the pretraining, for llama3, yarn and longrope."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    """cos and sin are multiplied by this (yarn and longrope)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    """Wavelengths are stretched by these, one for each rotated pair, where no sequence is longer than
    `original_max_positions` (longrope)."""
    long_factors: tuple[float, ...] = ()
    """The same where sequences may be longer."""
    query_beta: float = 0.0
    """q at position p is multiplied by 1 + query_beta * log(1 + floor(p / original_max_positions)), behind the
    rotation."""

    def rotary_dim(self, head_dim: int) -> int:
        """Number of a head's dims that are rotated."""
        return int(head_dim * self.share)


QkNorm = Literal["none", "head", "whole"]


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention (DeepSeek V2, arXiv 2405.04434): keys and values of all heads are products of one normed latent
    of each token, and each key has a rotated part behind it, which all heads share."""

    latent_dim: int
    """Numbers of a latent of keys and values."""
    rope_dim: int
    """Numbers of the rotated part of each query and key."""
    key_dim: int
    """Numbers of the other part, which for keys is a product of the latent."""
    value_dim: int
    """Numbers of a head's value."""
    query_rank: int | None
    """Numbers of a normed latent of which queries are products; None where they are products of the layer's input."""
    interleaved: bool = True
    """Rows of the checkpoint's weights that are rotated together are neighbours, in place of a half apart."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of the latents."""

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.key_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Numbers that are kept of a token."""
        return self.latent_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of one layer, whose heads are those of the model."""

    scale: float
    """Scale of the scores."""
    rope: RopeConfig | None
    """None leaves q and k as they are."""
    window: int | None = None
    """Number of tokens that a query sees, its own included; None sees all."""
    soft_cap: float | None = None
    """Scores are `soft_cap * tanh(score / soft_cap)`."""
    sinks: bool = False
    """Each query head has a further score, which takes part in the softmax's denominator alone."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm = "none"
    """RMS norm of q and of k before rope: over each head, or over all heads at once."""
    latent: LatentConfig | None = None
    """Keys and values are products of a latent, which is the model's only KV head; None where they are the layer's
    own."""


Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Feed-forward network with one gate, one up and one down projection: down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Feed-forward network of experts, of which each token takes a few, and perhaps of one more that all tokens take.

    Ranks that share the model have a part of each expert's features, or with `whole_experts` some of the experts
    (expert parallelism); a rank's own configuration says which.
    """

    routing: Routing
    intermediate_size: int
    """Features of each expert."""
    activation: GatedActivation = SILU
    bias: bool = False
    """The experts' linear layers have biases."""
    router_bias: bool = False
    choice_bias: bool = False
    """The router has a bias that counts in the choice only."""
    shared_size: int = 0
    """Features of what all tokens take; 0 for nothing."""
    shared_gate: bool = False
    """What all tokens take has a gate: sigmoid of a product with the token."""
    whole_experts: bool = False
    first_expert: int = 0
    num_held: int | None = None
    """Experts that are held, from `first_expert` on; None for all."""

    @property
    def held(self) -> range:
        """Numbers of the experts that this rank computes; all of them without ranks."""
        count = self.routing.num_experts if self.num_held is None else self.num_held
        return range(self.first_expert, self.first_expert + count)

    def scratch_bytes(self, num_tokens: int, hidden_size: int, element_bytes: int) -> int:
        """The most memory that the layer needs beside its weights in a step of so many tokens, in bytes."""
        return scratch_bytes(self.routing, num_tokens, hidden_size, self.intermediate_size, element_bytes)


FfnConfig = DenseConfig | ExpertsConfig
"""Feed-forward network of one layer."""

NormPlaces = Literal["before", "after", "both"]


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer of the decoder: attention, then a feed-forward network, each added to the residual stream."""

    attention: AttentionConfig
    ffn: FfnConfig
    norms: NormPlaces = "before"
    """Where attention and the feed-forward network have a norm: of their input, of their output before it is added, or
    of both."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """What an encoder has that no decoder has."""

    num_token_types: int
    """Rows of the embedding of token types, of which the first is used."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """All that the decoder needs to know of a model."""

    architecture: str
    """Name in config.json, which tells the family (`families/registry.py`)."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Number of KV heads; 1 for latent attention."""
    head_dim: int
    """Numbers of a head; with latent attention those that are kept of a token."""
    vocab_size: int
    max_positions: int
    """Longest sequence that the position embedding was made for."""
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    plus_one_norms: bool = False
    """The weight of every norm is one more than the tensor in the checkpoint."""
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    """The embedding multiplier is rounded to the model's dtype."""
    residual_multiplier: float = 1.0
    """Outputs of attention and feed-forward networks are multiplied by this before they are added."""
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    """Logits are `logits_soft_cap * tanh(logit / logits_soft_cap)`."""
    tied_embeddings: bool
    """The LM head is the embedding matrix."""
    num_extra_layers: int = 0
    """Layers behind the last one that the checkpoint has for predicting further tokens, which are not read."""
    eos_token_ids: tuple[int, ...]
    gives_vectors: bool = False
    """No token is ever sampled: the checkpoint need not have an LM head, and the embedding stands in its place."""
    encoder: EncoderConfig | None = None
    """Set for an encoder, which the decoder does not compute (`runner/encoder.py`)."""
    weight_format: WeightFormat | None = None
    """Format of quantized weights, which are dequantized when they are read; None where there are none."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def scratch_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """The most memory that layers of experts need beside their weights in a step of so many tokens, in bytes; they
        use it one after the other."""
        return max(
            (
                ffn.scratch_bytes(num_tokens, self.hidden_size, element_bytes)
                for layer in self.layers
                if isinstance(ffn := layer.ffn, ExpertsConfig)
            ),
            default=0,
        )

    @property
    def num_expert_weights(self) -> int:
        """Number of weights of the experts' matrices."""
        experts = [layer.ffn for layer in self.layers if isinstance(layer.ffn, ExpertsConfig)]
        return sum(3 * self.hidden_size * len(ffn.held) * ffn.intermediate_size for ffn in experts)

    @property
    def expert_share(self) -> float:
        """Share of its experts that a token chooses: the largest of all layers; 0 without experts."""
        routings = [layer.ffn.routing for layer in self.layers if isinstance(layer.ffn, ExpertsConfig)]
        return max((routing.top_k / routing.num_experts for routing in routings), default=0.0)

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of the layers that have one, each once, the narrowest first."""
        return tuple(sorted({window for layer in self.layers if (window := layer.attention.window) is not None}))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The ropes of the layers that have one, each once, in the order of layers."""
        return tuple(dict.fromkeys(rope for layer in self.layers if (rope := layer.attention.rope) is not None))

    @property
    def short_rope_len(self) -> int | None:
        """Longest sequence for which longrope stretches by its short factors; None for models without longrope."""
        lengths = [rope.original_max_positions for rope in self.ropes if rope.kind == "longrope"]
        return min(lengths) if lengths else None

    @property
    def max_exact_len(self) -> int:
        """Longest sequence that is computed as the checkpoint means it, whatever lengths the sequences have. Longrope
        means by its factors, that is by a sequence's length, two models whose KV cannot be mixed."""
        return min(self.max_positions, self.short_rope_len or self.max_positions)
