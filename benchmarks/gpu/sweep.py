"""Launch shapes of the attention kernels on this GPU: the section `sweep`.

Heads as in Llama-3-8B, bf16, blocks of 64. Shapes that fit on a multiprocessor (`shapes.py`) are timed in four cells of
decode and four of prefill, those first that are likely to tell most, so that a run that is cut off has tried them. A
row for each shape: its speed-up over the built-in one, geometric mean of the cells, and the times. Each result is
compared with that of the built-in shape. Behind each round, a row with the best so far as a value of
`DISAGG_TRITON_SHAPES`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.gpu import attention
from benchmarks.gpu.report import Row, RowFile, read_rows
from benchmarks.gpu.shapes import (
    DECODE_CELLS,
    PREFILL_CELLS,
    Cell,
    KernelShape,
    Kind,
    best,
    candidates,
    read_table,
    rounds,
    speed_up,
    variable,
)
from benchmarks.gpu.timing import attempt, kernel_ms, parse, row_file
from disagg.kernels.ops import PlannedPrefills
from disagg.kernels.prefill_work import ChunkPlace
from disagg.kernels.settings.triton_shapes import VARIABLE

SECTION = "sweep"
MAX_ERROR = 0.02
"""Largest norm of the error against the built-in shape: both round to 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The tensors and cells that a sweep measures."""

    shape: attention.TensorSizes
    calls: Mapping[Kind, int]
    """Calls in one CUDA graph."""
    repeats: int
    num_shapes: int
    """Maximum number of shapes of each round."""

    def cells(self, kind: Kind) -> tuple[Cell, ...]:
        """(batch, context) of decodes, (tokens, tokens before them) of prompts."""
        return self.shape.decode_cells if kind == "decode" else self.shape.prefill_chunks


FULL = Sizes(
    shape=attention.TensorSizes(decode_cells=DECODE_CELLS, prefill_chunks=PREFILL_CELLS),
    calls={"decode": 10, "prefill": 3},
    repeats=7,
    num_shapes=100,
)
TINY = Sizes(
    shape=attention.TensorSizes(
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.float16,
        decode_cells=((1, 70), (2, 20)),
        prefill_chunks=((64, 0), (64, 64)),
    ),
    calls={"decode": 1, "prefill": 1},
    repeats=1,
    num_shapes=2,
)
"""Sizes for a CPU, where Triton's interpreter computes."""


