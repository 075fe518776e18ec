"""Which part of a model a rank has. Pure arithmetic, after Shoeybi et al., "Megatron-LM" (2019): the projections into
attention and MLP are cut by columns, those out of them by rows, embedding and head by vocabulary.

With fewer KV heads than ranks, each KV head is held by several ranks next to each other, and the query heads that read
it are divided among them.

With several stages (pipeline parallelism) each stage has some of the layers, and all of this is within a stage. Ranks
are numbered stage by stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.proto.wording import counted


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a worker.

    Raises:
        ValueError: if there is no such rank.
    """

    rank: int = 0
    """Its number among the ranks of its stage."""
    size: int = 1
    """Ranks of each stage (tensor parallelism)."""
    stage: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.stage < self.stages):
            stages = f"{counted(self.stages, 'stage')} of {counted(self.size, 'rank')}"
            raise ValueError(f"there is no rank {self.rank} of stage {self.stage} among {stages}")

    @classmethod
    def of_number(cls, number: int, size: int, stages: int) -> Shard:
        """The rank of this number in a worker of `stages` stages of `size` ranks.

        Raises:
            ValueError: if there is no such rank.
        """
        return cls(number % size, size, number // size, stages)

    @property
    def number(self) -> int:
        """Its number among all ranks of the worker; 0 leads and samples."""
        return self.stage * self.size + self.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the worker."""
        return self.stages * self.size

    @property
    def in_stage(self) -> Shard:
        """The same rank where one stage has all layers."""
        return Shard(self.rank, self.size)

    @property
    def is_first(self) -> bool:
        """Whether its stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage has the final norm and the head."""
        return self.stage == self.stages - 1

    def part(self, count: int) -> range:
        """This rank's equal share of `count` things, such as query heads or columns.

        Raises:
            ValueError: if they cannot be divided equally.
        """
        if count % self.size:
            raise ValueError(f"{count} cannot be divided among {self.size} ranks")
        share = count // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def kv_heads(self, num_kv_heads: int) -> range:
        """The KV heads that this rank holds: its share, or the one that it shares with its neighbours.

        Raises:
            ValueError: if neither heads nor ranks can be divided equally.
        """
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        if self.size % num_kv_heads:
            raise ValueError(f"{num_kv_heads} KV heads cannot be shared by {self.size} ranks")
        head = self.rank // (self.size // num_kv_heads)
        return range(head, head + 1)


WHOLE = Shard()
"""The only rank of a worker that is not divided."""
