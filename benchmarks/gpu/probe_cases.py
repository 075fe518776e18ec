"""What the probe asks of each op: inputs at the shapes of Llama-3-8B, and of other models for what they have beside its
parts; and what the reference makes of them in fp32.

Shapes: T tokens, H hidden, F half of the MLP, N query heads, K KV heads, D head dim, L dim of latents, V vocabulary, B
tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from disagg.engine.randomness import uniform
from disagg.kernels import reference
from disagg.kernels.experts import Experts, Router
from disagg.kernels.lora import Lora
from disagg.kernels.ops import (
    AttentionForm,
    AttentionSpec,
    Filters,
    LatentWrite,
    PlannedPrefills,
    Pointwise,
    PrefillChunk,
    Prefills,
    RopeWrite,
)
from disagg.kernels.prefill_work import ChunkPlace
from disagg.kernels.routing import GatedActivation, Routing
from disagg.kernels.triton import attention
from disagg.kernels.triton.fp8_rows import quantize_rows
from disagg.kernels.triton.ops import TritonOps

OPS = TritonOps()
FP8 = torch.float8_e4m3fn
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", FP8: "fp8"}
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 1e-2, FP8: 3e-2}
"""Norm of the error over the norm of what fp32 gives, by the dtype of the inputs or of the KV, whichever is coarser."""

Outputs = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model and of the inputs."""

    T: int = 777
    H: int = 4096
    F: int = 14336
    N: int = 32
    K: int = 8
    D: int = 128
    V: int = 128256
    B: int = 64
    rows: int = 64
    """Rows of logits."""
    layers: int = 4
    """Layers of the cache that is copied."""
    contexts: tuple[int, ...] = (1, 0, 63, 64, 65, 1000, 4096, 8192)
    """Context lengths of a decode, in tokens."""
    chunks: tuple[tuple[int, int], ...] = ((1024, 0), (300, 2000), (1, 5000), (32, 8192))
    """(tokens, tokens before them) of the prompts of a step."""
    is_whole: bool = True
    """Whether there are 16-bit and 8-bit floats, which Triton's interpreter has not or rounds wrongly."""
    model: str = ""
    """Model whose attention this is, where it is not Llama-3-8B."""
    L: int | None = None
    """Dim of latents; None where values have a cache of their own."""
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.D if self.L is None else self.L


TINY = Sizes(
    T=9,
    H=200,
    F=96,
    N=4,
    K=2,
    D=32,
    V=260,
    B=16,
    rows=4,
    layers=2,
    contexts=(1, 0, 17, 40),
    chunks=((20, 0), (5, 30)),
    is_whole=False,
)


