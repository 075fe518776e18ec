"""The arithmetic of the transfer benchmark, exactly; and a few bytes through its rig."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.transfer import command, rates
from benchmarks.transfer.handover import Asked, Handover, handover, rest_of_step, rows
from benchmarks.transfer.rates import Case, in_turn, measure_rates
from benchmarks.transfer.worker import NotingCore, Timeline
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts import processes, worker_host
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.shell import worker
from tests.support.reports import report, write_json

ASKED = Asked(request_id="r", prompt_tokens=512, streams=4)
P = Timeline(steps=[(0.0, 1.0)], computed={"r": 1.0, "other": 9.0})


def decode(*steps: tuple[float, float], ready: float, began: float) -> Timeline:
    return Timeline(steps=list(steps), join_ordered={"r": ready}, first_step={"r": began})


@pytest.mark.parametrize(
    ("steps", "ready", "began", "moving", "wait", "starting"),
    [
        ([], 1.25, 1.5, 250.0, 0.0, 250.0),  # D was idle
        ([(1.0, 2.0), (2.125, 3.0)], 1.25, 2.125, 250.0, 750.0, 125.0),  # it waits for one step
        ([(1.0, 2.0), (2.0, 4.0), (4.0, 5.0)], 1.5, 4.0, 500.0, 500.0, 2000.0),  # it missed the next one
        ([(1.0, 1.25), (1.5, 2.0)], 1.25, 1.5, 250.0, 0.0, 250.0),  # between two steps
    ],
)
def test_only_the_step_that_ran_is_subtracted(
    steps: list[tuple[float, float]], ready: float, began: float, moving: float, wait: float, starting: float
) -> None:
    found = handover(ASKED, [P, decode(*steps, ready=ready, began=began)])
    assert found == Handover(prompt_tokens=512, streams=4, moving_ms=moving, wait_ms=wait, starting_ms=starting)
    assert found.exposed_ms == moving + starting


def test_a_request_that_was_not_handed_over_once_is_an_error() -> None:
    whole = decode(ready=1.0, began=2.0)
    for timelines in ([P], [whole], [P, P, whole], [P, whole, whole]):
        with pytest.raises(ValueError, match="r was computed"):
            handover(ASKED, timelines)


@pytest.mark.parametrize(("moment", "rest"), [(0.5, 0.0), (1.0, 2.0), (2.5, 0.5), (3.0, 0.0), (4.0, 1.0), (9.0, 0.0)])
def test_what_is_left_of_a_step(moment: float, rest: float) -> None:
    assert rest_of_step([(1.0, 3.0), (4.0, 5.0)], moment) == rest


def of(tokens: int, moving_ms: float) -> Handover:
    return Handover(prompt_tokens=tokens, streams=1, moving_ms=moving_ms, wait_ms=4.0, starting_ms=1.0)


def test_rows_and_figures_of_handovers() -> None:
    measured = [of(512, 1.0), of(512, 3.0), of(1024, 5.0)]
    small, large = rows(measured, "gloo")
    assert (small["prompt_tokens"], small["streams"], small["requests"]) == (512, 1, 2)
    assert (small["exposed_p50_ms"], small["moving_p50_ms"], small["wait_p99_ms"]) == (3.0, 2.0, 4.0)
    assert (large["exposed_p50_ms"], large["exposed_p99_ms"], large["transport"]) == (6.0, 6.0, "gloo")
    summary = command.handover_summary({"gloo": measured, "shm": [of(512, 0.5)]})
    assert (summary["exposed_p50_ms"], summary["exposed_p99_ms"]) == (4.0, 5.96)
    assert (summary["gloo_512_exposed_p50_ms"], summary["gloo_1024_exposed_p99_ms"]) == (3.0, 6.0)
    assert summary["shm_512_exposed_p50_ms"] == 1.5


def test_rows_and_figures_of_rates(tmp_path: Path) -> None:
    def case(transport: str, kib: int, in_flight: int) -> Case:
        return Case(transport=transport, size=kib << 10, in_flight=in_flight)

    rates = {
        case("memcpy", 4096, 2): [10.0, 8.0, 9.0],
        case("gloo", 4096, 2): [2.0, 4.0, 3.0],
        case("memcpy", 64, 1): [20.0],
        case("gloo", 64, 1): [1.0],
        case("memcpy", 64, 4): [40.0],
        case("gloo", 64, 4): [8.0],
    }
    measured = command.rate_rows(rates)
    assert measured[1] == {
        "what": "rate", "transport": "gloo", "kib": 4096, "in_flight": 2,
        "gb_s": 3.0, "gb_s_min": 2.0, "gb_s_max": 4.0, "share": 0.3333, "repeats": 3,
    }  # fmt: skip
    summary = command.rate_summary(measured)
    assert (summary["gloo_share"], summary["gloo_share_64k"], summary["gloo_gb_s_64k"]) == (0.3333, 0.2, 8.0)
    ranked = command.rank_rows({("shm", (1, 2)): [3.0, 1.0, 2.0]})
    assert command.rank_summary(ranked) == {"shm_gb_s_tp_1_2": 2.0}
    command.show_rates(measured)
    command.show_ranks(ranked)
    command.show_handovers(rows([of(512, 1.0)], "gloo"))
    write_json(tmp_path / "report.json", report([*measured, *ranked], summary))


def test_both_orders() -> None:
    assert [in_turn("abc", repeat) for repeat in range(3)] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]
    assert Case(transport="x", size=64 << 10, in_flight=4).count == rates.MOST
    assert Case(transport="x", size=64 << 20, in_flight=4).count == rates.FEWEST


def test_bytes_go_through_the_rig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MOVED_BYTES", 1)
    measured = measure_rates(["memcpy", "local"], [7, 4096], [1, 3], repeats=2)
    assert {(case.transport, case.size, case.in_flight) for case in measured} == {
        (transport, size, k) for transport in ("memcpy", "local") for size in (7, 4096) for k in (1, 3)
    }
    assert all(len(values) == 2 and min(values) > 0 for values in measured.values())


def test_wrong_bytes_are_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "checksum", lambda _: 0)
    with pytest.raises(rates.TransferError, match="another checksum"):
        measure_rates(["local"], [64], [1], repeats=1)


def test_the_noting_worker_takes_the_place_of_the_real_one() -> None:
    """What it replaces must be there under these names."""
    assert issubclass(NotingCore, EngineCore)
    assert worker.EngineCore is EngineCore  # type: ignore[attr-defined]
    assert worker_host.__name__ == processes.WORKER_MODULE
    assert callable(worker_host.make_host)


def test_a_timeline_survives_its_file() -> None:
    timeline = decode((1.0, 2.0), ready=1.5, began=2.0)
    assert msgspec.json.decode(msgspec.json.encode(timeline), type=Timeline) == timeline


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ([], {"name": "smollm2-135m", "dtype": "bfloat16"}),
        (["--model", "fake"], {"path": "fake", "dtype": "bfloat16"}),
        (["--model", "./m", "--dtype", "float32"], {"path": "./m", "dtype": "float32"}),
    ],
)
def test_the_clusters_configuration(arguments: list[str], model: dict[str, Any]) -> None:
    config = command.cluster_config(command.parse_arguments(arguments), "shm")
    assert config["model"] == model
    checked = parse_config(config)
    assert (checked.placement.local_prefill, checked.transfer.transport) == ("never", "shm")


def test_widths_on_the_command_line() -> None:
    assert command.parse_arguments(["--tp", "1,2", "4,2"]).tp == [(1, 2), (4, 2)]
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        command.tp_pair("1")
