"""The table of docs/gpu.md, from what `launches.py` found: each kernel, how often it is launched, and what it uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MODELS = {
    "Llama-3-8B": "Llama-3-8B",
    "Llama-3-8B, TP 2": "its TP 2 share",
    "Llama-3-70B, TP 8": "70B TP 8 share",
    "Qwen3-8B": "Qwen3-8B",
    "Qwen3-14B": "Qwen3-14B",
}
"""With the headings of their columns."""
WORDS = {
    "_embed_kernel": "embedding",
    "_rms_norm_kernel": "norm",
    "_kernel": "rope, and writing KV",
    "_prefill_kernel": "prefill attention",
    "_join_prefill_kernel": "joining the pieces of a split context",
    "_decode_kernel": "decode attention",
    "_join_kernel": "joining the pieces of a decode",
    "_add_rms_norm_kernel": "sum and norm",
    "_silu_mul_kernel": "SiLU and product",
    "_copy_kernel": "KV out of the cache and back, a slice each",
    "_chunk_kernel": "argmax of chunks",
    "_row_kernel": "argmax of rows",
    "_groups_kernel": "drawing: sums of groups",
    "_bounds_kernel": "drawing: bounds of the filters",
    "_collect_kernel": "drawing: the largest logits",
    "_rank_kernel": "drawing: ranking them",
    "_uniform_kernel": "drawing: random numbers",
    "_draw_kernel": "drawing: among those ranked",
    "_search_kernel": "drawing: search of the vocabulary",
    "_digest_kernel": "digest of 4 MiB",
    "_quantize_rows_kernel": "rows in fp8",
}
"""In the order of a step."""
KV = {"bfloat16": "bf16 KV", "float8_e4m3fn": "fp8 KV"}

Usage = tuple[int, int, int]
"""Registers, spilled bytes, bytes of shared memory."""


def table(found: Mapping[str, Any]) -> str:
    """In Markdown. A cell is "registers", or "registers / spilled bytes" where there are any."""
    lines = [
        "| kernel | launches | " + " | ".join(MODELS.values()) + " | shared memory, KiB |",
        "|" + "---|" * (len(MODELS) + 3),
    ]
    for kernel in sorted(kernels_of(found), key=list(WORDS).index):
        launches = launches_of(found, kernel)
        for kv, usages in by_kv(found, kernel):
            cells = [WORDS[kernel] + kv, launches, *map(cell, usages)]
            cells.append(f"{max(shared for _, _, shared in usages) / 1024:.1f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kernels_of(found: Mapping[str, Any]) -> set[str]:
    """All that were launched."""
    return {kernel for step in found["steps"].values() for kernel in step}


def launches_of(found: Mapping[str, Any], kernel: str) -> str:
    """Of a step of one layer that launches it, or of one call."""
    counts = {step[kernel] for step in found["steps"].values() if kernel in step}
    return " or ".join(map(str, sorted(counts)))


def by_kv(found: Mapping[str, Any], kernel: str) -> Iterable[tuple[str, Sequence[Usage]]]:
    """A row for each dtype of KV where it matters; one usage for each model."""
    wide = usages_of(found, kernel, "")
    if wide is not None:  # the model's own MLP is wider than that of its layer
        return [("", wide)]
    rows = {words: usages_of(found, kernel, kv) for kv, words in KV.items()}
    of_each = [(f", {words}", usages) for words, usages in rows.items() if usages is not None]
    return [("", of_each[0][1])] if of_each[0][1] == of_each[-1][1] else of_each


def usages_of(found: Mapping[str, Any], kernel: str, kv: str) -> Sequence[Usage] | None:
    """Of each model; None where they do not launch it with this dtype of KV."""
    usages = [found["kernels"][f"{name}, {kv}"].get(kernel) for name in MODELS]
    return None if None in usages else usages


def cell(usage: Usage) -> str:
    """Of one kernel with one model."""
    registers, spilled, _ = usage
    return f"{registers} / {spilled}" if spilled else str(registers)
