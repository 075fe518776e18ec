"""Members of process groups meet over real sockets on the loopback interface; strangers do not."""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.connection import ConnectionFailedError, connect
from disagg.engine.io import rendezvous
from disagg.engine.io.rendezvous import RendezvousServer, gloo_group, join_rendezvous, member_store
from tests.support.secret import OTHER_SECRET, SECRET
from tests.support.waiting import until

HOST = "127.0.0.1"
WAIT_S = 60.0
_dist: Any = torch.distributed


@pytest.fixture
def point() -> Iterator[RendezvousServer]:
    """Afterwards no thread is left."""
    before = set(threading.enumerate())
    point = RendezvousServer(HOST, SECRET)
    yield point
    point.close()
    until(lambda: set(threading.enumerate()) <= before, "a thread is left")


def form(point: RendezvousServer, name: str, rank: int, size: int, secret: ClusterSecret = SECRET) -> Any:
    with member_store(name, point.address, secret, rank, size, WAIT_S) as store:
        return gloo_group(store, secret, name, rank, size, HOST, WAIT_S), store


def all_ranks(size: int, function: Callable[[int], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(size) as pool:
        return [pool.submit(function, rank) for rank in range(size)]


def test_three_members_make_a_group_and_prove_themselves(point: RendezvousServer) -> None:
    groups = [each.result() for each in all_ranks(3, lambda rank: form(point, "ranks", rank, 3))]

    def total(rank: int) -> list[float]:
        tensor = torch.full((2,), float(rank + 1))
        groups[rank][0].allreduce([tensor]).wait()
        return tensor.tolist()

    assert [each.result() for each in all_ranks(3, total)] == [[6.0, 6.0]] * 3
    until(lambda: not point._groups and not point._taken, "a group is not forgotten")


def test_entries_are_seen_in_their_own_group_only(point: RendezvousServer) -> None:
    ours, other = (
        join_rendezvous(point.address, SECRET, "a", 0, WAIT_S),
        join_rendezvous(point.address, SECRET, "b", 1, WAIT_S),
    )
    ours.set("key", b"ours")
    late = join_rendezvous(point.address, SECRET, "a", 1, WAIT_S)
    assert late.get("key") == b"ours"
    other.set("key", b"other")
    later = join_rendezvous(point.address, SECRET, "b", 0, WAIT_S)
    assert later.get("key") == b"other"
    assert (ours.get("key"), late.check(["key"]), late.check(["none"])) == (b"ours", True, False)
    for store in (ours, other, late, later):
        store.close()
    until(lambda: not point._groups, "a group is not forgotten")
    fresh = join_rendezvous(point.address, SECRET, "a", 1, WAIT_S)
    with pytest.raises(RuntimeError, match=r"\['key'\] did not come in \d+\.\d s$"):
        fresh.wait(["key"], datetime.timedelta(seconds=0.1))


def test_strangers_are_refused_and_delay_no_member(point: RendezvousServer) -> None:
    host, port = point.address.split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(80)]  # more than may shake hands at once
    with socket.create_connection((host, int(port))) as noisy:
        noisy.sendall(b"\x00\x00\x00\x05hello")
    with pytest.raises(ConnectionFailedError, match="refused"):
        join_rendezvous(point.address, OTHER_SECRET, "pair", 0, WAIT_S)
    assert [len(each.result()) for each in all_ranks(2, lambda rank: form(point, "pair", rank, 2))] == [2, 2]
    for connection in silent:
        connection.close()


def test_a_rank_is_taken_once(point: RendezvousServer) -> None:
    first = join_rendezvous(point.address, SECRET, "pair", 0, WAIT_S)
    with pytest.raises(ConnectionFailedError, match="refused"):
        join_rendezvous(point.address, SECRET, "pair", 0, WAIT_S)
    first.set("key", b"value")
    second = join_rendezvous(point.address, SECRET, "pair", 1, WAIT_S)
    assert second.get("key") == b"value"


def test_what_a_member_may_store_is_bounded(point: RendezvousServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_ENTRIES", 3)
    watching = join_rendezvous(point.address, SECRET, "pair", 1, WAIT_S)
    greedy = join_rendezvous(point.address, SECRET, "pair", 0, WAIT_S)
    for number in range(4):
        greedy.set(f"key-{number}", b"x")
    watching.wait(["key-2"])
    until(lambda: list(point._groups["pair"].connections) == [1], "the member is still there")
    large = join_rendezvous(point.address, SECRET, "other", 0, WAIT_S)
    large.set("key", bytes(rendezvous.MAX_VALUE_BYTES + 1))
    until(lambda: list(point._groups) == ["pair"], "the member is still there")
    assert list(point._groups["pair"].connections) == [1]


def test_a_member_without_the_secret_is_found_over_the_groups_own_connection() -> None:
    """It came by gloo's addresses, or was first at gloo's port: here, both members share a store without a guard."""
    shared = _dist.HashStore()
    secrets = [SECRET, OTHER_SECRET]
    results = all_ranks(2, lambda rank: gloo_group(shared, secrets[rank], "pair", rank, 2, HOST, WAIT_S))
    assert [str(each.exception()) for each in results] == [
        "rank 1 of 'pair' does not know the cluster's secret",
        "rank 0 of 'pair' does not know the cluster's secret",
    ]


def test_the_end_of_the_meeting_point_wakes_its_members() -> None:
    point = RendezvousServer(HOST, SECRET)
    store = join_rendezvous(point.address, SECRET, "pair", 0, WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "key")
        point.close()
        with pytest.raises(RuntimeError, match=r"\['key'\] did not come"):
            waiting.result(WAIT_S)
    with pytest.raises(ConnectionFailedError):
        join_rendezvous(point.address, SECRET, "pair", 0, WAIT_S)


def test_what_is_no_entry_ends_the_connection(point: RendezvousServer) -> None:
    store = join_rendezvous(point.address, SECRET, "pair", 0, WAIT_S)
    store._connection.send(rendezvous.Entry(key="k" * (rendezvous.MAX_KEY_CHARS + 1), value=b""))
    with pytest.raises(RuntimeError, match="did not come"):
        store.get("key")
    connection = connect(point.address, WAIT_S)
    assert isinstance(connection.receive(4096), bytes)  # the next one is challenged as before
    connection.close()
