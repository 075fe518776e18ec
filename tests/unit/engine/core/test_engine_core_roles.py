"""The two halves of a disaggregated worker: prefill and hold; reserve, receive and join; and both together."""

from __future__ import annotations

import pytest

from disagg.engine.commands import (
    Add,
    ChunkPlanned,
    Ended,
    Event,
    Gather,
    Gathered,
    Join,
    Joined,
    PrefillComputed,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    Scattered,
    TokenSampled,
)
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import fake_logprobs
from disagg.proto.block_hash import chain_hashes
from disagg.proto.messages import BlocksSnapshot, BlocksStored, SequenceSpec, TokenLogprobs
from disagg.proto.token_ids import pack_token_ids
from tests.support.engine import (
    GATEWAY,
    ROOT,
    VOCAB_SIZE,
    FailingRunner,
    assert_idle,
    core_in_state,
    end_of,
    expected_output,
    handle_all,
    key_of,
    kv_of,
    logprobs_of,
    make_core,
    make_prompt,
    make_spec,
    move_kv,
    new_buffer,
    run_until_idle,
    token_ids_of,
)

KEY = key_of("a")
PROMPT = make_prompt(40)


class TestPrefillRole:
    def test_life(self) -> None:
        core = make_core(token_budget=32)
        events = handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True)) + run_until_idle(core)
        (token_id,) = expected_output(PROMPT, 1)
        assert events == [
            ChunkPlanned(KEY, 32),
            ChunkPlanned(KEY, 40),
            TokenSampled(KEY, GATEWAY, 0, token_id),
            PrefillComputed(KEY, GATEWAY, token_id, cached_tokens=0),
        ]
        assert core.audit() == (
            {"sequences": 1, "blocks_active": 3, "blocks_reserved": 0, "swap_bytes": 0, "copies": 0, "fetches": 0},
            [],
        )
        handle_all(core, Release(KEY))
        assert_idle(core)

    def test_a_last_chunk_of_one_token_is_told_before_its_step_too(self) -> None:
        core = make_core(token_budget=32)
        events = handle_all(core, Add(make_spec("a", PROMPT[:33]), hold_after_prefill=True)) + run_until_idle(core)
        assert [e for e in events if isinstance(e, ChunkPlanned)] == [ChunkPlanned(KEY, 32), ChunkPlanned(KEY, 33)]

    def test_the_cached_prefix_counts_in_the_first_chunk(self) -> None:
        core = make_core(20)
        handle_all(core, Add(make_spec("warm", PROMPT[:33])))
        run_until_idle(core)
        events = handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True)) + run_until_idle(core)
        assert [e for e in events if isinstance(e, ChunkPlanned)] == [ChunkPlanned(KEY, 40)]
        assert events[-1] == PrefillComputed(KEY, GATEWAY, expected_output(PROMPT, 1)[0], cached_tokens=32)

    def test_logprobs_of_the_first_token_come_with_it_and_for_the_hand_over(self) -> None:
        core = make_core()
        spec = make_spec("a", PROMPT, logprobs=2)
        events = handle_all(core, Add(spec, hold_after_prefill=True)) + run_until_idle(core)
        (token_id,) = expected_output(PROMPT, 1)
        logprobs = fake_logprobs(token_id, 2, VOCAB_SIZE)
        assert events == [
            ChunkPlanned(KEY, 40),
            TokenSampled(KEY, GATEWAY, 0, token_id, logprobs),
            PrefillComputed(KEY, GATEWAY, token_id, 0, logprobs),
        ]
        handle_all(core, Release(KEY))

    @pytest.mark.parametrize("reason", ["stop", "length"])
    def test_an_end_at_the_first_token_holds_nothing(self, reason: str) -> None:
        core = make_core()
        (token_id,) = expected_output(PROMPT, 1)
        spec = make_spec("a", PROMPT, max_tokens=1 if reason == "length" else 9, stop=[token_id] * (reason == "stop"))
        events = handle_all(core, Add(spec, hold_after_prefill=True)) + run_until_idle(core)
        assert events == [
            ChunkPlanned(KEY, 40),
            TokenSampled(KEY, GATEWAY, 0, token_id),
            Ended(KEY, GATEWAY, reason),  # type: ignore[arg-type]
        ]
        assert_idle(core)

    def test_what_a_planned_step_does_not_compute_is_not_gathered(self) -> None:
        runner = FailingRunner()
        core = make_core(runner=runner)
        handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True))
        runner.failing = {"run"}
        assert core.plan_step(0.0) == [ChunkPlanned(KEY, 40)]
        assert [type(event) for event in core.run_step()] == [Ended]
        assert handle_all(core, Gather(KEY, 0, 0, 40, new_buffer(40))) == [Gathered(KEY, 0, ok=False)]
        assert_idle(core)

    def test_a_waiting_one_blocked_by_held_ones_is_no_work_until_a_release(self) -> None:
        core = make_core(3)
        handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True))
        handle_all(core, Add(make_spec("b", make_prompt(40, seed=1)), hold_after_prefill=True))
        run_until_idle(core)
        assert core.load().num_waiting == 1
        handle_all(core, Release(KEY))
        assert token_ids_of(run_until_idle(core), "b") == expected_output(make_prompt(40, seed=1), 1)


