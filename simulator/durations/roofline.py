"""The time of a step from a model's shape and a device's numbers, for any width of tensor parallelism.

After S. Williams et al., "Roofline: An Insightful Visual Performance Model" (2009): what a kernel takes is what its
multiplications take at the device's peak rate, or what its bytes take at the memory's, whichever is longer; both
times the efficiency that real kernels reach (`devices.Kernels`), and a start-up time. A step is, layer by layer,

    four GEMMs            qkv, output, gate and up, down: 2 m n k FLOP; weights, inputs and outputs read or written once
    experts               in place of the last two, for k rows of each token, with the weights of the experts that so
                          many tokens are expected to choose, E (1 - (1 - k / E)^tokens)
    prefill attention     4 * heads * head_dim FLOP per query-key pair, and some pairs more for each prompt token
    decode attention      the KV of all contexts read once
    windows               layers that have one attend to at most that many tokens for each token
    two all-reduces       2 (n - 1) / n of the hidden states over the link between ranks (a ring's share)
    the rest              norms, rotation, activation: bytes

and once the LM head for the sequences that sample, and a fixed time. Ranks divide heads, columns and vocabulary as in
`engine/sharding/shards.py`; they compute the same at the same time, so that one rank's time is the step's. Where each
rank has whole experts (`ep`), the step takes as long as the rank with the most rows and the one with the most chosen
experts, if tokens choose at random. Workers of several stages are in stages.py; experts over several workers are not
computed (`check_parallelism`).
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.engine.cache_groups import SCALE_BYTES
from disagg.engine.checkpoint.model_config import ExpertsConfig
from disagg.proto.errors import ConfigError
from disagg.simulator.durations.devices import Device
from disagg.simulator.durations.model_shapes import DTYPE_BYTES, MXFP4, WEIGHT_DTYPE_BYTES, ModelShape
from disagg.simulator.durations.perf_tables import (
    AttentionTime,
    Curve,
    GemmCorrections,
    PerfTables,
    Surface,
    all_reduce_curve,
    attention_surface,
)
from disagg.step_times.interface import StepWork

ACTIVATION_BYTES = 2.0
"""Least bytes of one number of a hidden state; 4 with float32."""
NETWORK_SHARE = 0.8
"""Share of the network's bandwidth that a message between nodes reaches."""
NETWORK_LATENCY_S = 1e-5


class StepParts(NamedTuple):
    """Seconds of the parts of one step."""

    gemms: float
    prefill_attention: float
    decode_attention: float
    all_reduces: float
    others: float
    head: float
    fixed: float


@dataclass(frozen=True)
class _Gemm:
    n: int
    k: int
    curve: Curve | None


def check_parallelism(*, ep: int = 1) -> None:
    """Refuse expert parallelism over several workers, which neither this model nor the engine supports.

    Raises:
        ConfigError: expert parallelism over several workers is asked for.
    """
    if ep != 1:
        raise ConfigError(
            f"--ep: expert parallelism ({ep}) beyond the ranks of a worker is not supported; --tp divides the experts"
        )


