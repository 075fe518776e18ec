"""Paged attention against the oracle: context lengths around the block size, grouped queries, head dims."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.ops import AttentionForm
from tests.support.paged import PagedCase, prompts
from tests.unit.kernels import oracle

DTYPES = [torch.float32, torch.bfloat16]
FORMS: dict[str, dict[str, Any]] = {
    "window": {"window": 10},
    "soft cap": {"soft_cap": 0.7},
    "sinks": {"sinks": True},
    "all": {"window": 33, "soft_cap": 1.5, "sinks": True},
}
"""Parts of attention forms, by what they have."""
CONTEXTS = [1, 15, 16, 17, 100]


class Case:
    """Sequences with scattered blocks in layer 1 of a three-layer cache that holds NaN everywhere else."""

    def __init__(
        self, contexts: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype, block_size: int = 16
    ) -> None:
        torch.manual_seed(hash((tuple(contexts), heads, dim, block_size)) % 2**31)
        N, K = heads
        widths = [(context + block_size - 1) // block_size for context in contexts]
        self.contexts, self.group, self.form = contexts, N // K, AttentionForm(dim**-0.5)
        self.cache = oracle.new_cache(sum(widths) + 2, 3, K, block_size, dim, dtype)
        self.keys_NKBD, self.values_NKBD = self.cache[:, 1, 0], self.cache[:, 1, 1]
        # As in a model: a slice of the rows of q, k and v side by side.
        self.q_SND = torch.randn(len(contexts), N + 2 * K, dim).to(dtype)[:, :N]
        blocks = (torch.randperm(sum(widths) + 1) + 1).tolist()
        self.tables = [[blocks.pop() for _ in range(width)] for width in widths]
        self.k = [torch.randn(context, K, dim).to(dtype) for context in contexts]
        self.v = [torch.randn(context, K, dim).to(dtype) for context in contexts]
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            oracle.write(self.keys_NKBD, table, k)
            oracle.write(self.values_NKBD, table, v)
        self.tables_SM = torch.zeros(len(contexts), max(widths), dtype=torch.int32)
        for row, table in enumerate(self.tables):
            self.tables_SM[row, : len(table)] = torch.tensor(table)
        self.lens_S = torch.tensor(contexts, dtype=torch.int32)

    def decode(self, ops: Any) -> Tensor:
        out: Tensor = ops.paged_decode_attention(
            self.q_SND, self.keys_NKBD, self.values_NKBD, self.tables_SM, self.lens_S, self.form
        )
        return out

    def expected(self, q_ND: Tensor, sequence: int, context: int) -> Tensor:
        """One query row over the first `context` tokens of a sequence."""
        form = self.form
        seen = slice(max(context - (form.window or context), 0), context)
        k, v = self.k[sequence][seen], self.v[sequence][seen]
        sinks = [-math.inf] * len(q_ND) if form.sinks_N is None else form.sinks_N.tolist()
        heads = [
            oracle.attend(q_D, k[:, n // self.group], v[:, n // self.group], form.scale, form.soft_cap, sinks[n])
            for n, q_D in enumerate(q_ND)
        ]
        return torch.stack(heads)

    def expected_decode(self) -> Tensor:
        return torch.stack([self.expected(self.q_SND[i], i, context) for i, context in enumerate(self.contexts)])


def prefill(ops: Any, case: Case, q_TND: Tensor, table_M: Tensor, start: int) -> Tensor:
    """One prompt alone in a step."""
    out = torch.empty(q_TND.shape, dtype=q_TND.dtype)
    prefills = prompts((table_M, start, len(q_TND)))
    found: Tensor = ops.paged_prefill_attention(q_TND, case.keys_NKBD, case.values_NKBD, prefills, case.form, out)
    assert found is out
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (9, 3), (8, 1)])
def test_decode_attention(ops: Any, heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype) -> None:
    case = Case(CONTEXTS, heads, dim, dtype, block_size)
    oracle.assert_close(case.decode(ops), case.expected_decode())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "block_size"), [((10, 2), 32, 16), ((7, 1), 96, 16), ((3, 1), 24, 48)])
def test_decode_attention_of_odd_shapes(
    ops: Any, heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype
) -> None:
    case = Case([3, 50], heads, dim, dtype, block_size)
    oracle.assert_close(case.decode(ops), case.expected_decode())


def test_decode_attention_of_one_token_is_its_value(ops: Any) -> None:
    case = Case([1], (9, 3), 64, torch.float32)
    assert torch.allclose(case.decode(ops)[0], case.v[0][0].repeat_interleave(3, 0), rtol=1e-6, atol=0)


def test_decode_attention_over_a_long_context_with_large_scores(ops: Any) -> None:
    case = Case([700], (2, 1), 16, torch.float32)
    case.form = AttentionForm(30.0)  # scores in the hundreds: only exp(score - max) is representable
    oracle.assert_close(case.decode(ops), case.expected_decode())


def test_an_empty_sequence_attends_to_nothing(ops: Any) -> None:
    case = Case([5, 20], (4, 2), 64, torch.float32)
    case.lens_S[0] = 0
    out = case.decode(ops)
    assert torch.equal(out[0], torch.zeros(4, 64))
    oracle.assert_close(out[1], case.expected(case.q_SND[1], 1, 20))


def test_nan_in_a_query_shows_in_its_row_only(ops: Any) -> None:
    case = Case([5, 20], (4, 2), 64, torch.bfloat16)
    case.q_SND[0, 1, 3] = float("nan")
    out = case.decode(ops)
    assert out.isnan().any(-1).tolist() == [[False, True, False, False], [False] * 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_decode_attention_agrees_with_the_reference(native: NativeOps, dtype: torch.dtype) -> None:
    case = Case([300, 17, 1, 128, 299], (9, 3), 64, dtype)
    oracle.assert_close(case.decode(native), case.decode(reference).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 17, 24, 300])
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((20, 2), 64), ((4, 2), 128), ((2, 2), 80)])
def test_contexts_around_the_ends_of_pieces(
    native: NativeOps, heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype
) -> None:
    lengths = [239, 240, 241, 255, 256, 257, 300, 301, 359, 360, 361, 383, 384, 385, 449, 450, 512, 513, 600, 601]
    case = Case([*lengths, 639, 640], heads, dim, dtype, block_size)
    oracle.assert_close(case.decode(native), case.decode(reference).double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_piece_of_infinitely_low_scores_has_no_weight(native: NativeOps, dtype: torch.dtype) -> None:
    case = Case([400], (2, 1), 64, dtype)
    case.q_SND[0, :, 5] = 1.0
    case.keys_NKBD[case.tables[0][16:], 0, :, 5] = float("-inf")
    oracle.assert_close(case.decode(native), case.decode(reference).double())


def test_nan_in_a_late_key_shows_in_its_heads(native: NativeOps) -> None:
    case = Case([400, 400], (4, 2), 64, torch.bfloat16)
    case.keys_NKBD[case.tables[0][-1], 1, 0, 5] = float("nan")
    assert case.decode(native).isnan().any(-1).tolist() == [[False, False, True, True], [False] * 4]


def test_blocks_in_a_row_are_read_as_scattered_ones(ops: Any) -> None:
    case = Case([700, 40], (9, 3), 64, torch.bfloat16)
    scattered = case.decode(ops)
    rows = oracle.new_cache(50, 3, 3, 16, 64, torch.bfloat16)[:, 1]
    tables = torch.zeros_like(case.tables_SM)
    tables[0, :44] = torch.cat([torch.arange(3, 27), torch.arange(28, 48)])  # two rows
    tables[1, :3] = torch.arange(3)
    for sequence, width in ((0, 44), (1, 3)):
        there, here = tables[sequence, :width].long(), case.tables_SM[sequence, :width].long()
        rows[there, 0], rows[there, 1] = case.keys_NKBD[here], case.values_NKBD[here]
    case.keys_NKBD, case.values_NKBD, case.tables_SM = rows[:, 0], rows[:, 1], tables
    assert torch.equal(case.decode(ops), scattered)


def test_keys_may_be_the_values(native: NativeOps) -> None:
    case = Case([300, 40], (4, 2), 64, torch.float32)
    case.values_NKBD = case.keys_NKBD
    oracle.assert_close(case.decode(native), case.decode(reference).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "value_dim", "block_size"), [((16, 1), 576, 512, 16), ((3, 1), 40, 24, 17)])
def test_values_may_be_the_first_columns_of_the_keys(
    native: NativeOps, heads: tuple[int, int], dim: int, value_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Latent attention: one head, one plane."""
    case = Case([300, 40, 257], heads, dim, dtype, block_size)
    case.values_NKBD = case.keys_NKBD[..., :value_dim]
    expected = case.decode(reference)
    assert expected.shape == (3, heads[0], value_dim)
    oracle.assert_close(case.decode(native), expected.double())
    q_TND = torch.randn(30, heads[0], dim).to(dtype)
    prefills, caches = prompts((case.tables_SM[0], 270, 30)), (case.keys_NKBD, case.values_NKBD)
    right, found = (torch.empty(30, heads[0], value_dim, dtype=dtype) for _ in range(2))
    assert native.paged_prefill_attention(q_TND, *caches, prefills, case.form, found) is found
    reference.paged_prefill_attention(q_TND, *caches, prefills, case.form, right)
    oracle.assert_close(found, right.double())
    scores = case.k[0][:, 0].double() @ q_TND[-1, 0].double() * case.form.scale
    by_hand = scores.softmax(0) @ case.k[0][:, 0, :value_dim].double()
    oracle.assert_close(found[-1, 0], by_hand)


