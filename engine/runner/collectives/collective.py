"""What the ranks of a worker tell each other inside a step, as an interface. Every rank makes the same calls in the
same order."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from disagg.engine.sharding.shards import Shard


class Collective(Protocol):
    """Exchange of tensors among the ranks. Owner: the engine thread."""

    shard: Shard

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on every rank; may be in place. Shapes and dtypes must agree.

        Raises:
            RuntimeError: if a rank is lost.
        """
        ...

    def gather_columns(self, tensor_RC: Tensor) -> Tensor | None:
        """On rank 0 the ranks' columns side by side, [R, C * size]; None elsewhere.

        Raises:
            RuntimeError: if a rank is lost.
        """
        ...

    def close(self) -> None:
        """Leave; who still waits for this rank fails. Idempotent."""
        ...
