"""One rank's model runner, as rank 0's leader and the followers use it.

runner = ...                                    loads this rank's part of the weights; `num_blocks` has room
runner.join(collective, num_blocks)             what all ranks agreed on; the KV cache is made
rank 0:     arrays = runner.arrays(plan); (tell the others); result = runner.step(plan, arrays)
follower:   runner.compute(arrays)
all ranks:  runner.gather_part(...), runner.scatter_part(...)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from disagg.engine.kv_transfer.transports.checksum import Checksum
from disagg.engine.plan import Buffer, ModelRunner, StepPlan, StepResult
from disagg.engine.runner.model.arrays import BatchArrays
from disagg.engine.sharding.shards import Shard

if TYPE_CHECKING:
    from disagg.engine.runner.collectives.collective import Collective


class ShardRunner(ModelRunner, Protocol):
    """A `ModelRunner` that may be one rank of several; `layout` and `fingerprint` are the whole model's. With one rank
    it is complete as it is made, and `join` is not called. Owner: the engine thread."""

    shard: Shard
    checksum: Checksum
    """Of what is gathered; to be set before the first `gather`."""

    def join(self, collective: Collective | None, num_blocks: int) -> None:
        """Take the exchange with the other ranks and the number of blocks, at most its own; once, before any step.

        Raises:
            ConfigError: if `max_model_len` does not fit into `num_blocks`.
        """
        ...

    def arrays(self, plan: StepPlan) -> BatchArrays:
        """What every rank computes for a plan with at least one token."""
        ...

    def step(self, plan: StepPlan, arrays: BatchArrays) -> StepResult:
        """Rank 0: compute the plan, whose arrays these are, and sample."""
        ...

    def compute(self, arrays: BatchArrays) -> None:
        """Other ranks: this rank's part of a step."""
        ...

    def gather_part(self, block_table: Seq[int], start: int, end: int, out: Buffer, peer_tp: int) -> list[int]:
        """Copy this rank's slices of tokens [start, end) into `out`, for a worker of `peer_tp` ranks, one after the
        other, each in canonical order [layer][k|v][head][token][dim]. The checksum of each, in the order of
        `head_slices`; none, where other ranks send all that this one holds.

        Raises:
            ValueError: `out` is too small, or the table does not cover `end`.
        """
        ...

    def scatter_part(self, block_table: Seq[int], start: int, end: int, data: Buffer, peer_tp: int) -> None:
        """Copy this rank's slices of tokens [start, end) from `data`, which a worker of `peer_tp` ranks sent.

        Raises:
            ValueError: `data` is too small, or the table does not cover `end`.
        """
        ...
