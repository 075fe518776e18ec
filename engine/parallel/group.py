"""Forms the ranks of one worker and ends them; on rank 0.

    form()    listen (`RankRendezvous`) -> start the followers -> load the own part, as they do theirs -> all have
              joined: agree on the number of blocks, form the collective -> a runner over all ranks
    close()   the followers get `Stop` and end; `Ranks.stop` ends their processes

A failure while the group is formed is raised, a later one is passed to `on_fault`; `close` must follow either.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.connection import Connection
from disagg.connections.shell.handshake import AuthenticatedListener
from disagg.engine.config import WorkerConfig
from disagg.engine.kv_transfer.transport import Checksum
from disagg.engine.parallel.factories import NO_RENDEZVOUS, join_collective, make_runner, open_rendezvous
from disagg.engine.parallel.followers import STOP_TIMEOUT_S, ConnectedFollowers, RankLostError
from disagg.engine.parallel.interfaces import Ranks, ShardRunner, StartRanks
from disagg.engine.parallel.leader import GroupRunner
from disagg.engine.rank_messages import Begin, Join
from disagg.engine.sharding.shards import Shard

if TYPE_CHECKING:
    from disagg.engine.io.rendezvous import RendezvousServer
    from disagg.engine.runner.collectives import Collective


class RankRendezvous:
    """Takes one connection for each of the ranks 1 .. num_ranks - 1 and hands it to `on_connection`, on any thread.

    Raises:
        OSError: if it cannot listen on `host`.
    """

    def __init__(
        self,
        host: str,
        worker_id: str,
        num_ranks: int,
        secret: ClusterSecret,
        on_connection: Callable[[int, Connection], None],
    ) -> None:
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._missing = set(range(1, num_ranks))
        """Ranks that have not connected."""
        self._listener = AuthenticatedListener(
            host, secret, "rank connection", self._take, lambda _, rank, connection: on_connection(rank, connection)
        )
        self.address = self._listener.address

    def close(self) -> None:
        """Stop listening; ranks that have not connected are refused. Idempotent."""
        with self._lock:
            self._missing.clear()
        self._listener.close()

    def _take(self, worker_id: str, rank: int) -> bool:
        with self._lock:
            if worker_id != self._worker_id or rank not in self._missing:
                return False
            self._missing.remove(rank)
            return True


logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
"""How long followers may take to connect, from when rank 0 has loaded its own part: their processes were started before
that."""
LOAD_TIMEOUT_S = 600.0
"""How long they may then take to load theirs."""


class Group:
    """The ranks of one worker, for its rank 0. `followers` may be used once `form` has returned."""

    def __init__(
        self,
        config: WorkerConfig,
        secret: ClusterSecret,
        start_ranks: StartRanks,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._secret = secret
        self._start_ranks = start_ranks
        self._on_fault = on_fault
        self.followers = ConnectedFollowers(config.num_ranks, on_fault)
        self._ranks: Ranks | None = None
        self._rendezvous: RendezvousServer | None = None
        self._collective: Collective | None = None
        self._local: ShardRunner | None = None

    def form(self) -> GroupRunner:
        """Blocks until all ranks can compute.

        Raises:
            ConfigError: the configuration cannot work.
            RankLostError: a follower did not connect, failed, or has another model.
            OSError: rank 0 cannot listen.
        """
        config = self._config
        attach, num_ranks = self.followers.attach, config.num_ranks
        rendezvous = RankRendezvous(config.host, config.worker_id, num_ranks, self._secret, attach)
        try:
            self._ranks = self._start_ranks(rendezvous.address)
            local = make_runner(config, Shard.of_number(0, config.tp, config.pp))
            local.checksum = Checksum.of_secret(self._secret)
            joins = self.followers.wait_joined(CONNECT_TIMEOUT_S, LOAD_TIMEOUT_S)
        finally:
            rendezvous.close()
        self._begin(local, joins)
        for join in joins:
            logger.info("%s: rank %d joined, process %d", config.worker_id, join.rank, join.pid)
        return GroupRunner(local, self.followers, self._on_fault)

    def _begin(self, local: ShardRunner, joins: tuple[Join, ...]) -> None:
        for join in joins:
            if join.fingerprint != local.fingerprint:
                raise RankLostError(f"rank {join.rank} has loaded another model: {join.fingerprint}")
        num_blocks = min(local.num_blocks, *(join.num_blocks for join in joins))
        self._rendezvous = open_rendezvous(self._config, self._secret)
        address = NO_RENDEZVOUS if self._rendezvous is None else self._rendezvous.address
        self.followers.broadcast(Begin(num_blocks=num_blocks, collective_address=address))
        self._collective = join_collective(self._config, self._secret, local.shard, address)
        local.join(self._collective, num_blocks)
        self._local = local

    def close(self) -> None:
        """Stop all followers and end their processes. To be called when the engine has stopped. Idempotent."""
        self._end_followers(STOP_TIMEOUT_S)
        if self._local is not None:
            self._local.drop_captures()
        if self._collective is not None:
            self._collective.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def abandon(self) -> None:
        """End all followers without waiting for them: the engine hangs, perhaps because one of them does. The
        collective stays open: closing it would wait for the operation that the engine is in. Idempotent."""
        self._end_followers(0.0)

    def _end_followers(self, timeout_s: float) -> None:
        self.followers.close(timeout_s)
        if self._ranks is not None:
            self._ranks.stop()
