"""The connection between rank 0 and its followers, as both ends see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from disagg.engine.parallel.messages import Done, RankCall, RankCommand, TransportCommand

Reply = Callable[[Done], None]
"""Called once, on any thread; also, not ok, when the follower is lost. Must neither raise nor block."""


class Followers(Protocol):
    """Rank 0's view. Thread-safe; commands to one rank arrive in the order given."""

    size: int
    """Ranks of the worker, rank 0 included."""

    def broadcast(self, command: RankCommand) -> None:
        """To every follower; not answered."""
        ...

    def call(self, rank: int, command: RankCall, reply: Reply, on_posted: Callable[[], None] | None = None) -> None:
        """To one follower; its `call` is set here. `on_posted` is called when the follower says `Posted`, which
        it does at most once, before its answer."""
        ...


class NoFollowers:
    """See `Followers`. Of a worker of one rank."""

    size = 1

    def broadcast(self, command: RankCommand) -> None:
        """Nobody listens."""

    def call(self, rank: int, command: RankCall, reply: Reply, on_posted: Callable[[], None] | None = None) -> None:
        """There is nobody to ask."""
        raise AssertionError(f"{type(command).__name__} for rank {rank} of a worker of one")


class Ranks(Protocol):
    """The follower processes of a worker, as whoever started them sees them."""

    def stop(self) -> None:
        """End those that still run, and return when none does. Idempotent."""
        ...


StartRanks = Callable[[str], Ranks]
"""Starts the followers, which shall join rank 0 at this host:port; returns at once."""


class RankTransports(Protocol):
    """What a rank (also rank 0) does for the transport: all pairs' channels of this rank. Thread-safe."""

    def handle(self, command: TransportCommand, reply: Reply, on_posted: Callable[[], None]) -> None:
        """Carry out an command; `on_posted` is called where it is a `ReceivePart`, once its receives are posted."""
        ...

    def close(self) -> None:
        """Close all channels. Idempotent."""
        ...
