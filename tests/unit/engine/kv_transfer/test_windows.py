"""Hand-overs of a model with windows: what is sent of them, and what a peer may not send."""

from __future__ import annotations

import msgspec
import pytest

from disagg.engine.fake_runner import FakeModelRunner
from disagg.proto.handover import ChunkHeader, Commit, Failure
from disagg.proto.ids import AttemptKey
from tests.support.pair import Message, WorkerPair, prompt_of, spec_of

WINDOWS = ((40, 60), (5, 40))
LAYOUT = FakeModelRunner(1, 16, 16, windows=WINDOWS).layout


def handed_over(pair: WorkerPair, name: str, num_tokens: int, *, first: int = 100) -> AttemptKey:
    key = pair.offer(spec_of(name, prompt_of(num_tokens, first), max_tokens=60))
    pair.run()
    assert pair.outcome(key) == "handed_over"
    assert pair.answer(key) == pair.expected(key)
    return key


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40, 64, 79, 80, 200])
@pytest.mark.parametrize("chunk_tokens", [3, 24])
def test_what_is_sent_is_what_the_layout_says(num_tokens: int, chunk_tokens: int) -> None:
    pair = WorkerPair(windows=WINDOWS, chunk_tokens=chunk_tokens)
    key = handed_over(pair, "r", num_tokens)
    assert pair.p_overs[key][0].kv_bytes == pair.d_overs[key][0].kv_bytes == LAYOUT.bytes_of(num_tokens)
    pair.assert_at_rest()


def test_the_next_turn_sends_what_d_lacks() -> None:
    pair = WorkerPair(windows=WINDOWS)
    first = handed_over(pair, "first", 100)
    history = [*prompt_of(100), *pair.answer(first), *prompt_of(30, 900)]
    second = pair.offer(spec_of("second", history, max_tokens=60))
    pair.run()
    assert pair.answer(second) == pair.expected(second)
    (over,) = pair.d_overs[second]
    assert over.cached_tokens == (100 + 60 - 1) // 16 * 16
    assert over.kv_bytes == LAYOUT.bytes_of(len(history), over.cached_tokens)
    pair.assert_at_rest()


@pytest.mark.parametrize("num_prompt", [1, 16, 37, 150])
@pytest.mark.parametrize("start", [1, 15, 40])
def test_a_sequence_moves_with_the_windows_of_its_end(num_prompt: int, start: int) -> None:
    pair = WorkerPair(windows=WINDOWS)
    key = pair.decode_on_p(spec_of("r", prompt_of(num_prompt), max_tokens=700), start)
    pair.sender.move(key, 1)
    pair.run()
    assert pair.outcome(key) == "handed_over"
    assert pair.answer(key) == pair.expected(key)
    pair.assert_at_rest()


@pytest.mark.parametrize("seed", range(20))
def test_random_orders(seed: int) -> None:
    pair = WorkerPair(windows=WINDOWS, chunk_tokens=7, credits=2)
    for number, num_tokens in enumerate((37, 120, 80)):
        pair.offer(spec_of(f"r{number}", prompt_of(num_tokens, 300 * number), max_tokens=20))
    pair.run_randomly(seed)
    for key in pair.specs:
        assert pair.answer(key) == pair.expected(key)
    pair.assert_at_rest()


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"group": 3}, "is of cache group 3 of 3"),
        ({"group": -1}, "is of cache group -1 of 3"),
        ({"start_token": 47}, "starts at token 47, not 48"),
        ({"start_token": 49}, "starts at token 49, not 48"),
        ({"end_token": 101}, "ends at token 101 of 100"),
        ({"nbytes": 7}, "has 7 bytes"),
    ],
)
def test_a_header_that_is_not_due_closes_the_pair(change: dict[str, int], detail: str) -> None:
    """The first chunk of the wider window."""

    def tamper(message: Message) -> list[Message]:
        if isinstance(message, ChunkHeader) and message.group == 1 and message.start_token == 48:
            return [msgspec.structs.replace(message, **change)]
        return [message]

    pair = WorkerPair(windows=WINDOWS, chunk_tokens=24, tamper=tamper)
    key = pair.offer(spec_of("r", prompt_of(100)))
    pair.run()
    assert pair.outcome(key) == "failed"
    assert pair.receiver.machine.counters["violations"] == 1
    assert pair.receiver.close_cause is not None
    assert pair.receiver.close_cause.failure is Failure.VIOLATION
    assert detail in pair.receiver.close_detail
    pair.assert_nothing_is_held()


def test_a_commit_without_a_window_closes_the_pair() -> None:
    def tamper(message: Message) -> list[Message]:
        if isinstance(message, ChunkHeader) and message.group:
            return []
        if isinstance(message, Commit):
            return [msgspec.structs.replace(message, num_chunks=message.num_chunks - 2)]
        return [message]

    pair = WorkerPair(windows=((40, 60),), chunk_tokens=50, tamper=tamper)
    pair.offer(spec_of("r", prompt_of(16)))
    pair.run_some(400)
    assert pair.receiver.machine.counters["violations"] == 1
