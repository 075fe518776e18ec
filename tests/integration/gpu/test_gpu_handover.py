"""The pair of processes of `benchmarks/gpu/handover.py`, on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.handover import PAIRS, TINY, Peers
from benchmarks.gpu.handover_peer import PASSES


def test_a_process_that_dies_costs_one_transport() -> None:
    peers = Peers(torch.device("cpu"))
    bare, shm = PAIRS[:2]
    try:
        sent, received = peers.run(bare)
        num_chunks = PASSES * TINY.pair_tokens // TINY.chunk_tokens
        assert sent["digests"] == received["digests"] == [0] * num_chunks
        peers._processes[0].kill()
        with pytest.raises(RuntimeError, match="a process of the pair ended"):
            peers.run(shm)
        sent, received = peers.run(shm)
        assert sent["digests"] == received["digests"]
        assert len(set(sent["digests"])) == num_chunks // PASSES
        assert received["nbytes"] == (PASSES - 1) * TINY.pair_tokens * TINY.layout.bytes_per_token
    finally:
        peers.close()
