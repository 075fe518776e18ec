"""Where the captured steps of a GPU read their inputs, and how a step's arrays get there without a wait.

A step of B sequences is computed as one of the next bucket size (`kernels.cuda_graph.bucket_sizes`): the rows past B
are padding, with token 0, slot -1 (nothing is written) and a context of length 0 (nothing is read).

A step's numbers are written into one of two pieces of pinned host memory and cross as one copy on the stream of the
step (`Staged`), then one small kernel spreads the block tables over rows of fixed width. The host waits only if it is
two steps ahead, until the memory that it is about to overwrite was read. Tokens that the host does not have yet,
because the step that samples them was only queued, are put in their rows on the device.

Layout, in bytes, n = the largest bucket: token ids 8n, positions 8n, slots 8n, sources 8n, slots of each window 8n,
context lengths 4n, slots of adapters 4n, then the tables [G, bucket, W], W blocks wide as the step needs them, int32,
of G cache groups.

Shapes: S sequences of a bucket, M blocks of the widest table, W of the step's widest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.batch_arrays import I64, BatchArrays
from disagg.engine.runner.model.batch import AdapterRows, Batch, WindowBatch
from disagg.kernels.cuda_graph import bucket_sizes

_cuda: Any = torch.cuda
"""Untyped: torch's stubs lack types for events."""


