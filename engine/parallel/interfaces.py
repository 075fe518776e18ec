"""Interfaces between the ranks of a worker: rank 0's followers, their processes, one rank's runner and its transports.

runner = ...                                    loads this rank's weights; `num_blocks`: what it has memory for
runner.join(collective, num_blocks)             with what all ranks agreed on; allocates the KV cache
rank 0:     arrays = runner.arrays(plan); (broadcast to the others); result = runner.step(plan, arrays)
            with stages: queued = runner.launch(plan, arrays); ...; result = queued.result()
follower:   runner.compute(arrays)
all ranks:  runner.gather_part(...), runner.scatter_part(...)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from disagg.engine.batch_arrays import BatchArrays
from disagg.engine.plan import ComputedStep, QueuedStep, StepPlan, StepResult
from disagg.engine.rank_kv import RankKv
from disagg.engine.rank_messages import Done, RankCall, RankCommand, TransportCommand
from disagg.engine.sharding.shards import Shard

if TYPE_CHECKING:
    from disagg.engine.runner.collectives import Collective

Reply = Callable[[Done], None]
"""Called once, on any thread; also, not ok, when the follower is lost. Must neither raise nor block."""


class Followers(Protocol):
    """Rank 0's view. Thread-safe; commands to one rank arrive in the order given."""

    size: int
    """Ranks of the worker, rank 0 included."""

    def broadcast(self, command: RankCommand) -> None:
        """Send a command to every follower; it is not answered."""
        ...

    def call(self, rank: int, command: RankCall, reply: Reply, on_posted: Callable[[], None] | None = None) -> None:
        """Send a call to one follower; its `call` is set here. `on_posted` is called when the follower sends `Posted`,
        at most once and before its answer."""
        ...


class NoFollowers(Followers):
    """Followers of a worker of one rank: none."""

    size = 1

    @override
    def broadcast(self, command: RankCommand) -> None:
        """Does nothing: there are no other ranks."""

    @override
    def call(self, rank: int, command: RankCall, reply: Reply, on_posted: Callable[[], None] | None = None) -> None:
        """Raises `AssertionError`: there are no other ranks."""
        raise AssertionError(f"{type(command).__name__} for rank {rank} of a worker of one")


class Ranks(Protocol):
    """The follower processes of a worker, as seen by the code that started them."""

    def stop(self) -> None:
        """End those that still run, and return when none does. Idempotent."""
        ...


StartRanks = Callable[[str], Ranks]
"""Starts the followers, which are to join rank 0 at this host:port; returns at once."""


class RankTransports(Protocol):
    """What a rank (also rank 0) does for the transport: all pairs' channels of this rank. Thread-safe."""

    def handle(self, command: TransportCommand, reply: Reply, on_posted: Callable[[], None]) -> None:
        """Carry out a command; `on_posted` is called where it is a `ReceivePart`, once its receives are posted."""
        ...

    def close(self) -> None:
        """Close all channels. Idempotent."""
        ...


class ShardRunner(RankKv, Protocol):
    """A `ModelRunner` that may be one rank of several; `layout` and `fingerprint` are the whole model's. With one rank
    it is complete as it is made, and `join` is not called. Owner: the engine thread."""

    shard: Shard

    def join(self, collective: Collective | None, num_blocks: int) -> None:
        """Take the exchange with the other ranks and the number of blocks, at most its own; once, before any step.

        Raises:
            ConfigError: if `max_model_len` does not fit into `num_blocks`.
        """
        ...

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Rows of the decode steps to capture at start, in the order to do so; the same on all ranks."""
        return ()

    def capture(self, num_seqs: int) -> str:
        """Capture the decode step of so many rows, while all ranks do; why that failed, or an empty text. In both cases
        it was computed equally often."""
        raise AssertionError("there are no `capture_sizes`")

    def drop_captures(self) -> None:
        """Compute every step op by op from now on."""
        return

    def arrays(self, plan: StepPlan) -> BatchArrays:
        """What every rank computes for a plan with at least one token."""
        ...

    def step(self, plan: StepPlan, arrays: BatchArrays) -> StepResult:
        """Rank 0: compute the plan, whose arrays these are, and sample."""
        ...

    def launch(self, plan: StepPlan, arrays: BatchArrays) -> QueuedStep:
        """Rank 0 of several stages: compute this stage's part of the plan and send it on. `result` waits for the
        logits, where rows sample, and samples; results are taken in the order of the launches. Up to `stages` steps are
        under way when another one is launched."""
        return ComputedStep(self.step(plan, arrays))

    def compute(self, arrays: BatchArrays) -> None:
        """Other ranks: this rank's part of a step."""
        ...
