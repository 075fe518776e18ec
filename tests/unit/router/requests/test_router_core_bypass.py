"""A request that waits for room lets smaller ones pass, and is not starved by them."""

from __future__ import annotations

import heapq

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from disagg.proto.messages import Load, WorkerInfo
from disagg.router.config import RouterConfig
from tests.support.router import (
    EMPTY,
    PLAIN,
    Scenario,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    worker_info,
    worker_report,
)

BYPASS_S = 0.5
CONFIG = msgspec.structs.replace(PLAIN, bypass_s=BYPASS_S, decode_reserve_tokens=0)


def decode_worker(number: int, num_blocks: int = 100) -> WorkerInfo:
    return worker_info(f"d{number}", num_blocks=num_blocks, max_num_seqs=64, max_model_len=4096)


def prefill_worker(number: int = 0) -> WorkerInfo:
    return worker_info(f"p{number}", num_blocks=4096, max_num_seqs=512, token_budget=65536, max_model_len=4096)


def end_all(it: Scenario, decode: str, *names: str) -> list[str]:
    """These requests were handed over and end at once."""
    updates = []
    for name in names:
        updates += [handed_over_update(name, 0), end_update(name, 0, "stop")]
    return it.update(decode, *updates)


def prefilled(it: Scenario, *names: str) -> None:
    assert it.update("p0", *[prefilled_update(name, 0) for name in names]) == []


def test_small_requests_pass_a_large_one_that_waits_for_room() -> None:
    """The proof of finding C7: ten decode workers, each 55 % full."""
    it = Scenario(prefill_worker(), *map(decode_worker, range(10)), config=CONFIG)
    for number in range(10):
        assert it.submit(routed_request(f"f{number}", 55 * 16 - 4))[0].startswith("dispatch")
    assert it.submit(routed_request("large", 70 * 16)) == []
    placed = [it.submit(routed_request(f"s{number}", 60)) for number in range(40)]
    assert sum(bool(lines) for lines in placed) == 40
    assert it.core.holdings()["queued"] == 1


def test_after_a_while_a_worker_is_kept_for_the_large_one() -> None:
    it = Scenario(prefill_worker(), decode_worker(0), decode_worker(1), config=CONFIG)
    it.start(routed_request("f0", 55 * 16 - 4), "p0", "d0")
    it.start(routed_request("f1", 50 * 16 - 4), "p0", "d1")
    assert it.submit(routed_request("large", 70 * 16)) == []
    assert it.core.next_wakeup() == BYPASS_S
    it.start(routed_request("s0", 60), "p0", "d1")
    assert it.at(BYPASS_S) == []
    # D1 has 54 blocks assigned, D0 55: d1 is kept free of new ones, though it is the less loaded.
    for number in range(1, 6):
        it.start(routed_request(f"s{number}", 60), "p0", "d0")
    # The large one may not pass itself by: its room is on d1 once f1 has ended.
    prefilled(it, "f1", "s0")
    assert end_all(it, "d1", "f1") == ["finish f1 stop 0 cached=0", "dispatch p0 large/0 -> d1"]
    # Nothing is kept any more.
    it.start(routed_request("s6", 60), "p0", "d1")
    assert it.core.check_integrity() == []


def test_where_there_is_one_worker_all_wait_once_the_time_to_pass_is_over() -> None:
    it = Scenario(prefill_worker(), decode_worker(0), config=CONFIG)
    it.start(routed_request("f0", 55 * 16 - 4), "p0", "d0")
    assert it.submit(routed_request("large", 70 * 16)) == []
    it.start(routed_request("s0", 60), "p0", "d0")
    assert it.at(BYPASS_S) == []
    assert it.submit(routed_request("s1", 60)) == []
    assert it.submit(routed_request("urgent", 60, priority=1)) == ["dispatch p0 urgent/0 -> d0"]
    prefilled(it, "f0", "s0", "urgent")
    assert end_all(it, "d0", "f0") == [
        "finish f0 stop 0 cached=0",
        "dispatch p0 large/0 -> d0",
        "dispatch p0 s1/0 -> d0",
    ]


@pytest.mark.parametrize("num_before", [20, 100])
def test_a_worker_held_for_one_far_back_in_the_queue_is_used_for_it(num_before: int) -> None:
    """Requests that are due earlier and must not use the held worker stand before the one that it is held for: more of
    them than one pass tries, and than it looks at."""
    it = Scenario(prefill_worker(), decode_worker(0), config=CONFIG)
    it.start(routed_request("f0", 55 * 16 - 4), "p0", "d0")
    assert it.submit(routed_request("large", 70 * 16)) == []
    assert it.at(BYPASS_S) == []
    names = [f"q{number}" for number in range(num_before)]
    for name in names:
        assert it.submit(msgspec.structs.replace(routed_request(name, 70 * 16), ttft_slo_s=5.0)) == []
    prefilled(it, "f0")
    assert end_all(it, "d0", "f0") == ["finish f0 stop 0 cached=0", "dispatch p0 large/0 -> d0"]
    placed = "large"
    for name in names:  # None is left behind; the end of the one before is enough.
        prefilled(it, placed)
        assert end_all(it, "d0", placed) == [f"finish {placed} stop 0 cached=0", f"dispatch p0 {name}/0 -> d0"]
        placed = name
    assert it.core.check_integrity() == []


