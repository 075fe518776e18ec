"""`dispatch` with DISAGG_KERNELS=triton: CPU tensors take the Triton kernels."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg.kernels import dispatch, quantize, reference
from disagg.kernels.ops import AttentionSpec
from disagg.kernels.prefill_work import ChunkPlace
from disagg.kernels.triton import fp8_rows

pytestmark = pytest.mark.usefixtures("fresh_choice")


def test_tensors_take_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", "triton")
    assert dispatch.describe() == "triton (DISAGG_KERNELS=triton)"
    assert dispatch.embed(torch.tensor([5, 1]), torch.ones(3, 4)).tolist() == [[0.0] * 4, [1.0] * 4]
    cache = torch.arange(2 * 2 * 4 * 2, dtype=torch.float32).view(2, 1, 2, 1, 4, 2)
    found, expected = torch.zeros((2, 3 * 2 * 2 * 4), dtype=torch.uint8).unbind()
    dispatch.gather_kv(cache, [1, 0], 2, 5, found)
    reference.gather_kv(cache, [1, 0], 2, 5, expected)
    assert torch.equal(found, expected)
    copy = torch.zeros_like(cache)
    dispatch.scatter_kv(copy, [1, 0], 2, 5, found)
    assert copy[[0, 1], 0, 0, 0].sum(dim=-1).tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 41.0, 45.0]]


def test_an_op_that_is_switched_off_is_computed_by_torch_without_a_warning_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", "triton,-embed")
    with pytest.raises(IndexError):  # Triton's gives zeros for an id that is not in the table
        dispatch.embed(torch.tensor([5, 1]), torch.ones(3, 4))
    assert dispatch.embed(torch.tensor([2]), torch.ones(3, 4)).tolist() == [[1.0] * 4]
    monkeypatch.setattr(reference, "rms_norm", None)
    assert dispatch.rms_norm(torch.ones(2, 8), torch.ones(8), 0.0).tolist() == [[1.0] * 8] * 2  # by its kernel
    assert [record.getMessage() for record in caplog.records] == ["CUDA kernels: triton without embed (DISAGG_KERNELS)"]


def test_draws_that_are_switched_off_are_made_without_a_warning_of_their_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", "triton,-draw_rows")
    logits_RV = torch.tensor([[0.0, 90.0, 0.0]])
    drawn_R = dispatch.draw_unfiltered(logits_RV, 3, torch.ones(1), torch.full((1,), 0.5, dtype=torch.float64))
    assert drawn_R.tolist() == [1]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["CUDA kernels: triton without draw_rows (DISAGG_KERNELS)"]


@pytest.mark.parametrize(
    ("value", "by"), [("auto", "kernel"), ("auto,-quantize_rows", "torch"), ("reference", "torch")]
)
def test_rows_in_8_bits_are_made_by_torch_where_their_kernel_is_off(
    monkeypatch: pytest.MonkeyPatch, value: str, by: str
) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", value)
    monkeypatch.setattr(fp8_rows, "quantize_rows", lambda _: "kernel")
    monkeypatch.setattr(quantize, "_quantize", lambda _: "torch")
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    made: object = quantize.quantize_rows(on_gpu)
    assert made == by


@pytest.mark.parametrize(
    ("value", "draws", "plans"),
    [("triton", True, True), ("triton,-draw_rows", False, True), ("triton,-paged_prefill_attention", True, False)],
)
def test_what_prepares_for_a_kernel_is_left_out_with_it(
    monkeypatch: pytest.MonkeyPatch, value: str, draws: bool, plans: bool
) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", value)
    spec = AttentionSpec(
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=16,
        scale=0.25,
    )
    assert dispatch.draws_on(torch.device("cpu")) == draws
    assert list(dispatch.plan_prefills([ChunkPlace(0, 2, 3, 0)], spec)) == [None] * plans


def test_what_triton_does_not_take_goes_to_the_reference_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", "triton")
    x, weight = torch.randn(2, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    assert torch.equal(dispatch.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["rms_norm: the kernel does not take these tensors (torch.float64); using the torch reference"]
