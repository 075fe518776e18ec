"""The exchange of ranks over gloo: two real processes on the loopback interface. The parent is rank 0."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from disagg.engine.io.rendezvous import RendezvousServer
from disagg.engine.runner.collectives import Collective, GlooCollective, make_collective
from disagg.engine.sharding.shards import Shard
from tests.support.secret import SECRET

HOST = "127.0.0.1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ENDED_S = 60.0


def numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """[5, 3]; sums of two are exact in every dtype."""
    return (torch.arange(15).view(5, 3) * 2 + rank * 32).to(dtype)


def follow(address: str, exchanges: int, ending: str) -> None:
    """Rank 1's process: `exchanges` rounds of both kinds in every dtype, then its end."""
    torch.set_num_threads(1)
    collective = make_collective("cpu", address, SECRET, Shard(1, 2), HOST)
    with torch.inference_mode():
        for dtype in DTYPES * exchanges:
            collective.all_reduce(numbers(1, dtype))
            assert collective.gather_columns(numbers(1, dtype)) is None
    match ending:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "closed":
            collective.close()
            signal.pause()


@contextlib.contextmanager
def two_ranks(exchanges: int, ending: str) -> Iterator[Collective]:
    store = RendezvousServer(HOST, SECRET)
    child = multiprocessing.get_context("spawn").Process(target=follow, args=(store.address, exchanges, ending))
    child.start()
    try:
        collective: Collective = GlooCollective(store.address, SECRET, Shard(0, 2), HOST, operation_timeout_s=ENDED_S)
        yield collective
    finally:
        child.kill()
        child.join(ENDED_S)
        store.close()
    assert child.exitcode is not None


@pytest.mark.parametrize("ending", ["killed", "closed"])
def test_ranks_add_up_and_gather_until_one_is_lost(ending: str) -> None:
    with two_ranks(3, ending) as collective, torch.inference_mode():
        for dtype in DTYPES * 3:
            total = collective.all_reduce(numbers(0, dtype))
            assert torch.equal(total, numbers(0, dtype) + numbers(1, dtype))
            columns = collective.gather_columns(numbers(0, dtype))
            assert columns is not None
            assert torch.equal(columns, torch.cat((numbers(0, dtype), numbers(1, dtype)), dim=1))
        # Rank 1 is gone, or about to end; the connection shows that long before the operation's timeout.
        waiter = threading.Thread(target=lambda: failures.append(failure(collective)), daemon=True)
        failures: list[str] = []
        waiter.start()
        waiter.join(ENDED_S / 2)
        assert failures != [], "rank 0 still waits"
        assert failures != [""], "the sum came without rank 1"
        collective.close()
        with pytest.raises(RuntimeError, match="this rank has left the exchange"):
            collective.all_reduce(torch.ones(4))


def failure(collective: Collective) -> str:
    try:
        collective.all_reduce(torch.ones(4))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_all_come_are_named() -> None:
    store = RendezvousServer(HOST, SECRET)
    with pytest.raises(RuntimeError, match=f"the 3 ranks did not all meet at '{store.address}'"):
        GlooCollective(store.address, SECRET, Shard(2, 3), HOST, set_up_timeout_s=0.2)
    address = store.address
    store.close()
    with pytest.raises(RuntimeError, match=f"the 2 ranks did not all meet at '{address}'"):
        GlooCollective(address, SECRET, Shard(1, 2), HOST, set_up_timeout_s=5.0)
