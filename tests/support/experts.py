"""Layers of experts with random weights, and what they give in float64, row by row, with no code of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from disagg.kernels.experts import Experts, Router, Shared
from disagg.kernels.routing import GatedActivation, Routing

Tensors = TypeVar("Tensors", Router, Experts, Shared)

ROUTINGS = {
    "mixtral": Routing(num_experts=8, top_k=2, renormalize=True),
    "qwen2-moe": Routing(num_experts=12, top_k=4),
    "qwen3-moe": Routing(num_experts=33, top_k=8, renormalize=True),
    "gpt-oss": Routing(num_experts=8, top_k=4, score="softmax_of_top"),
    "deepseek-v2": Routing(num_experts=18, top_k=5, scale=16.0, groups=6, top_groups=3),
    "deepseek-v3": Routing(
        num_experts=16,
        top_k=4,
        score="sigmoid",
        renormalize=True,
        scale=2.5,
        groups=4,
        top_groups=2,
        group_score="two_largest",
    ),
    "glm-4.5": Routing(num_experts=8, top_k=3, score="sigmoid", renormalize=True, group_score="two_largest"),
    "minimax-m2": Routing(num_experts=10, top_k=3, score="sigmoid", renormalize=True),
}
WITH_CHOICE_BIAS = ("deepseek-v3", "glm-4.5", "minimax-m2")


@dataclass(frozen=True)
class Layer:
    """A layer, its rows, and what they share."""

    x_TH: Tensor
    router: Router
    experts: Experts
    shared: Shared | None = None


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(
    routing: Routing,
    *,
    rows: int = 7,
    hidden: int = 40,
    inner: int = 24,
    dtype: torch.dtype = torch.float32,
    activation: GatedActivation | None = None,
    choice_bias: bool = False,
    biases: bool = False,
    shared: str = "none",
) -> Layer:
    """Make a layer and its rows; `shared` is none, plain or gated."""
    E = routing.num_experts
    weights = Experts(
        activation or GatedActivation(),
        (numbers(1, E, 2 * inner, hidden) / hidden**0.5).to(dtype),
        (numbers(2, E, hidden, inner) / inner**0.5).to(dtype),
        numbers(3, E, 2 * inner, dtype=dtype) if biases else None,
        numbers(4, E, hidden, dtype=dtype) if biases else None,
    )
    router = Router(
        routing,
        numbers(5, E, hidden) / hidden**0.5,
        numbers(6, E) / 2 if biases else None,
        numbers(7, E) / 2 if choice_bias else None,
        torch.zeros(E, dtype=torch.int64),
    )
    gate_H = numbers(9, hidden, dtype=dtype) / hidden**0.5 if shared == "gated" else None
    beside = None if shared == "none" else Shared(numbers(8, rows, hidden, dtype=dtype), gate_H)
    return Layer(numbers(10, rows, hidden, dtype=dtype), router, weights, beside)


def moved(case: Layer, device: torch.device) -> Layer:
    """The layer and its rows on a device."""
    shared = None if case.shared is None else _there(case.shared, device)
    return Layer(case.x_TH.to(device), _there(case.router, device), _there(case.experts, device), shared)


def _there(tensors: Tensors, device: torch.device) -> Tensors:
    found: dict[str, Any] = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    found = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in found.items()}
    return replace(tensors, **found)


def part_of(experts: Experts, held: slice) -> Experts:
    """What a rank has that holds these experts."""
    gate_up, down, gate_up_bias, down_bias = (
        None if tensor is None else tensor[held]  # type: ignore[index]
        for tensor in (experts.gate_up_L2IH, experts.down_LHI, experts.gate_up_bias_L2I, experts.down_bias_LH)
    )
    assert gate_up is not None
    assert down is not None
    return Experts(experts.activation, gate_up, down, gate_up_bias, down_bias, held.start)


def expected_choice(logits: list[float], routing: Routing, choice_bias: list[float] | None) -> dict[int, float]:
    """Experts of one row, with their weights."""
    experts, bias = range(routing.num_experts), choice_bias or [0.0] * routing.num_experts
    if any(map(math.isnan, logits)):
        return dict.fromkeys(range(routing.top_k), math.nan)
    scores = list(logits)
    if routing.score == "sigmoid":
        scores = [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
    elif routing.score == "softmax":
        powers = [math.exp(logit - max(logits)) for logit in logits]
        scores = [power / sum(powers) for power in powers]
    values = [scores[expert] + bias[expert] for expert in experts]
    size = routing.num_experts // routing.groups
    best = 2 if routing.group_score == "two_largest" else 1
    of_group = [sum(sorted(values[at : at + size])[-best:]) for at in range(0, routing.num_experts, size)]
    groups = sorted(range(routing.groups), key=lambda group: (-of_group[group], group))[: routing.top_groups]
    allowed = [expert for expert in experts if expert // size in groups]
    chosen = sorted(sorted(allowed, key=lambda expert: (-values[expert], expert))[: routing.top_k])
    weights = [scores[expert] for expert in chosen]
    if routing.score == "softmax_of_top":
        powers = [math.exp(weight - max(weights)) for weight in weights]
        weights = [power / sum(powers) for power in powers]
    if routing.renormalize:
        weights = [weight / (sum(weights) + 1e-20) for weight in weights]
    return {expert: weight * routing.scale for expert, weight in zip(chosen, weights, strict=True)}


def expected(case: Layer) -> Tensor:
    """Results of all rows [T, H] in float64, without any rounding."""
    experts, router, shared = case.experts, case.router, case.shared
    rows = []
    for index, x in enumerate(case.x_TH.double()):
        logits = router.weight_EH.double() @ x  # type: ignore[union-attr]
        if router.bias_E is not None:
            logits += router.bias_E
        bias = None if router.choice_bias_E is None else router.choice_bias_E.tolist()
        total = torch.zeros_like(x)
        for expert, weight in expected_choice(logits.tolist(), router.routing, bias).items():
            total += weight * _expert(experts, expert, x)
        if shared is not None:
            gate = 1.0 if shared.gate_H is None else (x @ shared.gate_H.double()).sigmoid()
            total += gate * shared.result_TH[index].double()
        rows.append(total)
    return torch.stack(rows)


def _expert(experts: Experts, expert: int, x: Tensor) -> Tensor:
    gate_up = experts.gate_up_L2IH[expert].double() @ x  # type: ignore[index]
    if experts.gate_up_bias_L2I is not None:
        gate_up += experts.gate_up_bias_L2I[expert]
    gate, up = gate_up.chunk(2)
    kind, limit = experts.activation.kind, experts.activation.limit
    if kind == "silu":
        gated = gate * gate.sigmoid() * up
    elif kind == "gelu_tanh":
        gated = 0.5 * gate * (1.0 + (math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up
    else:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        gated = gate * (experts.activation.alpha * gate).sigmoid() * (up + 1.0)
    result = experts.down_LHI[expert].double() @ gated  # type: ignore[index]
    return result if experts.down_bias_LH is None else result + experts.down_bias_LH[expert]
