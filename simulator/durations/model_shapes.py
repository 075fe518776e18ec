"""The sizes of a model, on which its time and memory depend. Some well-known models come as data, any other from its
`config.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from disagg.engine.cache_groups import LayerKv, layer_windows, layout_of
from disagg.engine.checkpoint.formats.mxfp4 import WEIGHT_BYTES
from disagg.engine.checkpoint.model_config import DenseConfig, ExpertsConfig, LatentConfig, ModelConfig
from disagg.proto.errors import ConfigError
from disagg.proto.messages import KvLayout

_Number = TypeVar("_Number", int, float)

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}
"""Bytes of one number."""
MXFP4 = "mxfp4"
"""Dtype of experts only: beside them, matrices have the dtype of activations, in which experts are multiplied, too."""
WEIGHT_DTYPE_BYTES = {**DTYPE_BYTES, MXFP4: WEIGHT_BYTES}
"""Bytes of one weight."""


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """Experts of a model, and how many of its layers have them in place of a dense MLP."""

    config: ExpertsConfig
    num_layers: int

    def vector_parameters(self, hidden_size: int) -> int:
        """Number of parameters beside the matrices: biases, and the gate of what all tokens take."""
        config, num_experts = self.config, self.config.routing.num_experts
        of_expert = config.router_bias + config.choice_bias
        of_expert += config.bias * (2 * config.intermediate_size + hidden_size)
        return self.num_layers * (num_experts * of_expert + config.shared_gate * hidden_size)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder whose layers have attention of one shape. `num_heads` and `num_kv_heads` are those of queries and of
    keys and values; without experts all layers have an MLP of `intermediate_size`."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Tokens of the longest sequence."""
    tied_embeddings: bool = False
    """The LM head is the embedding matrix."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Norms over each head of q and k."""
    whole_qk_norm: bool = False
    """Norms over all heads of q, and over all of k."""
    norms_per_layer: int = 2
    """Number of norms over the hidden size."""
    sinks: bool = False
    latent: LatentConfig | None = None
    """Latent attention, with one KV head of `head_dim` numbers, which are keys and values in one; None for others."""
    experts: ExpertsShape | None = None
    windows: tuple[int, ...] = ()
    """Tokens that a token attends to in each layer, itself included, 0 for all before it; empty where no layer has a
    window."""

    @property
    def q_size(self) -> int:
        """Number of outputs of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of outputs of the key projection, which is also that of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def score_dim(self) -> float:
        """Half the multiply-adds of a query head with a token: the numbers of a key and of a value, averaged."""
        return self.head_dim if self.latent is None else (self.head_dim + self.latent.latent_dim) / 2

    @property
    def kept_dim(self) -> float:
        """Half the numbers that a KV head keeps of a token."""
        return self.head_dim if self.latent is None else self.head_dim / 2

    @property
    def num_dense_layers(self) -> int:
        """Number of layers without experts."""
        return self.num_layers - (0 if self.experts is None else self.experts.num_layers)

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters in the matrices of all layers."""
        return self._matrix_parameters(None if self.experts is None else self.experts.config.routing.num_experts)

    @property
    def active_parameters(self) -> int:
        """Number of parameters in the matrices of all layers with which each token is multiplied."""
        return self._matrix_parameters(None if self.experts is None else self.experts.config.routing.top_k)

    def read_parameters(self, num_rows: float) -> float:
        """Number of parameters in the matrices of all layers that a step of so many rows is expected to read."""
        if self.experts is None:
            return self.matrix_parameters
        return self._matrix_parameters(self.experts.config.routing.distinct_experts(num_rows))

    def read_expert_parameters(self, num_rows: float) -> float:
        """The part of `read_parameters` that experts have."""
        if self.experts is None:
            return 0.0
        routing = self.experts.config.routing
        return self.expert_parameters * routing.distinct_experts(num_rows) / routing.num_experts

    def latent_matrices(self, latent: LatentConfig, num_heads: int) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the products of a layer with latent attention, with so many of the heads."""
        hidden, queries = self.hidden_size, num_heads * latent.query_dim
        down: tuple[tuple[int, int], ...] = ((hidden, queries + latent.cache_dim),)
        if (rank := latent.query_rank) is not None:
            down = ((hidden, rank + latent.cache_dim), (rank, queries))
        return (
            *down,
            (latent.key_dim, num_heads * latent.latent_dim),
            (latent.latent_dim, num_heads * latent.value_dim),
            (num_heads * latent.value_dim, hidden),
        )

    def _matrix_parameters(self, num_experts: _Number | None) -> _Number | int:
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        if self.latent is not None:
            attention = sum([inputs * outputs for inputs, outputs in self.latent_matrices(self.latent, self.num_heads)])
        dense = self.num_layers * attention + 3 * self.num_dense_layers * self.hidden_size * self.intermediate_size
        if self.experts is None or num_experts is None:
            return dense
        experts = self.experts.config
        features = num_experts * experts.intermediate_size + experts.shared_size
        return dense + self.experts.num_layers * self.hidden_size * (3 * features + experts.routing.num_experts)

    @property
    def num_parameters(self) -> int:
        """Number of all parameters in the checkpoint."""
        layer = self.norms_per_layer * self.hidden_size + self.sinks * self.num_heads
        layer += self.whole_qk_norm * (self.q_size + self.kv_size)
        if self.latent is not None:
            layer += (self.latent.query_rank or 0) + self.latent.latent_dim
        layer += self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.o_bias * self.hidden_size
        layer += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size) + self.qk_norm * 2 * self.head_dim
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        found = self.matrix_parameters + self.num_layers * layer + embeddings + self.hidden_size
        return found if self.experts is None else found + self.experts.vector_parameters(self.hidden_size)

    def kv_layout(self, kv_dtype: str = "bfloat16") -> KvLayout:
        """What is kept of the keys and values of a sequence, counted once for all ranks."""
        windows = self.windows or (0,) * self.num_layers
        value_dim, prefix = (self.head_dim, 0) if self.latent is None else (0, self.latent.latent_dim)
        layers = [LayerKv(window, self.num_kv_heads, self.head_dim, value_dim, prefix) for window in windows]
        return layout_of(layers, kv_dtype, DTYPE_BYTES[kv_dtype])

    def kv_bytes_per_token(self, kv_dtype: str = "bfloat16") -> int:
        """Bytes of the keys and values of one token in all layers. What a prefix takes is `kv_layout().bytes_of`."""
        return self.kv_layout(kv_dtype).bytes_per_token

    def scratch_bytes(self, num_tokens: int, tp: int = 1, dtype: str = "bfloat16", *, ep: bool = False) -> int:
        """Bytes that experts need beside their weights on each of `tp` ranks, in a step of so many tokens. With `ep`
        each rank has whole experts."""
        if self.experts is None:
            return 0
        experts = self.experts.config
        of_rank = experts if ep else replace(experts, intermediate_size=experts.intermediate_size // tp)
        return of_rank.scratch_bytes(num_tokens, self.hidden_size, int(DTYPE_BYTES[dtype]))

    @property
    def expert_parameters(self) -> int:
        """Number of parameters in the matrices of experts."""
        if self.experts is None:
            return 0
        experts = self.experts.config
        features = experts.routing.num_experts * experts.intermediate_size
        return 3 * self.experts.num_layers * self.hidden_size * features

    @property
    def expert_share(self) -> float:
        """Share of its experts that a token chooses; 0 without experts."""
        if self.experts is None:
            return 0.0
        return self.experts.config.routing.top_k / self.experts.config.routing.num_experts

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads that each of `tp` ranks holds. With fewer heads than ranks, neighbouring ranks hold the same one."""
        return max(1, self.num_kv_heads // tp)

    def check_tp(self, tp: int, flag: str = "--tp", *, ep: bool = False) -> None:
        """Check that `tp` ranks can divide the model; the rules are those of `engine/sharding/model_shards.py`. With
        `ep` each rank has whole experts.

        Raises:
            ConfigError: they cannot; names the size that stands against it.
        """
        if tp < 1:
            raise ConfigError(f"{flag}: a worker has at least 1 rank, not {tp}")
        sizes = [("query heads", self.num_heads)]
        if self.num_dense_layers:
            sizes.append(("MLP columns", self.intermediate_size))
        if self.experts is not None:
            experts = self.experts.config
            divided = ("columns of an expert", experts.intermediate_size)
            if ep:
                divided = ("experts", experts.routing.num_experts)
            sizes += [divided, ("shared columns", experts.shared_size)]
        for name, count in sizes:
            if count % tp:
                raise ConfigError(f"{flag}: {count} {name} of {self.name} cannot be divided among {tp} ranks")
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ConfigError(
                f"{flag}: {tp} is neither a divisor nor a multiple of the {self.num_kv_heads} KV heads of {self.name}"
            )


def shape_of(config: ModelConfig, name: str) -> ModelShape:
    """The sizes of a model whose `config.json` was read."""
    attention = config.layers[0].attention
    dense = [layer.ffn for layer in config.layers if isinstance(layer.ffn, DenseConfig)]
    windows = layer_windows(config)
    return ModelShape(
        name=name,
        hidden_size=config.hidden_size,
        intermediate_size=dense[0].intermediate_size if dense else 0,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_exact_len,
        tied_embeddings=config.tied_embeddings,
        qkv_bias=attention.qkv_bias,
        o_bias=attention.o_bias,
        mlp_bias=bool(dense) and dense[0].bias,
        windows=windows if any(windows) else (),
        qk_norm=attention.qk_norm == "head",
        whole_qk_norm=attention.qk_norm == "whole",
        norms_per_layer=4 if config.layers[0].norms == "both" else 2,
        sinks=attention.sinks,
        latent=attention.latent,
        experts=_experts_of(config),
    )


def _experts_of(config: ModelConfig) -> ExpertsShape | None:
    found = [layer.ffn for layer in config.layers if isinstance(layer.ffn, ExpertsConfig)]
    if not found:
        return None
    return ExpertsShape(config=found[0], num_layers=len(found))


def _qwen3(name: str, hidden: int, inner: int, layers: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_positions=40960,
        qk_norm=True,
    )


def _llama(name: str, hidden: int, inner: int, layers: int, heads: int, vocab: int, longest: int) -> ModelShape:
    return ModelShape(
        name=name,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=vocab,
        max_positions=longest,
    )


MODEL_SHAPES = {
    shape.name: shape
    for shape in (  # sizes as in the `config.json` that each model was published with
        ModelShape(
            name="smollm2-135m",
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            vocab_size=49152,
            max_positions=8192,
            tied_embeddings=True,
        ),
        _llama("llama-2-70b", 8192, 28672, 80, 64, 32000, 4096),
        _llama("llama-3-8b", 4096, 14336, 32, 32, 128256, 8192),
        _llama("llama-3-70b", 8192, 28672, 80, 64, 128256, 8192),
        _llama("llama-3.1-8b", 4096, 14336, 32, 32, 128256, 131072),
        _llama("llama-3.1-70b", 8192, 28672, 80, 64, 128256, 131072),
        _llama("mistral-7b", 4096, 14336, 32, 32, 32768, 32768),  # v0.3, which has no sliding window
        _qwen3("qwen3-8b", 4096, 12288, 36, 32),
        _qwen3("qwen3-14b", 5120, 17408, 40, 40),
        _qwen3("qwen3-32b", 5120, 25600, 64, 64),
    )
}


def known_shape(name: str) -> ModelShape | None:
    """The shape of a well-known model, by its name in any case; None for others."""
    return MODEL_SHAPES.get(name.lower())
