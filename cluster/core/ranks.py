"""The ranks of one worker, as launchers see them. Pure.

A worker of `pp` stages of `tp` ranks is `tp * pp` processes, numbered stage by stage. Rank 0 is the worker for all
other processes, and has its name; the others are its followers. All of them have the same `WorkerConfig`; `rank_config`
sets what differs.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from disagg.engine.config import WorkerConfig
from disagg.engine.sharding.shards import Shard

_RANK: Final = re.compile(r"(.+)\.rank-(\d+)")


def rank_name(worker: str, rank: int) -> str:
    """The name of a rank's process: the worker's own for rank 0, `decode-0.rank-1` for a follower."""
    return worker if rank == 0 else f"{worker}.rank-{rank}"


def worker_of(process: str) -> str:
    """The worker that a rank's process belongs to; any other process belongs to itself."""
    found = _RANK.fullmatch(process)
    return found[1] if found else process


def rank_cores(cores: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    """The part of its worker's cores that a rank is pinned to. Ranks share cores if there are fewer cores than
    ranks."""
    number, num_ranks = shard.number, shard.num_ranks
    if not cores:
        return ()
    if len(cores) < num_ranks:
        return (cores[number % len(cores)],)
    return cores[len(cores) * number // num_ranks : len(cores) * (number + 1) // num_ranks]


def rank_config(config: WorkerConfig, rank: int, *, sees_all_devices: bool) -> WorkerConfig:
    """The worker's configuration on one of its ranks: its cores, its device.

    Args:
        rank: its number among the ranks of all stages.
        sees_all_devices: whether the ranks must choose different CUDA devices; otherwise each sees only its own, which
            has no other index there than 0.
    """
    kind, _, first = config.device.partition(":")
    device = config.device
    if kind == "cuda":
        device = f"cuda:{int(first or 0) + rank}" if sees_all_devices else kind
    cores = rank_cores(config.cores, Shard.of_number(rank, config.tp, config.pp))
    return msgspec.structs.replace(config, cores=cores, device=device)