class Staged:
    """Memory of one layout on the device and twice on the host. Owner: the model runner. On a CPU, for tests, it
    copies plainly.

    Args:
        nbytes: of each piece.
        split: the arrays of a piece, views of a flat uint8 tensor.
    """

    def __init__(self, nbytes: int, device: torch.device, split: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.on_device = split(self._memory)
        """The arrays, always at the same place."""
        pinned = device.type == "cuda"
        self._pieces = tuple(_HostPiece(nbytes, split, pinned=pinned) for _ in range(2))
        self._current = 0

    def to_write(self) -> tuple[NDArray[Any], ...]:
        """The arrays on the host, free to be overwritten; they hold what was sent the time before last."""
        self._current ^= 1
        piece = self._pieces[self._current]
        piece.read.wait()
        return piece.arrays

    def send(self, used: int | None = None) -> None:
        """Queue the copy of the first `used` bytes of what was written, by default of all."""
        piece = self._pieces[self._current]
        self._memory[:used].copy_(piece.memory[:used], non_blocking=True)
        piece.read.set()


class _HostPiece:
    def __init__(self, nbytes: int, split: Callable[[Tensor], tuple[Tensor, ...]], *, pinned: bool) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.arrays = tuple(view.numpy() for view in split(self.memory))
        self.read = Mark(pinned=pinned)
        """Behind the copy of it."""


class Mark:
    """A place in the current stream that the host can wait for. Without pinned memory there is nothing to wait for.
    `blocking`: a thread that waits sleeps, instead of asking again and again."""

    def __init__(self, *, pinned: bool, blocking: bool = False) -> None:
        self._event: Any = None
        if pinned:
            self._event = _cuda.Event(blocking=True) if blocking else _cuda.Event()

    def set(self) -> None:
        """Set the mark behind all that is queued by now."""
        if self._event is not None:
            self._event.record()

    def is_done(self) -> bool:
        """Whether what was queued before it is done."""
        return self._event is None or bool(self._event.query())

    def hold_up(self, stream: Any) -> None:
        """Have what follows on `stream` wait for it; the host does not."""
        if self._event is not None:
            stream.wait_event(self._event)

    def wait(self) -> None:
        """Wait until what was queued before the mark is done; returns at once if it was never set."""
        if self._event is not None:
            self._event.synchronize()


PADDING_SLOT = -1
NO_SOURCE = -1
NO_ADAPTER = -1

_ROW_BYTES, _WINDOW_ROW_BYTES = 40, 8
"""Bytes of a row without its block tables, and of what it has beside for each window."""


class Pending(NamedTuple):
    """Tokens of a step that are known on the device only."""

    sources_S: I64
    """For each row of the step, the row of `sampled_R` that holds its token; `NO_SOURCE` where the host knows it."""
    sampled_R: Tensor
    """What another step samples, int64; -1 where that failed."""


class DeviceStepInputs:
    """The inputs of decode steps, at fixed addresses. Owner: the model runner. On a CPU, for tests, it copies
    plainly."""

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device, num_windows: int = 0) -> None:
        self.sizes = bucket_sizes(max_num_seqs)
        most = self.sizes[-1]
        self._num_groups = 1 + num_windows
        self._row_bytes = (_ROW_BYTES + _WINDOW_ROW_BYTES * num_windows) * most
        nbytes = self._row_bytes + 4 * most * max_blocks * self._num_groups
        self._staged = Staged(nbytes, device, lambda memory: _views(memory, most, num_windows))
        self._rows = _Rows(*self._staged.on_device)
        self._tables_GSM = torch.zeros((self._num_groups, most, max_blocks), dtype=torch.int32, device=device)

    def bucket(self, num_seqs: int) -> int | None:
        """Rows of the step that computes `num_seqs` sequences; None where that is more than the largest."""
        return next((size for size in self.sizes if size >= num_seqs), None)

    def batch(self, bucket: int, *, has_adapters: bool = False) -> Batch:
        """The tensors that a captured step of this size reads, always the same ones. `has_adapters`: some rows may have
        an adapter."""
        rows = self._rows
        adapter_slots_S = rows.adapter_slots[:bucket]
        return Batch(
            token_ids_T=rows.ids[:bucket],
            positions_T=rows.positions[:bucket],
            slot_mapping_T=rows.slots[:bucket],
            num_decodes=bucket,
            block_tables_SM=self._tables_GSM[0, :bucket],
            context_lens_S=rows.lens[:bucket],
            prefills=None,
            sample_rows=None,
            windows=tuple(
                WindowBatch(rows.window_slots[number, :bucket], self._tables_GSM[1 + number, :bucket], None)
                for number in range(self._num_groups - 1)
            ),
            adapters=AdapterRows(adapter_slots_S, adapter_slots_S) if has_adapters else None,
        )

    def fill(self, arrays: BatchArrays, pending: Pending | None = None) -> int:
        """Queue the copy of a step's numbers, all of decodes; the bucket that computes them."""
        bucket = self.bucket(arrays.num_decodes)
        assert bucket is not None, "the step is larger than any that is captured"
        num_seqs, width = arrays.block_tables_SM.shape
        host = _Rows(*self._staged.to_write())
        host.ids[:num_seqs] = arrays.token_ids_T
        host.positions[:num_seqs] = arrays.positions_T
        host.slots[:num_seqs] = arrays.slot_mapping_T
        host.sources[:num_seqs] = NO_SOURCE if pending is None else pending.sources_S
        host.lens[:num_seqs] = arrays.context_lens_S
        host.adapter_slots[:num_seqs] = NO_ADAPTER if arrays.adapter_slots_T is None else arrays.adapter_slots_T
        for number, window in enumerate(arrays.windows):
            host.window_slots[number, :num_seqs] = window.slot_mapping_T
        tables_GSW = host.tables[: self._num_groups * bucket * width].reshape(self._num_groups, bucket, width)
        for number, tables_SM in enumerate(
            (arrays.block_tables_SM, *(each.block_tables_SM for each in arrays.windows))
        ):
            tables_GSW[number, :num_seqs] = tables_SM
        tables_GSW[:, num_seqs:] = 0
        host.pad(num_seqs, bucket)
        self._send(bucket, width)
        if pending is not None:
            self._take(pending.sampled_R, bucket)
        return bucket

    def fill_padding(self, bucket: int) -> None:
        """Queue rows that compute nothing, for a capture without sequences."""
        _Rows(*self._staged.to_write()).pad(0, bucket)
        self._send(bucket, 0)

    def _send(self, bucket: int, width: int) -> None:
        num_groups = self._num_groups
        self._staged.send(self._row_bytes + 4 * num_groups * bucket * width)
        if width:
            tables_GSW = self._rows.tables[: num_groups * bucket * width].view(num_groups, bucket, width)
            self._tables_GSM[:, :bucket, :width].copy_(tables_GSW)

    def _take(self, sampled_R: Tensor, bucket: int) -> None:
        """Put the tokens into their rows, on the device. A row whose token is missing (-1) gets token 0: its
        sequence ends once the host has read that."""
        ids, sources = self._rows.ids[:bucket], self._rows.sources[:bucket]
        taken = sampled_R.index_select(0, sources.clamp(min=0)).clamp_(min=0)
        ids.copy_(torch.where(sources < 0, ids, taken))


class _Rows(NamedTuple):
    """The arrays of one piece of memory: numpy's on the host, tensors on the device."""

    ids: Any
    positions: Any
    slots: Any
    sources: Any
    window_slots: Any
    lens: Any
    adapter_slots: Any
    tables: Any

    def pad(self, first: int, last: int) -> None:
        """Rows [first, last) compute nothing."""
        self.ids[first:last] = 0
        self.positions[first:last] = 0
        self.slots[first:last] = PADDING_SLOT
        self.window_slots[:, first:last] = PADDING_SLOT
        self.sources[first:last] = NO_SOURCE
        self.lens[first:last] = 0
        self.adapter_slots[first:last] = NO_ADAPTER


def _views(memory: Tensor, most: int, num_windows: int) -> tuple[Tensor, ...]:
    """The fields of `_Rows` in a piece of memory, without a copy."""
    nbytes = 8 * (4 + num_windows) * most
    numbers, rest = memory[:nbytes].view(torch.int64), memory[nbytes:].view(torch.int32)
    window_slots = numbers[4 * most :].view(num_windows, most)
    return (
        *(numbers[most * i : most * (i + 1)] for i in range(4)),
        window_slots,
        rest[:most],
        rest[most : 2 * most],
        rest[2 * most :],
    )
