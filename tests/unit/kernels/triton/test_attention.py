"""Triton's attention in the interpreter against the torch reference: lengths around a block, groups, head dims.

What the real compiler makes of the kernels: test_attention_compiles.py; bf16: tests/gpu/test_attention.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels import prefill_work, reference
from disagg.kernels.ops import AttentionForm, AttentionSpec, PlannedPrefills
from disagg.kernels.triton import attention
from disagg.kernels.triton.decode_attention import DecodeShape, decode_attention
from disagg.kernels.triton.prefill_attention import prefill_shape
from tests.support.paged import PagedCase

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
"""Of results that are means of values of size 1 to 4; fp16 also rounds the weights."""

LENGTHS = [129, 1, 0, 15, 16, 17]

Planner = Callable[[list[prefill_work.ChunkPlace], AttentionSpec, int | None], prefill_work.PrefillWork]


def planned(case: PagedCase, chunks: list[tuple[int, int]]) -> PlannedPrefills:
    return case.planned(case.prompts(chunks), attention.plan_prefills)


def assert_close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[found.dtype])


def expected_decode(case: PagedCase, q_SND: Tensor) -> Tensor:
    return reference.paged_decode_attention(
        q_SND, case.keys_NKBD, case.values_NKBD, case.tables_SM, case.lens_S, case.form
    )


@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "dtype"),
    [
        ((2, 2), 64, 16, torch.float32),
        ((3, 1), 80, 32, torch.float32),
        ((8, 2), 128, 64, torch.float16),
        ((8, 1), 64, 48, torch.float16),
    ],
)
def test_decode(heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype) -> None:
    case = PagedCase(LENGTHS, heads=heads, dim=dim, block_size=block_size, dtype=dtype)
    q = case.queries(len(LENGTHS))
    found = attention.paged_decode_attention(
        q, case.keys_NKBD, case.values_NKBD, case.poisoned_tables_SM, case.lens_S, case.form
    )
    assert_close(found, expected_decode(case, q))


FORMS: dict[str, dict[str, Any]] = {
    "window": {"window": 10},
    "soft cap": {"soft_cap": 0.7},
    "sinks": {"sinks_N": torch.linspace(-2.0, 3.0, 4)},
    "all": {"window": 100, "soft_cap": 1.5, "sinks_N": torch.linspace(-2.0, 3.0, 4)},
}


Shape = tuple[int, int, torch.dtype]


def forms_of(shapes: dict[Shape, tuple[str, ...]]) -> list[Any]:
    """Every form of every shape: dim, block size, dtype. Those that a shape does not name are slow."""
    return [
        pytest.param(*shape, name, id=f"{shape[0]}-{shape[1]}-{name}", marks=() if name in quick else pytest.mark.slow)
        for shape, quick in shapes.items()
        for name in FORMS
    ]


@pytest.mark.parametrize(
    ("dim", "block_size", "dtype", "name"),
    forms_of(
        {
            (64, 16, torch.float32): ("window", "sinks"),
            (256, 64, torch.float16): ("all",),
            (80, 48, torch.float16): ("soft cap", "all"),
        }
    ),
)
def test_forms_of_decodes(dim: int, block_size: int, dtype: torch.dtype, name: str) -> None:
    """What is before a window is gone: its entries of the tables must not be read, and its slots hold no numbers."""
    lengths = [129, 1, 0, 16, 400, 257]
    case = PagedCase(lengths, heads=(4, 2), dim=dim, block_size=block_size, dtype=dtype)
    case.form = AttentionForm(0.15, **FORMS[name])
    for sequence, length in enumerate(lengths):
        case.forget(sequence, max(length - (case.form.window or length), 0))
    q = case.queries(len(lengths))
    found = attention.paged_decode_attention(
        q, case.keys_NKBD, case.values_NKBD, case.poisoned_tables_SM, case.lens_S, case.form
    )
    assert_close(found, expected_decode(case, q))


PLAIN, WINDOW = AttentionForm(0.25), AttentionForm(0.25, window=500, sinks_N=torch.tensor([-1.0, 2.0]))


@pytest.mark.parametrize(
    ("num_programs", "form"),
    [
        pytest.param(1, PLAIN, id="plain-1"),
        pytest.param(4, WINDOW, id="all-4"),
        pytest.param(40, PLAIN, id="plain-40"),
        *(
            pytest.param(number, form, id=f"{name}-{number}", marks=pytest.mark.slow)
            for number, form, name in ((1, WINDOW, "all"), (4, PLAIN, "plain"), (40, WINDOW, "all"))
        ),
    ],
)
def test_decode_is_the_same_however_many_programs_share_the_contexts(num_programs: int, form: AttentionForm) -> None:
    """With 40 the long context is in 34 pieces, and 16 are joined at once; with 1 none is cut."""
    case = PagedCase([5, 531, 0, 17], heads=(2, 1), dim=16)
    case.form = form
    q = case.queries(4)
    shape = DecodeShape(tile=16, num_programs=num_programs, num_warps=4, num_stages=3)
    score_scale = case.form.scale * math.log2(math.e)
    found = decode_attention(
        q, case.keys_NKBD, case.values_NKBD, case.poisoned_tables_SM, case.lens_S, score_scale, 1.0, shape, case.form
    )
    assert_close(found, expected_decode(case, q))


def test_decode_of_padded_rows_alone_gives_zeros() -> None:
    case = PagedCase([0, 0], heads=(2, 1), dim=16)
    found = attention.paged_decode_attention(
        case.queries(2), case.keys_NKBD, case.values_NKBD, case.poisoned_tables_SM, case.lens_S, case.form
    )
    assert_close(found, torch.zeros(2, 2, 16))


def assert_prefill(case: PagedCase, chunks: list[tuple[int, int]], plan: Planner = attention.plan_prefills) -> None:
    """All chunks in one call, behind three rows that are not theirs and before two."""
    prefills = case.prompts(chunks, first_row=3)
    num_rows = prefills.chunks[-1].rows.stop + 2
    q, caches = case.queries(num_rows), (case.keys_NKBD, case.values_NKBD)
    expected, found = (torch.full((num_rows, case.num_heads, case.value_dim), 7.0, dtype=case.dtype) for _ in range(2))
    reference.paged_prefill_attention(q, *caches, prefills, case.form, expected)
    planned = case.planned(prefills, plan)
    assert_close(attention.paged_prefill_attention(q, *caches, planned, case.form, found), expected)
    assert (found[[0, 1, 2, -2, -1]] == 7.0).all()


@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "start", "end", "dtype"),
    [
        ((2, 2), 64, 16, 0, 1, torch.float32),
        ((3, 1), 80, 16, 0, 33, torch.float32),
        ((3, 1), 64, 32, 17, 49, torch.float32),
        ((4, 1), 64, 16, 127, 160, torch.float16),
        ((16, 2), 128, 64, 5, 134, torch.float16),
    ],
)
def test_prefill(heads: tuple[int, int], dim: int, block_size: int, start: int, end: int, dtype: torch.dtype) -> None:
    case = PagedCase([end], heads=heads, dim=dim, block_size=block_size, dtype=dtype)
    assert_prefill(case, [(start, end - start)])


@pytest.mark.parametrize(
    ("dim", "block_size", "dtype", "name"),
    forms_of(
        {
            (64, 16, torch.float32): ("window",),
            (256, 64, torch.float16): ("sinks", "all"),
            (64, 64, torch.float16): ("soft cap", "all"),
        }
    ),
)
def test_forms_of_prompts(dim: int, block_size: int, dtype: torch.dtype, name: str) -> None:
    chunks = [(0, 1), (16, 1), (0, 130), (150, 33), (64, 64), (300, 3)]
    case = PagedCase([sum(chunk) for chunk in chunks], heads=(4, 2), dim=dim, block_size=block_size, dtype=dtype)
    case.form = AttentionForm(0.15, **FORMS[name])
    for sequence, (start, _) in enumerate(chunks):
        case.forget(sequence, max(start + 1 - (case.form.window or start + 1), 0))
    assert_prefill(case, chunks)


@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "dtype"),
    [
        ((2, 2), 64, 16, torch.float32),
        ((5, 1), 80, 32, torch.float16),
        ((8, 2), 128, 64, torch.float16),
    ],
)
def test_prompts_of_all_lengths_in_one_launch(
    heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype
) -> None:
    chunks = [(0, 1), (16, 1), (0, 70), (50, 33), (63, 1), (64, 64), (0, 16), (200, 3)]
    case = PagedCase([sum(chunk) for chunk in chunks], heads=heads, dim=dim, block_size=block_size, dtype=dtype)
    assert_prefill(case, chunks)


SPLIT = {
    "a suffix": ([(600, 4)], 10),
    "beside others": ([(0, 40), (640, 1), (639, 1), (3, 5)], 20),
    "with a long diagonal": ([(560, 90)], 29),
}
SPLIT_SHAPES = {"fp32": ((2, 1), 16, torch.float32), "boxes": ((4, 1), 64, torch.float16)}
SPLIT_QUICK = {
    (None, "fp32", "a suffix"),
    (None, "fp32", "beside others"),
    (None, "boxes", "a suffix"),
    (None, "boxes", "with a long diagonal"),
    (300, "fp32", "a suffix"),
    (300, "boxes", "beside others"),
}


@pytest.mark.parametrize(
    ("window", "heads", "block_size", "dtype", "chunks", "num_pieces"),
    [
        pytest.param(
            *(window, *SPLIT_SHAPES[shape], *SPLIT[name]),
            id=f"{window}-{shape}-{name}",
            marks=() if (window, shape, name) in SPLIT_QUICK else pytest.mark.slow,
        )
        for window, shape, name in itertools.product((None, 300), SPLIT_SHAPES, SPLIT)
    ],
)
def test_a_long_context_is_split(
    heads: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    chunks: list[tuple[int, int]],
    num_pieces: int,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Among many programs, into pieces of a tile."""
    monkeypatch.setattr(prefill_work, "MIN_PIECE_TOKENS", 1)
    works: list[prefill_work.PrefillWork] = []

    def plan(
        places: list[prefill_work.ChunkPlace], spec: AttentionSpec, window: int | None
    ) -> prefill_work.PrefillWork:
        monkeypatch.setattr(attention, "_num_multiprocessors", lambda _: 1000)
        works.append(attention.plan_prefills(places, spec, window))
        return works[0]

    case = PagedCase([sum(chunk) for chunk in chunks], heads=heads, dim=64, block_size=block_size, dtype=dtype)
    case.form = AttentionForm(0.125, window=window, sinks_N=torch.linspace(-1.0, 2.0, heads[0]) if window else None)
    assert_prefill(case, chunks, plan)
    assert works[0].num_joins >= 1
    assert works[0].num_pieces >= (num_pieces // 3 if window else num_pieces)


@pytest.mark.parametrize(
    ("dim", "block_size", "max_query_len", "boxes"),
    [(128, 64, 32, True), (64, 128, 32, True), (128, 16, 32, False), (80, 64, 32, False), (128, 64, 8, False)],
)
def test_the_copy_engine_fetches_tiles_that_are_parts_of_a_block(
    dim: int, block_size: int, max_query_len: int, boxes: bool
) -> None:
    shape = prefill_shape(torch.float16, torch.float16, dim, block_size, 4, max_query_len)
    assert shape.boxes == boxes
    assert not boxes or block_size % shape.tile == 0


def test_results_go_where_they_are_wanted() -> None:
    case = PagedCase([40, 31], heads=(4, 2), dim=32)
    q, caches = case.queries(2), (case.keys_NKBD, case.values_NKBD)
    rows = torch.full((6, 4, 32), 7.0)
    decode = attention.paged_decode_attention(
        q, *caches, case.poisoned_tables_SM, case.lens_S, case.form, out_SND=rows[1:3]
    )
    assert decode is not None
    assert decode.data_ptr() == rows[1:].data_ptr()
    assert_close(decode, reference.paged_decode_attention(q, *caches, case.tables_SM, case.lens_S, case.form))
    assert (rows[[0, 3, 4, 5]] == 7.0).all()


@pytest.mark.parametrize("out", [torch.zeros(3, 4, 32), torch.zeros(2, 4, 64)[..., ::2], torch.zeros(2, 4, 32).half()])
def test_where_results_cannot_go_the_kernels_decline(out: Tensor) -> None:
    case = PagedCase([40, 31], heads=(4, 2), dim=32)
    q, caches = case.queries(2), (case.keys_NKBD, case.values_NKBD)
    assert attention.paged_decode_attention(q, *caches, case.tables_SM, case.lens_S, case.form, out_SND=out) is None
    assert attention.paged_prefill_attention(q, *caches, planned(case, [(38, 2)]), case.form, out) is None


def test_an_fp8_cache_is_read_with_its_scales() -> None:
    case = PagedCase([100, 31], heads=(4, 2), dim=64, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn)
    q, scales = case.queries(2), (0.5, 3.0)
    keys, values = case.keys_NKBD.to(torch.float16) * 0.5, case.values_NKBD.to(torch.float16) * 3.0
    decode = attention.paged_decode_attention(
        q, case.keys_NKBD, case.values_NKBD, case.poisoned_tables_SM, case.lens_S, case.form, *scales
    )
    assert_close(decode, reference.paged_decode_attention(q, keys, values, case.tables_SM, case.lens_S, case.form))
    prefill = attention.paged_prefill_attention(
        q, case.keys_NKBD, case.values_NKBD, planned(case, [(98, 2)]), case.form, torch.empty(2, 4, 64).half(), *scales
    )
    expected = torch.empty(2, 4, 64).half()
    reference.paged_prefill_attention(q, keys, values, case.prompts([(98, 2)]), case.form, expected)
    assert_close(prefill, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda case, q: (q.double(), case.keys_NKBD, case.values_NKBD, case.tables_SM),
        lambda case, q: (q, case.keys_NKBD.half(), case.values_NKBD.half(), case.tables_SM),
        lambda case, q: (q, case.keys_NKBD, case.values_NKBD, case.tables_SM.long()),
        lambda case, q: (q, case.keys_NKBD, case.values_NKBD.repeat(1, 2, 1, 1)[:, :1], case.tables_SM),
        lambda case, q: (
            q.transpose(0, 1).contiguous().transpose(0, 1),
            case.keys_NKBD,
            case.values_NKBD,
            case.tables_SM,
        ),
    ],
    ids=["dtype of q", "dtype of the cache", "dtype of the table", "strides of the caches", "strides of q"],
)
def test_declines_what_it_cannot_read(change: Callable[[PagedCase, Tensor], tuple[Tensor, ...]]) -> None:
    case = PagedCase([3, 4], heads=(2, 1), dim=16)
    q, keys, values, tables = change(case, case.queries(2))
    assert attention.paged_decode_attention(q, keys, values, tables, case.lens_S, case.form) is None
    prefills = dataclasses.replace(planned(case, [(1, 2)]), block_tables=tables[0])
    assert attention.paged_prefill_attention(q, keys, values, prefills, case.form, torch.empty(2, 2, 16)) is None
