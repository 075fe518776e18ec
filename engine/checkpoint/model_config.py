"""What a model computes, as values: sizes, and one description of each layer. Made from config.json by the functions of
`families/`, read by the decoder, the loader, the plans and the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `dynamic` scaling is `default` here: both agree up to the longest context we serve."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = DEFAULT_ROPE_THETA
    factor: float = 1.0
    original_max_positions: int = 0
    """Context length of the pretraining, for llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    """cos and sin are multiplied by this (yarn)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of one layer, whose heads are those of the model."""

    scale: float
    """Scale of the scores."""
    rope: RopeConfig
    window: int | None = None
    """Number of tokens that a query sees, its own included; None sees all."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k, before rope."""


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Feed-forward network with one gate, one up and one down projection: down(silu(gate(x)) * up(x))."""

    intermediate_size: int
    bias: bool = False


FfnConfig = DenseConfig
"""Feed-forward network of one layer."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer of the decoder: attention, then a feed-forward network, each added to the residual stream."""

    attention: AttentionConfig
    ffn: FfnConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """All that the decoder needs to know of a model."""

    architecture: str
    """Name in config.json, which tells the family (`families/registry.py`)."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Longest sequence that the position embedding was made for."""
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    tied_embeddings: bool
    """The LM head is the embedding matrix."""
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def kv_head_bytes(self, element_bytes: int) -> int:
        """Bytes of one token's K and V in one KV head of all layers."""
        return 2 * self.num_layers * self.head_dim * element_bytes

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of the layers that have one, each once, the narrowest first."""
        return tuple(sorted({window for layer in self.layers if (window := layer.attention.window) is not None}))

    @property
    def max_exact_len(self) -> int:
        """Longest sequence that full attention computes as the checkpoint means it."""
        return min((self.max_positions, *self.windows))
