"""What the program of hostile loads sends, and its summary."""

from __future__ import annotations

from disagg.v1 import inference_pb2 as pb
from tests.acceptance.isolation.hostile_loads import empty_turns, summary


def test_turns_without_a_field() -> None:
    request = pb.GenerateRequest.FromString(empty_turns("fake", 1001))
    assert (request.model, len(request.chat.messages)) == ("fake", 500)
    assert all(message == pb.ChatMessage() for message in request.chat.messages)


def test_the_summary_has_the_worst_of_all_loads() -> None:
    row = {"alone_longest_ms": 10.0, "longest_ms": 30.0, "loop_longest_ms": 8.0, "growth_mib": 1.0, "left": 0}
    rows = [{**row, "same_processes": 1}, {**row, "longest_ms": 25.0, "alone_longest_ms": 2.0, "same_processes": 0}]
    assert summary(rows) == {
        "longest_ms": 30.0,
        "longest_delay_ms": 23.0,
        "loop_longest_ms": 8.0,
        "growth_mib": 1.0,
        "same_processes": 0,
        "left": 0,
    }
