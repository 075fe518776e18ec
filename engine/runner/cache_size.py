"""What `kv_cache_bytes: auto` is on a GPU: a share of what weights, captures and one full step leave free.

A rank that has its weights makes a cache that is just large enough for the step, captures what it captures at start,
and computes. Then torch holds all memory that it needs beside the cache, so that what the device has free, and what the
small cache takes, is what a cache can take. Ranks measure without each other (`collectives.Alone`), and agree on the
least.

The other tenth is for what comes later: communicators and staging memory on the device (`transfer.staging_bytes` for
each pair that is used), and memory that is free in pieces too small.
"""

from __future__ import annotations

from typing import Any

import torch

from disagg.engine.batch_arrays import blocks_for_tokens
from disagg.engine.config import WorkerConfig
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import dummy_sequence

SHARE = 0.9


def cache_bytes(free_bytes: int, held_bytes: int) -> int:
    """Of a cache, where so many bytes are free on the device beside one of `held_bytes`."""
    return int(SHARE * (free_bytes + held_bytes))


def full_step(config: WorkerConfig, max_model_len: int, num_windows: int = 0) -> StepPlan:
    """As many tokens and as many rows that sample, with a draw each, as a step can have; all in the same blocks, since
    nobody reads what it computes."""
    num_tokens = max(1, min(config.token_budget // config.num_places, max_model_len - 1))
    pools = (blocks_for_tokens(num_tokens, config.block_size),) * num_windows
    sequences = [
        dummy_sequence(num_tokens, 0, config.block_size, pools, temperature=1.0) for _ in range(config.num_places)
    ]
    return StepPlan(prefills=tuple(ScheduledSequence(sequence, 0, num_tokens, True) for sequence in sequences))


def free_bytes(device: torch.device) -> int:
    """What torch could still allocate there."""
    cuda: Any = torch.cuda
    cuda.synchronize(device)
    free, _ = cuda.mem_get_info(device)
    return int(free)


def give_back(device: torch.device) -> None:
    """Let memory go that torch keeps and nothing uses."""
    cuda: Any = torch.cuda
    with cuda.device(device):
        cuda.empty_cache()
