"""Links: bandwidth, latency, fair shares."""

from __future__ import annotations

import pytest

from disagg.simulator.world.clock import EventLoop
from disagg.simulator.world.network import Network
from disagg.step_times.interface import LinkTimes


def ends(sends: list[tuple[float, str, str, int]], latency_s: float = 0.0) -> dict[str, float]:
    """When each transfer (begin, from, to, bytes) ends, over links of 100 bytes/s; named `from-to`."""
    loop = EventLoop()
    network = Network(loop, LinkTimes(bandwidth_bytes_per_s=100.0, latency_s=latency_s))
    found: dict[str, float] = {}
    for begin, source, target, size in sends:
        name = f"{source}-{target}"
        loop.at(begin, network.send, source, target, size, lambda name=name: found.update({name: loop.now}))
    loop.run()
    assert network.num_under_way == 0
    return found


def test_a_transfer_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    assert ends([(1.0, "p0", "d0", 50)], latency_s=0.25) == {"p0-d0": 1.75}


def test_two_transfers_of_one_sender_share_its_link() -> None:
    assert ends([(0.0, "p0", "d0", 100), (0.0, "p0", "d1", 100)]) == {"p0-d0": 2.0, "p0-d1": 2.0}


def test_two_transfers_to_one_receiver_share_its_link() -> None:
    assert ends([(0.0, "p0", "d0", 100), (0.0, "p1", "d0", 100)]) == {"p0-d0": 2.0, "p1-d0": 2.0}


def test_transfers_of_other_workers_do_not_disturb_each_other() -> None:
    assert ends([(0.0, "p0", "d0", 100), (0.0, "p1", "d1", 100)]) == {"p0-d0": 1.0, "p1-d1": 1.0}


def test_a_transfer_that_comes_later_slows_the_first_one_from_then_on() -> None:
    # 50 bytes alone, then both at 50 bytes/s: the first has 50 left, 1 s; the second then has 50 left alone.
    assert ends([(0.0, "p0", "d0", 100), (0.5, "p0", "d1", 100)]) == {"p0-d0": 1.5, "p0-d1": 2.0}


def test_nothing_arrives_from_or_at_a_worker_that_is_gone() -> None:
    loop = EventLoop()
    seen: list[tuple[float, str]] = []
    network = Network(loop, LinkTimes(bandwidth_bytes_per_s=100.0, latency_s=0.0))
    network.send("p0", "d0", 100, lambda: seen.append((loop.now, "lost")))
    network.send("p0", "d1", 100, lambda: seen.append((loop.now, "there")))
    loop.at(1.0, network.drop, "d0")
    loop.run()
    assert seen == [(1.5, "there")]  # 50 bytes at half the rate, 50 alone
    assert network.num_under_way == 0


@pytest.mark.parametrize(
    "link", [LinkTimes(bandwidth_bytes_per_s=0, latency_s=0), LinkTimes(bandwidth_bytes_per_s=1, latency_s=-1)]
)
def test_a_link_that_cannot_be_is_refused(link: LinkTimes) -> None:
    with pytest.raises(ValueError, match="link: expected a bandwidth above 0"):
        Network(EventLoop(), link)
