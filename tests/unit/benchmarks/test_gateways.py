"""What the benchmark of several gateways makes of its rows."""

from __future__ import annotations

from benchmarks.gateways.command import PARTS, Row, capacities, parse_arguments, summary


def window(replicas: int, gateway: str, tokens_per_cpu_s: float) -> Row:
    return {"what": "capacity", "replicas": replicas, "gateway": gateway, "tokens_per_cpu_s": tokens_per_cpu_s}


CAPACITY = [
    *(window(1, "gateway", value) for value in (90.0, 100.0, 500.0)),
    *(window(2, "gateway", value) for value in (95.0, 96.0, 10.0)),
    *(window(2, "gateway-1", value) for value in (94.0, 94.0, 94.0)),
]


def test_capacity_is_the_sum_of_the_medians_of_each_gateway() -> None:
    assert capacities(CAPACITY) == {1: 100.0, 2: 189.0}
    assert capacities([]) == {}


def test_summary() -> None:
    rows = [
        *CAPACITY,
        {"what": "death", "streams": 200, "whole": 199, "longest_gap_s": 1.5},
        {"what": "prefix", "replicas": 1, "reuse": 0.8},
        {"what": "prefix", "replicas": 2, "reuse": 0.76},
        {"what": "burst", "spread": 1},
        {"what": "burst", "spread": 4},
    ]
    assert summary(rows) == {
        "two_over_one": 1.89,
        "tokens_per_cpu_s_of_one": 100.0,
        "streams": 200,
        "streams_whole": 199,
        "longest_gap_s": 1.5,
        "prefix_reuse_two_over_one": 0.95,
        "burst_spread_max": 4,
    }
    assert set(summary([]).values()) == {None}


def test_everything_is_measured_by_default() -> None:
    assert tuple(parse_arguments([]).only) == PARTS