@pytest.mark.parametrize("how", ["cancel", "lost", "drain", "suspected"])
def test_what_was_kept_is_given_back(how: str) -> None:
    it = Scenario(prefill_worker(), decode_worker(0), decode_worker(1), config=CONFIG)
    it.start(routed_request("f0", 55 * 16 - 4), "p0", "d0")
    it.start(routed_request("f1", 50 * 16 - 4), "p0", "d1")
    assert it.submit(routed_request("large", 70 * 16)) == []
    assert it.at(BYPASS_S) == []
    it.start(routed_request("s0", 60), "p0", "d0")
    if how == "cancel":
        it.cancel("large")
        it.start(routed_request("s1", 60), "p0", "d1")
        return
    if how == "lost":
        it.lost("d1")
    elif how == "drain":
        it.drain("d1")
    else:
        it.suspected("d1")
    # Only d0 is left, which is kept from now on.
    assert it.submit(routed_request("s2", 60)) == []
    prefilled(it, "f0", "s0")
    lines = end_all(it, "d0", "f0")
    if how != "drain":  # What was on d1 goes first.
        assert lines == ["finish f0 stop 0 cached=0", "dispatch p0 f1/1 -> d0"]
        lines = it.update("d0", end_update("f1", 1, "stop"))
    assert "dispatch p0 large/0 -> d0" in lines


def test_a_prefill_worker_is_kept_too_where_it_is_what_lacks_room() -> None:
    small = worker_info("p0", num_blocks=100, max_num_seqs=64, token_budget=65536, max_model_len=4096)
    it = Scenario(small, decode_worker(0, 4096), config=CONFIG)
    it.start(routed_request("f0", 55 * 16 - 4), "p0", "d0")
    assert it.submit(routed_request("large", 70 * 16)) == []
    it.start(routed_request("s0", 60), "p0", "d0")
    assert it.at(BYPASS_S) == []
    assert it.submit(routed_request("s1", 60)) == []
    prefilled(it, "f0")
    assert it.update("d0", handed_over_update("f0", 0)) == ["dispatch p0 large/0 -> d0", "dispatch p0 s1/0 -> d0"]


def test_looks_for_one_event_are_few_however_many_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scenario(prefill_worker(), decode_worker(0), config=CONFIG)
    it.start(routed_request("f0", 90 * 16 - 4), "p0", "d0")
    for number in range(50):
        assert it.submit(routed_request(f"q{number}", 20 * 16)) == []
    looks: list[object] = []
    try_start = it.core._attempts.try_start

    def counting(*args: object) -> object:
        looks.append(args)
        return try_start(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(it.core._attempts, "try_start", counting)
    assert it.report(worker_report("d0", 0, load=Load(blocks_active=90))) == []
    assert len(looks) == 1
    assert it.submit(routed_request("as-large", 20 * 16)) == []
    assert len(looks) == 1


@settings(max_examples=15, deadline=None, phases=(Phase.generate,))
@given(
    num_decodes=st.integers(1, 3),
    arrivals=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 30), st.floats(0.01, 1.0)), min_size=40, max_size=120
    ),
    large=st.integers(45, 90),
)
def test_the_large_one_is_placed_within_a_bound(
    num_decodes: int, arrivals: list[tuple[int, int, float]], large: int
) -> None:
    """Small requests keep coming, each of up to 30 of 100 blocks and held for at most a second. The large one is placed
    once it has let them pass for `bypass_s`, and the longest of them has left the worker that is then kept for it."""
    it = Scenario(prefill_worker(), *[decode_worker(number) for number in range(num_decodes)], config=CONFIG)
    running: list[tuple[float, str, str]] = []
    lifetimes: dict[str, float] = {}
    placed_at: dict[str, float] = {}

    def note(lines: list[str]) -> None:
        for line in lines:
            if line.startswith("dispatch"):
                name, decode = line.split()[2].split("/")[0], line.split()[-1]
                placed_at[name] = it.now
                if name != "large":
                    heapq.heappush(running, (it.now + lifetimes[name], name, decode))

    def pass_until(when: float) -> None:
        while True:
            wakeup, ending = it.core.next_wakeup(), running[0][0] if running else None
            due = min((t for t in (wakeup, ending) if t is not None), default=when)
            if due >= when or "large" in placed_at:
                break
            it.now = due
            if due == wakeup:
                note(it.at(due))
            if ending == due:
                _, name, decode = heapq.heappop(running)
                it.update("p0", prefilled_update(name, 0))
                note(it.update(decode, handed_over_update(name, 0), end_update(name, 0, "stop")))
        it.now = when

    def submit(name: str, num_blocks: int, lifetime_s: float) -> None:
        lifetimes[name] = lifetime_s
        note(it.submit(routed_request(name, 16 * num_blocks - 4)))

    for number, (_, num_blocks, lifetime_s) in enumerate(arrivals[:20]):
        submit(f"f{number}", num_blocks, lifetime_s)
    submit("large", large, 1.0)
    for number, (gap, num_blocks, lifetime_s) in enumerate(arrivals[20:]):
        pass_until(it.now + gap / 1000)
        submit(f"s{number}", num_blocks, lifetime_s)
    pass_until(10.0)
    # Requests before it in the queue: at most those that came first, each placed within a second of the last.
    assert placed_at["large"] <= _waits_before_s(placed_at) + BYPASS_S + 1.0 + 1e-6
    for name in list(it.core._requests):
        it.cancel(name)
    assert it.core.holdings() == EMPTY


def _waits_before_s(placed_at: dict[str, float]) -> float:
    """When the last one that stood before the large one was placed."""
    return max((when for name, when in placed_at.items() if name.startswith("f")), default=0.0)


def test_the_time_to_pass_must_be_a_time() -> None:
    with pytest.raises(ValueError, match=r"router.bypass_s: must not be negative, not -1"):
        RouterConfig(bypass_s=-1)
