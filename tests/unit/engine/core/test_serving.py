"""How much KV is copied for other workers between two steps."""

from __future__ import annotations

import math

import numpy as np

from disagg.engine.commands import Add, Event, Gather, Gathered, Pin, Release
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.serving import BYTE_MS, SHARE, Serving
from disagg.engine.kv_transfer.send_window import SendAttempt, SendState
from disagg.proto.messages import StepSample
from tests.support.engine import (
    BLOCK,
    assert_idle,
    handle_all,
    key_of,
    make_core,
    make_prompt,
    make_spec,
    run_until_idle,
)

TOKEN_BYTES = 23_040
PROMPT = make_prompt(300)
KEY = key_of("fetch-a")


def gather(number: int, num_tokens: int = BLOCK) -> Gather:
    start = number * num_tokens
    return Gather(KEY, number, start, start + num_tokens, np.zeros(num_tokens * 8, dtype=np.uint8))


def test_a_copy_takes_its_share_of_a_step_and_at_least_a_block() -> None:
    serving = Serving(TOKEN_BYTES, BLOCK)
    for step_ms in (13.0, 40.0, 400.0):
        num_tokens = serving.most_tokens(step_ms)
        assert num_tokens % BLOCK == 0
        assert 0.5 * SHARE * step_ms < num_tokens * TOKEN_BYTES * BYTE_MS <= SHARE * step_ms
    assert serving.most_tokens(1.0) == BLOCK
    assert Serving(1 << 20, BLOCK).most_tokens(20.0) == BLOCK


def test_copies_before_a_step_take_no_more_than_its_share_or_are_one() -> None:
    serving = Serving(TOKEN_BYTES, BLOCK)
    block_ms = BLOCK * TOKEN_BYTES * BYTE_MS
    for number in range(9):
        serving.add(gather(number))
    assert [copy.seq for copy in serving.take(0.0)] == [0]
    assert [copy.seq for copy in serving.take(3.5 * block_ms / SHARE)] == [1, 2, 3]
    assert [copy.seq for copy in serving.take(block_ms)] == [4]
    assert [copy.seq for copy in serving.take(math.inf)] == [5, 6, 7, 8]
    assert not len(serving)


def holding_core() -> EngineCore:
    """A worker that holds a prefix of 288 tokens for another one; its steps take about 13 ms, a block of KV 0.1."""
    core = make_core(64)
    handle_all(core, Add(make_spec("earlier", PROMPT, max_tokens=1)))
    run_until_idle(core)
    handle_all(core, Pin(make_spec(KEY.request_id, PROMPT[:288], max_tokens=1)))
    return core


def copies(events: list[Event]) -> list[int]:
    return [event.seq for event in events if isinstance(event, Gathered) and event.ok]


def test_nothing_waits_where_nothing_runs() -> None:
    core = holding_core()
    assert [handle_all(core, gather(number)) != [] for number in range(4)] == [True] * 4
    (answer,) = handle_all(core, gather(4))
    assert isinstance(answer, Gathered)
    assert (answer.ok, answer.most_tokens) == (True, 0)
    handle_all(core, Release(KEY))
    assert_idle(core)


def test_between_two_steps_of_a_stream_a_share_of_a_step_is_copied() -> None:
    core = holding_core()
    handle_all(core, Add(make_spec("stream", make_prompt(20, seed=5), max_tokens=40)))
    core.step(0.0)
    token_ms = core._exchange._serving._token_ms = 0.2  # one block takes 3.2 ms, as that of a large model
    assert [handle_all(core, gather(number)) for number in range(4)] == [[]] * 4
    seen: list[list[int]] = []
    while core.has_work and len(seen) < 6:
        seen.append(copies(core.plan_step(0.0)))
        events = core.run_step()
        assert not copies(events)
    step_ms = core._model.coefficients.step_ms(StepSample(0.0, num_decodes=1, decode_context=25))
    assert BLOCK * token_ms > SHARE * step_ms
    assert seen == [[0], [1], [2], [3], [], []]
    handle_all(core, Release(KEY))
    run_until_idle(core)
    assert_idle(core)


def test_what_waits_is_copied_when_the_stream_ends_and_answered_where_the_prefix_is_gone() -> None:
    core = holding_core()
    handle_all(core, Add(make_spec("stream", make_prompt(20, seed=5), max_tokens=2)))
    core.step(0.0)
    core._exchange._serving._token_ms = 0.2
    handle_all(core, *[gather(number) for number in range(5)])
    events = core.step(0.0)
    assert copies(events) == [0]
    assert core.has_work
    assert core.num_alike == 0
    assert copies(core.step(0.0)) == [1, 2, 3, 4]
    handle_all(core, Add(make_spec("other", make_prompt(20, seed=6), max_tokens=9)))
    core.step(0.0)
    handle_all(core, gather(5), Release(KEY))
    answers = [event for event in core.step(0.0) if isinstance(event, Gathered)]
    assert [(answer.seq, answer.ok) for answer in answers] == [(5, False)]
    run_until_idle(core)
    assert_idle(core)


def test_the_sender_begins_with_a_block() -> None:
    spec = make_spec("fetch-b", PROMPT[:288])
    attempt = SendAttempt(spec, SendState.OFFERED, None, is_prefix=True)
    assert attempt.most_tokens == BLOCK
    assert SendAttempt(spec, SendState.OFFERED, None).most_tokens == 0
