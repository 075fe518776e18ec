"""The other Triton kernels against the torch reference at the sizes of published models, on the GPU; without one, small
and interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.ops import Filters, RopeWrite
from tests.support.experts import ROUTINGS, WITH_CHOICE_BIAS, layer, moved
from tests.support.latent import LatentRows

pytest.importorskip("triton")
from disagg.kernels.triton import rope_write, sampling
from disagg.kernels.triton.ops import TritonOps
from disagg.kernels.triton.ranking import rank_top

ROUNDING = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative to max(1, |expected|): one rounding of the result."""

OPS = TritonOps()
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)


def assert_close(found: Tensor | None, expected: Tensor) -> None:
    """Nearly all equal to a rounding. Where a sum in another order rounds a factor the other way, a few differ by more,
    since the rotation multiplies that by up to 4 and may then cancel."""
    assert found is not None
    assert found.dtype == expected.dtype
    error = (found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    assert (error > ROUNDING[found.dtype]).double().mean().item() < 1e-3
    assert error.max().item() <= 32 * ROUNDING[found.dtype]


def assert_equal(found: Tensor | None, expected: Tensor) -> None:
    """Bits, but for the sign of zero; told with the first that differs."""
    assert found is not None
    assert found.dtype == expected.dtype
    got, wanted = found.double(), expected.double()
    differs = got != wanted
    if bool(differs.any()):
        place, count = tuple(differs.nonzero()[0].tolist()), int(differs.sum())
        largest, nans = float((got - wanted).abs().nan_to_num(torch.inf).max()), int(got.isnan().sum())
        pytest.fail(
            f"{count} of {differs.numel()} differ by up to {largest:.6g}, {nans} are NaN; first {list(place)}:"
            f" {float(got[place]):.9g} instead of {float(wanted[place]):.9g}"
        )


def random(device: torch.device, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def of(device: torch.device, gpu: int, small: int) -> int:
    """A size on a GPU, and in the interpreter."""
    return gpu if device.type == "cuda" else small


@DTYPES
def test_norms_and_silu(device: torch.device, dtype: torch.dtype) -> None:
    T, H = of(device, 777, 3), of(device, 4096, 200)
    x, residual, weight = (random(device, *shape, dtype=dtype) for shape in ((T, H), (T, H), (H,)))
    assert_close(OPS.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    found = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert found is not None
    for got, wanted in zip(found, reference.add_rms_norm(x, residual, weight, 1e-5), strict=True):
        assert_close(got, wanted)
    gate_up = random(device, T, 2 * of(device, 14336, 96), dtype=dtype) * 4
    assert_close(OPS.silu_mul(gate_up), reference.silu_mul(gate_up))


def rope_arguments(device: torch.device, T: int, cache: Tensor, dtype: torch.dtype, normed: bool) -> tuple[Any, ...]:
    """Of `qkv_rope_write`: every seventh token is padding, the others have slots in any order."""
    K, block_size, D = cache.shape[3:]
    cos, sin = (random(device, 64, D // 2, dtype=dtype).repeat(1, 2) * size for size in (1.0, 0.5))
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(cache.shape[0] * block_size, generator=generator)[:T]
    slots[::7] = -1
    positions = torch.randint(0, 64, (T,), generator=generator)
    norms = (random(device, D, dtype=dtype), random(device, D, dtype=dtype) * 2) if normed else (None, None)
    qkv = random(device, T, (4 * K + 2 * K) * D, dtype=dtype)
    q_norm, k_norm = norms
    layer = RopeWrite(q_norm, k_norm, 1e-6, cos, sin, cache[:, 1, 0], cache[:, 1, 1])
    return qkv, positions.to(device), slots.to(device), layer


@DTYPES
@pytest.mark.parametrize("normed", [False, True])
def test_qkv_rope_write(device: torch.device, dtype: torch.dtype, normed: bool) -> None:
    """The same bits, but for the sum of a norm."""
    T, K, D = of(device, 1000, 8), of(device, 8, 2), of(device, 128, 32)
    cache = torch.zeros((of(device, 100, 3), 2, 2, K, 16, D), dtype=dtype, device=device)
    expected_cache = cache.clone()
    expected = reference.qkv_rope_write(*rope_arguments(device, T, expected_cache, dtype, normed))
    found = OPS.qkv_rope_write(*rope_arguments(device, T, cache, dtype, normed))
    assert_close(found, expected)
    assert_close(cache, expected_cache)
    if not normed:
        assert_equal(found, expected)
        assert_equal(cache, expected_cache)


@pytest.mark.gpu  # the interpreter rounds to 8 bits in another way
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0**-8, 0.3])
def test_fp8_cache(device: torch.device, side: str, scale: float) -> None:
    cache = torch.zeros((100, 2, 2, 8, 16, 128), dtype=torch.float8_e4m3fn, device=device)
    wide_cache = torch.zeros(cache.shape, dtype=torch.bfloat16, device=device)
    reference.qkv_rope_write(*rope_arguments(device, 1000, wide_cache, torch.bfloat16, False))
    arguments = rope_arguments(device, 1000, cache, torch.bfloat16, False)
    scales = (scale, 1.0) if side == "keys" else (1.0, scale)
    rope_write.qkv_rope_write(*(*arguments, *scales))
    at = ["keys", "values"].index(side)
    divisor = torch.tensor(scale, device=device)  # torch multiplies by the reciprocal of a number
    expected = (wide_cache[:, :, at].float() / divisor).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    assert_equal(cache[:, :, at], expected)


@DTYPES
@pytest.mark.parametrize("num_heads", [16, 128])
def test_latent_rope_write(device: torch.device, dtype: torch.dtype, num_heads: int) -> None:
    """The same bits."""
    dims = (of(device, 512, 32), of(device, 64, 16))
    case = LatentRows(of(device, 1000, 8), num_heads, dims, dtype, device)
    expected_cache = case.cache.clone()
    expected = case.write(reference, expected_cache)
    assert expected is not None
    assert_equal(case.write(OPS, case.cache), expected)
    assert torch.equal(case.cache.isnan(), expected_cache.isnan())
    assert_equal(case.cache.nan_to_num(), expected_cache.nan_to_num())


@DTYPES
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3", "qwen2-moe"])
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_experts(device: torch.device, dtype: torch.dtype, rows: int, name: str) -> None:
    """Each row, and how many of them each expert had."""
    hidden, inner, rows = of(device, 1024, 40), of(device, 512, 24), of(device, rows, min(rows, 9))
    case = moved(
        layer(
            ROUTINGS[name],
            rows=rows,
            hidden=hidden,
            inner=inner,
            dtype=dtype,
            choice_bias=name in WITH_CHOICE_BIAS,
            biases=name == "gpt-oss",
            shared="gated" if name == "qwen2-moe" else "none",
        ),
        device,
    )
    found = OPS.moe_ffn(case.x_TH, case.router, case.experts, case.shared)
    counts_E = case.router.counts_E
    assert counts_E is not None
    chosen = counts_E.tolist()
    expected = reference.moe_ffn(case.x_TH, case.router, case.experts, case.shared)
    assert found is not None
    assert found.dtype == dtype
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error.item() <= {torch.float32: 1e-5}.get(dtype, 4 * ROUNDING[dtype])
    assert counts_E.tolist() == [2 * count for count in chosen]
    assert sum(chosen) == rows * ROUTINGS[name].top_k


@DTYPES
def test_embed_and_argmax(device: torch.device, dtype: torch.dtype) -> None:
    V, H, T = of(device, 128256, 5000), of(device, 4096, 100), of(device, 64, 3)
    table = random(device, of(device, 32000, 50), H, dtype=dtype)
    ids = torch.arange(T, device=device) * 7
    assert torch.equal(OPS.embed(ids, table), table[ids])  # type: ignore[arg-type]
    logits = random(device, T, V + 8, dtype=dtype)
    logits[0, V - 1] = float("inf")
    logits[1, V // 2] = float("nan")
    found = OPS.argmax_rows(logits, V)
    assert found is not None
    assert found[:2].tolist() == [-1, -1]
    assert torch.equal(found, reference.argmax_rows(logits, V))


@pytest.mark.parametrize(("start", "spare"), [(0, 0), (5, 3)])
def test_gather_and_scatter(device: torch.device, start: int, spare: int) -> None:
    layers, heads, D = of(device, 32, 2), of(device, 8, 2), of(device, 128, 8)
    cache = random(device, of(device, 300, 5), layers, 2, heads, 16, D, dtype=torch.float16)
    blocks = list(range(of(device, 280, 4), 0, -1))
    end = len(blocks) * 16 - spare
    view = cache[:, :, :, 1:heads]
    nbytes = layers * 2 * (heads - 1) * (end - start) * D * 2
    found, expected = torch.zeros((2, nbytes), dtype=torch.uint8, device=device).unbind()
    assert OPS.gather_kv(view, blocks, start, end, found) is found
    reference.gather_kv(view, blocks, start, end, expected)
    assert torch.equal(found, expected)
    found_cache, expected_cache = torch.zeros_like(cache), torch.zeros_like(cache)
    assert OPS.scatter_kv(found_cache[:, :, :, 1:heads], blocks, start, end, found) is not None
    reference.scatter_kv(expected_cache[:, :, :, 1:heads], blocks, start, end, found)
    assert torch.equal(found_cache, expected_cache)


@pytest.mark.gpu
def test_gather_into_pinned_memory(device: torch.device) -> None:
    cache = random(device, 9, 4, 2, 2, 16, 64, dtype=torch.float16)
    on_host = torch.zeros(4 * 2 * 2 * 30 * 64 * 2, dtype=torch.uint8, pin_memory=True)
    expected = torch.zeros_like(on_host, device=device)
    assert OPS.gather_kv(cache, [3, 1], 1, 31, on_host) is on_host
    reference.gather_kv(cache, [3, 1], 1, 31, expected)
    assert torch.equal(on_host, expected.cpu())


def filters(device: torch.device, R: int) -> Filters:
    """Of row 0 without filters, and of the others with every filter by turns."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor([values[row % len(values)] for row in range(R)], dtype=dtype, device=device)

    return Filters(
        temperatures_R=column([1.0, 0.7, 0.0, 2.0], torch.float32),
        top_k_R=column([0, 50, 0, 400, 0], torch.int32),
        top_p_R=column([1.0, 0.9, 1.0], torch.float64),
        min_p_R=column([0.0, 0.0, 0.01, 0.0, 0.0, 0.05, 0.0], torch.float64),
        seeds_R=torch.arange(R, device=device) * 12345 - 7,
        indices_R=torch.arange(R, device=device),
    )


def test_ranking(device: torch.device) -> None:
    R, V, num = of(device, 64, 2), of(device, 128256, 4200), of(device, 256, 8)
    logits = random(device, R, V, dtype=torch.float16) * 3
    temperatures = filters(device, R).temperatures_R
    found = rank_top(logits, num, temperatures, V)
    divisors = torch.where(temperatures < 1e-5, 1.0, temperatures)
    expected = (logits.float() / divisors[:, None]).sort(dim=1, descending=True, stable=True)
    assert torch.equal(found.ids_RC, expected.indices[:, :num])
    assert torch.equal(found.values_RC, expected.values[:, :num])


def test_the_device_draws_what_the_host_would(device: torch.device) -> None:
    """Without filters always; with filters, decided by the ranked tokens or by the search, but for a neighbour whose
    border is as close as the error of a sum."""
    R, V, num_ranked = of(device, 64, 16), of(device, 128256, 4200), of(device, 256, 16)
    logits = random(device, R, V, dtype=of_dtype(device)) * 3
    rules = filters(device, R)
    uniform_R = sampling.uniform(rules.seeds_R, rules.indices_R)
    unfiltered = reference.draw_unfiltered(logits, V, rules.temperatures_R, uniform_R).tolist()
    found = sampling.sample(logits, V, rules, num_ranked).tolist()
    expected = [
        draws_on_host(logits[row].float().cpu(), rules, row, float(uniform_R[row]))
        if is_filtered(rules, row)
        else [unfiltered[row]]
        for row in range(R)
    ]
    assert [(row, found[row], expected[row]) for row in range(R) if found[row] not in expected[row]] == []


SUM_ERROR = 2e-6
"""Relative error of the device's sums of weights, whose exponentials are fp32."""


def of_dtype(device: torch.device) -> torch.dtype:
    """Of logits on a GPU, and in the interpreter, which lacks bf16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def is_filtered(rules: Filters, row: int) -> bool:
    """Whether a row has a filter, or is greedy: else its token is drawn in the order of ids."""
    has_filter = int(rules.top_k_R[row]) > 0 or float(rules.top_p_R[row]) < 1.0 or float(rules.min_p_R[row]) > 0.0
    return has_filter or float(rules.temperatures_R[row]) < 1e-5


def draws_on_host(logits_V: Tensor, rules: Filters, row: int, u: float) -> list[int]:
    """What one row with filters may draw, by sums in fp64 over the whole vocabulary: the token at `u`, and neighbours
    that sums with an error of `SUM_ERROR` give."""
    temperature = float(rules.temperatures_R[row])
    divisor = rules.temperatures_R[row].cpu() if temperature >= 1e-5 else torch.tensor(1.0)
    values, ids = (logits_V / divisor).sort(descending=True, stable=True)
    if temperature < 1e-5:
        return [int(ids[0])]
    weights = (values.double() - values[0].double()).exp()
    sums = weights.cumsum(0)

    def place(factor: float) -> int:
        kept = int(rules.top_k_R[row]) or len(weights)
        if float(rules.top_p_R[row]) < 1.0:
            goal = factor * float(rules.top_p_R[row]) * float(sums[kept - 1])
            kept = min(kept, int((sums[:kept] < goal).sum()) + 1)
        kept = max(1, min(kept, int((weights * factor >= float(rules.min_p_R[row])).sum())))
        return min(int((sums[:kept] <= factor * u * sums[kept - 1]).sum()), kept - 1)

    return ids[place(1.0 - SUM_ERROR) : place(1.0 + SUM_ERROR) + 1].tolist()


@pytest.mark.gpu
def test_a_graph_replays_every_op_with_new_inputs(device: torch.device) -> None:
    """Nothing reads from the device or allocates outside the graph's pool; the copies are not part of a step."""
    logits = random(device, 8, 32000, dtype=torch.bfloat16)
    rules = filters(device, 8)
    rows, weight = random(device, 8, 4096, dtype=torch.bfloat16), random(device, 4096, dtype=torch.bfloat16)
    cache = torch.zeros((9, 2, 2, 8, 16, 128), dtype=torch.bfloat16, device=device)
    arguments = rope_arguments(device, 8, cache, torch.bfloat16, True)
    ids = torch.zeros(8, dtype=torch.int64, device=device)
    shape = {"rows": 8, "hidden": 4096, "inner": 256, "dtype": torch.bfloat16}
    moe = moved(layer(ROUTINGS["deepseek-v3"], **shape, choice_bias=True), device)  # type: ignore[arg-type]
    latents = LatentRows(8, 128, (512, 64), torch.bfloat16, device)
    steps: list[Callable[[], Any]] = [
        lambda: sampling.sample(logits, 32000, rules),
        lambda: OPS.argmax_rows(logits, 32000),
        lambda: OPS.rms_norm(rows, weight, 1e-5),
        lambda: OPS.silu_mul(rows),
        lambda: OPS.embed(ids, logits),
        lambda: OPS.qkv_rope_write(*arguments),
        lambda: OPS.moe_ffn(rows, moe.router, moe.experts, None),
        lambda: latents.write(OPS, latents.cache),
    ]
    for step in steps:  # compile outside the capture
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [step() for step in steps]
    logits.copy_(random(device, 8, 32001, dtype=torch.bfloat16)[:, :32000] * 2)
    rows.mul_(-1.5)
    ids.copy_(torch.arange(8))
    latents.absorbed.mul_(2.0)
    rules.indices_R.add_(5)
    graph.replay()
    for found, step in zip(captured, steps, strict=True):
        assert torch.equal(found, step())
