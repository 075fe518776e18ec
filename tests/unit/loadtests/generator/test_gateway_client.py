"""Requests as bytes, answers from bytes: the parts of the client that need no channel."""

from __future__ import annotations

import pytest

from disagg.loadtests.generator.gateway_client import Answer, answer_of, digest, request_bytes
from disagg.loadtests.records import PlannedRequest
from disagg.v1 import inference_pb2 as pb

PLANNED = PlannedRequest(index=0, due_s=0.0, prompt_token_ids=(7, 8), max_tokens=3)


def delta(first_index: int, *token_ids: int) -> bytes:
    message = pb.GenerateResponse(delta=pb.TokenDelta(first_index=first_index, token_ids=token_ids, text="x"))
    return message.SerializeToString()


def finished(cached_tokens: int = 0) -> bytes:
    end = pb.Finished(
        reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=2, cached_tokens=cached_tokens), request_id="r1"
    )
    return pb.GenerateResponse(finished=end).SerializeToString()


def test_a_request_is_greedy_and_has_its_length_forced() -> None:
    request = pb.GenerateRequest.FromString(request_bytes(PLANNED, "m", before=(1, 2)))
    assert (request.model, list(request.token_ids.ids)) == ("m", [1, 2, 7, 8])
    assert request.sampling.temperature == 0.0
    assert request.sampling.HasField("temperature")
    assert (request.stopping.max_tokens, request.stopping.ignore_eos) == (3, True)


def test_each_token_has_the_time_of_its_message() -> None:
    messages = [(1.0, delta(0, 5)), (1.5, delta(1, 6, 7)), (1.75, finished(cached_tokens=16))]
    assert answer_of(messages, "ok", "", 2.0, max_tokens=3) == Answer(
        status="ok",
        token_ids=(5, 6, 7),
        token_times_s=(1.0, 1.5, 1.5),
        end_s=2.0,
        cached_tokens=16,
        request_id="r1",
    )


def test_an_answer_of_another_length_has_failed() -> None:
    answer = answer_of([(1.0, delta(0, 5)), (1.1, finished())], "ok", "", 2.0, max_tokens=3)
    assert (answer.status, answer.error) == ("failed", "1 tokens came, 3 were requested")


def test_the_tokens_before_a_failure_are_kept() -> None:
    answer = answer_of([(1.0, delta(0, 5))], "deadline", "DEADLINE_EXCEEDED: late", 2.0, max_tokens=3)
    assert (answer.status, answer.token_ids, answer.error) == ("deadline", (5,), "DEADLINE_EXCEEDED: late")


def test_bytes_that_are_no_message_have_failed() -> None:
    answer = answer_of([(1.0, delta(0, 5)), (1.1, b"\xff\xff")], "ok", "", 2.0, max_tokens=3)
    assert (answer.status, answer.token_ids) == ("failed", (5,))
    assert answer.error.startswith("no GenerateResponse")


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [((), ""), ((1, 2), digest([1, 2])), ((2, 1), digest([2, 1]))],
)
def test_a_digest_is_of_the_ids_in_order(token_ids: tuple[int, ...], expected: str) -> None:
    assert Answer("ok", token_ids, (), 0.0).digest == expected
    assert digest([1, 2]) != digest([2, 1])
    assert len(digest([1])) == 16
