"""Who computes the attention of a step's prompts: providers in the order of preference.

    provider = kind.of(spec)                      once: shapes and dtypes of a rank; `attention_choice` chooses the kind
    works = provider.works(places)                once a step, before its arrays are copied to the device
    provider.plan(prefills)                       once a step, behind that copy
    provider.attend(q, keys, values, form, out)   in each layer

Providers do not compute decodes: these are in captured graphs, see `dispatch`.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from typing_extensions import override

from disagg.kernels.dispatch import paged_prefill_attention, plan_prefills
from disagg.kernels.ops import AttentionForm, AttentionSpec, PlannedPrefills, PrefillChunk, Prefills
from disagg.kernels.prefill_work import ChunkPlace, PrefillWork


class AttentionProvider(Protocol):
    """Owner: the thread that computes."""

    name: str
    spec: AttentionSpec

    @classmethod
    def of(cls, spec: AttentionSpec) -> Self:
        """Make the provider of a rank."""
        ...

    @staticmethod
    def takes(spec: AttentionSpec) -> str | None:
        """Reason why this provider cannot be used, or None. Does not touch the device."""
        ...

    def works(self, places: Sequence[ChunkPlace]) -> Mapping[int | None, PrefillWork]:
        """Data that `plan` needs on the device, as `Prefills.planned`, for at least one chunk; empty if it needs
        none."""
        ...

    def plan(self, prefills: Prefills) -> None:
        """Prepare a step whose chunks are adjacent in the batch."""
        ...

    def attend(
        self, q_TND: Tensor, key_cache_NKBD: Tensor, value_cache_NKBD: Tensor, form: AttentionForm, out_TND: Tensor
    ) -> None:
        """Write the rows of `out` of the planned chunks; q and `out` are those of the whole batch. The KV is in the
        cache. The layer's form is one of those that the spec names."""
        ...


class OwnKernels(AttentionProvider):
    """Our own kernels, through `dispatch`: on a GPU Triton's kernel, all chunks in one launch, on a CPU the compiled
    one for each chunk."""

    name = "triton"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._prefills = Prefills(())

    @override
    @classmethod
    def of(cls, spec: AttentionSpec) -> Self:
        return cls(spec)

    @override
    @staticmethod
    def takes(spec: AttentionSpec) -> str | None:
        if not spec.device.startswith("cuda"):
            return f"its kernels are for CUDA devices, not for {spec.device}"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        from disagg.kernels.triton.attention import reads

        q_TND, cache_NKBD, table_M = _meta(spec)
        values_NKBD, form = cache_NKBD[..., : spec.value_dim], _meta_form(spec)
        return None if reads(q_TND, cache_NKBD, values_NKBD, table_M, form) else f"its kernels do not take {spec}"

    @override
    def works(self, places: Sequence[ChunkPlace]) -> Mapping[int | None, PrefillWork]:
        return plan_prefills(places, self.spec)

    @override
    def plan(self, prefills: Prefills) -> None:
        self._prefills = prefills

    @override
    def attend(
        self, q_TND: Tensor, key_cache_NKBD: Tensor, value_cache_NKBD: Tensor, form: AttentionForm, out_TND: Tensor
    ) -> None:
        paged_prefill_attention(q_TND, key_cache_NKBD, value_cache_NKBD, self._prefills, form, out_TND)


