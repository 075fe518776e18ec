"""One order of sums in both attention kernels: a token's attention has the same bits in a prompt, in any chunk of it,
as a decode, and as one of several rows of its sequence."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from disagg.kernels import kv_rows
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.ops import AttentionForm
from tests.support.paged import UNREADABLE_BLOCK, PagedCase, prompts

LENGTHS = (1, 16, 17, 255, 256, 257, 300, 511, 513, 700)
BLOCK_SIZES = (16, 16, 32, 48, 17, 512)
DIMS = (16, 24, 30, 32, 64, 72, 80, 96, 128, 160, 256)
WINDOWS = (None, 1, 5, 16, 100, 255, 256, 300)


@dataclass(frozen=True)
class Shape:
    """Of one random case."""

    num_tokens: int
    heads: tuple[int, int]
    dim: int
    block_size: int
    form: AttentionForm | None = None

    @classmethod
    def draw(cls, seed: int) -> Shape:
        draw = random.Random(seed)
        num_kv_heads = draw.choice((1, 2, 3))
        heads = (num_kv_heads * draw.choice((1, 2, 3, 4, 5, 8)), num_kv_heads)
        shape = cls(draw.choice(LENGTHS), heads, draw.choice(DIMS), draw.choice(BLOCK_SIZES))
        sinks_N = torch.tensor([draw.uniform(-3.0, 3.0) for _ in range(heads[0])])
        form = AttentionForm(
            shape.dim**-0.5, draw.choice(WINDOWS), draw.choice((None, 0.5)), draw.choice((None, sinks_N))
        )
        return replace(shape, form=form) if seed % 2 else shape


class Attention:
    """All tokens of one sequence, with their queries."""

    def __init__(
        self, native: NativeOps, shape: Shape, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
    ) -> None:
        self._native, self.num_tokens = native, shape.num_tokens
        self.case = PagedCase(
            [shape.num_tokens],
            heads=shape.heads,
            dim=shape.dim,
            block_size=shape.block_size,
            dtype=dtype,
            cache_dtype=cache_dtype,
        )
        self.case.form = shape.form or self.case.form
        self.q_TND = self.case.queries(shape.num_tokens)

    def prompt(self, chunk_tokens: int) -> Tensor:
        case = self.case
        out = torch.empty((*self.q_TND.shape[:2], kv_rows.width(case.values_NKBD)), dtype=self.q_TND.dtype)
        for start in range(0, self.num_tokens, chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, self.num_tokens))
            prefills = prompts((case.tables_SM[0], start, rows.stop - start))
            found = self._native.paged_prefill_attention(
                self.q_TND[rows], case.keys_NKBD, case.values_NKBD, prefills, case.form, out[rows]
            )
            assert found is not None
        return out

    def decodes(self, positions: list[int]) -> Tensor:
        """The tokens at these positions, as rows of one step."""
        case = self.case
        found = self._native.paged_decode_attention(
            self.q_TND[positions], case.keys_NKBD, case.values_NKBD, case.poisoned_tables_SM.repeat(len(positions), 1),
            torch.tensor(positions, dtype=torch.int32) + 1, case.form,
        )  # fmt: skip
        assert found is not None
        return found


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "seed"),
    [
        *((dtype, None, seed) for dtype in (torch.float32, torch.bfloat16) for seed in range(24)),
        *((dtype, torch.int8, seed) for dtype in (torch.float32, torch.bfloat16) for seed in range(6)),
    ],
)
def test_a_token_has_the_same_bits_whoever_computes_it(
    native: NativeOps, seed: int, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    attention, draw = Attention(native, Shape.draw(seed), dtype, cache_dtype), random.Random(seed)
    num_tokens = attention.num_tokens
    whole = attention.prompt(num_tokens)
    assert torch.equal(attention.prompt(draw.randint(1, num_tokens)), whole)
    scattered = sorted(draw.sample(range(num_tokens), min(num_tokens, 8)))
    last = list(range(max(0, num_tokens - draw.choice((2, 5, 16))), num_tokens))
    for positions in (scattered, last, [num_tokens - 1]):
        assert torch.equal(attention.decodes(positions), whole[positions])
    attention.case.forget(0, max(num_tokens - (attention.case.form.window or num_tokens), 0))
    assert torch.equal(attention.decodes([num_tokens - 1]), whole[[num_tokens - 1]])


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("window", [None, 90, 300])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_sequences_that_share_blocks_keep_their_bits(
    native: NativeOps, num_threads: int, window: int | None, cache_dtype: torch.dtype | None
) -> None:
    """Rows meet in the pieces whose blocks they share, and see what is theirs alone."""
    case = PagedCase([700, 600, 600], heads=(6, 2), dim=64, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    case.form = AttentionForm(0.125, window=window)
    tables = case.poisoned_tables_SM
    tables[1, :20] = tables[0, :20]  # they part in the second piece
    tables[2] = tables[0]
    rows = [(0, 700), (2, 100), (0, 520), (1, 600), (1, 320), (0, 320), (2, 600), (0, 0), (1, 256)]
    q_SND, lengths = case.queries(len(rows)), [length for _, length in rows]

    def decode(some: list[int]) -> Tensor:
        table_SM = tables[[rows[i][0] for i in some]]
        lens_S = torch.tensor([lengths[i] for i in some], dtype=torch.int32)
        for row_M, length in zip(table_SM, lens_S.tolist(), strict=True):
            row_M[: max(length - (window or length), 0) // 16] = UNREADABLE_BLOCK
        found = native.paged_decode_attention(
            q_SND[some], case.keys_NKBD, case.values_NKBD, table_SM, lens_S, case.form
        )
        assert found is not None
        return found

    alone = torch.cat([decode([i]) for i in range(len(rows))])
    native.set_num_threads(num_threads)
    together = decode(list(range(len(rows))))
    native.set_num_threads(1)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "value_dim", "block_size"), [(576, 512, 16), (40, 24, 17)])
def test_latent_attention_has_the_same_bits_whoever_computes_it(
    native: NativeOps, dim: int, value_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    attention = Attention(native, Shape(300, (4, 1), dim, block_size), dtype)
    attention.case.values_NKBD = attention.case.keys_NKBD[..., :value_dim]
    whole = attention.prompt(300)
    assert whole.shape == (300, 4, value_dim)
    assert torch.equal(attention.prompt(77), whole)
    assert torch.equal(attention.decodes([0, 16, 255, 256, 298, 299]), whole[[0, 16, 255, 256, 298, 299]])


def test_values_behind_a_row_do_not_reach_it(native: NativeOps) -> None:
    """A draft that is not a number spoils no row before it."""
    attention = Attention(native, Shape(300, (4, 2), 64, 16), torch.bfloat16)
    expected = attention.decodes([296, 297])
    case = attention.case
    case.values_NKBD[case.tables_SM[0, 298 // 16].long(), :, 298 % 16] = float("nan")
    found = attention.decodes([296, 297, 298, 299])
    assert torch.equal(found[:2], expected)
    assert found[2:].isnan().all()
