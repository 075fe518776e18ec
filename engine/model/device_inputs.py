"""Where the captured steps of a GPU read, and how a step's arrays get there without a wait.

A step of B sequences is computed as one of the next bucket size (`kernels.cuda_graph.bucket_sizes`): the rows past B
are padding, with token 0, slot -1 (nothing is written) and a context of length 0 (nothing is read).

A step's numbers are written into one of two pieces of pinned host memory and cross to the device as one copy on the
stream of the step, then one small kernel spreads the block tables over rows of fixed width. The host waits only if it
is two steps ahead, until the memory that it is about to overwrite was read.

Layout, in bytes, n = the largest bucket: token ids 8n, positions 8n, slots 8n, context lengths 4n, then the tables
[bucket, W], W blocks wide as the step needs them, int32.

Shapes: S sequences of a bucket, M blocks of the widest table, W of the step's widest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from disagg.engine.model.arrays import BatchArrays
from disagg.engine.model.batch import Batch
from disagg.kernels.cuda_graph import bucket_sizes

PADDING_SLOT = -1

_cuda: Any = torch.cuda
"""Untyped: torch's stubs lack types for events."""


class DeviceStepInputs:
    """The inputs of decode steps, at fixed addresses. Owner: the model runner. On a CPU, for tests, it copies
    plainly."""

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.sizes = bucket_sizes(max_num_seqs)
        self._device = device
        self._most = self.sizes[-1]
        self._max_blocks = max_blocks
        nbytes = 28 * self._most + 4 * self._most * max_blocks
        self._staged = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._tables_SM = torch.zeros((self._most, max_blocks), dtype=torch.int32, device=device)
        self._host = tuple(_HostCopy(nbytes, self._most, pinned=device.type == "cuda") for _ in range(2))
        self._turn = 0

    def bucket(self, num_seqs: int) -> int | None:
        """Rows of the step that computes `num_seqs` sequences; None where that is more than the largest."""
        return next((size for size in self.sizes if size >= num_seqs), None)

    def batch(self, bucket: int) -> Batch:
        """The tensors that a captured step of this size reads, always the same ones."""
        ids, positions, slots, lens, _ = _views(self._staged, self._most)
        return Batch(
            token_ids_T=ids[:bucket],
            positions_T=positions[:bucket],
            slot_mapping_T=slots[:bucket],
            num_decodes=bucket,
            block_tables_SM=self._tables_SM[:bucket],
            context_lens_S=lens[:bucket],
            prefills=(),
            sample_rows=None,
        )

    def fill(self, arrays: BatchArrays) -> int:
        """Queue the copy of a step's numbers, all of decodes; the bucket that computes them."""
        bucket = self.bucket(arrays.num_decodes)
        assert bucket is not None, "the step is larger than any that is captured"
        self._turn ^= 1
        host, width = self._host[self._turn], arrays.block_tables_SM.shape[1]
        host.wait()
        host.write(arrays, bucket)
        self._send(host, bucket, width)
        return bucket

    def fill_padding(self, bucket: int) -> None:
        """Queue rows that compute nothing, for a capture that serves nobody."""
        self._turn ^= 1
        host = self._host[self._turn]
        host.wait()
        host.pad(0, bucket)
        self._send(host, bucket, 0)

    def _send(self, host: _HostCopy, bucket: int, width: int) -> None:
        used = 28 * self._most + 4 * bucket * width
        self._staged[:used].copy_(host.memory[:used], non_blocking=True)
        if width:
            tables_SW = _views(self._staged, self._most)[4][: bucket * width].view(bucket, width)
            self._tables_SM[:bucket, :width].copy_(tables_SW)
        host.sent()


class _HostCopy:
    """One step's numbers on the host, until the device has read them."""

    def __init__(self, nbytes: int, most: int, *, pinned: bool) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
        views = [view.numpy() for view in _views(self.memory, most)]
        self._ids, self._positions, self._slots, self._lens, self._tables = views
        self._read: Any = _cuda.Event() if pinned else None

    def wait(self) -> None:
        """Until nobody reads it."""
        if self._read is not None:
            self._read.synchronize()

    def sent(self) -> None:
        """The copy is queued on the current stream."""
        if self._read is not None:
            self._read.record()

    def write(self, arrays: BatchArrays, bucket: int) -> None:
        """A step's numbers, padded to the bucket."""
        num_seqs, width = arrays.block_tables_SM.shape
        self._ids[:num_seqs] = arrays.token_ids_T
        self._positions[:num_seqs] = arrays.positions_T
        self._slots[:num_seqs] = arrays.slot_mapping_T
        self._lens[:num_seqs] = arrays.context_lens_S
        self._tables[: num_seqs * width] = arrays.block_tables_SM.reshape(-1)
        self._tables[num_seqs * width : bucket * width] = 0
        self.pad(num_seqs, bucket)

    def pad(self, first: int, last: int) -> None:
        """Rows [first, last) compute nothing."""
        self._ids[first:last] = 0
        self._positions[first:last] = 0
        self._slots[first:last] = PADDING_SLOT
        self._lens[first:last] = 0


def _views(memory: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(token ids, positions, slots, context lengths, tables) of a piece of memory, without a copy."""
    numbers, rest = memory[: 24 * most].view(torch.int64), memory[24 * most :].view(torch.int32)
    return numbers[:most], numbers[most : 2 * most], numbers[2 * most :], rest[:most], rest[most:]
