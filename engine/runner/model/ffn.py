"""The way of a layer's two branches, attention and feed-forward network, back to the residual stream; and the
feed-forward networks.

A branch ends in a `Join`: by `project`, where its last step is a product, or by `add`, with what this rank has of its
output. Both give the norm of the new residual stream, by the weight of whatever follows, and that stream. The output
may have a norm of its own before it is added, and be multiplied by a number. Where it has neither, and there is one
rank, product, sum and norm are one call.

Shapes, on each rank: T tokens, H hidden, I features of an intermediate row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from disagg.engine.adapters.modules import ProductName
from disagg.engine.checkpoint.model_config import DenseConfig, ExpertsConfig, FfnConfig
from disagg.engine.runner.collectives import Collective
from disagg.engine.runner.model.parameters import DenseParameters, ExpertsParameters, FfnParameters, Weight
from disagg.kernels import dispatch
from disagg.kernels.dispatch import (
    gelu_tanh_mul,
    linear,
    linear_add_rms_norm,
    linear_gelu_tanh_mul,
    linear_silu_mul,
    lora_add,
    moe_ffn,
    silu_mul,
)
from disagg.kernels.experts import Experts, Router, Shared
from disagg.kernels.lora import Lora


@dataclass(frozen=True, slots=True)
class Norms:
    """The RMS norms of a model, which differ in their weights only."""

    eps: float
    plus_one: bool

    def norm(self, x_TH: Tensor, weight_H: Tensor | None) -> Tensor:
        """The norm of rows by a weight; without one, the rows themselves."""
        return x_TH if weight_H is None else dispatch.rms_norm(x_TH, weight_H, self.eps, self.plus_one)

    def add_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of the sum by a weight, without one the sum itself; and the sum."""
        if weight_H is not None:
            return dispatch.add_rms_norm(x_TH, residual_TH, weight_H, self.eps, self.plus_one)
        total_TH = dispatch.add(x_TH, residual_TH)
        return total_TH, total_TH


class RowAdapters(NamedTuple):
    """The adapters beside a product, and the slot of each row."""

    lora: Lora
    slots_T: Tensor


def with_adapters(x_TI: Tensor, out_TO: Tensor, adapters: RowAdapters | None) -> Tensor:
    """The result of a product with what adapters add, in place."""
    return out_TO if adapters is None else lora_add(x_TI, out_TO, adapters.lora, adapters.slots_T)


def beside(lora: Lora | None, slots_T: Tensor | None) -> RowAdapters | None:
    """The adapters beside a product, where it has some and a row has one."""
    return None if lora is None or slots_T is None else RowAdapters(lora, slots_T)


