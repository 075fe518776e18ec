"""The experts of a layer as tensors: what `moe_ffn` of `disagg.kernels.dispatch` takes.

Shapes: T tokens, H hidden, I intermediate size of an expert, E experts of the layer, L experts of this rank, which are
consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from disagg.kernels.cpu.linear import NativeExpertWeight
from disagg.kernels.linear import PackedWeight
from disagg.kernels.routing import GatedActivation, Routing

ExpertWeight = Tensor | NativeExpertWeight
"""Weights of the linear layers of a rank's experts, [L, out, in]; a tensor until they are packed."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """What chooses the experts of each row."""

    routing: Routing
    weight_EH: Tensor | PackedWeight
    """Weight of the router, fp32."""
    bias_E: Tensor | None = None
    """Bias of the router's product, fp32."""
    choice_bias_E: Tensor | None = None
    """Bias of the scores for the choice only, fp32."""
    counts_E: Tensor | None = None
    """Counters of the rows of each expert, int64, to which each call adds."""


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The experts of a rank."""

    activation: GatedActivation
    gate_up_L2IH: ExpertWeight
    """Weights of gate, then of up."""
    down_LHI: ExpertWeight
    gate_up_bias_L2I: Tensor | None = None
    down_bias_LH: Tensor | None = None
    first: int = 0
    """Number of this rank's first expert."""


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What each row has beside its experts: the result of an MLP for all rows."""

    result_TH: Tensor
    gate_H: Tensor | None = None
    """Weight of a product with the row whose sigmoid is the weight of the result; None for a weight of one."""
