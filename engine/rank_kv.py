"""KV in and out of a rank: a worker of one rank copies what that rank does."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from typing_extensions import override

from disagg.engine.kv_transfer.transport import Checksum
from disagg.engine.plan import Buffer, ModelRunner
from disagg.proto.messages import ONE_RANK, ParallelShape


class RankKv(ModelRunner, Protocol):
    """A `ModelRunner` that may be one rank of several, by its KV."""

    checksum: Checksum
    """Checksum function for gathered bytes; to be set before the first `gather`."""

    @override
    def gather(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        out: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> int:
        """What `gather_part` copies, which of one rank is all; one checksum.

        Raises:
            ValueError: as `gather_part`.
        """
        return self.checksum.combined(self.gather_part(block_table, start, end, out, peer, group))

    @override
    def scatter(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        data: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> None:
        """What `scatter_part` copies, which of one rank is all.

        Raises:
            ValueError: as `scatter_part`.
        """
        self.scatter_part(block_table, start, end, data, peer, group)

    def gather_part(
        self, block_table: Seq[int], start: int, end: int, out: Buffer, peer: ParallelShape, group: int = 0
    ) -> list[int]:
        """Copy this rank's slices of tokens [start, end) into `out`, for a worker of the shape `peer`, one after
        the other, each in canonical order [layer][k|v][head][token][dim]. The checksum of each, in the order of the
        pair's plan; none, where other ranks send all that this one holds, and where its stage has no layer of the
        group.

        Raises:
            ValueError: `out` is too small, or the table does not cover `end`.
        """
        ...

    def scatter_part(
        self, block_table: Seq[int], start: int, end: int, data: Buffer, peer: ParallelShape, group: int = 0
    ) -> None:
        """Copy this rank's slices of tokens [start, end) from `data`, which a worker of the shape `peer` sent.

        Raises:
            ValueError: `data` is too small, or the table does not cover `end`.
        """
        ...
