"""Triton's layer of experts in the interpreter, against float64 and the torch reference."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.experts import Router
from disagg.kernels.routing import GatedActivation, Routing
from disagg.kernels.triton.ops import TritonOps
from tests.support.experts import ROUTINGS, WITH_CHOICE_BIAS, Layer, expected, layer, numbers, part_of

torch.set_num_threads(1)


def computed(case: Layer) -> Tensor:
    found = TritonOps().moe_ffn(case.x_TH, case.router, case.experts, case.shared)
    assert found is not None
    assert found.dtype == case.x_TH.dtype
    return found


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    assert ((found.double() - wanted).abs().max() / wanted.abs().max()).item() <= tolerance


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing(name: str) -> None:
    case = layer(ROUTINGS[name], choice_bias=name in WITH_CHOICE_BIAS)
    assert_close(computed(case), expected(case))
    chosen = case.router.counts_E
    assert chosen is not None
    before = chosen.clone()
    reference.moe_ffn(case.x_TH, case.router, case.experts, None)
    assert torch.equal(chosen, 2 * before)


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("silu", "plain"),
        ("gelu_tanh", "gated"),
        ("clamped_swiglu", "plain"),
        pytest.param("silu", "gated", marks=pytest.mark.slow),
        pytest.param("gelu_tanh", "plain", marks=pytest.mark.slow),
        pytest.param("clamped_swiglu", "gated", marks=pytest.mark.slow),
    ],
)
def test_activations_biases_and_what_is_shared(kind: Any, shared: str) -> None:
    activation = GatedActivation(kind=kind, limit=0.75)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2.0**-9)):
        case = layer(
            ROUTINGS["gpt-oss"], hidden=33, inner=21, dtype=dtype, activation=activation, biases=True, shared=shared
        )
        assert_close(computed(case), expected(case), tolerance)


@pytest.mark.parametrize("rows", [0, 1, 20, pytest.param(40, marks=pytest.mark.slow)])
def test_any_number_of_rows_on_one_expert_and_on_all(rows: int) -> None:
    """Several tiles of one expert, and experts without rows."""
    for bias in (torch.zeros(10), torch.eye(10)[4] * 9):
        case = layer(ROUTINGS["minimax-m2"], rows=rows)
        case = dataclasses.replace(case, router=dataclasses.replace(case.router, choice_bias_E=bias))
        if rows:
            assert_close(computed(case), expected(case))
        else:
            assert computed(case).shape == (0, 40)


def test_many_rows_take_larger_tiles() -> None:
    case = layer(Routing(num_experts=2, top_k=2), rows=70, hidden=16, inner=16)
    assert_close(computed(case), expected(case))


def test_ties_and_rows_of_nan() -> None:
    for routing in (ROUTINGS["qwen2-moe"], ROUTINGS["deepseek-v3"], ROUTINGS["gpt-oss"], ROUTINGS["deepseek-v2"]):
        case = layer(routing, rows=3)
        x = case.x_TH.clone()
        x[0], x[1, 2] = 0.0, math.nan
        case = dataclasses.replace(case, x_TH=x)
        found, wanted = computed(case), reference.moe_ffn(x, case.router, case.experts, None)
        assert found[1].isnan().all()
        assert_close(found[[0, 2]], wanted[[0, 2]].double())
        counters = case.router.counts_E
        assert counters is not None
        assert (counters % 2).sum() == 0
        assert (counters[: routing.top_k] >= 4).all()


def test_ranks_add_up_to_the_whole() -> None:
    case = layer(ROUTINGS["deepseek-v3"], rows=5, choice_bias=True, biases=True)
    whole, total = computed(case), torch.zeros(5, 40)
    for rank in range(4):
        mine = slice(4 * rank, 4 * rank + 4)
        part = part_of(case.experts, mine)
        total += computed(dataclasses.replace(case, experts=part))
    assert_close(total, whole.double())


def test_what_it_does_not_take() -> None:
    case = layer(ROUTINGS["mixtral"])
    strided = dataclasses.replace(case, x_TH=numbers(1, 40, 7).t())
    half = dataclasses.replace(case, x_TH=case.x_TH.half())
    router = dataclasses.replace(case, router=Router(case.router.routing, torch.ones(8, 40).half()))
    for each in (strided, half, router):
        assert TritonOps().moe_ffn(each.x_TH, each.router, each.experts, None) is None
