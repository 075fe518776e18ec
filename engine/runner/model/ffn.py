"""The way of a layer's two branches, attention and feed-forward network, back to the residual stream; and the
feed-forward networks.

A branch ends in a `Join`: by `project`, where its last step is a product, which is computed with the sum and the norm
behind it in one call, or by `add`, with what this rank has of its output. Both give the norm of the new residual
stream, and that stream.

Shapes, on each rank: T tokens, H hidden, I features of an intermediate row.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from disagg.engine.runner.collectives import Collective
from disagg.engine.runner.model.parameters import DenseParameters, Weight
from disagg.kernels.dispatch import add_rms_norm, linear, linear_add_rms_norm, linear_silu_mul


class Join:
    """Adds the outputs of branches to the residual stream, over all ranks. Stateless."""

    def __init__(self, eps: float, collective: Collective | None) -> None:
        self._eps = eps
        self._collective = collective

    def project(
        self, x_TI: Tensor, weight_HI: Weight, bias_H: Tensor | None, residual_TH: Tensor, norm_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The branch's output is `x` times the weight. All ranks have the bias; one adds it."""
        if self._collective is None:
            return linear_add_rms_norm(x_TI, weight_HI, bias_H, residual_TH, norm_H, self._eps)
        bias_H = bias_H if self._collective.shard.rank == 0 else None
        return self.add(linear(x_TI, weight_HI, bias_H), residual_TH, norm_H)

    def add(self, out_TH: Tensor, residual_TH: Tensor, norm_H: Tensor) -> tuple[Tensor, Tensor]:
        """The branch's output is the sum of `out` over the ranks; it may be changed."""
        if self._collective is not None:
            out_TH = self._collective.all_reduce(out_TH)
        return add_rms_norm(out_TH, residual_TH, norm_H, self._eps)


class Ffn(Protocol):
    """Feed-forward network of a layer, with its parameters and its join."""

    def transform(self, normed_TH: Tensor, residual_TH: Tensor, next_norm_H: Tensor) -> tuple[Tensor, Tensor]:
        """Add the output for `normed` to the residual stream; the norm of that stream by the weight that follows, and
        the stream."""
        ...


class DenseFfn(Ffn):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, parameters: DenseParameters, join: Join) -> None:
        self._p = parameters
        self._join = join

    def transform(self, normed_TH: Tensor, residual_TH: Tensor, next_norm_H: Tensor) -> tuple[Tensor, Tensor]:
        """As `Ffn`."""
        p = self._p
        activated_TI = linear_silu_mul(normed_TH, p.gate_up_weight_2IH, p.gate_up_bias_2I)
        return self._join.project(activated_TI, p.down_weight_HI, p.down_bias_H, residual_TH, next_norm_H)
