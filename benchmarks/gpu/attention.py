"""Attention over the paged cache on a GPU, against FlashAttention-3, the measured limits, and what torch has here.

32 query heads on 8 KV heads of 128, as in Llama-3-8B; blocks of 64 tokens in random order, and prefill with blocks of
16 besides. Nothing is measured that a cache of the GPU holds: calls take turns on KV of four times its L2 in all.

The peers of the same run are torch's attention by cuDNN and by its flash kernels, over KV that lies in a row, which
takes no block tables (`torch_attention.py`).

The figures of FlashAttention-3 were measured by others with vLLM 0.24 on an H200: ai-dynamo/aiconfigurator
(Apache-2.0), `generation_attention_perf` and `context_attention_perf` of h200_sxm, kernel `vllm_flash_attn_fa3`, bf16,
same heads, no window. A share is their time over ours, so that 1 is equal and more is better. An H200 reads 1.4 times
as fast as an H100: where reading the KV here takes longer than their time, that is what a decode is compared with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.report import RowFile
from benchmarks.gpu.timing import Ceilings, attempt, in_turns, kernel_ms, parse, read_ceilings, row_file
from benchmarks.gpu.torch_attention import measure_torch_decode, measure_torch_prefill
from disagg.kernels.attention import PROVIDERS, AttentionProvider, OwnKernels, prompts
from disagg.kernels.attention_choice import probe
from disagg.kernels.dispatch import paged_decode_attention
from disagg.kernels.ops import AttentionForm, AttentionSpec

PROBE_LIMIT_S = 40.0
"""A library that compiles for longer is measured at the next run."""

FA3_DECODE_US: Mapping[int, Mapping[int, float]] = {
    1: {1024: 13.6, 4096: 16.6, 16384: 33.5, 65536: 84.3},
    2: {1024: 15.1, 4096: 18.5, 16384: 49.1, 65536: 152.1},
    4: {1024: 17.5, 4096: 32.8, 16384: 83.2, 65536: 257.2},
    8: {1024: 17.4, 4096: 49.4, 16384: 151.2, 65536: 497.6},
    16: {1024: 31.4, 4096: 82.3, 16384: 271.4},
    32: {1024: 46.8, 4096: 135.5, 16384: 494.0},
    64: {1024: 80.7, 4096: 270.9},
    128: {1024: 148.6, 4096: 492.6},
    256: {1024: 272.5},
}
"""Batch -> context -> microseconds."""

FA3_PREFILL_US: Mapping[int, float] = {1024: 35.3, 2048: 87.4, 4096: 267.7, 8192: 938.3}
"""Tokens of one prompt without a prefix -> microseconds."""

DECODE_TARGET, SMALL_DECODE_TARGET = 0.95, 1.0
PREFILL_TARGET, PREFILL_RATE_TARGET = 0.75, 0.55
"""Of FlashAttention-3, and of the measured matrix product where there is no figure of that."""
SMALL_BATCH, SMALL_CONTEXT = 8, 4096
READ_SHARE = 0.9
"""Of the measured read rate, by which FlashAttention-3 would read the KV of a decode on another device."""
DECODE_READ_TARGET = 0.85
"""Share of the measured read rate that a decode which reads much should reach."""
LARGE_DECODE = 64 * 4096
"""Tokens from which a decode counts as large."""
MOST_CHUNKS = 32
"""Maximum number of chunks that take turns."""
SHORT_CHUNK = 128
"""Tokens; shorter chunks behind a prefix wait for memory, and their rate has no target."""


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """The tensors and cells that are measured."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    """Whether the cache holds 8-bit floats."""
    decode_cells: tuple[tuple[int, int], ...] = (
        *((1, context_len) for context_len in (1024, 4096, 16384, 65536)),
        *((8, context_len) for context_len in (1024, 4096, 16384)),
        *((32, context_len) for context_len in (4096, 16384)),
        *((64, context_len) for context_len in (1024, 4096)),
        (256, 1024),
    )
    """(sequences, tokens of each)."""
    prefill_chunks: tuple[tuple[int, int], ...] = ((2048, 0), (8192, 0), (2048, 8192), (32, 32768))
    """(tokens, tokens before them)."""

    @property
    def cache_dtype(self) -> torch.dtype:
        """fp8 (e4m3) or `dtype`."""
        return torch.float8_e4m3fn if self.fp8 else self.dtype

    @property
    def form(self) -> AttentionForm:
        """That of a plain model."""
        return AttentionForm(float(self.head_dim**-0.5))

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the KV of one layer."""
        return 2 * num_tokens * self.num_kv_heads * self.head_dim * self.cache_dtype.itemsize