class TestDecodeRole:
    def test_life(self) -> None:
        core = make_core()
        output = expected_output(PROMPT, 4)
        assert handle_all(core, Reserve(make_spec("a", PROMPT))) == [Reserved(KEY, cached_tokens=0)]
        assert core.audit()[0] == {
            "sequences": 1,
            "blocks_active": 0,
            "blocks_reserved": 3,
            "swap_bytes": 0,
            "copies": 0,
            "fetches": 0,
        }
        assert not core.has_work
        assert handle_all(core, Scatter(KEY, 0, 0, 20, kv_of(PROMPT, 0, 20))) == [Scattered(KEY, 0, ok=True)]
        assert core.audit()[0] == {
            "sequences": 1,
            "blocks_active": 2,
            "blocks_reserved": 1,
            "swap_bytes": 0,
            "copies": 0,
            "fetches": 0,
        }
        handle_all(core, Scatter(KEY, 1, 20, 40, kv_of(PROMPT, 20, 40)))
        assert core.drain_kv_events() == ()
        events = handle_all(core, Join(KEY, output[0]))
        assert events == [Joined(KEY), TokenSampled(KEY, GATEWAY, 0, output[0])]
        hashes = tuple(chain_hashes(ROOT, pack_token_ids(PROMPT)))
        assert core.drain_kv_events() == (BlocksStored(hashes=hashes),)
        assert core.prefix_snapshot() == BlocksSnapshot(hashes=hashes)
        events += run_until_idle(core)
        assert token_ids_of(events, "a") == output
        assert end_of(events, "a").reason == "length"
        assert_idle(core)

    def test_chunks_in_any_order(self) -> None:
        core = make_core()
        handle_all(core, Reserve(make_spec("a", PROMPT)))
        for seq, (start, end) in enumerate([(33, 40), (0, 16), (16, 33)]):
            handle_all(core, Scatter(KEY, seq, start, end, kv_of(PROMPT, start, end)))
        events = handle_all(core, Join(KEY, expected_output(PROMPT, 1)[0])) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 4)

    def test_only_the_missing_suffix_is_taken(self) -> None:
        core = make_core(20)
        handle_all(core, Add(make_spec("warm", PROMPT, max_tokens=1)))
        run_until_idle(core)
        assert handle_all(core, Reserve(make_spec("a", PROMPT))) == [Reserved(KEY, cached_tokens=32)]
        assert handle_all(core, Scatter(KEY, 0, 31, 40, new_buffer(9))) == [Scattered(KEY, 0, ok=False)]
        handle_all(core, Scatter(KEY, 1, 32, 40, kv_of(PROMPT, 32, 40)))
        events = handle_all(core, Join(KEY, expected_output(PROMPT, 1)[0])) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 4)
        assert end_of(events, "a").cached_tokens == 32

    def test_what_it_received_is_evicted_before_what_it_computed(self) -> None:
        core = make_core(7)
        handle_all(core, Add(make_spec("local", PROMPT, max_tokens=1)))
        run_until_idle(core)
        for name in "abc":
            prompt = make_prompt(40, seed=ord(name))
            handle_all(core, Reserve(make_spec(name, prompt)))
            key = make_spec(name, prompt).key
            handle_all(core, Scatter(key, 0, 0, 40, kv_of(prompt, 0, 40)))
            handle_all(core, Join(key, expected_output(prompt, 1)[0]))
            run_until_idle(core)
        assert core.load().blocks_copied == 4
        again = make_spec("again", PROMPT)
        assert handle_all(core, Reserve(again)) == [Reserved(again.key, cached_tokens=32)]

    @pytest.mark.parametrize(("start", "end"), [(-1, 3), (0, 41), (5, 5), (6, 5)])
    def test_ranges_outside_the_sequence_are_not_scattered(self, start: int, end: int) -> None:
        core = core_in_state("reserved")
        assert handle_all(core, Scatter(KEY, 7, start, end, new_buffer(41))) == [Scattered(KEY, 7, ok=False)]

    @pytest.mark.parametrize(
        ("ranges", "num_landed"),
        [([], 0), ([(0, 39)], 39), ([(0, 16), (17, 40)], 16), ([(1, 40)], 0), ([(20, 40), (0, 18), (3, 19)], 19)],
    )
    def test_a_join_without_all_kv_fails_and_publishes_nothing(
        self, ranges: list[tuple[int, int]], num_landed: int
    ) -> None:
        core = make_core()
        handle_all(core, Reserve(make_spec("a", PROMPT)))
        for start, end in ranges:
            handle_all(core, Scatter(KEY, 0, start, end, kv_of(PROMPT, start, end)))
        detail = f"joined with the KV of {num_landed} of 40 tokens"
        assert handle_all(core, Join(KEY, 1)) == [Ended(KEY, GATEWAY, "failed", detail)]
        assert core.drain_kv_events() == ()
        assert_idle(core)

    def test_a_joined_token_outside_the_vocabulary_fails(self) -> None:
        core = core_in_state("reserved")
        detail = f"token id {VOCAB_SIZE} is not in the vocabulary"
        assert handle_all(core, Join(KEY, VOCAB_SIZE)) == [Ended(KEY, GATEWAY, "failed", detail)]
        assert_idle(core)

    @pytest.mark.parametrize(("asked", "came"), [(-1, TokenLogprobs(-1.0)), (0, None), (3, None)])
    def test_a_joined_token_has_logprobs_exactly_where_the_request_asks(
        self, asked: int, came: TokenLogprobs | None
    ) -> None:
        core = make_core()
        spec = make_spec("a", PROMPT, logprobs=asked)
        handle_all(core, Reserve(spec), Scatter(KEY, 0, 0, 40, kv_of(PROMPT, 0, 40)))
        detail = "the token's logprobs are not what was requested"
        assert handle_all(core, Join(KEY, 5, came)) == [Ended(KEY, GATEWAY, "failed", detail)]
        assert_idle(core)

    def test_a_joined_token_that_is_the_last_ends_it(self) -> None:
        core = make_core()
        handle_all(core, Reserve(make_spec("a", PROMPT, max_tokens=1)), Scatter(KEY, 0, 0, 40, kv_of(PROMPT, 0, 40)))
        events = handle_all(core, Join(KEY, 5))
        assert events == [Joined(KEY), TokenSampled(KEY, GATEWAY, 0, 5), Ended(KEY, GATEWAY, "length")]
        assert_idle(core)

    def test_blocks_of_a_released_reservation_were_never_published(self) -> None:
        core = make_core()
        handle_all(core, Reserve(make_spec("a", PROMPT)), Scatter(KEY, 0, 0, 40, kv_of(PROMPT, 0, 40)), Release(KEY))
        assert core.prefix_snapshot() == BlocksSnapshot(hashes=())
        assert handle_all(core, Reserve(make_spec("b", PROMPT))) == [Reserved(key_of("b"), cached_tokens=0)]

    def test_reservations_are_refused_when_the_blocks_are_promised(self) -> None:
        core = make_core(10)
        answers = handle_all(core, *(Reserve(make_spec(name, make_prompt(48, seed=n))) for n, name in enumerate("abc")))
        assert answers == [
            Reserved(KEY, 0),
            Reserved(key_of("b"), 0),
            ReserveRefused(key_of("c"), "not enough free KV blocks"),
        ]
        handle_all(core, Release(KEY))
        assert handle_all(core, Reserve(make_spec("c", make_prompt(48, seed=2)))) == [Reserved(key_of("c"), 0)]

    def test_one_alone_is_reserved_beyond_the_watermark(self) -> None:
        core = make_core(10, watermark=0.5)
        assert handle_all(core, Reserve(make_spec("a", make_prompt(150), max_tokens=500))) == [Reserved(KEY, 0)]
        assert core.load().blocks_reserved == 10

    def test_places_in_the_batch_are_promised_too(self) -> None:
        core = make_core(10, max_num_seqs=1)
        handle_all(core, Add(make_spec("x", make_prompt(5, seed=1))))
        core.step(0.0)
        assert handle_all(core, Reserve(make_spec("a", PROMPT))) == [ReserveRefused(KEY, "the batch is full")]

    def test_a_joined_sequence_that_is_preempted_is_computed_here(self) -> None:
        core = make_core(6, decode_reserve_tokens=0)
        prompts = {"a": make_prompt(30), "b": make_prompt(30, seed=1)}
        events = []
        for name, prompt in prompts.items():
            handle_all(core, Reserve(make_spec(name, prompt, max_tokens=50)))
            handle_all(core, Scatter(key_of(name), 0, 0, 30, kv_of(prompt, 0, 30)))
            events += handle_all(core, Join(key_of(name), expected_output(prompt, 1)[0]))
        events += run_until_idle(core)
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected_output(prompt, 50)
        assert_idle(core)


