"""Which request continues a stream whose gateway died, and for how long that is tried."""

from __future__ import annotations

import pytest

from disagg.client.resuming import MAX_PAUSE_S, MIN_PAUSE_S, Attempts, Resumption
from disagg.proto.errors import NO_WORKER_YET, DisaggError, InternalError, OverloadedError, UnavailableError
from disagg.v1 import inference_pb2 as pb

LOST = UnavailableError("socket closed", "unreachable")


def asked(**sampling: float) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(**sampling))  # type: ignore[arg-type]


def delta(first_index: int, *token_ids: int, text: str = "x") -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.TokenDelta(first_index=first_index, token_ids=token_ids, text=text))


def test_a_request_without_a_seed_gets_one_and_keeps_it() -> None:
    given = asked(temperature=1.0)
    first, second = Resumption(given, 10.0), Resumption(given, 10.0)
    assert not given.sampling.HasField("seed")
    assert first.request().sampling.HasField("seed")
    assert first.request().sampling.seed == first.request().sampling.seed
    assert first.request().sampling.seed != second.request().sampling.seed
    assert Resumption(asked(seed=7), 10.0).request() == asked(seed=7)


def test_nothing_is_changed_where_nothing_is_resumed() -> None:
    several = pb.GenerateRequest(text="hi", n=2)
    assert Resumption(several, 10.0).request() == several
    assert Resumption(several, 10.0).pause_s(LOST, True, 0.0) is None
    assert Resumption(asked(), 0.0).request() == asked()
    assert Resumption(asked(), 0.0).pause_s(LOST, True, 0.0) is None


def test_the_next_attempt_continues_after_all_tokens_that_came() -> None:
    stream = Resumption(asked(seed=7), 10.0)
    assert stream.request() == asked(seed=7)  # nothing came: from the beginning
    assert stream.took(delta(0, 5, 6))
    assert stream.took(delta(2, 7))
    assert stream.pause_s(LOST, True, 100.0) == MIN_PAUSE_S
    assert list(stream.request().resume.token_ids) == [5, 6, 7]
    assert stream.request().sampling.seed == 7
    assert stream.took(delta(3, 8))
    assert list(stream.request().resume.token_ids) == [5, 6, 7, 8]


def test_tokens_that_a_guardrail_replaces_behind_a_break_are_no_break() -> None:
    """Only where it continues must the answer fit. It cannot be continued again."""
    stream = Resumption(asked(seed=7), 10.0)
    assert stream.took(delta(0, 5, 6))
    assert stream.pause_s(LOST, True, 100.0) == MIN_PAUSE_S
    assert list(stream.request().resume.token_ids) == [5, 6]
    assert stream.took(delta(2, 7))
    assert stream.took(delta(4, 9))
    assert stream.took(delta(5, 10))
    assert stream.pause_s(LOST, True, 101.0) is None


def test_the_next_attempt_names_the_version_that_made_the_tokens() -> None:
    stream = Resumption(asked(seed=7), 10.0)
    first = delta(0, 5)
    first.delta.model_version = "00000000000000ab"
    assert stream.took(first)
    assert stream.took(delta(1, 6))  # only the first message tells it
    assert stream.request().resume == pb.Resume(token_ids=[5, 6], model_version="00000000000000ab")


def test_text_after_the_last_token_is_passed_on_once() -> None:
    stream = Resumption(asked(seed=7), 10.0)
    assert stream.took(delta(0, 5))
    assert stream.took(delta(1, text="tail"))
    assert stream.pause_s(LOST, True, 0.0) is not None
    assert list(stream.request().resume.token_ids) == [5]
    assert not stream.took(delta(1, text="tail"))
    assert stream.took(pb.GenerateResponse(finished=pb.Finished()))


def test_texts_without_tokens_are_passed_on_where_nothing_broke() -> None:
    """A guardrail put them in the place of tokens. What continues after a break repeats the last one at most."""
    stream = Resumption(asked(seed=7), 10.0)
    assert stream.took(delta(0, 5))
    assert stream.took(delta(1, text="#"))
    assert stream.took(delta(1, text="#"))
    assert stream.request().HasField("resume")
    assert not stream.took(delta(1, text="#"))
    assert stream.took(delta(1, 6))
    assert stream.took(delta(2, text="#"))