FP8_CELLS = ((1, 16384), (8, 16384), (32, 16384), (64, 4096))

TINY = TensorSizes(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=16,
    dtype=torch.float32,
    decode_cells=((1, 32), (2, 40)),
    prefill_chunks=((32, 0), (16, 16)),
)


COLD = 4
"""Times the L2 that calls which take turns read."""


def l2_bytes(device: torch.device) -> int:
    """Of a GPU; a few blocks for a CPU, so that calls take turns there, too."""
    if device.type != "cuda":
        return 1 << 10
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def num_turns(nbytes: int, cache_bytes: int) -> int:
    """Calls of `nbytes` each that read more than a cache keeps."""
    return -(-COLD * cache_bytes // nbytes)


class Cache:
    """Random KV of one layer, in the order in memory that `KvCache` has, and tables of its blocks."""

    def __init__(self, shape: TensorSizes, device: torch.device) -> None:
        self._shape, self.device = shape, device
        self.l2_bytes = l2_bytes(device)
        most = max(max(b * c for b, c in shape.decode_cells), max(t + s for t, s in shape.prefill_chunks))
        cold = 2 * COLD * self.l2_bytes // shape.kv_bytes(1)
        num_blocks = max(2 * -(-most // shape.block_size), -(-cold // shape.block_size))
        size = (2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.keys_NKBD, self.values_NKBD = (
            torch.empty(size, dtype=shape.dtype, device=device).normal_().to(shape.cache_dtype)
        )
        self._order_N = torch.randperm(num_blocks, device=device).to(torch.int32)

    def tables(self, num_seqs: int, context_len: int) -> Tensor:
        """int32 [num_seqs, blocks of a sequence]; no block is in two tables while there are enough."""
        width = -(-context_len // self._shape.block_size)
        places = torch.arange(num_seqs * width, device=self.device) % len(self._order_N)
        return self._order_N[places].view(num_seqs, width)

    def turns(self, num_seqs: int, context_len: int) -> list[Tensor]:
        """As many tables as it takes that the KV of all is more than the GPU's L2 keeps; of one size each."""
        width = -(-context_len // self._shape.block_size)
        most = len(self._order_N) // (num_seqs * width)
        count = max(1, min(num_turns(self._shape.kv_bytes(num_seqs * context_len), self.l2_bytes), most))
        places = torch.arange(count * num_seqs * width, device=self.device) % len(self._order_N)
        return list(self._order_N[places].view(count, num_seqs, width))

    @property
    def spec(self) -> AttentionSpec:
        """The sizes that providers of attention are made for."""
        shape = self._shape
        return AttentionSpec(
            device=str(self.device),
            dtype=str(shape.dtype).removeprefix("torch."),
            kv_dtype=str(shape.cache_dtype).removeprefix("torch."),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            scale=shape.form.scale,
        )

    def queries(self, num_rows: int) -> Tensor:
        """Random queries [rows, heads, head dim]."""
        shape = self._shape
        return torch.randn(num_rows, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=self.device)


def decode_share(batch: int, context_len: int, nbytes: int, us: float, ceilings: Ceilings) -> float | None:
    """Share of the peer's rate that a decode of `us` microseconds reaches; None without a figure of the peer."""
    peer_us = FA3_DECODE_US.get(batch, {}).get(context_len)
    return None if peer_us is None else max(peer_us, nbytes / (READ_SHARE * ceilings.read_gb_s) / 1e3) / us


def measure_decode(
    rows: RowFile, shape: TensorSizes, cache: Cache, batch: int, context_len: int, ceilings: Ceilings
) -> None:
    """One query row of each of `batch` sequences."""
    q_SND = cache.queries(batch)
    lens_S = torch.full((batch,), context_len, dtype=torch.int32, device=q_SND.device)
    keys, values = cache.keys_NKBD, cache.values_NKBD

    def attend(tables_SM: Tensor) -> Tensor:
        return paged_decode_attention(q_SND, keys, values, tables_SM, lens_S, shape.form)

    turns = [functools.partial(attend, tables_SM) for tables_SM in cache.turns(batch, context_len)]
    us = kernel_ms(in_turns(turns), q_SND.device, calls=max(10, len(turns))) * 1e3
    nbytes = shape.kv_bytes(batch * context_len)
    peer = None if shape.fp8 else FA3_DECODE_US.get(batch, {}).get(context_len)
    is_small = batch <= SMALL_BATCH and context_len <= SMALL_CONTEXT
    rows.add(
        f"decode{', fp8 KV' if shape.fp8 else ''}, batch {batch}, context {context_len}",
        us,
        "us",
        share=None if shape.fp8 else decode_share(batch, context_len, nbytes, us, ceilings),
        target=SMALL_DECODE_TARGET if is_small else DECODE_TARGET,
        detail=f"{nbytes / us / 1e3:.0f} GB/s" + (f"; FlashAttention-3 {peer} us" if peer else ""),
    )
    if shape.fp8:
        return
    rows.add(
        f"decode by its bytes, batch {batch}, context {context_len}",
        nbytes / us / 1e3,
        "GB/s",
        share=nbytes / us / 1e3 / ceilings.read_gb_s,
        target=DECODE_READ_TARGET if batch * context_len >= LARGE_DECODE else None,
        detail=f"KV alone; limit {ceilings.read_gb_s:.0f} GB/s",
    )
    measure_torch_decode(rows, shape, q_SND.device, batch, context_len, us, num_turns(nbytes, cache.l2_bytes))


def measure_fp8(rows: RowFile, device: torch.device, ceilings: Ceilings) -> None:
    """Decode over a cache of 8-bit floats, in a few cells."""
    shape = TensorSizes(fp8=True, decode_cells=FP8_CELLS)
    cache = Cache(shape, device)
    for batch, context_len in FP8_CELLS:
        measure_decode(rows, shape, cache, batch, context_len, ceilings)


def prefill_rate(shape: TensorSizes, num_tokens: int, start: int, us: float) -> float:
    """TFLOP/s of a causal chunk of `num_tokens` behind `start` others that takes `us`."""
    attended = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return 4.0 * shape.num_heads * shape.head_dim * attended / us / 1e6


def prefill_share(
    shape: TensorSizes, num_tokens: int, start: int, us: float, ceilings: Ceilings
) -> tuple[float, float | None]:
    """(share, target) of a chunk that takes `us`. Of a short one behind a long context the share is that of the time to
    read its KV once, without a target: no peer's figure is known."""
    if start == 0 and num_tokens in FA3_PREFILL_US:
        return FA3_PREFILL_US[num_tokens] / us, PREFILL_TARGET
    if num_tokens <= SHORT_CHUNK < start:
        kv_bytes = 2 * (start + num_tokens) * shape.num_kv_heads * shape.head_dim * shape.cache_dtype.itemsize
        return kv_bytes / ceilings.read_gb_s / 1e3 / us, None
    return prefill_rate(shape, num_tokens, start, us) / ceilings.gemm_tflop_s, PREFILL_RATE_TARGET


def prefill_us(cache: Cache, provider: AttentionProvider, num_tokens: int, start: int) -> float:
    """Of a chunk that is alone in its step, without the plan. Of our own kernels as many chunks take turns as it takes
    to read more than the L2 keeps, each with a plan of its own."""
    q_TND = cache.queries(num_tokens)
    out_TND, form = torch.empty_like(q_TND), AttentionForm(cache.spec.scale)
    turns: list[Callable[[], object]] = []
    for (table_M,) in cache.turns(1, start + num_tokens)[: MOST_CHUNKS if isinstance(provider, OwnKernels) else 1]:
        each = OwnKernels.of(cache.spec) if isinstance(provider, OwnKernels) else provider
        each.plan(prompts(each, (table_M, start, num_tokens)))
        turns.append(functools.partial(each.attend, q_TND, cache.keys_NKBD, cache.values_NKBD, form, out_TND))
    return kernel_ms(in_turns(turns), q_TND.device, calls=max(3, len(turns))) * 1e3


def measure_prefill(
    rows: RowFile, shape: TensorSizes, cache: Cache, num_tokens: int, start: int, ceilings: Ceilings
) -> None:
    """A chunk of one prompt, causal."""
    us = prefill_us(cache, OwnKernels.of(cache.spec), num_tokens, start)
    rate = prefill_rate(shape, num_tokens, start, us)
    share, target = prefill_share(shape, num_tokens, start, us, ceilings)
    peer = FA3_PREFILL_US.get(num_tokens) if start == 0 else None
    small_blocks = shape.block_size < TensorSizes.block_size and cache.device.type == "cuda"
    rows.add(
        f"prefill{f', blocks of {shape.block_size}' if small_blocks else ''}, {num_tokens} tokens behind {start}",
        rate,
        "TFLOP/s",
        share=share,
        target=None if small_blocks else target,
        detail=f"{us:.0f} us; {rate / ceilings.gemm_tflop_s:.2f} of the measured matrix product"
        + (f"; FlashAttention-3 {peer} us" if peer else ""),
    )
    if not small_blocks:
        turns = min(MOST_CHUNKS, num_turns(shape.kv_bytes(start + num_tokens), cache.l2_bytes))
        measure_torch_prefill(rows, shape, cache.device, num_tokens, start, us, turns)


def measure_others(rows: RowFile, shape: TensorSizes, cache: Cache, ceilings: Ceilings) -> None:
    """Prefill by the providers of attention that `auto` does not take, beside Triton in the rows above: whoever has a
    GPU decides by these two which one `auto` shall be."""
    for kind in PROVIDERS[1:]:
        if reason := kind.takes(cache.spec) or probe(kind.name, cache.spec, PROBE_LIMIT_S):
            rows.add(f"prefill by {kind.name}", None, "", detail=reason)
            continue
        provider = kind.of(cache.spec)
        for num_tokens, start in shape.prefill_chunks:
            us = prefill_us(cache, provider, num_tokens, start)
            rows.add(
                f"prefill by {kind.name}, {num_tokens} tokens behind {start}",
                prefill_rate(shape, num_tokens, start, us),
                "TFLOP/s",
                share=prefill_share(shape, num_tokens, start, us, ceilings)[0],
                detail=f"{us:.0f} us",
            )


def main() -> None:
    """The section `attention`."""
    arguments = parse(main.__doc__)
    device, rows = torch.device(arguments.device), row_file(arguments, "attention")
    ceilings = read_ceilings(arguments.ceilings)
    shape = TensorSizes() if device.type == "cuda" else TINY
    cache = Cache(shape, device)
    for batch, context_len in shape.decode_cells:
        name = f"decode, batch {batch}, context {context_len}"
        attempt(rows, name, functools.partial(measure_decode, rows, shape, cache, batch, context_len, ceilings))
    for num_tokens, start in shape.prefill_chunks:
        name = f"prefill, {num_tokens} tokens behind {start}"
        attempt(rows, name, functools.partial(measure_prefill, rows, shape, cache, num_tokens, start, ceilings))
    attempt(rows, "other providers", functools.partial(measure_others, rows, shape, cache, ceilings))
    del cache
    if device.type == "cuda":
        small = TensorSizes(block_size=16, decode_cells=((1, 16),), prefill_chunks=((8192, 0),))
        small_cache = Cache(small, device)
        measure = functools.partial(measure_prefill, rows, small, small_cache, 8192, 0, ceilings)
        attempt(rows, "prefill, blocks of 16", measure)
        attempt(rows, "decode, fp8 KV", functools.partial(measure_fp8, rows, device, ceilings))


if __name__ == "__main__":
    main()
