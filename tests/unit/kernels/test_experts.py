"""Layers of experts: every routing against float64, and what must hold for any of them, in all implementations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels import dispatch, reference
from disagg.kernels.cpu.calls import ProgramCapturer
from disagg.kernels.cpu.experts import MoeFfn
from disagg.kernels.cpu.linear import KINDS, NativeLinear
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.expert_reference import gated
from disagg.kernels.experts import Experts, Router, Shared
from disagg.kernels.quantize import quantize_int8
from disagg.kernels.routing import GatedActivation, Routing, scratch_bytes
from tests.support.experts import ROUTINGS, WITH_CHOICE_BIAS, Layer, expected, layer, numbers, part_of
from tests.unit.kernels.conftest import LEVELS, compiled_or_skip

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6}
"""Largest difference relative to the largest result: sums in fp32; roundings of the products and of the result."""

Run = Callable[[Layer], Tensor]


def packed(case: Layer, products: NativeLinear, quantization: Any = "none") -> Layer:
    """The same with packed weights."""
    gate_up, down = (products.pack_experts(w, quantization) for w in (case.experts.gate_up_L2IH, case.experts.down_LHI))  # type: ignore[arg-type]
    router = products.pack(case.router.weight_EH)  # type: ignore[arg-type]
    assert gate_up is not None
    assert down is not None
    assert router is not None
    experts = dataclasses.replace(case.experts, gate_up_L2IH=gate_up, down_LHI=down)
    return dataclasses.replace(case, experts=experts, router=dataclasses.replace(case.router, weight_EH=router))


def computed(ops: Any, case: Layer) -> Tensor:
    found = ops.moe_ffn(case.x_TH, case.router, case.experts, case.shared)
    assert found is not None
    assert found.dtype == case.x_TH.dtype
    assert found.shape == case.x_TH.shape
    assert isinstance(found, Tensor)
    return found


@pytest.fixture(params=[None, *LEVELS], ids=lambda level: f"cpu-c++-{level.name}" if level else "reference")
def run(request: pytest.FixtureRequest) -> Run:
    """An implementation, which packs where it takes packed weights."""
    if request.param is None:
        return lambda case: computed(reference, case)
    native, products = compiled_or_skip(request.param)
    return lambda case: computed(native, packed(case, products))


def assert_close(found: Tensor, wanted: Tensor) -> None:
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error.item() <= TOLERANCE[found.dtype]


def with_rows(case: Layer, x_TH: Tensor) -> Layer:
    return dataclasses.replace(case, x_TH=x_TH)


def counts(case: Layer) -> list[int]:
    found = case.router.counts_E
    assert found is not None
    return found.tolist()


# ---------------------------------------------------------------- against float64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing(run: Run, name: str, dtype: torch.dtype) -> None:
    case = layer(ROUTINGS[name], dtype=dtype, choice_bias=name in WITH_CHOICE_BIAS)
    assert_close(run(case), expected(case))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_biases_and_what_is_shared(run: Run, dtype: torch.dtype, kind: Any) -> None:
    """With a limit that many numbers reach, and sizes that no vector divides."""
    activation = GatedActivation(kind=kind, limit=0.75)
    for shared in ("plain", "gated"):
        case = layer(
            ROUTINGS["gpt-oss"], hidden=33, inner=21, dtype=dtype, activation=activation, biases=True, shared=shared
        )
        assert_close(run(case), expected(case))


def test_roundings_of_the_clamped_swiglu_are_those_of_separate_ops(native: NativeOps, products: NativeLinear) -> None:
    """Experts whose products are exact, so that only the activation rounds."""
    routing = Routing(num_experts=1, top_k=1, score="softmax_of_top")
    x = (numbers(1, 40, 64, dtype=torch.bfloat16) * 4).clamp(-3.0, 12.0)  # torch's gelu cancels further below
    gate_up, down = torch.cat([torch.eye(64), torch.eye(64).flip(0)])[None].bfloat16(), torch.eye(64)[None].bfloat16()
    for kind in ("silu", "gelu_tanh", "clamped_swiglu"):
        experts = Experts(GatedActivation(kind=kind), gate_up, down)
        case = Layer(x, Router(routing, torch.zeros(1, 64)), experts)
        assert torch.equal(computed(reference, case), gated(x @ gate_up[0].t(), experts.activation))
        found = computed(native, packed(case, products))
        wanted = computed(reference, case)
        assert torch.allclose(found.float(), wanted.float(), rtol=2.0**-7, atol=1e-6)
        assert (found != wanted).float().mean() < 0.02  # where exp is off by an ulp


@pytest.mark.parametrize("rows", [0, 1, 2, 13, 100])
def test_any_number_of_rows(run: Run, rows: int) -> None:
    case = layer(ROUTINGS["qwen2-moe"], rows=rows, dtype=torch.bfloat16, shared="gated")
    found = run(case)
    if rows:
        assert_close(found, expected(case))
    assert sum(counts(case)) == 4 * rows


# ---------------------------------------------------------------- the choice


def choice(run: Run, logits: list[float], routing: Routing, choice_bias: list[float] | None = None) -> list[int]:
    """Experts of one row whose logits are these, by the counters."""
    E = routing.num_experts
    case = layer(routing, rows=1, hidden=1)
    bias = None if choice_bias is None else torch.tensor(choice_bias)
    counters = torch.zeros(E, dtype=torch.int64)
    router = Router(routing, torch.tensor(logits)[:, None], None, bias, counters)
    run(dataclasses.replace(case, x_TH=torch.ones(1, 1), router=router))
    assert counters.max() <= 1
    return counters.nonzero()[:, 0].tolist()


def test_ties_go_to_the_lowest_expert_and_the_first_group(run: Run) -> None:
    for score in ("softmax", "softmax_of_top", "sigmoid"):
        routing = Routing(num_experts=6, top_k=2, score=score)
        assert choice(run, [1.0] * 6, routing) == [0, 1]
        assert choice(run, [0.0, 2.0, 1.0, 2.0, 2.0, 1.0], routing) == [1, 3]
        assert choice(run, [0.0, 1.0, 1.0, 2.0, 1.0, 1.0], routing) == [1, 3]
        assert choice(run, [-math.inf] * 6, routing) == [0, 1]
        grouped = dataclasses.replace(routing, groups=3, top_groups=1)
        assert choice(run, [0.0, 1.0, 1.0, 0.0, 1.0, 1.0], grouped) == [0, 1]


def test_a_softmax_is_chosen_from_by_its_logits(run: Run) -> None:
    """Probabilities of both are zero in fp32."""
    assert choice(run, [0.0, -300.0, -200.0], Routing(num_experts=3, top_k=2)) == [0, 2]


def test_the_choice_bias_is_in_the_choice_only(run: Run) -> None:
    routing = Routing(num_experts=4, top_k=2, score="sigmoid", renormalize=True)
    assert choice(run, [0.0, 0.1, 0.2, 0.3], routing, [0.5, 0.0, 0.0, 0.0]) == [0, 3]
    case = layer(routing, choice_bias=True)
    far = dataclasses.replace(case.router, choice_bias_E=torch.tensor([9.0, 0.0, 0.0, 9.0]))
    farther = dataclasses.replace(case.router, choice_bias_E=torch.tensor([99.0, 0.0, 0.0, 50.0]))
    found = [run(dataclasses.replace(case, router=router)) for router in (far, farther)]
    assert torch.equal(found[0], found[1])


def test_groups_are_judged_by_their_largest_or_by_their_two_largest_values(run: Run) -> None:
    logits = [3.0, -3.0, 2.0, 2.0, 0.0, 0.0]
    routing = Routing(num_experts=6, top_k=2, score="softmax_of_top", groups=3, top_groups=1)
    assert choice(run, logits, routing) == [0, 1]
    assert choice(run, logits, dataclasses.replace(routing, group_score="two_largest")) == [2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_nan_takes_the_first_experts_and_spoils_no_other(run: Run, dtype: torch.dtype) -> None:
    for name in ("qwen2-moe", "deepseek-v3", "gpt-oss"):
        case = layer(ROUTINGS[name], rows=5, dtype=dtype)
        without = run(case)
        before = torch.tensor(counts(case))
        alone = dataclasses.replace(case, x_TH=torch.full_like(case.x_TH[:1], math.nan))
        assert run(alone).isnan().all()
        assert (torch.tensor(counts(case)) - before).nonzero()[:, 0].tolist() == list(range(case.router.routing.top_k))
        x = case.x_TH.clone()
        x[2, 3] = math.nan
        found = run(with_rows(case, x))
        assert found[2].isnan().all()
        assert_close(found[[0, 1, 3, 4]], without[[0, 1, 3, 4]].double())


# ---------------------------------------------------------------- whatever stands beside a row


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_a_row_are_those_it_has_alone(
    native: NativeOps, products: NativeLinear, dtype: torch.dtype
) -> None:
    case = packed(layer(ROUTINGS["qwen2-moe"], rows=60, hidden=65, dtype=dtype, shared="gated"), products)
    assert case.shared is not None

    def of(rows: slice) -> Tensor:
        assert case.shared is not None
        part = Shared(case.shared.result_TH[rows].contiguous(), case.shared.gate_H)
        return computed(native, dataclasses.replace(case, x_TH=case.x_TH[rows], shared=part))

    alone = torch.cat([of(slice(row, row + 1)) for row in range(60)])
    for count in (2, 7, 31, 60):
        assert torch.equal(of(slice(count)), alone[:count])


def test_threads_change_no_bits(native: NativeOps, products: NativeLinear) -> None:
    case = packed(layer(ROUTINGS["qwen3-moe"], rows=40, hidden=256, inner=96, dtype=torch.bfloat16), products)
    expected = computed(native, case)
    try:
        for threads in (2, 3):
            native.set_num_threads(threads)
            assert torch.equal(computed(native, case), expected)
    finally:
        native.set_num_threads(1)


def test_levels_of_one_arithmetic_have_the_same_bits() -> None:
    for dtype in DTYPES:
        made: dict[str, Tensor] = {}
        for level in LEVELS:
            native, products = compiled_or_skip(level)
            case = layer(ROUTINGS["deepseek-v3"], rows=20, dtype=dtype, choice_bias=True, shared="gated")
            found = computed(native, packed(case, products))
            assert torch.equal(found, made.setdefault(products.arithmetic(dtype), found)), level.name


def test_all_rows_on_one_expert_and_rows_on_all_experts(run: Run) -> None:
    for bias in ([9.0] + [0.0] * 9, [0.0] * 10):
        case = layer(ROUTINGS["minimax-m2"], rows=50, dtype=torch.bfloat16)
        router = dataclasses.replace(case.router, choice_bias_E=torch.tensor(bias))
        case = dataclasses.replace(case, router=router)
        assert_close(run(case), expected(case))
        assert max(counts(case)) == (50 if bias[0] else max(counts(case)))
        assert sum(counts(case)) == 150


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_some_of_the_experts_add_up_to_the_whole(run: Run, ranks: int) -> None:
    case = layer(ROUTINGS["deepseek-v3"], rows=9, choice_bias=True, biases=True)
    whole, share = run(case), 16 // ranks
    before = counts(case)
    total, parts = torch.zeros_like(whole), []
    for rank in range(ranks):
        mine = slice(rank * share, (rank + 1) * share)
        part = part_of(case.experts, mine)
        parts.append(run(dataclasses.replace(case, experts=part)))
        total += parts[-1]
    assert_close(total, whole.double())
    assert counts(case) == [count * (1 + ranks) for count in before]
    nowhere = dataclasses.replace(case.router, choice_bias_E=torch.tensor([99.0] * 4 + [0.0] * 12))
    assert not run(dataclasses.replace(case, router=nowhere, experts=part)).any()


# ---------------------------------------------------------------- weights in 8 bits


def test_int8_weights_are_their_rounded_values(native: NativeOps, products: NativeLinear) -> None:
    case = layer(ROUTINGS["mixtral"], rows=30, dtype=torch.bfloat16, biases=True)

    def rounded(weight_LOI: Any) -> Tensor:
        return torch.stack([quantize_int8(weight_OI).dequantized(torch.float32) for weight_OI in weight_LOI])

    experts = dataclasses.replace(
        case.experts, gate_up_L2IH=rounded(case.experts.gate_up_L2IH), down_LHI=rounded(case.experts.down_LHI)
    )
    wanted = expected(dataclasses.replace(case, experts=experts))
    assert_close(computed(native, packed(case, products, "int8")), wanted)


def test_a_weight_that_is_not_finite_is_not_quantized(products: NativeLinear) -> None:
    weight = numbers(1, 3, 4, 5, dtype=torch.bfloat16)
    weight[2, 1, 0] = math.inf
    with pytest.raises(ValueError, match="row 1 of a weight is not finite"):
        products.pack_experts(weight, "int8")
    with pytest.raises(ValueError, match="fp8 is not supported for experts"):
        dispatch.pack_experts(weight, "fp8")


# ---------------------------------------------------------------- capture and memory


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replay_follows_the_routing_of_new_rows(
    native: NativeOps, products: NativeLinear, dtype: torch.dtype
) -> None:
    case = packed(layer(ROUTINGS["qwen2-moe"], rows=6, dtype=dtype, shared="plain"), products)
    found, tape = ProgramCapturer(native.library).capture(lambda: computed(native, case))
    assert torch.equal(found, computed(native, case))
    for seed in (20, 21):
        case.x_TH.copy_(numbers(seed, 6, 40, dtype=dtype))
        assert torch.equal(tape.replay(), computed(native, case))
    assert sum(counts(case)) == 6 * 6 * 4


@pytest.mark.parametrize(("rows", "hidden", "inner"), [(1, 40, 24), (3, 2048, 768), (512, 100, 33), (2048, 64, 2048)])
def test_scratch_memory_is_within_what_plans_count(native: NativeOps, rows: int, hidden: int, inner: int) -> None:
    kernel = MoeFfn(native.library)
    for routing in ROUTINGS.values():
        router = Router(routing, torch.empty(0))
        for kind, element_bytes in (
            (KINDS[torch.float32], 4),
            (KINDS[torch.bfloat16], 2),
            (KINDS[torch.uint8], 2),
            (9, 2),
        ):
            used = kernel.scratch_bytes(kind, rows, hidden, inner, router, routing.num_experts)
            assert used <= scratch_bytes(routing, rows, hidden, inner, element_bytes)


def test_distinct_experts_of_a_step() -> None:
    routing = Routing(num_experts=128, top_k=8)
    assert routing.distinct_experts(1) == 8.0
    assert routing.distinct_experts(8) == pytest.approx(51.6, abs=0.1)
    assert routing.distinct_experts(1000) == pytest.approx(128.0)


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts: must be 1 to 1024, not 0"),
        ({"num_experts": 2000}, "num_experts: must be 1 to 1024, not 2000"),
        ({"top_k": 9}, "top_k: must be 1 to 8 with 8 experts, not 9"),
        ({"top_k": 0}, "top_k: must be 1 to 8 with 8 experts, not 0"),
        ({"groups": 3}, "groups: 3 do not divide 8 experts"),
        ({"groups": 0}, "groups: 0 do not divide 8 experts"),
        ({"groups": 4, "top_groups": 5}, "top_groups: must be 1 to 4, not 5"),
        ({"groups": 4, "top_groups": 0}, "top_groups: must be 1 to 4, not 0"),
        (
            {"groups": 8, "top_groups": 1},
            r"top_groups: 1 x 1 experts of a group are fewer than the 2 of a row \(top_k\)",
        ),
        (
            {"groups": 8, "top_groups": 2, "group_score": "two_largest"},
            "groups: 8 groups of one expert have no two largest scores",
        ),
    ],
)
def test_a_routing_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        dataclasses.replace(ROUTINGS["mixtral"], **changes)


def test_tensors_that_do_not_fit_the_weights_are_refused(native: NativeOps, products: NativeLinear) -> None:
    case = packed(layer(ROUTINGS["mixtral"], shared="gated"), products)
    router, experts, shared = case.router, case.experts, case.shared
    assert shared is not None
    wrong = {
        r"x is torch.float32 \[7, 41\]": with_rows(case, torch.ones(7, 41)),
        r"x is torch.bfloat16 \[7, 40\]": with_rows(case, case.x_TH.bfloat16()),
        "experts 1 to 9 are not among 8": dataclasses.replace(case, experts=dataclasses.replace(experts, first=1)),
        r"choice bias is torch.float32 \[7\]": dataclasses.replace(
            case, router=dataclasses.replace(router, choice_bias_E=torch.ones(7))
        ),
        r"counters is torch.float32 \[8\]": dataclasses.replace(
            case, router=dataclasses.replace(router, counts_E=torch.ones(8))
        ),
        r"down bias is torch.float32 \[8, 39\]": dataclasses.replace(
            case, experts=dataclasses.replace(experts, down_bias_LH=torch.ones(8, 39))
        ),
        r"shared gate is torch.float32 \[39\]": dataclasses.replace(
            case, shared=dataclasses.replace(shared, gate_H=torch.ones(39))
        ),
        "the router's weight is not packed in fp32": dataclasses.replace(
            case, router=dataclasses.replace(router, weight_EH=torch.ones(8, 40))
        ),
        "the experts have 80 and 40 outputs, not 48 and 40": dataclasses.replace(
            case,
            experts=dataclasses.replace(experts, gate_up_L2IH=products.pack_experts(torch.ones(8, 80, 40))),  # type: ignore[arg-type]
        ),
    }
    for message, broken in wrong.items():
        with pytest.raises(ValueError, match=message):
            native.moe_ffn(broken.x_TH, broken.router, broken.experts, broken.shared)