@pytest.mark.parametrize("length", [-1, 33])
def test_cpp_decode_attention_refuses_lengths_outside_its_tables(native: NativeOps, length: int) -> None:
    case = Case([20, 30], (4, 2), 64, torch.float32)
    case.lens_S[1] = length
    with pytest.raises(IndexError, match="sequence 1: "):
        case.decode(native)


@pytest.mark.parametrize("block", [-1, 99])
def test_cpp_decode_attention_refuses_blocks_outside_the_cache(native: NativeOps, block: int) -> None:
    case = Case([20, 30], (4, 2), 64, torch.float32)
    case.tables_SM[0, 1] = block
    with pytest.raises(IndexError, match="sequence 0: "):
        case.decode(native)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(("heads", "dim"), [((2, 2), 80), ((4, 2), 16), ((9, 3), 64), ((8, 1), 128)])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 17), (1, 15), (16, 16), (15, 2), (50, 1), (99, 1), (37, 40)])
def test_prefill_attention(
    ops: Any, start: int, count: int, heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype
) -> None:
    case = Case([start + count], heads, dim, dtype, block_size)
    q_TND = torch.randn(count, heads[0] + 2 * heads[1], dim).to(dtype)[:, : heads[0]]
    table_M = torch.tensor([*case.tables[0], 0, 0], dtype=torch.int32)
    out = prefill(ops, case, q_TND, table_M, start)
    expected = torch.stack([case.expected(q_ND, 0, start + i + 1) for i, q_ND in enumerate(q_TND)])
    oracle.assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("start", "count", "heads", "dim"),
    [
        (0, 150, (9, 3), 64),
        (70, 131, (9, 3), 64),
        (1500, 40, (9, 3), 64),
        (200, 0, (9, 3), 64),
        (300, 40, (16, 16), 128),  # so much K and V in fp32 that the heads are packed in two parts
    ],
)
def test_cpp_prefill_attention_agrees_with_the_reference_over_many_tiles(
    native: NativeOps, start: int, count: int, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    case = Case([start + count], heads, dim, dtype)
    q_TND = torch.randn(count, heads[0], dim).to(dtype)
    table_M = torch.tensor(case.tables[0], dtype=torch.int32)
    found = prefill(native, case, q_TND, table_M, start)
    if count:
        oracle.assert_close(found, prefill(reference, case, q_TND, table_M, start).double())
    assert found.shape == (count, heads[0], dim)


def test_cpp_attention_writes_where_it_is_told(native: NativeOps) -> None:
    case = Case([40, 31], (4, 2), 64, torch.bfloat16)
    q_TND, caches = torch.randn(2, 4, 64).bfloat16(), (case.keys_NKBD, case.values_NKBD)
    decode = (q_TND, *caches, case.tables_SM, case.lens_S, case.form)
    rows = torch.full((6, 4, 64), 7.0).bfloat16()
    assert native.paged_decode_attention(*decode, out_SND=rows[1:3]) is not None
    expected = native.paged_decode_attention(*decode)
    assert expected is not None
    assert torch.equal(rows[1:3], expected)
    assert (rows[[0, 3, 4, 5]] == 7.0).all()
    prefills = prompts((case.tables_SM[0], 38, 2))
    for out in (rows[:3], rows.float()[:2], rows[:4:2]):
        assert native.paged_decode_attention(*decode, out_SND=out) is None
        assert native.paged_prefill_attention(q_TND, *caches, prefills, case.form, out) is None


def form_of(name: str, num_heads: int, scale: float = 0.3) -> AttentionForm:
    parts = dict(FORMS[name])
    has_sinks = parts.pop("sinks", False)
    return AttentionForm(scale, sinks_N=torch.linspace(-2.0, 3.0, num_heads) if has_sinks else None, **parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("heads", "dim", "block_size"), [((9, 3), 64, 16), ((4, 1), 256, 16), ((2, 2), 80, 32)])
def test_forms_of_attention(
    ops: Any, heads: tuple[int, int], dim: int, block_size: int, name: str, dtype: torch.dtype
) -> None:
    case = Case(CONTEXTS, heads, dim, dtype, block_size)
    case.form = form_of(name, heads[0])
    oracle.assert_close(case.decode(ops), case.expected_decode())
    q_TND = torch.randn(37, heads[0], dim).to(dtype)
    out = prefill(ops, case, q_TND, case.tables_SM[4], 63)
    oracle.assert_close(out, torch.stack([case.expected(q_ND, 4, 64 + i) for i, q_ND in enumerate(q_TND)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 17])
@pytest.mark.parametrize("window", [1, 17, 256, 257, 400])
def test_windows_around_the_ends_of_pieces(native: NativeOps, window: int, block_size: int, dtype: torch.dtype) -> None:
    """What is before a window is gone: its entries of the tables must not be read, and its slots hold no numbers."""
    lengths = [1, 16, 255, 256, 257, 300, 511, 512, 513, 600, 767, 769]
    case = PagedCase(lengths, heads=(6, 2), dim=64, dtype=dtype, block_size=block_size)
    case.form = AttentionForm(0.125, window=window, sinks_N=torch.linspace(-1.0, 1.0, 6))
    for sequence, length in enumerate(lengths):
        case.forget(sequence, max(length - window, 0))
    q_SND, caches = case.queries(len(lengths)), (case.keys_NKBD, case.values_NKBD)
    found = native.paged_decode_attention(q_SND, *caches, case.poisoned_tables_SM, case.lens_S, case.form)
    assert found is not None
    expected = reference.paged_decode_attention(q_SND, *caches, case.tables_SM, case.lens_S, case.form)
    oracle.assert_close(found, expected.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 64, 300])
@pytest.mark.parametrize(("start", "count"), [(0, 300), (511, 2), (600, 190)])
def test_a_prompt_behind_what_left_its_window(
    native: NativeOps, start: int, count: int, window: int, dtype: torch.dtype
) -> None:
    case = PagedCase([start + count], heads=(6, 2), dim=64, dtype=dtype)
    case.form = AttentionForm(0.125, window=window, soft_cap=2.0)
    case.forget(0, max(start + 1 - window, 0))
    q_TND, caches = case.queries(count), (case.keys_NKBD, case.values_NKBD)
    expected, found = (torch.empty(count, 6, 64, dtype=dtype) for _ in range(2))
    prefills = prompts((case.poisoned_tables_SM[0], start, count))
    assert native.paged_prefill_attention(q_TND, *caches, prefills, case.form, found) is not None
    reference.paged_prefill_attention(q_TND, *caches, case.prompts([(start, count)]), case.form, expected)
    oracle.assert_close(found, expected.double())


@pytest.mark.parametrize("sinks_N", [torch.zeros(4).bfloat16(), torch.zeros(3), torch.zeros(8)[::2]])
def test_cpp_attention_declines_sinks_that_it_does_not_read(native: NativeOps, sinks_N: Tensor) -> None:
    case = Case([20], (4, 2), 64, torch.float32)
    case.form = AttentionForm(0.125, sinks_N=sinks_N)
    assert case.decode(native) is None
    prefills, out = prompts((case.tables_SM[0], 18, 2)), torch.zeros(2, 4, 64)
    caches = (case.keys_NKBD, case.values_NKBD)
    assert native.paged_prefill_attention(torch.zeros(2, 4, 64), *caches, prefills, case.form, out) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_prompts_of_a_step_write_their_rows(ops: Any, dtype: torch.dtype) -> None:
    case = Case([40, 31, 17], (4, 2), 64, dtype)
    tables = case.tables_SM
    prefills = prompts((tables[0], 38, 2), (tables[1], 0, 31), (tables[2], 9, 8), first_row=1)
    q_TND = torch.randn(43, 8, 64).to(dtype)[:, :4]
    out = torch.full((43, 4, 64), 7.0).to(dtype)
    found = ops.paged_prefill_attention(q_TND, case.keys_NKBD, case.values_NKBD, prefills, case.form, out)
    assert found is out
    assert (out[[0, 42]] == 7.0).all()
    for row, chunk in enumerate(prefills.chunks):
        alone = prefill(ops, case, q_TND[chunk.rows], chunk.block_table_M, chunk.start)
        assert torch.equal(out[chunk.rows], alone), row


def test_prefill_in_chunks_is_prefill_at_once(ops: Any) -> None:
    case = Case([90], (4, 2), 32, torch.float32)
    q_TND = torch.randn(90, 4, 32)
    table_M = torch.tensor(case.tables[0], dtype=torch.int32)

    def chunk(start: int, end: int) -> Tensor:
        return prefill(ops, case, q_TND[start:end], table_M, start)

    pieces = torch.cat([chunk(0, 33), chunk(33, 34), chunk(34, 90)])
    assert torch.allclose(pieces, chunk(0, 90), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [-1, 99])
def test_cpp_prefill_attention_refuses_blocks_outside_the_cache(native: NativeOps, block: int) -> None:
    case = Case([40], (4, 2), 64, torch.float32)
    table_M = torch.tensor([*case.tables[0][:2], block], dtype=torch.int32)
    with pytest.raises(IndexError, match=r"^the block at place 2 is outside the cache$"):
        prefill(native, case, torch.zeros(8, 4, 64), table_M, 32)


def test_cpp_prefill_attention_declines_a_table_that_is_too_short(native: NativeOps) -> None:
    case = Case([40], (4, 2), 64, torch.float32)
    table_M = torch.tensor(case.tables[0][:2], dtype=torch.int32)
    q_TND, prefills = torch.zeros(8, 4, 64), prompts((table_M, 32, 8))
    args = (q_TND, case.keys_NKBD, case.values_NKBD, prefills, case.form, torch.zeros(8, 4, 64))
    assert native.paged_prefill_attention(*args) is None
