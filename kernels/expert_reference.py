"""The torch reference of layers of experts, a part of `reference.py`.

Shapes: T tokens, H hidden, I features of an expert, E experts of the layer, L of this rank, K experts of a token, R
rows of one expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from disagg.kernels.experts import Experts, Router, Shared
from disagg.kernels.routing import SMALLEST_SUM, GatedActivation, Routing


def gated(gate_up_T2I: Tensor, activation: GatedActivation) -> Tensor:
    """activation(gate) * up, [T, I], where gate is the first half of the last dim."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    if activation.kind == "silu":
        return F.silu(gate) * up
    if activation.kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * activation.alpha))


def route(logits_TE: Tensor, routing: Routing, choice_bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts of each row, ascending, and their weights (fp32), both [T, k]; the rules are those of `routing`.

    Logits are fp32.
    """
    is_bad_T1 = logits_TE.isnan().any(dim=-1, keepdim=True)
    scores_TE = _scores(logits_TE, routing)
    if choice_bias_E is not None:
        values_TE = scores_TE + choice_bias_E
    else:
        values_TE = scores_TE if routing.score == "sigmoid" else logits_TE
    values_TE = values_TE.masked_fill(is_bad_T1, 0.0)
    if routing.groups > 1:
        values_TE = _kept_groups(values_TE, routing)
    ids_TK = _largest(values_TE, routing.top_k).sort(dim=-1).values
    weights_TK = scores_TE.gather(1, ids_TK)
    if routing.score == "softmax_of_top":
        weights_TK = weights_TK.softmax(dim=-1)
    if routing.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return ids_TK, (weights_TK * routing.scale).masked_fill(is_bad_T1, float("nan"))


def _scores(logits_TE: Tensor, routing: Routing) -> Tensor:
    if routing.score == "softmax":
        return logits_TE.softmax(dim=-1)
    return logits_TE.sigmoid() if routing.score == "sigmoid" else logits_TE


def _largest(values_TE: Tensor, count: int) -> Tensor:
    """Indices of the largest values of each row, of equal ones the first."""
    return values_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _kept_groups(values_TE: Tensor, routing: Routing) -> Tensor:
    """-inf in place of the values outside of the best groups."""
    values_TGM = values_TE.view(len(values_TE), routing.groups, routing.group_size)
    num_best = 1 if routing.group_score == "largest" else 2
    scores_TG = values_TGM.sort(dim=-1, descending=True).values[:, :, :num_best].sum(dim=-1)
    is_kept_TG = torch.zeros_like(scores_TG, dtype=torch.bool)
    is_kept_TG.scatter_(1, _largest(scores_TG, routing.top_groups), True)
    return values_TGM.masked_fill(~is_kept_TG[:, :, None], float("-inf")).flatten(1)


def moe_ffn(x_TH: Tensor, router: Router, experts: Experts, shared: Shared | None) -> Tensor:
    """The sum of what each row's experts give, times their weights, and of what is shared; [T, H].

    The router's product, the weights and the sum are fp32; an expert's products and its activation round to the dtype
    of x. The sum is in the order of the experts, what is shared comes last, and it is rounded once. An expert that is
    not among this rank's adds nothing. On a GPU each expert computes all rows, so that a CUDA graph can hold it.
    """
    gate_up_L2IH, down_LHI = experts.gate_up_L2IH, experts.down_LHI
    assert isinstance(router.weight_EH, Tensor), "the reference takes plain weights"
    assert isinstance(gate_up_L2IH, Tensor), "the reference takes plain weights"
    assert isinstance(down_LHI, Tensor), "the reference takes plain weights"
    logits_TE = F.linear(x_TH.float(), router.weight_EH, router.bias_E)
    ids_TK, weights_TK = route(logits_TE, router.routing, router.choice_bias_E)
    if router.counts_E is not None:
        slots = ids_TK.flatten()
        router.counts_E.scatter_add_(0, slots, torch.ones_like(slots))
    total_TH = x_TH.new_zeros(x_TH.shape, dtype=torch.float32)
    for index in range(len(gate_up_L2IH)):
        is_its_TK = ids_TK == experts.first + index
        is_its_T = is_its_TK.any(dim=-1)
        rows_R = is_its_T.nonzero()[:, 0] if x_TH.is_cpu else slice(None)
        gate_up_R2I = F.linear(x_TH[rows_R], gate_up_L2IH[index], _row_of(experts.gate_up_bias_L2I, index))
        result_RH = F.linear(
            gated(gate_up_R2I, experts.activation), down_LHI[index], _row_of(experts.down_bias_LH, index)
        )
        weight_R1 = weights_TK.masked_fill(~is_its_TK, 0.0).sum(dim=-1)[rows_R, None]
        total_TH[rows_R] += (result_RH.float() * weight_R1).masked_fill(~is_its_T[rows_R, None], 0.0)
    if shared is not None:
        total_TH += _shared(x_TH, shared)
    return total_TH.to(x_TH.dtype)


def _row_of(bias_LN: Tensor | None, index: int) -> Tensor | None:
    return None if bias_LN is None else bias_LN[index]


def _shared(x_TH: Tensor, shared: Shared) -> Tensor:
    result_TH = shared.result_TH.float()
    if shared.gate_H is None:
        return result_TH
    return result_TH * (x_TH.float() @ shared.gate_H.float()).sigmoid()[:, None]
