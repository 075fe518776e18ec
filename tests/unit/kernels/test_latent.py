"""Latent attention: what is written, what the kernels refuse, and the absorbed form against the expanded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.ops import AttentionForm, LatentWrite
from tests.support.paged import prompts
from tests.unit.kernels import oracle

T, N, L, R, BLOCK = 37, 4, 32, 16, 16
NOPE, VALUE = 24, 20


class Case:
    """Tokens of one sequence in scattered blocks of layer 1 of a two-layer cache of NaN, one plane a layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._random = torch.Generator().manual_seed(5)
        self.latent, self.k = self.of(T, L + 3, dtype=dtype)[:, :L], self.of(T, R + 5, dtype=dtype)[:, 5:]
        self.absorbed = self.of(N, T, L, dtype=dtype).transpose(0, 1)
        self.q = self.of(T, N, NOPE + R, dtype=dtype)[..., NOPE:]
        self.positions = torch.arange(T)
        angles = self.positions[:, None] * torch.linspace(0.1, 1.0, R // 2)[None]
        cos, sin = (torch.cat((f(angles), f(angles)), -1).to(dtype) for f in (torch.cos, torch.sin))
        self.table = torch.tensor([3, 1, 4], dtype=torch.int32)
        self.slots = self.table.long()[self.positions // BLOCK] * BLOCK + self.positions % BLOCK
        cache = torch.full((2, 1, 5, 1, BLOCK, L + R), torch.nan, dtype=dtype).permute(2, 0, 1, 3, 4, 5)
        self.layer = LatentWrite(cos, sin, cache[:, 1, 0])

    def of(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self._random).to(dtype)

    def write(self, ops: Any) -> Tensor:
        args = (self.latent, self.k, self.absorbed, self.q, self.positions, self.slots, self.layer)
        found: Tensor = ops.latent_rope_write(*args)
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_and_queries_put_together(ops: Any, dtype: torch.dtype) -> None:
    case = Case(dtype)
    case.slots[2] = -1
    q_TND = case.write(ops)
    assert q_TND.is_contiguous()
    assert torch.equal(q_TND[..., :L], case.absorbed)
    rotated, k = reference.apply_rope(case.q, case.k[:, None], case.layer.cos_PR, case.layer.sin_PR)
    assert torch.equal(q_TND[..., L:], rotated)
    rows = case.layer.cache_N1BD[:, 0].reshape(-1, L + R)
    written = case.slots[case.slots >= 0]
    assert torch.equal(rows[written], torch.cat((case.latent, k[:, 0]), dim=-1)[case.slots >= 0])
    assert rows.isnan().all(1).sum() == len(rows) - (T - 1)


def test_the_absorbed_form_is_attention_over_expanded_keys_and_values(ops: Any) -> None:
    case = Case(torch.float32)
    no_rope = case.of(T, N, NOPE, dtype=torch.float32)
    to_keys, to_values = case.of(N, NOPE, L, dtype=torch.float32) / 8, case.of(N, VALUE, L, dtype=torch.float32) / 8
    case.absorbed = torch.einsum("tnp,npl->tnl", no_rope, to_keys)
    q_TND, keys = case.write(ops), case.layer.cache_N1BD
    caches, form = (keys, keys[..., :L]), AttentionForm(0.2)
    out_TNL = torch.empty(T, N, L)
    assert ops.paged_prefill_attention(q_TND, *caches, prompts((case.table, 0, T)), form, out_TNL) is out_TNL
    last_NL = ops.paged_decode_attention(q_TND[-1:], *caches, case.table[None], torch.tensor([T]).int(), form)[0]
    rotated, k = reference.apply_rope(case.q, case.k[:, None], case.layer.cos_PR, case.layer.sin_PR)
    for head in range(N):
        expanded = torch.cat((case.latent @ to_keys[head].T, k[:, 0]), dim=-1)
        q, values = torch.cat((no_rope[:, head], rotated[:, head]), dim=-1), case.latent @ to_values[head].T
        expected = torch.stack([oracle.attend(q[t], expanded[: t + 1], values[: t + 1], 0.2) for t in range(T)])
        oracle.assert_close(out_TNL[:, head] @ to_values[head].T, expected)
        oracle.assert_close(last_NL[head] @ to_values[head].T, expected[-1])


@pytest.mark.parametrize(("positions", "slots"), [(T, 0), (-1, 0), (0, 5 * BLOCK), (0, -2)])
def test_what_lies_outside_is_refused_and_nothing_written(native: NativeOps, positions: int, slots: int) -> None:
    case = Case(torch.bfloat16)
    case.positions[9], case.slots[9] = positions, slots
    with pytest.raises(IndexError, match=r"^token 9: its slot or its position is outside the cache$"):
        case.write(native)
    assert case.layer.cache_N1BD.isnan().all()


def test_what_the_kernel_does_not_read_is_declined(native: NativeOps) -> None:
    case = Case(torch.bfloat16)
    case.k = case.k.float()
    assert case.write(native) is None
    case = Case(torch.bfloat16)
    case.latent = case.latent.T.contiguous().T
    assert case.write(native) is None
