"""The twin's loop, with a client that is none."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from disagg.cli.twin import command
from disagg.cli.twin.command import message_of
from disagg.gateway.operators.decode_placement_log import check
from disagg.gateway.operators.load_codec import encode_arrival
from disagg.proto.errors import ConfigError, InvalidRequestError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.router.api import RequestTrace
from disagg.router.telemetry.recent_load import arrival_of
from disagg.simulator.twin.comparison import Attained, Comparison
from disagg.v1 import inference_pb2 as pb

READS = (
    "twin: reads the load of 127.0.0.1:9; answers decode with spread; comparisons begin with 40 requests that have "
    "targets"
)


class FakeClient:
    """Answers of a gateway, one after the other; the last one again and again."""

    def __init__(self, *answers: pb.GetLoadResponse | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.refuses: Exception | None = None
        self.told: list[tuple[str, pb.ShapeComparison]] = []

    def load(self, limit: int) -> pb.GetLoadResponse:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def set_decodes(self, decodes: str, comparison: pb.ShapeComparison) -> None:
        self.told.append((decodes, comparison))
        if self.refuses is not None:
            raise self.refuses


def looks(client: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], str]:
    """The pauses of so many looks, and what was shown."""
    monkeypatch.setattr(command, "_bound_look", lambda: None)
    pauses: list[float] = []
    out = io.StringIO()

    def wait(pause_s: float) -> bool:
        pauses.append(pause_s)
        return len(pauses) == number

    command.look_again_and_again(client, wait, Console(file=out, width=400), "127.0.0.1:9")
    return pauses, out.getvalue()


def test_a_gateway_that_does_not_answer_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = UnavailableError("no gateway", "unreachable")
    there = pb.GetLoadResponse(policy="elastic", decodes="spread")
    client = FakeClient(gone, gone, gone, gone, there)
    pauses, shown = looks(client, 6, monkeypatch)
    assert pauses == [20.0, 40.0, 60.0, 60.0, 10.0, 10.0]
    assert shown.splitlines() == ["twin: no gateway answers at 127.0.0.1:9; trying again until one does", READS]
    assert client.told == []


def test_a_gateway_that_went_and_came_back_has_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = UnavailableError("no gateway", "unreachable")
    there = pb.GetLoadResponse(policy="elastic", decodes="spread")
    _, shown = looks(FakeClient(there, there, gone, gone, there), 5, monkeypatch)
    assert shown.splitlines() == [
        READS,
        "twin: no gateway answers at 127.0.0.1:9; trying again until one does",
        READS,
    ]


def test_other_errors_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="stopping"):
        looks(FakeClient(UnavailableError("stopping", "shutting_down")), 1, monkeypatch)
    with pytest.raises(ConfigError, match="mode elastic"):
        looks(FakeClient(pb.GetLoadResponse(policy="joint")), 1, monkeypatch)


def capacity(name: str) -> pb.WorkerCapacity:
    return pb.WorkerCapacity(
        worker_id=name,
        kv_blocks=1000,
        block_size=16,
        max_num_seqs=64,
        token_budget=1024,
        max_model_len=4096,
        kv_bytes_per_token=1000,
        scheduling="slack",
        base_ms=5.0,
        prefill_token_ms=0.4,
        decode_ms=0.5,
    )


def load_of_forty() -> pb.GetLoadResponse:
    workers = [capacity("w0"), capacity("w1")]
    traces = [
        RequestTrace(
            request_id=RequestId(f"r{number}"),
            arrival=float(number),
            num_prompt_tokens=64,
            num_output_tokens=4,
            most_output_tokens=4,
            outcome="length",
            ttft_slo_s=2.0,
        )
        for number in range(40)
    ]
    return pb.GetLoadResponse(
        requests=[encode_arrival(arrival_of(trace)) for trace in traces],
        workers=workers,
        policy="elastic",
        decodes="spread",
        now_s=40.0,
    )


def test_a_comparison_is_sent_to_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(load_of_forty())
    pauses, shown = looks(client, 2, monkeypatch)
    assert (pauses, shown) == ([10.0, 10.0], READS + "\n")
    ((decodes, comparison),) = client.told
    assert (decodes, comparison.requests, comparison.chosen) == ("spread", 40, "spread")
    assert [[each.attainment for each in option.predictions] for option in comparison.options] == [[1.0, 1.0]] * 3


def test_a_comparison_that_came_too_late_does_not_end_it_and_other_refusals_do(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(load_of_forty())
    client.refuses = InvalidRequestError("comparison.present", "it is gather by now, not spread")
    assert looks(client, 2, monkeypatch) == ([10.0, 10.0], READS + "\n")
    client.refuses = InvalidRequestError("comparison.options", "at most 8, not 9")
    with pytest.raises(InvalidRequestError, match="at most 8"):
        looks(client, 2, monkeypatch)


def test_a_comparison_is_told_whole() -> None:
    comparison = Comparison(
        at_s=3.0,
        cause="first",
        num_requests=40,
        present="spread",
        chosen="gather",
        attained=(
            Attained("spread", ((1.0, 0.5), (1.15, 0.25))),
            Attained("gather", ((1.0, 0.75), (1.15, 0.5))),
        ),
        difference=0.25,
        error=0.125,
        reason="gather is better",
        measured=0.75,
        num_measured=20,
    )
    told = message_of(comparison)
    check(told, "spread")
    assert (told.cause, told.requests, told.present, told.chosen) == ("first", 40, "spread", "gather")
    assert (told.measured, told.measured_requests) == (0.75, 20)
    assert not message_of(msgspec.structs.replace(comparison, measured=None)).HasField("measured")
    assert [(each.decodes, [(p.rate_factor, p.attainment) for p in each.predictions]) for each in told.options] == [
        ("spread", [(1.0, 0.5), (1.15, 0.25)]),
        ("gather", [(1.0, 0.75), (1.15, 0.5)]),
    ]
    assert (told.difference, told.error, told.needed, told.reason) == (0.25, 0.125, 0.135, "gather is better")
