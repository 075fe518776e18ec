"""Head norms, rotary embedding and the KV write in one op: against the oracle, and C++ against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.ops import HeadSquares, RopeWrite
from tests.unit.kernels import oracle

DTYPES = [torch.float32, torch.bfloat16]
EPS, POSITIONS = 1e-5, 50


def assert_close(found: Tensor, expected: Tensor) -> None:
    """fp32 as the oracle says; bf16 is rounded up to four times on the way."""
    tolerance = 1e-5 if found.dtype == torch.float32 else 2.0**-5
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() / expected.abs().clamp(min=1.0)).max() <= tolerance


class Case:
    """Tokens at scattered positions and slots of layer 1 of a two-layer cache of zeros; token 2 has no slot."""

    plus_one = False
    is_whole = False
    query_scale: Tensor | None = None

    def __init__(
        self,
        T: int,
        N: int,
        K: int,
        D: int,
        dtype: torch.dtype,
        *,
        norms: bool,
        block_size: int = 16,
        rotary_dim: int | None = None,
    ) -> None:
        R = D if rotary_dim is None else rotary_dim
        generator = torch.Generator().manual_seed(100 * T + 10 * N + D)
        self.K = K
        self.qkv = torch.randn(T, (N + 2 * K) * D + 7, generator=generator).to(dtype)[:, 3:-4]
        self.q_norm = torch.randn(D, generator=generator).to(dtype) if norms else None
        self.k_norm = torch.randn(D, generator=generator).to(dtype) if norms else None
        self.positions = torch.randint(0, POSITIONS, (T,), generator=generator)
        self.positions[0] = 0
        angles = torch.arange(POSITIONS)[:, None] * torch.linspace(0.1, 1.0, R // 2)[None]
        self.cos, self.sin = (torch.cat((f(angles), f(angles)), -1).to(dtype) for f in (torch.cos, torch.sin))
        self.slots = torch.randperm(5 * block_size, generator=generator)[:T]
        self.slots[2] = -1
        self.cache = torch.zeros(5, 2, 2, K, block_size, D, dtype=dtype)

    def run(self, ops: Any, **changes: Any) -> Tensor:
        args = {"positions": self.positions, "slots": self.slots, "qkv": self.qkv, "cos": self.cos, **changes}
        keys, values = self.cache[:, 1, 0], self.cache[:, 1, 1]
        layer = RopeWrite(
            self.q_norm,
            self.k_norm,
            EPS,
            args["cos"],
            self.sin,
            keys,
            values,
            self.plus_one,
            self.query_scale,
            self.is_whole,
        )
        squares = args.get("squares")
        out: Tensor = ops.qkv_rope_write(args["qkv"], args["positions"], args["slots"], layer, squares)
        return out

    def rotated(self, x_D: Tensor, norm_D: Tensor | None, token: int) -> Tensor:
        if norm_D is not None:
            x_D = oracle.rms_norm(x_D, norm_D, EPS, self.plus_one).to(x_D.dtype)
        position = int(self.positions[token])
        return oracle.rope(x_D, self.cos[position], self.sin[position])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("T", "N", "K", "D"), [(3, 9, 3, 64), (9, 2, 1, 80), (17, 4, 4, 2), (4, 1, 1, 16)])
def test_q_is_rotated_and_k_and_v_are_at_their_slots(
    ops: Any, T: int, N: int, K: int, D: int, norms: bool, dtype: torch.dtype
) -> None:
    case = Case(T, N, K, D, dtype, norms=norms)
    heads = case.qkv.reshape(T, -1, D)
    found = case.run(ops)
    assert found.is_contiguous()
    assert_close(
        found, torch.stack([torch.stack([case.rotated(h, case.q_norm, t) for h in heads[t, :N]]) for t in range(T)])
    )
    if not norms:
        assert torch.equal(found[0], heads[0, :N])  # position 0 turns by nothing
    for token, slot in enumerate(case.slots.tolist()):
        if slot < 0:
            continue
        keys, values = case.cache[slot // 16, 1, :, :, slot % 16]
        assert_close(keys, torch.stack([case.rotated(h, case.k_norm, token) for h in heads[token, N : N + K]]))
        assert torch.equal(values, heads[token, N + K :])
    assert not case.cache[:, 0].any()
    written = case.cache[:, 1, 1].transpose(1, 2).flatten(2).abs().sum(-1).count_nonzero()
    assert written == T - 1  # the token without a slot left nothing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("D", "R"), [(64, 48), (80, 20), (16, 0)])
def test_only_the_first_dims_of_a_head_are_rotated(ops: Any, D: int, R: int, norms: bool, dtype: torch.dtype) -> None:
    case = Case(9, 4, 2, D, dtype, norms=norms, rotary_dim=R)
    case.plus_one = True
    heads = case.qkv.reshape(9, -1, D)
    found = case.run(ops)
    assert_close(
        found, torch.stack([torch.stack([case.rotated(h, case.q_norm, t) for h in heads[t, :4]]) for t in range(9)])
    )
    slot = int(case.slots[1])
    keys = case.cache[slot // 16, 1, 0, :, slot % 16]
    assert_close(keys, torch.stack([case.rotated(h, case.k_norm, 1) for h in heads[1, 4:6]]))
    if not norms:
        assert torch.equal(found[..., R:], heads[:, :4, R:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [False, True])
def test_a_norm_of_all_heads(ops: Any, given: bool, dtype: torch.dtype) -> None:
    """Of all that are here, or by the sums of all ranks: here of three that have the same."""
    T, N, K, D = 9, 4, 2, 16
    case = Case(T, N, K, D, dtype, norms=True)
    case.is_whole = True
    generator = torch.Generator().manual_seed(3)
    case.q_norm, case.k_norm = (torch.randn(n * D, generator=generator).to(dtype) for n in (N, K))
    sums = ops.head_squares(case.qkv, K, D)
    expected_sums = torch.stack(
        [part.double().square().sum(1) for part in torch.split(case.qkv, [N * D, K * D, K * D], 1)[:2]]
    )
    oracle.assert_close(sums, expected_sums.T)
    squares = HeadSquares(3 * sums, 3 * N * D, 3 * K * D) if given else None

    found = case.run(ops, squares=squares)

    normed = [oracle.rms_norm(row, case.q_norm, EPS).to(dtype).view(N, D) for row in case.qkv[:, : N * D]]
    assert_close(found, torch.stack([torch.stack([case.rotated(h, None, t) for h in normed[t]]) for t in range(T)]))
    slot = int(case.slots[1])
    normed_k = oracle.rms_norm(case.qkv[1, N * D : (N + K) * D], case.k_norm, EPS).to(dtype).view(K, D)
    keys = case.cache[slot // 16, 1, 0, :, slot % 16]
    assert_close(keys, torch.stack([case.rotated(head, None, 1) for head in normed_k]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_q_is_scaled_by_its_position_and_k_is_not(ops: Any, dtype: torch.dtype) -> None:
    plain, scaled = (Case(9, 4, 2, 64, dtype, norms=False) for _ in range(2))
    scaled.query_scale = torch.linspace(1.0, 3.0, POSITIONS).to(dtype)
    factors = scaled.query_scale[scaled.positions].double()[:, None, None]
    expected = plain.run(ops).double() * factors
    oracle.assert_close(scaled.run(ops), expected)
    assert torch.equal(scaled.cache, plain.cache)


@pytest.mark.parametrize("norms", [False, True])
def test_cpp_has_the_bits_of_the_reference_in_bf16(native: NativeOps, norms: bool) -> None:
    """Without norms every rounding is the same; with them a head's sum of squares has another order."""
    cases = [Case(33, 9, 3, 64, torch.bfloat16, norms=norms, block_size=32) for _ in range(2)]
    found, expected = cases[0].run(native), cases[1].run(reference)
    for a, b in ((found, expected), (cases[0].cache, cases[1].cache)):
        if norms:
            assert torch.allclose(a.float(), b.float(), rtol=2.0**-6, atol=2.0**-6)
        else:
            assert torch.equal(a, b)