def test_an_answer_of_which_tokens_are_missing_cannot_be_continued() -> None:
    stream = Resumption(asked(seed=7), 10.0)
    assert stream.took(delta(0, 5))
    assert stream.pause_s(LOST, True, 0.0) == MIN_PAUSE_S
    assert stream.took(delta(2, 7))
    assert stream.pause_s(LOST, True, 0.0) is None


def test_a_gateway_that_does_not_continue_is_an_error() -> None:
    stream = Resumption(asked(seed=7), 10.0)
    stream.took(delta(0, 5, 6))
    stream.request()
    with pytest.raises(UnavailableError, match="continues at token 0, not 2"):
        stream.took(delta(0, 5))


def test_pauses_grow_until_the_limit_and_begin_anew_with_progress() -> None:
    attempts = Attempts(2.0)
    attempts.progressed()
    assert [attempts.pause_s(LOST, False, now) for now in (0.0, 0.1, 0.2, 0.4, 0.8, 1.4)] == [
        MIN_PAUSE_S,
        2 * MIN_PAUSE_S,
        4 * MIN_PAUSE_S,
        8 * MIN_PAUSE_S,
        MAX_PAUSE_S,
        MAX_PAUSE_S,
    ]
    assert attempts.pause_s(LOST, False, 1.6) is None
    attempts.progressed()
    assert attempts.pause_s(LOST, False, 9.0) == MIN_PAUSE_S


def test_a_call_that_no_gateway_took_is_not_tried_again() -> None:
    assert Attempts(10.0).pause_s(LOST, False, 0.0) is None
    assert Attempts(10.0).pause_s(LOST, True, 0.0) == MIN_PAUSE_S


@pytest.mark.parametrize(
    ("error", "at_first", "afterwards"),
    [
        (UnavailableError("x", "shutting_down"), MIN_PAUSE_S, 2 * MIN_PAUSE_S),
        (UnavailableError("x", "no_decode_capacity"), None, 2 * MIN_PAUSE_S),
        (UnavailableError("x", "stream_lost"), None, None),
        (OverloadedError("x", 0.7), None, 0.7),
        (OverloadedError("x", None), None, 2 * MIN_PAUSE_S),
        (OverloadedError("x", 11.0), None, None),
        (InternalError("x"), None, None),
    ],
)
def test_which_errors_end_the_call(error: DisaggError, at_first: float | None, afterwards: float | None) -> None:
    assert Attempts(10.0).pause_s(error, True, 0.0) == at_first
    broken = Attempts(10.0)
    broken.pause_s(LOST, True, 0.0)
    assert broken.pause_s(error, True, 0.1) == afterwards


def test_an_empty_pool_is_waited_for_until_something_came() -> None:
    empty = UnavailableError("x", NO_WORKER_YET)
    attempts = Attempts(10.0, start_s=2.5)
    assert [attempts.pause_s(empty, True, now) for now in (5.0, 6.0, 7.0)] == [1.0, 1.0, None]
    assert Attempts(10.0).pause_s(empty, True, 0.0) is None
    several = Resumption(pb.GenerateRequest(text="hi", n=2), 10.0, 2.5)
    assert several.pause_s(empty, True, 0.0) == 1.0
    several.took(delta(0, 5))
    assert several.pause_s(empty, True, 1.0) is None


def test_an_answer_is_finished_once_all_its_ends_came() -> None:
    finished = pb.GenerateResponse(finished=pb.Finished())
    stream = Resumption(asked(seed=7), 10.0)
    assert [stream.took(delta(0, 5)), stream.is_finished] == [True, False]
    assert [stream.took(finished), stream.is_finished] == [True, True]
    several = Resumption(pb.GenerateRequest(text="hi", n=2), 10.0)
    assert [several.took(finished), several.is_finished] == [True, False]
    assert [several.took(finished), several.is_finished] == [True, True]
