"""What it costs to take the KV of a sequence out of the paged cache and to put it into another, on a GPU.

The shapes are those of Llama-3-8B in bf16: a block of 16 tokens holds 2 MiB. The limit is a plain copy of as many bytes
from device memory to device memory: gather and scatter each read and write every byte once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from benchmarks.gpu.report import RowFile
from benchmarks.gpu.timing import attempt, call_ms, parse, row_file
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.kernels.dispatch import gather_kv, scatter_kv
from disagg.proto.messages import KvLayout

TARGET = 0.90


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is measured."""

    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    ranges: tuple[tuple[int, int], ...] = ((0, 512), (0, 4096), (5, 4091))
    """Tokens [start, end) that are taken out at once."""

    @property
    def layout(self) -> KvLayout:
        """Of one token."""
        per_layer = 2 * self.num_kv_heads * self.head_dim * getattr(torch, self.dtype).itemsize
        return KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            bytes_per_token=self.num_layers * per_layer,
        )


TINY = Shape(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", ranges=((0, 48), (5, 41)))


def measure(rows: RowFile, shape: Shape, device: torch.device, start: int, end: int) -> None:
    """Gather and scatter of one range, and a copy of as many bytes; then what the engine does, checksum included."""
    num_blocks = 2 * -(-end // shape.block_size)
    cache = KvCache(shape.layout, num_blocks, shape.block_size, device)
    cache.tensor_NL2KBD.normal_()
    table = torch.randperm(num_blocks)[: num_blocks // 2].tolist()
    nbytes = (end - start) * shape.layout.bytes_per_token
    out, other = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy_ms = call_ms(lambda: other.copy_(out), device)
    gather_ms = call_ms(lambda: gather_kv(cache.tensor_NL2KBD, table, start, end, out), device)
    scatter_ms = call_ms(lambda: scatter_kv(cache.tensor_NL2KBD, table, start, end, out), device)
    rows.add(
        f"gather + scatter, tokens {start} to {end}",
        2 * nbytes / (gather_ms + scatter_ms) / 1e6,
        "GB/s",
        share=2 * copy_ms / (gather_ms + scatter_ms),
        target=TARGET,
        detail=f"{nbytes / 1e6:.0f} MB; gather {gather_ms:.3f} ms, scatter {scatter_ms:.3f} ms, copy {copy_ms:.3f} ms",
    )
    whole_ms = call_ms(lambda: cache.gather_part(table, start, end, out, 1), device, calls=1, repeats=3)
    rows.add(f"gather with checksum, tokens {start} to {end}", nbytes / whole_ms / 1e6, "GB/s", detail="as the engine")


def main() -> None:
    """The section `transfer`."""
    arguments = parse(main.__doc__)
    device, rows = torch.device(arguments.device), row_file(arguments, "transfer")
    shape = Shape() if device.type == "cuda" else TINY
    for start, end in shape.ranges:
        attempt(rows, f"tokens {start} to {end}", functools.partial(measure, rows, shape, device, start, end))


if __name__ == "__main__":
    main()
