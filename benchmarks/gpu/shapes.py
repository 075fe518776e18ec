"""Which launch shapes of the attention kernels `sweep` tries, in which order, and which of them is best. Pure.

What each uses of a multiprocessor was read off its machine code for sm_90, without a GPU (`shapes.json`, made by
`python -m tests.gpu_stub.shapes`). A shape is tried if the programs that it counts on are at once on a multiprocessor
of a Hopper GPU, and a thread spills few registers.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["decode", "prefill"]
Cell = tuple[int, int]
Fields = tuple[tuple[str, int | bool], ...]

DECODE_CELLS = ((64, 4096), (8, 8192), (256, 1024), (1, 32768))
"""(batch, context). The KV of each is larger than an L2 cache."""
PREFILL_CELLS = ((2048, 0), (8192, 0), (2048, 8192), (32, 32768))
"""(tokens of a chunk, tokens before them)."""

REGISTERS, REGISTER_UNIT = 65536, 256
"""Of a multiprocessor of sm_90, and those that a warp is given at a time."""
SHARED_BYTES, RESERVED_BYTES, BLOCK_BYTES = 233472, 1024, 232448
"""Of a multiprocessor; what each block takes besides; the most of a block."""
MAX_SPILLED_BYTES = 256
"""Spilled bytes of a thread. The built-in shapes have up to 248."""
TABLE = Path(__file__).with_name("shapes.json")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a thread; the shared memory is that of a block."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Values of `DISAGG_TRITON_SHAPES` for one kernel."""

    kind: Kind
    fields: Fields

    @property
    def values(self) -> dict[str, int | bool]:
        """The values of the fields, by key."""
        return dict(self.fields)

    def __str__(self) -> str:
        return ", ".join(f"{key} {str(value).lower()}" for key, value in self.fields)

    @property
    def code(self) -> str:
        """Names the machine code, which is the same however many programs run it."""
        return f"{self.kind}: {KernelShape(self.kind, tuple(field for field in self.fields if field[0] != 'programs'))}"


BUILT_IN: Mapping[Kind, KernelShape] = {
    "decode": KernelShape("decode", (("tile", 64), ("programs", 2), ("warps", 4), ("stages", 7))),
    "prefill": KernelShape("prefill", (("rows", 128), ("tile", 64), ("warps", 4), ("stages", 2), ("boxes", True))),
}
"""The shapes that the kernels have built in, for heads of 128 in bf16 and blocks of 64."""
LOADED = KernelShape("prefill", (("rows", 128), ("tile", 128), ("warps", 8), ("stages", 3), ("boxes", False)))
"""Built in as well, for caches that allow no boxes."""

SMALL_AND_LARGE = (
    (128, 64, 4, 1, True),
    (128, 32, 4, 2, True),
    (128, 32, 4, 3, True),
    (64, 64, 4, 2, True),
    (64, 64, 4, 3, True),
    (64, 32, 4, 2, True),
    (64, 32, 4, 3, True),
    (256, 64, 8, 2, True),
    (256, 64, 8, 3, True),
    (256, 32, 8, 2, True),
)
"""Beside the grid of prefill: programs of which three or four run at once, and one with two warp groups."""


def candidates(block_size: int = 64) -> list[KernelShape]:
    """All of the grid. A box lies within a block of the cache."""
    grid = itertools.product((32, 64, 128), (1, 2, 3), (4,), (3, 5, 7))
    found = [
        KernelShape("decode", tuple(zip(("tile", "programs", "warps", "stages"), each, strict=True))) for each in grid
    ]
    boxes = itertools.product((128,), (64, 128), (4, 8), (2, 3, 4), (True, False))
    for each in (*boxes, *SMALL_AND_LARGE):
        if not each[-1] or block_size % each[1] == 0:
            names = ("rows", "tile", "warps", "stages", "boxes")
            found.append(KernelShape("prefill", tuple(zip(names, each, strict=True))))
    return found


def programs_at_once(usage: Usage, num_warps: int) -> int:
    """Number of programs that one multiprocessor runs at once."""
    registers = num_warps * math.ceil(32 * usage.registers / REGISTER_UNIT) * REGISTER_UNIT
    if usage.shared_bytes > BLOCK_BYTES:
        return 0
    return min(REGISTERS // registers, SHARED_BYTES // (usage.shared_bytes + RESERVED_BYTES))


def fits(shape: KernelShape, usage: Usage) -> bool:
    """Whether it is worth a try."""
    wanted = int(shape.values.get("programs", 1))
    return usage.spilled_bytes <= MAX_SPILLED_BYTES and programs_at_once(usage, shape.values["warps"]) >= wanted


def read_table(path: Path = TABLE) -> dict[str, Usage]:
    """Usage by `KernelShape.code`."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {code: Usage(*numbers) for code, numbers in found["shapes"].items()}


def rounds(shapes: Iterable[KernelShape], table: Mapping[str, Usage]) -> list[list[KernelShape]]:
    """Those that fit, in order of what they are likely to tell: the built-in ones, then those that differ from one of
    them in one value, in two, and so on; within a round those that spill least first, decode and prefill in turns."""
    by_distance: dict[int, list[KernelShape]] = {}
    for shape in shapes:
        if fits(shape, table[shape.code]):
            by_distance.setdefault(_distance(shape), []).append(shape)
    return [_in_turns(by_distance[distance], table) for distance in sorted(by_distance)]


def _distance(shape: KernelShape) -> int:
    known = [each.values for each in (*BUILT_IN.values(), LOADED) if each.kind == shape.kind]
    return min(sum(value != built_in[key] for key, value in shape.fields) for built_in in known)


def _in_turns(shapes: Sequence[KernelShape], table: Mapping[str, Usage]) -> list[KernelShape]:
    kinds: tuple[Kind, ...] = ("decode", "prefill")

    def order(shape: KernelShape) -> tuple[bool, int]:
        return shape not in BUILT_IN.values(), table[shape.code].spilled_bytes  # others are compared with these

    columns = [sorted((shape for shape in shapes if shape.kind == kind), key=order) for kind in kinds]
    return [shape for row in itertools.zip_longest(*columns) for shape in row if shape is not None]


Times = Mapping[KernelShape, Mapping[Cell, float]]
"""Microseconds by shape and cell."""


def speed_up(shape: KernelShape, times: Times) -> float | None:
    """Over the built-in shape, geometric mean of the cells that this was timed in; None where it was in none, or a time
    of `shape` is missing."""
    mine, theirs = times.get(shape, {}), times.get(BUILT_IN[shape.kind], {})
    if not theirs or not all(cell in mine for cell in theirs):
        return None
    return math.exp(sum(math.log(us / mine[cell]) for cell, us in theirs.items()) / len(theirs))


def best(times: Times) -> dict[Kind, tuple[KernelShape, float]]:
    """The shape of each kind with the largest speed-up, and that; a kind without one is left out."""
    found: dict[Kind, tuple[KernelShape, float]] = {}
    for shape in times:
        gained = speed_up(shape, times)
        if gained is not None and (shape.kind not in found or gained > found[shape.kind][1]):
            found[shape.kind] = (shape, gained)
    return found


def variable(shapes: Iterable[KernelShape]) -> str:
    """The value of `DISAGG_TRITON_SHAPES` that launches these, at most one of each kind."""
    return json.dumps({shape.kind: shape.values for shape in shapes})