def others(sizes: Sizes) -> tuple[Sizes, ...]:
    """Sizes of models with other attention."""
    if not sizes.is_whole:
        return (
            replace(sizes, model="gpt-oss", window=20, sinks=True),
            replace(sizes, model="Gemma 2", window=20, soft_cap=2.0),
            replace(sizes, model="DeepSeek V3", K=1, D=48, L=32),
        )
    return (
        replace(sizes, model="gpt-oss", N=64, K=8, D=64, window=128, sinks=True),
        replace(sizes, model="Gemma 2", N=16, K=8, D=256, window=4096, soft_cap=50.0),
        replace(sizes, model="DeepSeek V3", N=128, K=1, D=576, L=512),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an op. Both functions give the outputs by name; `run` gives None where the kernel takes no such
    tensors, and makes outputs anew each time."""

    op: str
    label: str
    shape: str
    run: Callable[[], Outputs | None]
    expected: Callable[[], Outputs]
    tolerance: float = 0.0
    """Largest norm of the error; 0 requires the same values."""
    may_differ: float = 0.0
    """Share of the values that may differ where they are compared singly."""

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.op}, {self.label}"


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """All of them, those first that everything needs. Inputs are made when a case is taken."""
    dtypes = (torch.bfloat16, torch.float32) if sizes.is_whole else (torch.float32,)
    for dtype in dtypes:
        make = _Maker(sizes, device, dtype)
        yield from (make.embed(), make.rms_norm(), make.add_rms_norm(), make.silu_mul(), make.argmax_rows())
        yield from (make.add(), make.gelu_tanh_mul(), make.pointwise(), make.head_squares())
        for cache_dtype in (dtype, FP8) if dtype == torch.bfloat16 else (dtype,):
            yield make.qkv_rope_write(cache_dtype)
            yield make.decode(cache_dtype)
            yield make.prefill(cache_dtype)
            yield from make.copies(cache_dtype)
        yield make.draw_rows()
        yield make.moe_ffn()
        yield make.lora_add()
    for model in others(sizes):
        make = _Maker(model, device, dtypes[0])
        yield make.decode(dtypes[0])
        yield make.prefill(dtypes[0])
        if model.L is not None:
            yield make.latent_rope_write(model.D - model.L)
            yield from make.copies(dtypes[0])
    yield digest_case(sizes, device)
    if sizes.is_whole:
        yield quantize_case(sizes, device)


def nan_filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of NaN, or of the byte 0x7f where there is none."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)
    return torch.full(tuple(shape), 0x7F, dtype=torch.uint8, device=device).view(dtype)


def _named(*names: str) -> Callable[..., Outputs]:
    def outputs(*tensors: Tensor) -> Outputs:
        return dict(zip(names, tensors, strict=True))

    return outputs


class _Maker:
    """Cases of one dtype."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self._sizes, self._device, self._dtype = sizes, device, dtype
        self._random = torch.Generator(device).manual_seed(7)

    def _normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        found = torch.randn(shape, generator=self._random, device=self._device) * scale
        return found.to(self._dtype)

    def _case(
        self,
        op: str,
        shape: object,
        run: Callable[[], Outputs | None],
        expected: Callable[[], Outputs],
        *,
        kv: torch.dtype | None = None,
        tolerance: float | None = None,
        may_differ: float = 0.0,
    ) -> Case:
        label = NAMES[self._dtype] + (", fp8 KV" if kv == FP8 else "")
        label += f", {self._sizes.model}" if self._sizes.model else ""
        usual = TOLERANCES[FP8 if kv == FP8 else self._dtype]
        return Case(
            op=op,
            label=label,
            shape=str(shape),
            run=run,
            expected=expected,
            tolerance=usual if tolerance is None else tolerance,
            may_differ=may_differ,
        )

    # ---------------------------------------------------------------- rows

    def embed(self) -> Case:
        """Rows of a table."""
        table = self._normal(self._sizes.V, self._sizes.H)
        ids = torch.arange(self._sizes.rows, device=self._device) * 7
        out = _named("rows")
        return self._case(
            "embed",
            list(table.shape),
            lambda: _or_none(out, OPS.embed(ids, table)),
            lambda: out(table[ids]),
            tolerance=0.0,
        )

    def rms_norm(self) -> Case:
        """The norm of rows."""
        x, weight, out = self._normal(self._sizes.T, self._sizes.H), self._normal(self._sizes.H), _named("normed")
        return self._case(
            "rms_norm",
            list(x.shape),
            lambda: _or_none(out, OPS.rms_norm(x, weight, 1e-5)),
            lambda: out(reference.rms_norm(x.float(), weight.float(), 1e-5)),
        )

    def add_rms_norm(self) -> Case:
        """The sum, too."""
        shape = (self._sizes.T, self._sizes.H)
        x, residual, weight = self._normal(*shape), self._normal(*shape), self._normal(self._sizes.H)
        out = _named("normed", "sum")

        def run() -> Outputs | None:
            found = OPS.add_rms_norm(x, residual, weight, 1e-5)
            return None if found is None else out(*found)

        return self._case(
            "add_rms_norm",
            list(shape),
            run,
            lambda: out(*reference.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-5)),
        )

    def silu_mul(self) -> Case:
        """Both halves."""
        x, out = self._normal(self._sizes.T, 2 * self._sizes.F, scale=4.0), _named("product")
        return self._case(
            "silu_mul",
            list(x.shape),
            lambda: _or_none(out, OPS.silu_mul(x)),
            lambda: out(reference.silu_mul(x.float())),
        )

    def gelu_tanh_mul(self) -> Case:
        """Both halves, with the other activation."""
        x, out = self._normal(self._sizes.T, 2 * self._sizes.F, scale=2.0), _named("product")
        return self._case(
            "gelu_tanh_mul",
            list(x.shape),
            lambda: _or_none(out, OPS.gelu_tanh_mul(x)),
            lambda: out(reference.gelu_tanh_mul(x.float())),
        )

    def add(self) -> Case:
        """Two matrices."""
        (x, y), out = (self._normal(self._sizes.T, self._sizes.H) for _ in range(2)), _named("sum")
        return self._case(
            "add", list(x.shape), lambda: _or_none(out, OPS.add(x, y)), lambda: out(x.float() + y.float())
        )

    def pointwise(self) -> Case:
        """All functions."""
        x, out = self._normal(self._sizes.T, self._sizes.H, scale=30.0), _named(*get_args(Pointwise))

        def run() -> Outputs | None:
            found = [OPS.pointwise(x, function, 20.0) for function in get_args(Pointwise)]
            return None if any(each is None for each in found) else out(*found)

        return self._case(
            "pointwise",
            list(x.shape),
            run,
            lambda: out(*(reference.pointwise(x.float(), function, 20.0) for function in get_args(Pointwise))),
        )

    def head_squares(self) -> Case:
        """Of all heads of q and k."""
        sizes, out = self._sizes, _named("sums")
        qkv = self._normal(sizes.T, (sizes.N + 2 * sizes.K) * sizes.D)
        return self._case(
            "head_squares",
            list(qkv.shape),
            lambda: _or_none(out, OPS.head_squares(qkv, sizes.K, sizes.D)),
            lambda: out(reference.head_squares(qkv.float(), sizes.K, sizes.D)),
        )

    def moe_ffn(self) -> Case:
        """A share of gpt-oss's experts, with few rows of each."""
        sizes, out = self._sizes, _named("rows")
        E, H, inner = (32, 2880, 720) if sizes.is_whole else (8, 40, 24)
        x, bias_E = self._normal(sizes.rows, H), self._normal(E).float()
        router = Router(
            Routing(num_experts=E, top_k=4, score="softmax_of_top"), self._normal(E, H).float() / 50, bias_E
        )
        activation = GatedActivation(kind="clamped_swiglu")
        weights = [self._normal(E, *shape, scale=0.02) for shape in ((2 * inner, H), (H, inner), (2 * inner,), (H,))]
        experts = Experts(activation, weights[0], weights[1], weights[2], weights[3])
        gate_up, down, gate_up_bias, down_bias = (weight.float() for weight in weights)
        wide = Experts(activation, gate_up, down, gate_up_bias, down_bias)
        return self._case(
            "moe_ffn",
            [sizes.rows, E, H, inner],
            lambda: _or_none(out, OPS.moe_ffn(x, router, experts, None)),
            lambda: out(reference.moe_ffn(x.float(), router, wide, None)),
        )

    def lora_add(self) -> Case:
        """Adapters of three modules side by side, of other ranks each; rows without an adapter stay as they were."""
        T, H, outputs, rank = self._sizes.rows, self._sizes.H, self._sizes.H // 2, 16
        columns, device, out = (outputs - 2 * (outputs // 4), *2 * (outputs // 4,)), self._device, _named("rows")
        ranks = torch.tensor([[16, 5, 0], [1, 0, 8]], dtype=torch.int32, device=device)
        scales = torch.tensor([[2.0, 0.5, 1.0], [1.0, 1.0, 0.25]], device=device)
        a, b = self._normal(2, 3, rank, H, scale=H**-0.5), self._normal(2, rank, outputs)
        adapters = Lora(a, b, ranks, scales, columns)
        wide = Lora(a.float(), b.float(), ranks, scales, columns)
        x, y = self._normal(T, H), self._normal(T, outputs)
        slots = torch.arange(T, dtype=torch.int32, device=device) % 3 - 1
        return self._case(
            "lora_add",
            [T, H, outputs, rank],
            lambda: _or_none(out, OPS.lora_add(x, y.clone(), adapters, slots)),
            lambda: out(reference.lora_add(x.float(), y.float().clone(), wide, slots)),
        )

    def argmax_rows(self) -> Case:
        """With padding behind the vocabulary, and rows that nothing can be chosen from."""
        V, out = self._sizes.V, _named("ids")
        logits = self._normal(self._sizes.rows, V + 8)
        logits[:, V:] = 100.0
        logits[0, V - 1], logits[1, V // 2] = float("inf"), float("nan")
        return self._case(
            "argmax_rows",
            list(logits.shape),
            lambda: _or_none(out, OPS.argmax_rows(logits, V)),
            lambda: out(reference.argmax_rows(logits, V)),
            tolerance=0.0,
        )

    def draw_rows(self) -> Case:
        """Greedy rows, rows without filters, and rows with filters that leave one token."""
        R, V, device, out = self._sizes.rows, self._sizes.V, self._device, _named("ids")
        logits = self._normal(R, V, scale=3.0)
        rows = torch.arange(R, device=device)
        temperatures = torch.tensor([1.0, 0.7, 0.0, 2.0], device=device)[rows % 4]
        top_k = torch.where(rows % 8 == 5, 1, 0).to(torch.int32)
        filters = Filters(
            temperatures_R=temperatures,
            top_k_R=top_k,
            top_p_R=torch.ones(R, dtype=torch.float64, device=device),
            min_p_R=torch.zeros(R, dtype=torch.float64, device=device),
            seeds_R=rows * 12345 - 7,
            indices_R=rows,
        )

        def expected() -> Outputs:
            numbers = [uniform((row * 12345 - 7) % (1 << 64), row) for row in range(R)]
            drawn = reference.draw_unfiltered(
                logits, V, temperatures.clamp(min=1e-5), torch.tensor(numbers, dtype=torch.float64, device=device)
            )
            is_greedy = (temperatures < 1e-5) | (top_k == 1)
            return out(torch.where(is_greedy, reference.argmax_rows(logits, V), drawn))

        return self._case(
            "draw_rows",
            list(logits.shape),
            lambda: out(OPS.draw_rows(logits, V, filters)),
            expected,
            tolerance=0.0,
            may_differ=1.0 / R,  # a number at the border of two tokens
        )

    # ---------------------------------------------------------------- KV

    def _cache(self, num_tokens: int, dtype: torch.dtype, layers: int = 1) -> Tensor:
        """NL2KBD with values."""
        sizes = self._sizes
        blocks = -(-num_tokens // sizes.B) + 2
        shape = (blocks, layers, self._planes, sizes.K, sizes.B, sizes.D)
        return torch.randn(shape, generator=self._random, device=self._device).to(dtype)

    @property
    def _planes(self) -> int:
        return 2 if self._sizes.L is None else 1

    def _keys_and_values(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Of layer 0."""
        return cache[:, 0, 0], cache[:, 0, self._planes - 1, ..., : self._sizes.value_dim]

    def _form(self) -> AttentionForm:
        sizes = self._sizes
        sinks_N = torch.linspace(-2.0, 3.0, sizes.N, device=self._device) if sizes.sinks else None
        return AttentionForm(float(sizes.D**-0.5), sizes.window, sizes.soft_cap, sinks_N)

    def _room(self, q: Tensor) -> Tensor:
        return nan_filled((*q.shape[:2], self._sizes.value_dim), q.dtype, q.device)

    def qkv_rope_write(self, cache_dtype: torch.dtype) -> Case:
        """With norms of the heads; every seventh token is padding, and writes nothing into a cache of NaN."""
        sizes, device = self._sizes, self._device
        blocks = -(-sizes.T // sizes.B) + 2
        slots = torch.randperm(blocks * sizes.B, generator=self._random, device=device)[: sizes.T]
        slots[::7] = -1
        positions = torch.randint(0, 64, (sizes.T,), generator=self._random, device=device)
        cos, sin = (self._normal(64, sizes.D // 2).repeat(1, 2) for _ in range(2))
        norms = [self._normal(sizes.D) for _ in range(2)]
        qkv = self._normal(sizes.T, (sizes.N + 2 * sizes.K) * sizes.D)
        out = _named("q", "keys", "values")
        shape = (blocks, 1, 2, sizes.K, sizes.B, sizes.D)

        def run() -> Outputs | None:
            cache = nan_filled(shape, cache_dtype, device)
            layer = RopeWrite(norms[0], norms[1], 1e-6, cos, sin, cache[:, 0, 0], cache[:, 0, 1])
            found = OPS.qkv_rope_write(qkv, positions, slots, layer)
            return None if found is None else out(found, cache[:, 0, 0], cache[:, 0, 1])

        def expected() -> Outputs:
            # Roundings before that to 8 bits move a value in twenty to its neighbour there: they are made here, too.
            dtype = self._dtype if cache_dtype == FP8 else torch.float32
            cache = nan_filled(shape, dtype, device)
            q_norm, k_norm, wide_cos, wide_sin = (each.to(dtype) for each in (*norms, cos, sin))
            layer = RopeWrite(q_norm, k_norm, 1e-6, wide_cos, wide_sin, cache[:, 0, 0], cache[:, 0, 1])
            q = reference.qkv_rope_write(qkv.to(dtype), positions, slots, layer)
            stored = cache.float().clamp(-448.0, 448.0).to(FP8).float() if cache_dtype == FP8 else cache
            return out(q, stored[:, 0, 0], stored[:, 0, 1])

        return self._case("qkv_rope_write", list(qkv.shape), run, expected, kv=cache_dtype)

    def latent_rope_write(self, tail: int) -> Case:
        """Every seventh token is padding, and writes nothing into a cache of NaN."""
        sizes, device, L = self._sizes, self._device, self._sizes.value_dim
        blocks = -(-sizes.T // sizes.B) + 2
        slots = torch.randperm(blocks * sizes.B, generator=self._random, device=device)[: sizes.T]
        slots[::7] = -1
        positions = torch.randint(0, 64, (sizes.T,), generator=self._random, device=device)
        cos, sin = (self._normal(64, tail // 2).repeat(1, 2) for _ in range(2))
        absorbed = self._normal(sizes.N, sizes.T, L).transpose(0, 1)
        rows = (self._normal(sizes.T, L), self._normal(sizes.T, tail), absorbed, self._normal(sizes.T, sizes.N, tail))
        out = _named("q", "cache")

        def written(ops: Any, dtype: torch.dtype) -> Outputs | None:
            cache = nan_filled((blocks, 1, sizes.B, sizes.D), dtype, device)
            layer = LatentWrite(cos.to(dtype), sin.to(dtype), cache)
            found = ops.latent_rope_write(*(each.to(dtype) for each in rows), positions, slots, layer)
            return None if found is None else out(found, cache)

        def expected() -> Outputs:
            found = written(reference, torch.float32)
            assert found is not None, "the reference takes all tensors"
            return found

        return self._case("latent_rope_write", [sizes.T, sizes.N, L], lambda: written(OPS, self._dtype), expected)

    def decode(self, cache_dtype: torch.dtype) -> Case:
        """Slots behind each context hold NaN."""
        sizes, out = self._sizes, _named("out")
        counts = [-(-context // sizes.B) for context in sizes.contexts]
        cache = self._cache(sum(counts) * sizes.B, cache_dtype)
        tables = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device=self._device)
        order = torch.randperm(sum(counts), generator=self._random, device=self._device).to(torch.int32)
        first = 0
        for row, (count, context) in enumerate(zip(counts, sizes.contexts, strict=True)):
            tables[row, :count] = order[first : first + count]
            first += count
            if context % sizes.B:
                _spoil(cache, int(tables[row, count - 1]), context % sizes.B)
        lens = torch.tensor(sizes.contexts, dtype=torch.int32, device=self._device)
        q, form = self._normal(len(counts), sizes.N, sizes.D), self._form()
        caches = self._keys_and_values(cache)

        def run() -> Outputs | None:
            return _or_none(out, OPS.paged_decode_attention(q, *caches, tables, lens, form, self._room(q)))

        def expected() -> Outputs:
            args = (q.float(), *self._keys_and_values(cache.float()), tables, lens, form)
            return out(reference.paged_decode_attention(*args))

        return self._case("paged_decode_attention", f"contexts {sizes.contexts}", run, expected, kv=cache_dtype)

    def prefill(self, cache_dtype: torch.dtype) -> Case:
        """Several prompts at once; slots behind each context hold NaN."""
        sizes, out = self._sizes, _named("out")
        counts = [-(-(tokens + start) // sizes.B) for tokens, start in sizes.chunks]
        cache = self._cache(sum(counts) * sizes.B, cache_dtype)
        order = torch.randperm(sum(counts), generator=self._random, device=self._device).to(torch.int32)
        chunks, places, row, first = [], [], 0, 0
        for (tokens, start), count in zip(sizes.chunks, counts, strict=True):
            table = order[first : first + count]
            chunks.append(PrefillChunk(slice(row, row + tokens), start, table))
            places.append(ChunkPlace(row, tokens, start, first))
            row, first = row + tokens, first + count
            if (tokens + start) % sizes.B:
                _spoil(cache, int(table[-1]), (tokens + start) % sizes.B)
        spec = AttentionSpec(
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            kv_dtype=str(cache_dtype).removeprefix("torch."),
            num_heads=sizes.N,
            num_kv_heads=sizes.K,
            head_dim=sizes.D,
            block_size=sizes.B,
            scale=float(sizes.D**-0.5),
            value_dim=sizes.L,
        )
        q, caches, form = self._normal(row, sizes.N, sizes.D), self._keys_and_values(cache), self._form()

        def run() -> Outputs | None:
            work = attention.plan_prefills(places, spec, form.window)
            planned: dict[int | None, PlannedPrefills] = {
                form.window: PlannedPrefills(work, torch.from_numpy(work.numbers).to(q.device), order)
            }
            prefills = Prefills(tuple(chunks), planned)
            return _or_none(out, OPS.paged_prefill_attention(q, *caches, prefills, form, self._room(q)))

        def expected() -> Outputs:
            room = self._room(q).float()
            args = (q.float(), *self._keys_and_values(cache.float()), Prefills(tuple(chunks)), form, room)
            return out(reference.paged_prefill_attention(*args))

        return self._case("paged_prefill_attention", f"chunks {sizes.chunks}", run, expected, kv=cache_dtype)

    def copies(self, cache_dtype: torch.dtype) -> Iterator[Case]:
        """Part of a sequence out of the cache, and into another one."""
        sizes = self._sizes
        blocks = list(range(17, 0, -1))
        cache = self._cache(17 * sizes.B, cache_dtype, sizes.layers)
        start, end = 5, 17 * sizes.B - 3
        nbytes = sizes.layers * self._planes * sizes.K * (end - start) * sizes.D * cache_dtype.itemsize
        taken, placed = _named("bytes"), _named("cache")
        expected_bytes = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        reference.gather_kv(cache, blocks, start, end, expected_bytes)

        def gather() -> Outputs | None:
            room = nan_filled((nbytes,), torch.uint8, self._device)
            return _or_none(taken, OPS.gather_kv(cache, blocks, start, end, room))

        def scatter() -> Outputs | None:
            room = nan_filled(cache.shape, cache_dtype, self._device)
            found = OPS.scatter_kv(room, blocks, start, end, expected_bytes)
            return None if found is None else placed(room.view(torch.uint8))

        def scattered() -> Outputs:
            room = nan_filled(cache.shape, cache_dtype, self._device)
            return placed(reference.scatter_kv(room, blocks, start, end, expected_bytes).view(torch.uint8))

        shape = f"tokens {start} to {end} of {list(cache.shape)}"
        yield self._case("gather_kv", shape, gather, lambda: taken(expected_bytes), kv=cache_dtype, tolerance=0.0)
        yield self._case("scatter_kv", shape, scatter, scattered, kv=cache_dtype, tolerance=0.0)


def digest_case(sizes: Sizes, device: torch.device) -> Case:
    """The digest of random words."""
    words = torch.randint(-(1 << 62), 1 << 62, (sizes.T * sizes.H + 1,), device=device)
    out = _named("sums")
    return Case(
        op="digest_sums",
        label="int64",
        shape=str(list(words.shape)),
        run=lambda: _or_none(out, OPS.digest_sums(words, -5)),
        expected=lambda: out(reference.digest_sums(words, -5)),
    )


def quantize_case(sizes: Sizes, device: torch.device) -> Case:
    """Rows of 8-bit floats, and their scales; no op of `DISAGG_KERNELS`."""
    x = torch.randn((sizes.T, sizes.F), device=device).to(torch.bfloat16) * 3
    out = _named("values")

    def run() -> Outputs:
        values, scales = quantize_rows(x)
        return out(values.float() * scales[:, None])

    return Case(
        op="quantize_rows",
        label="bf16",
        shape=str(list(x.shape)),
        run=run,
        expected=lambda: out(x.float()),
        tolerance=4e-2,
    )


def _or_none(name: Callable[..., Outputs], found: Tensor | None) -> Outputs | None:
    return None if found is None else name(found)


def _spoil(cache_NL2KBD: Tensor, block: int, offset: int) -> None:
    """NaN in a block from a token on."""
    tail = cache_NL2KBD[block, :, :, :, offset:]
    tail.copy_(nan_filled(tail.shape, tail.dtype, tail.device))