def test_a_quarter_turn_swaps_the_halves(ops: Any) -> None:
    cache = torch.zeros(1, 1, 2, 1, 16, 4)
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0] * 3])
    cos, sin, slots = torch.zeros(1, 4), torch.ones(1, 4), torch.tensor([5])
    layer = RopeWrite(None, None, EPS, cos, sin, cache[:, 0, 0], cache[:, 0, 1])
    assert ops.qkv_rope_write(qkv, torch.tensor([0]), slots, layer).tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]
    assert cache[0, 0, :, 0, 5].tolist() == [[-3.0, -4.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]


def test_no_token_changes_nothing(ops: Any) -> None:
    case = Case(3, 2, 1, 16, torch.float32, norms=True)
    none = torch.empty(0, dtype=torch.int64)
    assert case.run(ops, qkv=case.qkv[:0], positions=none, slots=none).shape == (0, 2, 16)
    assert not case.cache.any()


@pytest.mark.parametrize(("name", "value"), [("slots", -2), ("slots", 80), ("positions", -1), ("positions", POSITIONS)])
def test_cpp_refuses_what_is_outside_before_it_writes(native: NativeOps, name: str, value: int) -> None:
    case = Case(3, 2, 1, 16, torch.float32, norms=False)
    changed = getattr(case, name).clone()
    changed[1] = value
    with pytest.raises(IndexError, match=r"^token 1: its slot or its position is outside the cache$"):
        case.run(native, **{name: changed})
    assert not case.cache.any()


def test_cpp_declines_what_it_does_not_read(native: NativeOps) -> None:
    case = Case(3, 2, 1, 16, torch.float32, norms=False)
    assert case.run(native, qkv=case.qkv.bfloat16()) is None
    assert case.run(native, qkv=case.qkv[:, :-1]) is None
    assert case.run(native, slots=case.slots.int()) is None
    assert case.run(native, positions=case.positions[:2]) is None
    assert case.run(native, cos=case.cos[:5]) is None
    case.query_scale = torch.ones(POSITIONS - 1)
    assert case.run(native) is None
    assert not case.cache.any()
