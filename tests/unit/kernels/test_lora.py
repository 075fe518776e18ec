"""What adapters add to the rows of a product: C++ and the reference against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.lora import Lora, allocate_lora
from tests.unit.kernels import oracle

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


def filled(dtype: torch.dtype, inputs: int = 45, columns: tuple[int, ...] = (70, 33, 33)) -> Lora:
    """Three slots: of ranks 3 to 16, of one module only, and an empty one. What lies behind a rank is not read."""
    lora = allocate_lora(3, 20, inputs, columns, dtype, CPU)
    generator = torch.Generator().manual_seed(inputs)
    lora.a_SPRI.copy_(torch.randn(lora.a_SPRI.shape, generator=generator) / 6)
    lora.b_SRO.copy_(torch.randn(lora.b_SRO.shape, generator=generator) / 6)
    ranks = torch.tensor([[3, 16, 20], [0, 9, 0], [0, 0, 0]], dtype=torch.int32)
    lora.ranks_SP.copy_(ranks[:, : len(columns)])
    lora.scales_SP.copy_(torch.tensor([[2.0, 0.5, 1.0], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0]])[:, : len(columns)])
    return lora


def expected(x: Tensor, y: Tensor, lora: Lora, slots: list[int]) -> Tensor:
    """In double precision, rounded once."""
    total, start = y.double().clone(), 0
    for part, count in enumerate(lora.columns):
        for row, slot in enumerate(slots):
            rank = int(lora.ranks_SP[slot, part]) if slot >= 0 else 0
            a, b = lora.a_SPRI[slot, part, :rank].double(), lora.b_SRO[slot, :rank, start : start + count].double()
            total[row, start : start + count] += float(lora.scales_SP[slot, part]) * (x[row].double() @ a.T @ b)
        start += count
    return total.to(y.dtype)


def rows(seed: int, count: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_get_what_their_own_adapter_adds(ops: Any, dtype: torch.dtype) -> None:
    lora, slots = filled(dtype), [0, -1, 1, 2, 0, -1]
    x, y = rows(1, 6, 90, dtype)[:, :45], rows(2, 6, 136, dtype)
    wanted = expected(x, y, lora, slots)
    found = y.clone()
    assert ops.lora_add(x, found, lora, torch.tensor(slots, dtype=torch.int32)).data_ptr() == found.data_ptr()
    oracle.assert_close(found, wanted)
    for row in (1, 3, 5):
        assert torch.equal(found[row], y[row])
    assert torch.equal(found[2, :70], y[2, :70])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_the_others(native: NativeOps, dtype: torch.dtype) -> None:
    lora = filled(dtype, 576, (1536, 1536))
    x, y, slots = rows(3, 40, 576, dtype), rows(4, 40, 3072, dtype), [-1, 0, 1, 0] * 10
    together = native.lora_add(x, y.clone(), lora, torch.tensor(slots, dtype=torch.int32))
    assert together is not None
    for row in range(4):
        alone = native.lora_add(
            x[row : row + 1], y[row : row + 1].clone(), lora, torch.tensor(slots[row : row + 1], dtype=torch.int32)
        )
        assert alone is not None
        assert torch.equal(alone[0], together[row])


def test_a_slot_outside_is_refused_and_nothing_is_added(native: NativeOps) -> None:
    x, y = rows(5, 2, 45, torch.float32), rows(6, 2, 136, torch.float32)
    for slots in ([0, 3], [0, -2]):
        found = y.clone()
        with pytest.raises(IndexError, match="row 1"):
            native.lora_add(x, found, filled(torch.float32), torch.tensor(slots, dtype=torch.int32))
        assert torch.equal(found, y)


def test_other_dtypes_and_shapes_are_declined(native: NativeOps) -> None:
    lora, slots = filled(torch.float32), torch.zeros(2, dtype=torch.int32)
    x, y = rows(7, 2, 45, torch.float32), rows(8, 2, 136, torch.float32)
    for bad in ((x.half(), y.half(), lora, slots), (x[:, :40], y, lora, slots), (x, y[:, :99], lora, slots)):
        assert native.lora_add(*bad) is None
    assert native.lora_add(x, y, lora, slots.long()) is None


@pytest.mark.parametrize("columns", [(), (1, 2, 3, 4)])
def test_a_product_has_one_to_three_parts(columns: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parts"):
        allocate_lora(1, 16, 8, columns, torch.float32, CPU)