class FlashInfer(AttentionProvider):
    """FlashInfer's wrapper for paged prompts: all chunks in one launch, long contexts split among processors. Our cache
    is its "HND" layout. NOT VERIFIED on a GPU: written against the signatures of flashinfer-python 0.7.2."""

    name = "flashinfer"
    WORKSPACE_BYTES = 128 << 20

    def __init__(self, spec: AttentionSpec) -> None:
        library: Any = importlib.import_module("flashinfer")
        workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._wrapper: Any = library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")
        self.spec = spec
        self._rows = slice(0)

    @override
    @classmethod
    def of(cls, spec: AttentionSpec) -> Self:
        return cls(spec)

    @override
    @staticmethod
    def takes(spec: AttentionSpec) -> str | None:
        if not spec.device.startswith("cuda"):
            return f"it is for CUDA devices, not for {spec.device}"
        if importlib.util.find_spec("flashinfer") is None:
            return "it is not installed (pip install flashinfer-python)"
        if spec.dtype not in ("bfloat16", "float16"):
            return f"it takes bfloat16 and float16, not {spec.dtype}"
        if spec.kv_dtype != spec.dtype:
            return f"KV in {spec.kv_dtype} beside {spec.dtype} was not tried with it"
        if spec.value_dim is not None:
            return "latent attention was not tried with it"
        if not spec.is_plain:
            return "windows, soft caps and sinks were not tried with it"
        if spec.head_dim not in (64, 128, 256):
            return f"it takes heads of 64, 128 and 256, not of {spec.head_dim}"
        return None

    @override
    def works(self, places: Sequence[ChunkPlace]) -> Mapping[int | None, PrefillWork]:
        return {}

    @override
    def plan(self, prefills: Prefills) -> None:
        """Takes the numbers from the host, where the library reads them; only the tables are on the device."""
        spec, chunks = self.spec, prefills.chunks
        first = chunks[0].rows.start
        ends = [chunk.start + chunk.rows.stop - chunk.rows.start for chunk in chunks]
        page_ends = itertools.accumulate(len(chunk.block_table_M) for chunk in chunks)
        self._rows = slice(first, chunks[-1].rows.stop)
        self._wrapper.plan(
            _int32([0, *(chunk.rows.stop - first for chunk in chunks)]),
            _int32([0, *page_ends]),
            torch.cat([chunk.block_table_M for chunk in chunks]),
            _int32([(end - 1) % spec.block_size + 1 for end in ends]),
            num_qo_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_qk=spec.head_dim,
            page_size=spec.block_size,
            causal=True,
            sm_scale=spec.scale,
            q_data_type=getattr(torch, spec.dtype),
            kv_data_type=getattr(torch, spec.kv_dtype),
        )

    @override
    def attend(
        self, q_TND: Tensor, key_cache_NKBD: Tensor, value_cache_NKBD: Tensor, form: AttentionForm, out_TND: Tensor
    ) -> None:
        self._wrapper.run(q_TND[self._rows], (key_cache_NKBD, value_cache_NKBD), out=out_TND[self._rows])


PROVIDERS: tuple[type[AttentionProvider], ...] = (OwnKernels, FlashInfer)
"""The providers in the order of preference."""


def prompts(provider: AttentionProvider, *chunks: tuple[Tensor, int, int], first_row: int = 0) -> Prefills:
    """Make the prefills of chunks with the provider's work. A chunk is (block table on the provider's device, start,
    number of tokens); chunks stand one behind the other in the batch, as the engine gives them to `plan`."""
    made, places, row, first = [], [], first_row, 0
    for table_M, start, num_tokens in chunks:
        made.append(PrefillChunk(slice(row, row + num_tokens), start, table_M))
        places.append(ChunkPlace(row, num_tokens, start, first))
        row += num_tokens
        first += len(table_M)
    tables = torch.cat([table_M for table_M, _, _ in chunks])
    planned = {
        window: PlannedPrefills(work, torch.from_numpy(work.numbers).to(provider.spec.device), tables)
        for window, work in provider.works(places).items()
    }
    return Prefills(tuple(made), planned)


def _meta(spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, a cache and a table of these shapes, on the meta device."""
    heads = (spec.num_kv_heads, spec.block_size, spec.head_dim)
    return (
        torch.empty((1, spec.num_heads, spec.head_dim), dtype=getattr(torch, spec.dtype), device="meta"),
        torch.empty((1, *heads), dtype=getattr(torch, spec.kv_dtype), device="meta"),
        torch.empty(1, dtype=torch.int32, device="meta"),
    )


def _meta_form(spec: AttentionSpec) -> AttentionForm:
    """A form with all that some layer has."""
    return AttentionForm(
        spec.scale,
        window=min((window for window in spec.windows if window is not None), default=None),
        soft_cap=1.0 if spec.has_soft_cap else None,
        sinks_N=torch.empty(spec.num_heads, device="meta") if spec.has_sinks else None,
    )


def _int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