@dataclass
class Sweep:
    """The measurements of a sweep so far. Owner: the one thread."""

    sizes: Sizes
    device: torch.device
    rows: RowFile
    times: dict[KernelShape, dict[Cell, float]] = field(default_factory=dict)
    """Microseconds."""
    _right: dict[tuple[Kind, Cell], Tensor] = field(default_factory=dict)
    """Results of the first shape that was measured, which is the built-in one unless that failed."""

    def measure(self, shape: KernelShape) -> None:
        """All cells of a shape, and its row.

        Raises:
            ValueError: a result differs from that of the built-in shape.
        """
        found: dict[Cell, float] = {}
        with launched_as(shape):
            for cell in self.sizes.cells(shape.kind):
                run = self._prepared(shape.kind, cell)
                self._compare(shape.kind, cell, run())
                calls = self.sizes.calls[shape.kind]
                found[cell] = kernel_ms(run, self.device, calls=calls, repeats=self.sizes.repeats) * 1e3
        self.times[shape] = found
        self.rows.add(name_of(shape), speed_up(shape, self.times), "of the built-in's speed", detail=as_detail(found))

    def report_best(self) -> None:
        """A row with the value of the variable, once there is a time of a built-in shape."""
        found = best(self.times)
        if found:
            gains = ", ".join(f"{kind} {gained:.3f}" for kind, (_, gained) in found.items())
            value = variable(shape for shape, _ in found.values())
            self.rows.add(f"best of {len(self.times)}", None, "", detail=f"{VARIABLE}='{value}' ({gains})")

    @functools.cached_property
    def _cache(self) -> attention.Cache:
        return attention.Cache(self.sizes.shape, self.device)

    def _prepared(self, kind: Kind, cell: Cell) -> Callable[[], Tensor]:
        """A call with the same inputs for every shape; the list of work is that of the shape."""
        return self._decode(*cell) if kind == "decode" else self._prefill(*cell)

    def _compare(self, kind: Kind, cell: Cell, result: Tensor) -> None:
        right = self._right.setdefault((kind, cell), result.clone())
        error = float((result.float() - right.float()).norm() / right.float().norm())
        if not error <= MAX_ERROR:  # NaN is an error, too
            raise ValueError(f"{cell}: the result differs from that of the built-in shape by {error:.3g} of its norm")

    def _decode(self, batch: int, context_len: int) -> Callable[[], Tensor]:
        from disagg.kernels.triton.attention import paged_decode_attention

        cache, q_SND = self._cache, self._queries(batch)
        lens_S = torch.full((batch,), context_len, dtype=torch.int32, device=self.device)
        arguments = (q_SND, cache.keys_NKBD, cache.values_NKBD, cache.tables(batch, context_len), lens_S)
        return lambda: taken(paged_decode_attention(*arguments, self.sizes.shape.form))

    def _prefill(self, num_tokens: int, start: int) -> Callable[[], Tensor]:
        from disagg.kernels.triton.attention import paged_prefill_attention, plan_prefills

        cache, q_TND = self._cache, self._queries(num_tokens)
        work = plan_prefills([ChunkPlace(0, num_tokens, start, 0)], cache.spec)
        numbers = torch.from_numpy(work.numbers).to(self.device)
        planned = PlannedPrefills(work, numbers, cache.tables(1, start + num_tokens)[0])
        arguments = (q_TND, cache.keys_NKBD, cache.values_NKBD, planned, self.sizes.shape.form)
        out_TND = torch.empty_like(q_TND)
        return lambda: taken(paged_prefill_attention(*arguments, out_TND))

    def _queries(self, num_rows: int) -> Tensor:
        """The same for every shape."""
        torch.manual_seed(num_rows)
        return self._cache.queries(num_rows)


@contextmanager
def launched_as(shape: KernelShape) -> Iterator[None]:
    """The variable is read at each launch."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = variable([shape])
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def taken(out: Tensor | None) -> Tensor:
    """Of a kernel that has to take the tensors."""
    if out is None:
        raise ValueError("the kernel does not take these tensors")
    return out


def name_of(shape: KernelShape) -> str:
    """Name of a shape's row."""
    return f"{shape.kind}: {shape}"


def as_detail(found: Mapping[Cell, float]) -> str:
    """Such as `64 x 4096: 358.2 us`; `times_of` reads it."""
    return "; ".join(f"{first} x {second}: {us:.1f} us" for (first, second), us in found.items())


def times_of(rows: Iterable[Row], shapes: Iterable[KernelShape]) -> dict[KernelShape, dict[Cell, float]]:
    """What an earlier process with the same file of rows measured, before it lost its context."""
    by_name = {name_of(shape): shape for shape in shapes}
    return {
        by_name[row.name]: {
            (int(first), int(second)): float(us)
            for first, second, us in re.findall(r"(\d+) x (\d+): ([0-9.]+) us", row.detail)
        }
        for row in rows
        if row.section == SECTION and row.name in by_name and row.status != "failed"
    }


def main() -> None:
    """The section `sweep`."""
    arguments = parse(main.__doc__)
    device = torch.device(arguments.device)
    sizes = FULL if device.type == "cuda" else TINY
    shapes = candidates(sizes.shape.block_size)
    sweep = Sweep(sizes, device, row_file(arguments, SECTION), times_of(read_rows(arguments.rows), shapes))
    for each in rounds(shapes, read_table()):
        for shape in each[: sizes.num_shapes]:
            attempt(sweep.rows, name_of(shape), functools.partial(sweep.measure, shape))
        sweep.report_best()


if __name__ == "__main__":
    main()
