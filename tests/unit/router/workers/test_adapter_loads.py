"""What is known of the adapters that workers have loaded, and of the time to load others."""

from __future__ import annotations

import pytest

from disagg.proto.messages import AdapterState
from disagg.router.workers import adapter_loads
from disagg.router.workers.adapter_loads import DEFAULT_BYTES, Loaded, LoadTimes


def state(name: str, num_bytes: int = 1000, load_ms: float = 50.0) -> AdapterState:
    return AdapterState(fingerprint=name, bytes=num_bytes, load_ms=load_ms, uses=0)


def test_the_time_of_a_load_is_by_bytes() -> None:
    times = LoadTimes()
    assert times.predict_ms("a") == pytest.approx(DEFAULT_BYTES * 1e-6)
    assert times.predict_ms("a", 5_000_000) == pytest.approx(5.0)
    times.observe(state("a", 1000, 50.0))
    times.observe(state("b", 3000, 70.0))
    assert times.predict_ms("a") == pytest.approx(30.0)  # 120 ms for 4000 bytes, and it has 1000
    assert times.predict_ms("c", 2000) == pytest.approx(60.0)
    times.observe(state("empty", 0, 5.0))
    times.observe(state("loaded before", 1000, 0.0))
    assert times.predict_ms("c", 2000) == pytest.approx(60.0)


def test_later_loads_count_more_and_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_loads, "MEMORY_BYTES", 1500)
    monkeypatch.setattr(adapter_loads, "MAX_KNOWN", 2)
    times = LoadTimes()
    for name in ("a", "b", "c"):
        times.observe(state(name, 1000, 10.0))
    times.observe(state("d", 1000, 100.0))
    # 10/1000, 20/2000, halved to 10/1000 before c, 20/2000 halved before d
    assert times.predict_ms("x", 1000) == pytest.approx(55.0)
    assert times.predict_ms("a") == pytest.approx(DEFAULT_BYTES * 0.055)  # its size was forgotten


def test_a_load_that_was_ordered_counts_as_under_way_until_it_is_reported_or_late() -> None:
    loaded = Loaded()
    assert loaded.report([]) == []
    assert loaded.wait_ms("a", 200.0, 10.0) == 200.0
    loaded.order("a", 200.0, 10.0)
    loaded.order("a", 900.0, 10.1)  # it is under way
    assert loaded.is_coming("a", 10.1)
    assert loaded.wait_ms("a", 200.0, 10.05) == pytest.approx(150.0)
    assert loaded.wait_ms("a", 200.0, 11.0) == 0.0
    assert loaded.wait_ms("a", 200.0, 11.8) == 200.0  # 4 x 0.2 s and 1 s are over
    assert not loaded.is_coming("a", 11.8)
    assert loaded.report([state("a"), state("b")]) == [state("a"), state("b")]
    assert loaded.report([state("b"), state("c")]) == [state("c")]
    assert [loaded.wait_ms(name, 5.0, 20.0) for name in "abc"] == [5.0, 0.0, 0.0]
    loaded.order("b", 5.0, 20.0)
    assert not loaded.is_coming("b", 20.0)