class Join:
    """Adds the outputs of one branch to the residual stream, over all ranks. Stateless."""

    def __init__(
        self,
        norms: Norms,
        collective: Collective | None,
        out_norm_H: Tensor | None = None,
        multiplier: float = 1.0,
    ) -> None:
        self._norms = norms
        self._collective = collective
        self._out_norm_H = out_norm_H
        self._multiplier = multiplier
        self._is_plain = collective is None and out_norm_H is None and multiplier == 1.0

    @property
    def is_first(self) -> bool:
        """Whether this rank adds what all ranks have."""
        return self._collective is None or self._collective.shard.rank == 0

    def project(
        self,
        x_TI: Tensor,
        weight_HI: Weight,
        bias_H: Tensor | None,
        residual_TH: Tensor,
        norm_H: Tensor | None,
        adapters: RowAdapters | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The branch's output is `x` times the weight, and what adapters add. All ranks have the bias; one adds it. Of
        what adapters add each rank has its part of the sum."""
        if self._is_plain and norm_H is not None and adapters is None:
            norms = self._norms
            return linear_add_rms_norm(x_TI, weight_HI, bias_H, residual_TH, norm_H, norms.eps, norms.plus_one)
        out_TH = linear(x_TI, weight_HI, bias_H if self.is_first else None)
        return self.add(with_adapters(x_TI, out_TH, adapters), residual_TH, norm_H)

    def add(self, out_TH: Tensor, residual_TH: Tensor, norm_H: Tensor | None) -> tuple[Tensor, Tensor]:
        """The branch's output is the sum of `out` over the ranks; it may be changed."""
        if self._collective is not None:
            out_TH = self._collective.all_reduce(out_TH)
        out_TH = self._norms.norm(out_TH, self._out_norm_H)
        if self._multiplier != 1.0:
            out_TH = dispatch.pointwise(out_TH, "multiply", self._multiplier)
        return self._norms.add_norm(out_TH, residual_TH, norm_H)


NO_LORAS: Mapping[ProductName, Lora] = {}


class Ffn(Protocol):
    """Feed-forward network of a layer, with its parameters and its join."""

    def transform(
        self, normed_TH: Tensor, residual_TH: Tensor, next_norm_H: Tensor | None, slots_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add the output for `normed` to the residual stream; the norm of that stream by the weight that follows, and
        the stream. `slots` are those of the rows' adapters."""
        ...


_FUSED = {"silu": linear_silu_mul, "gelu_tanh": linear_gelu_tanh_mul}
_ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


class DenseFfn(Ffn):
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, config: DenseConfig, parameters: DenseParameters, join: Join, loras: Mapping[ProductName, Lora] = NO_LORAS
    ) -> None:
        self._p = parameters
        self._join = join
        self._fused, self._activation = _FUSED[config.activation], _ACTIVATIONS[config.activation]
        self._gate_up_lora, self._down_lora = loras.get("gate_up"), loras.get("down")

    @override
    def transform(
        self, normed_TH: Tensor, residual_TH: Tensor, next_norm_H: Tensor | None, slots_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        p = self._p
        gate_up, down = beside(self._gate_up_lora, slots_T), beside(self._down_lora, slots_T)
        if gate_up is None:
            activated_TI = self._fused(normed_TH, p.gate_up_weight_2IH, p.gate_up_bias_2I)
        else:
            product_T2I = linear(normed_TH, p.gate_up_weight_2IH, p.gate_up_bias_2I)
            activated_TI = self._activation(with_adapters(normed_TH, product_T2I, gate_up))
        return self._join.project(activated_TI, p.down_weight_HI, p.down_bias_H, residual_TH, next_norm_H, down)


class ExpertsFfn(Ffn):
    """The sum of a few experts' outputs for each token, and of what all tokens take.

    A rank has a part of each expert's features, or some whole experts (`ExpertsConfig`), and a part of the features of
    what all tokens take; the ranks' outputs are added.
    """

    def __init__(self, config: ExpertsConfig, parameters: ExpertsParameters, join: Join) -> None:
        """`config` is the rank's."""
        p = parameters
        self._p = p
        self._join = join
        device = p.router_weight_EH.device if isinstance(p.router_weight_EH, Tensor) else torch.device("cpu")
        self.counts_E = torch.zeros(config.routing.num_experts, dtype=torch.int64, device=device)
        """Number of tokens that each expert of the model had so far."""
        self._router = Router(config.routing, p.router_weight_EH, p.router_bias_E, p.choice_bias_E, self.counts_E)
        has_bias = config.whole_experts or join.is_first
        self._experts = Experts(
            config.activation,
            p.gate_up_weight_L2IH,
            p.down_weight_LHI,
            p.gate_up_bias_L2I,
            p.down_bias_LH if has_bias else None,
            config.first_expert,
        )
        self._shared_gate_H = None if p.shared_gate_1H is None else p.shared_gate_1H[0]

    def transform(
        self, normed_TH: Tensor, residual_TH: Tensor, next_norm_H: Tensor | None, slots_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Route, compute and add up, then join the residual stream. Adapters of experts are refused."""
        out_TH = moe_ffn(normed_TH, self._router, self._experts, self._shared(normed_TH))
        return self._join.add(out_TH, residual_TH, next_norm_H)

    def _shared(self, normed_TH: Tensor) -> Shared | None:
        gate_up, down = self._p.shared_gate_up_weight_2SH, self._p.shared_down_weight_HS
        if gate_up is None or down is None:
            return None
        return Shared(linear(linear_silu_mul(normed_TH, gate_up, None), down, None), self._shared_gate_H)


def make_ffn(
    config: FfnConfig, parameters: FfnParameters, join: Join, loras: Mapping[ProductName, Lora] = NO_LORAS
) -> Ffn:
    """The network that a rank's configuration describes."""
    if isinstance(config, ExpertsConfig):
        assert isinstance(parameters, ExpertsParameters), "both are of one layer"
        return ExpertsFfn(config, parameters, join)
    assert isinstance(parameters, DenseParameters), "both are of one layer"
    return DenseFfn(config, parameters, join, loras)


def rounded(number: float, dtype: torch.dtype) -> float:
    """A number as a dtype holds it."""
    return float(torch.tensor(number, dtype=dtype))
