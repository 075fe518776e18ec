"""Prefixes that D fetches from P, with both halves of a hand-over and two engines over the fake model, whose tokens
depend on the KV that it reads back."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from disagg.engine.commands import Add, Release, Reserve, ReserveRefused
from disagg.proto.handover import Commit
from disagg.proto.ids import BlockHash, RequestId
from disagg.proto.token_ids import pack_token_ids
from tests.support.pair import BYTES_PER_TOKEN, WorkerPair, prompt_of, spec_of

NUM_TOKENS = 300
PREFIX = 256
PROMPT = prompt_of(NUM_TOKENS)


def pair_with_prefix(d_blocks: int = 64) -> WorkerPair:
    """P has computed the prompt."""
    pair = WorkerPair(chunk_tokens=24, d_blocks=d_blocks)
    pair.p.run_alone(spec_of("earlier", PROMPT))
    return pair


def prompt_tokens_of(pair: WorkerPair) -> int:
    """Prompt tokens that D found in its cache."""
    return pair.d.core.totals().cached_tokens


def assert_at_rest(pair: WorkerPair) -> None:
    pair.assert_nothing_is_held()
    pair.assert_answers_are_right()


def test_what_p_has_is_fetched_and_only_the_rest_is_computed() -> None:
    pair = pair_with_prefix()
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX)
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert prompt_tokens_of(pair) == PREFIX
    message = pair.fetched[key]
    assert (message.source, message.outcome, message.tokens) == ("p", "done", PREFIX)
    assert message.kv_bytes == PREFIX * BYTES_PER_TOKEN
    totals = pair.d.core.totals()
    assert (totals.fetched_tokens, dict(totals.fetches)) == (PREFIX, {"done": 1})
    assert pair.chunk_tokens_sent == PREFIX
    assert_at_rest(pair)


def test_only_what_d_lacks_is_sent() -> None:
    pair = pair_with_prefix()
    pair.d.run_alone(spec_of("shorter", PROMPT[:130]))
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX)
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert pair.chunk_tokens_sent == PREFIX - 128
    assert pair.fetched[key].tokens == PREFIX - 128
    assert_at_rest(pair)


def test_nothing_is_asked_for_that_d_has() -> None:
    pair = pair_with_prefix()
    pair.d.run_alone(spec_of("same", PROMPT))
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX)
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert (pair.fetches, pair.fetched, dict(pair.d.core.totals().fetches)) == ({}, {}, {})


def test_p_sends_what_is_left_where_some_of_it_was_evicted() -> None:
    pair = WorkerPair(chunk_tokens=24)
    pair.p.run_alone(spec_of("earlier", PROMPT[:200]))
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX)
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert (pair.fetched[key].outcome, pair.fetched[key].tokens, prompt_tokens_of(pair)) == ("done", 192, 192)
    assert_at_rest(pair)


def test_where_nothing_is_left_the_prompt_is_computed() -> None:
    pair = WorkerPair()
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX)
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert (pair.fetched[key].outcome, pair.fetched[key].tokens, prompt_tokens_of(pair)) == ("refused", 0, 0)
    assert dict(pair.d.core.totals().fetches) == {"refused": 1}
    assert_at_rest(pair)


def test_sequences_that_want_the_same_prefix_share_a_fetch() -> None:
    pair = pair_with_prefix()
    first, second, third = (spec_of("a", PROMPT), spec_of("b", [*PROMPT[:280], 7, 8, 9]), spec_of("c", PROMPT[:140]))
    keys = [pair.fetch(first, end_token=PREFIX), pair.fetch(second, end_token=PREFIX), pair.fetch(third, end_token=128)]
    pair.run()
    assert [pair.answer(key) == pair.expected(key) for key in keys] == [True] * 3
    assert [pair.fetched[key].outcome for key in keys] == ["done"] * 3
    assert [pair.fetched[key].kv_bytes for key in keys] == [PREFIX * BYTES_PER_TOKEN, 0, 0]
    assert pair.chunk_tokens_sent == PREFIX
    assert prompt_tokens_of(pair) == PREFIX + PREFIX + 128
    assert_at_rest(pair)


def test_a_sequence_that_comes_after_its_fetch_does_not_wait() -> None:
    pair = pair_with_prefix()
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX)
    add = pair.d.commands.pop()
    pair.run()
    assert pair.fetched[key].outcome == "done"
    pair.d.commands.append(add)
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert prompt_tokens_of(pair) == PREFIX


def test_a_source_that_is_silent_costs_the_time_limit_and_no_more() -> None:
    pair = pair_with_prefix()
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX, timeout_s=0.2)
    for _ in range(2):  # FetchPrefix and Add; the source gets nothing
        pair.deliver("d_command")
    pair.d.core.step(pair.now + 0.19)
    assert pair.d.core.load().num_waiting == 1
    assert not pair.d.core.has_work
    assert pair.d.core.next_deadline == pytest.approx(0.2)
    pair.tick(0.2)
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert (pair.fetched[key].outcome, dict(pair.d.core.totals().fetches)) == ("late", {"late": 1})
    pair.settle()
    assert_at_rest(pair)


def test_what_came_in_order_before_the_time_limit_counts() -> None:
    pair = pair_with_prefix()
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX, timeout_s=0.2)
    while pair.d.core.totals().fetched_tokens == 0 and not pair.d.core.audit()[0]["blocks_active"] >= 6:
        pair.run_some(1)
    pair.tick(0.2)
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert pair.fetched[key].outcome == "late"
    num_arrived = pair.fetched[key].tokens
    assert 0 < num_arrived < PREFIX
    assert num_arrived // 16 * 16 <= prompt_tokens_of(pair) < PREFIX
    pair.settle()
    assert_at_rest(pair)


def test_a_damaged_chunk_is_not_used() -> None:
    pair = pair_with_prefix()
    pair.wire.corrupt_next = True
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX)
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert (pair.fetched[key].outcome, pair.fetched[key].tokens) == ("failed", 0)
    assert pair.wire.num_corrupted == 1
    assert_at_rest(pair)


def test_a_prefix_that_is_committed_with_a_token_ends_the_pair() -> None:
    pair = pair_with_prefix()
    pair.tampers["to_d"] = lambda message: (
        [msgspec.structs.replace(message, token_id=1)] if isinstance(message, Commit) else [message]
    )
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX)
    pair.run()
    assert pair.receiver.machine.counters["violations"] == 1
    assert pair.answer(key) == pair.expected(key)
    assert pair.fetched[key].outcome == "failed"
    assert_at_rest(pair)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_id": RequestId("fetch-x")}, "nobody waits for this prefix"),
        ({"root_hash": BlockHash(b"another")}, "this is not the prefix that was asked for"),
        ({"tenant_tag": b"another"}, "this is not the prefix that was asked for"),
        ({"block_hashes": spec_of("x", range(PREFIX)).block_hashes}, "this is not the prefix that was asked for"),
        ({"block_hashes": ()}, "this is not the prefix that was asked for"),
        ({"prompt_token_ids": pack_token_ids(PROMPT[:24])}, "this is not the prefix that was asked for"),
    ],
)
def test_nobody_gets_a_prefix_that_was_not_asked_for(changes: dict[str, Any], reason: str) -> None:
    pair = pair_with_prefix()
    key = pair.fetch(spec_of("a", PROMPT), end_token=PREFIX)
    while not pair.fetches:
        pair.run_some(1)
    (order,) = pair.fetches.values()
    offered = msgspec.structs.replace(order.spec, **changes)
    if "prompt_token_ids" in changes:
        offered = msgspec.structs.replace(offered, block_hashes=order.spec.block_hashes[:1])
    assert pair.d.core.handle(Reserve(offered, is_prefix=True), 0.0) == [ReserveRefused(offered.key, reason)]
    pair.run()
    assert pair.answer(key) == pair.expected(key)
    assert pair.fetched[key].outcome == "done"
    assert_at_rest(pair)


@pytest.mark.parametrize("fault", ["", "break", "corrupt", "cancel", "late", "p_dies"])
def test_faults_at_any_moment_change_no_token_and_leave_nothing(fault: str) -> None:
    for seed in range(25):
        chosen = random.Random(seed)
        pair = pair_with_prefix(d_blocks=40)
        keys = [
            pair.fetch(spec_of(name, prompt), end_token=PREFIX, timeout_s=0.3)
            for name, prompt in (("a", PROMPT), ("b", [*PROMPT[:290], 5]))
        ]
        for _ in range(chosen.randrange(140)):
            ready = pair.ready()
            if ready:
                pair.deliver(chosen.choice(ready))
        match fault:
            case "break":
                pair.break_stream()
            case "corrupt":
                pair.wire.corrupt_next = True
            case "cancel":
                pair.d.commands.append(Release(keys[0]))
            case "late":
                pair.tick(0.3)
            case "p_dies":
                pair.die("p")
        pair.run_randomly(seed)
        pair.tick(1.0)
        pair.settle()
        for key in keys[fault == "cancel" :]:
            assert pair.answer(key) == pair.expected(key), (seed, key)
        pair.wire.num_corrupted = min(pair.wire.num_corrupted, pair.receiver.machine.counters["corrupt_chunks"])
        pair.assert_nothing_is_held()


def test_an_added_sequence_without_a_fetch_is_unchanged() -> None:
    pair = pair_with_prefix()
    spec = spec_of("a", PROMPT)
    pair.specs[spec.key] = spec
    pair.d.commands.append(Add(spec))
    pair.run()
    assert pair.answer(spec.key) == pair.expected(spec.key)
    assert pair.fetched == {}