class RooflineStepTimes:
    """A worker of `tp` devices, each of which has whole experts where `ep` is true. `weight_dtype` is what weights are
    stored in (`fp8` and `int8` halve what decode reads, and multiply at that dtype's rate; `mxfp4` is of experts, which
    multiply at the rate of `dtype`), `kv_dtype` what keys and values are.

    Raises:
        ConfigError: the model cannot be divided so, or the device lacks the dtype.
    """

    def __init__(
        self,
        model: ModelShape,
        device: Device,
        *,
        tp: int = 1,
        dtype: str = "bfloat16",
        weight_dtype: str | None = None,
        kv_dtype: str | None = None,
        tables: PerfTables | None = None,
        step_s: float | None = None,
        ep: bool = False,
    ) -> None:
        model.check_tp(tp, ep=ep)
        self.model, self.device, self.tp, self._ep = model, device, tp, ep
        self._has_head = True
        self._windows = Counter(model.windows)
        """Number of layers of each window, 0 for none; empty where no layer has one."""
        weight_dtype, kv_dtype = weight_dtype or dtype, kv_dtype or dtype
        self._expert_bytes = WEIGHT_DTYPE_BYTES.get(weight_dtype, 0.0)
        weight_dtype = dtype if weight_dtype == MXFP4 else weight_dtype
        for flag, name in (("--dtype", dtype), ("--weight-dtype", weight_dtype), ("--kv-dtype", kv_dtype)):
            if name not in DTYPE_BYTES:
                raise ConfigError(f"{flag}: {name!r} is not known; there is {', '.join(DTYPE_BYTES)}")
        kernels = device.kernels
        self._kernels = kernels
        self._peak = device.peak(weight_dtype, "--weight-dtype")
        self._attention_peak = device.peak(dtype)
        self._weight_bytes, self._kv_bytes = DTYPE_BYTES[weight_dtype], DTYPE_BYTES[kv_dtype]
        self._scale_bytes = SCALE_BYTES.get(kv_dtype, 0)
        self.activation_bytes = max(ACTIVATION_BYTES, DTYPE_BYTES[dtype])
        """Bytes of one number of a hidden state."""
        self._fixed_s = kernels.step_s if step_s is None else step_s
        self._heads, self._kv_heads = model.num_heads // tp, model.kv_heads_per_rank(tp)
        self._correct(tables or PerfTables(), weight_dtype)

    def _correct(self, tables: PerfTables, weight_dtype: str) -> None:
        model, tp = self.model, self.tp
        rows = tables.gemm.get(weight_dtype, ())
        corrections = GemmCorrections(rows, self._gemm_s, self._peak)

        def gemm(n: int, k: int) -> _Gemm:
            return _Gemm(n, k, corrections.curve(n, k))

        def mlp(features: int) -> tuple[_Gemm, ...]:
            return gemm(2 * features // tp, model.hidden_size), gemm(model.hidden_size, features // tp)

        self._attention_gemms: tuple[_Gemm, ...] = (
            gemm((self._heads + 2 * self._kv_heads) * model.head_dim, model.hidden_size),
            gemm(model.hidden_size, self._heads * model.head_dim),
        )
        if model.latent is not None:
            self._attention_gemms = tuple([gemm(n, k) for k, n in model.latent_matrices(model.latent, self._heads)])
        self._mlp_gemms = mlp(model.intermediate_size) if model.num_dense_layers else ()
        self._shared_gemms: tuple[_Gemm, ...] = ()
        if model.experts is not None:
            experts = model.experts.config
            self._shared_gemms = (gemm(experts.routing.num_experts, model.hidden_size),)
            if experts.shared_size:
                self._shared_gemms += mlp(experts.shared_size)
        self._gemms = (*self._attention_gemms, *self._mlp_gemms, *self._shared_gemms)
        self._head = gemm(-(-model.vocab_size // tp), model.hidden_size)
        heads = (self._heads, self._kv_heads, model.head_dim)
        self._prefill_surface: Surface | None = attention_surface(
            tables.prefill_attention, *heads, self._prefill_of, self._least_prefill_s
        )
        self._decode_surface: Surface | None = attention_surface(
            tables.decode_attention, *heads, self._decode_of, self._least_decode_s
        )
        self._all_reduce_curve = all_reduce_curve(tables.all_reduce, tp, self._all_reduce_s)
        parts = (
            ("GEMMs", any(each.curve for each in self._gemms)),
            ("prefill attention", self._prefill_surface),
            ("decode attention", self._decode_surface),
            ("all-reduce", self._all_reduce_curve),
        )
        self.corrected = tuple(name for name, found in parts if found)
        """Names of the parts that measured times correct."""

    def of_stage(self, shape: ModelShape, *, is_first: bool, is_last: bool) -> RooflineStepTimes:
        """The times of a stage of such workers, with the layers of `shape`. The fixed time is that of the first stage,
        which plans the steps; the last one has the head."""
        stage = copy.copy(self)
        stage.model = shape
        stage._windows = Counter(shape.windows)
        stage._has_head = is_last
        stage._fixed_s = self._fixed_s if is_first else 0.0
        return stage

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step."""
        return sum(self.parts(work))

    def parts(self, work: StepWork) -> StepParts:
        """Seconds of the parts of one step."""
        num_layers, kernels = self.model.num_layers, self._kernels
        tokens = work.prefill_tokens + work.num_decodes
        if tokens == 0:
            return StepParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, self._fixed_s)
        return StepParts(
            gemms=self._gemms_s(tokens),
            prefill_attention=self._over_layers(self._prefill_attention_s, work),
            decode_attention=self._over_layers(self._decode_attention_s, work),
            all_reduces=0.0 if self.tp == 1 else 2 * num_layers * self._corrected_all_reduce_s(tokens),
            others=num_layers
            * (kernels.other_start_s + self._other_bytes(tokens) / self._memory(kernels.other_memory)),
            head=self._corrected_gemm_s(num_sampling(work), self._head) if self._has_head else 0.0,
            fixed=self._fixed_s,
        )

    def _over_layers(self, seconds: Callable[[StepWork], float], work: StepWork) -> float:
        """Of all layers, each with the work that its window leaves."""
        if not self._windows:
            return self.model.num_layers * seconds(work)
        return sum([count * seconds(_within(work, window)) for window, count in self._windows.items()])

    # ------------------------------------------------------------ kernels

    def _memory(self, efficiency: float) -> float:
        return self.device.memory_bandwidth * efficiency

    def _gemm_s(self, m: float, n: float, k: float) -> float:
        return self._product_s(m, n, k, self._weight_bytes)

    def _product_s(self, m: float, n: float, k: float, weight_bytes: float) -> float:
        """Of m rows, each with one of several weights of n by k numbers. `weight_bytes`: of one number of all these."""
        kernels = self._kernels
        num_bytes = weight_bytes * n * k + self.activation_bytes * m * (n + k)
        return kernels.gemm_start_s + _overlapped(
            2.0 * m * n * k / (self._peak * kernels.gemm_compute),
            num_bytes / self._memory(kernels.gemm_memory),
            kernels.gemm_overlap,
        )

    def _gemms_s(self, tokens: int) -> float:
        """Of all layers."""

        def seconds(gemms: Sequence[_Gemm]) -> float:
            return sum([self._corrected_gemm_s(tokens, each) for each in gemms])

        model, experts = self.model, self.model.experts
        if experts is None:
            return model.num_layers * seconds(self._gemms)
        found = model.num_layers * seconds(self._attention_gemms) + model.num_dense_layers * seconds(self._mlp_gemms)
        return found + experts.num_layers * (seconds(self._shared_gemms) + self._experts_s(tokens, experts.config))

    def _experts_s(self, tokens: int, experts: ExpertsConfig) -> float:
        """The two products of all rows with their experts, of those that the rows are expected to choose."""
        rows, distinct = float(tokens * experts.routing.top_k), experts.routing.distinct_experts(tokens)
        features, hidden = float(experts.intermediate_size), self.model.hidden_size
        if self._ep:
            num_experts = experts.routing.num_experts
            rows = _of_busiest(rows, self.tp, rows * (1.0 - 1.0 / self.tp))
            chosen = distinct * (1.0 - distinct / num_experts)
            distinct = min(_of_busiest(distinct, self.tp, chosen), num_experts / self.tp)
        else:
            features /= self.tp
        weight_bytes = self._expert_bytes * distinct
        gate_up = self._product_s(rows, 2 * features, hidden, weight_bytes)
        return gate_up + self._product_s(rows, hidden, features, weight_bytes)

    def _corrected_gemm_s(self, m: int, gemm: _Gemm) -> float:
        seconds = self._gemm_s(m, gemm.n, gemm.k)
        return seconds if gemm.curve is None else seconds * gemm.curve.factor(m)

    def _prefill_attention_s(self, work: StepWork) -> float:
        tokens, pairs = work.prefill_tokens, work.prefill_attended
        if tokens == 0:
            return 0.0
        seconds = self._prefill_s(tokens, pairs, self._heads, self.model.score_dim)
        if self._prefill_surface is None:
            return seconds
        # Prompts of so many tokens, all new, have as many pairs for each token as these.
        alike = max(1.0, 2.0 * pairs / tokens - 1.0)
        return seconds * self._prefill_surface.factor(max(1.0, tokens / alike), alike)

    def _prefill_s(self, tokens: float, pairs: float, heads: int, head_dim: float) -> float:
        kernels = self._kernels
        flops = 4.0 * heads * head_dim * (pairs + kernels.prefill_attention_pairs * tokens)
        return kernels.attention_start_s + flops / (self._attention_peak * kernels.prefill_attention_compute)

    def _decode_attention_s(self, work: StepWork) -> float:
        if work.num_decodes == 0:
            return 0.0
        seconds = self._decode_s(work.num_decodes, work.decode_context, self._kv_heads, self.model.kept_dim)
        if self._decode_surface is None:
            return seconds
        return seconds * self._decode_surface.factor(work.num_decodes, work.decode_context / work.num_decodes)

    def _decode_s(self, batch: float, context: float, kv_heads: int, head_dim: float) -> float:
        kernels = self._kernels
        num_bytes = 2.0 * context * kv_heads * (head_dim * self._kv_bytes + self._scale_bytes)
        return kernels.attention_start_s + _overlapped(
            num_bytes / self._memory(kernels.decode_attention_memory),
            batch * kv_heads * kernels.decode_attention_head_s,
            kernels.decode_attention_overlap,
        )

    def _other_bytes(self, tokens: int) -> float:
        """Bytes of two norms and residuals (each reads two hidden states and writes two), rotation of q and k,
        activation."""
        model = self.model
        rotated = 2 * (self._heads + self._kv_heads) * model.head_dim
        features: float = model.intermediate_size
        if (experts := model.experts) is not None:
            chosen = experts.config.routing.top_k * experts.config.intermediate_size + experts.config.shared_size
            features = (model.num_dense_layers * features + experts.num_layers * chosen) / model.num_layers
        return self.activation_bytes * tokens * (8 * model.hidden_size + rotated + 3 * features / self.tp)

    def _all_reduce_s(self, num_bytes: float) -> float:
        kernels, device = self._kernels, self.device
        inside = min(self.tp, device.max_tp)
        share = 2.0 * (inside - 1) / inside * num_bytes
        seconds = kernels.all_reduce_start_s + kernels.all_reduce_rank_s * inside
        seconds += share / (device.link_bandwidth * kernels.all_reduce_bandwidth)
        num_nodes = -(-self.tp // device.max_tp)
        if num_nodes > 1:  # each rank exchanges its part of the node's sum with its like on the other nodes
            outside = 2.0 * (num_nodes - 1) / num_nodes * num_bytes / inside
            seconds += 2 * (num_nodes - 1) * NETWORK_LATENCY_S + outside / (device.network_bandwidth * NETWORK_SHARE)
        return seconds

    def _corrected_all_reduce_s(self, tokens: int) -> float:
        num_bytes = self.activation_bytes * tokens * self.model.hidden_size
        seconds = self._all_reduce_s(num_bytes)
        return seconds if self._all_reduce_curve is None else seconds * self._all_reduce_curve.factor(num_bytes)

    # ------------------------------------------------------------ rows of the tables

    def _prefill_of(self, row: AttentionTime) -> float:
        tokens = row.batch * row.tokens
        return self._prefill_s(tokens, _pairs(row), row.num_heads, row.head_dim)

    def _decode_of(self, row: AttentionTime) -> float:
        return self._decode_s(row.batch, row.batch * row.tokens, row.num_kv_heads, row.head_dim)

    def _least_prefill_s(self, row: AttentionTime) -> float:
        return 4.0 * row.num_heads * row.head_dim * _pairs(row) / self._attention_peak

    def _least_decode_s(self, row: AttentionTime) -> float:
        row_bytes = row.head_dim * self._kv_bytes + self._scale_bytes
        num_bytes = 2.0 * row.batch * row.tokens * row.num_kv_heads * row_bytes
        return num_bytes / self.device.memory_bandwidth


def num_sampling(work: StepWork) -> int:
    """Rows of a step for which logits are computed."""
    return work.num_decodes + (max(1, work.num_prefills) if work.prefill_tokens else 0)


def _of_busiest(total: float, num_ranks: int, variance: float) -> float:
    """The share of the rank that gets most of `total` things which fall on ranks at random: the mean, and sqrt(2 ln n)
    deviations, about the largest of n normal numbers. `variance`: of one rank's share, times the number of ranks."""
    mean = total / num_ranks
    return min(total, mean + math.sqrt(2.0 * math.log(num_ranks) * max(0.0, variance) / num_ranks))


def _within(work: StepWork, window: int) -> StepWork:
    """The work of a layer with this window, 0 for none, where sequences are equally long."""
    if not window:
        return work
    return work._replace(
        prefill_attended=min(work.prefill_attended, work.prefill_tokens * window),
        decode_context=min(work.decode_context, work.num_decodes * window),
    )


def _pairs(row: AttentionTime) -> float:
    return row.batch * row.tokens * (row.tokens + 1) / 2.0


def _overlapped(first: float, second: float, exponent: float) -> float:
    """(a^p + b^p)^(1/p), without overflow."""
    longer, shorter = (first, second) if first >= second else (second, first)
    if longer <= 0.0:
        return 0.0
    return float(longer * (1.0 + (shorter / longer) ** exponent) ** (1.0 / exponent))