class TestHandOver:
    @pytest.mark.parametrize("logprobs", [0, 4])
    def test_logprobs_are_those_of_one_worker_alone(self, logprobs: int) -> None:
        spec = make_spec("a", PROMPT, max_tokens=6, logprobs=logprobs)
        events = hand_over(make_core(), make_core(), spec, chunk_tokens=23)
        alone = make_core()
        expected = logprobs_of(handle_all(alone, Add(spec)) + run_until_idle(alone), "a")
        assert logprobs_of(events, "a") == expected
        assert expected == [fake_logprobs(each, logprobs, VOCAB_SIZE) for each in expected_output(PROMPT, 6)]

    @pytest.mark.parametrize("warm_decode", [0, 20, 100])
    @pytest.mark.parametrize("warm_prefill", [0, 20, 100])
    @pytest.mark.parametrize("num_tokens", [1, 16, 17, 100])
    def test_prefill_here_decode_there(self, num_tokens: int, warm_prefill: int, warm_decode: int) -> None:
        """Block sizes differ too: the ranges are in tokens."""
        prefill, decode = make_core(20, token_budget=48), make_core(10, block_size=32)
        prompt = make_prompt(num_tokens)
        for core, warm in [(prefill, warm_prefill), (decode, warm_decode)]:
            if warm:
                handle_all(core, Add(make_spec("warm", prompt[:warm], max_tokens=1)))
                run_until_idle(core)
        events = hand_over(prefill, decode, make_spec("a", prompt, max_tokens=40), chunk_tokens=23)
        assert token_ids_of(events, "a") == expected_output(prompt, 40)
        assert_idle(prefill)
        assert_idle(decode)


def hand_over(prefill: EngineCore, decode: EngineCore, spec: SequenceSpec, chunk_tokens: int) -> list[Event]:
    """Reserve, prefill, move, join, decode; D's events from its join on."""
    (reserved,) = handle_all(decode, Reserve(spec))
    assert isinstance(reserved, Reserved)
    prefilled = handle_all(prefill, Add(spec, hold_after_prefill=True)) + run_until_idle(prefill)
    (computed,) = [e for e in prefilled if isinstance(e, PrefillComputed)]
    starts = range(reserved.cached_tokens, spec.num_known_tokens, chunk_tokens)
    ranges = [(start, min(start + chunk_tokens, spec.num_known_tokens)) for start in starts]
    answers = move_kv(prefill, decode, spec.key, ranges[::-1])
    assert all(answer.ok for answer in answers if isinstance(answer, Gathered | Scattered))
    handle_all(prefill, Release(spec.key))
    return [*handle_all(decode, Join(spec.key, computed.token_id, computed.logprobs)), *run_until_idle(decode)]
