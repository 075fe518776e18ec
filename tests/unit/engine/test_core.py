from __future__ import annotations

import numpy as np
import pytest

from disagg.engine.commands import (
    Add,
    ChunkComputed,
    Command,
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
from disagg.engine.config import WorkerConfig
from disagg.engine.core import EngineCore
from disagg.engine.fake import FakeModelRunner, fake_generate
from disagg.engine.plan import StepPlan
from disagg.proto.block_hash import chain_hashes
from disagg.proto.ids import GatewayId
from disagg.proto.messages import BlocksSnapshot, BlocksStored, Load, SequenceSpec
from tests.support.engine import (
    GATEWAY,
    ROOT,
    VOCAB_SIZE,
    FailingRunner,
    assert_idle,
    end_of,
    handle_all,
    key_of,
    kv_of,
    make_core,
    make_prompt,
    make_spec,
    move_kv,
    run_until_idle,
    token_ids_of,
)

KEY = key_of("a")
PROMPT = make_prompt(40)


def expected(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return fake_generate(prompt, num_tokens, VOCAB_SIZE)


def buffer(num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.zeros(num_tokens * 8, dtype=np.uint8)


class TestColocated:
    @pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 103])
    @pytest.mark.parametrize("token_budget", [5, 32, 200])
    def test_output(self, num_tokens: int, token_budget: int) -> None:
        core = make_core(token_budget=token_budget)
        prompt = make_prompt(num_tokens)
        events = handle_all(core, Add(make_spec("a", prompt, max_tokens=20))) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected(prompt, 20)
        assert end_of(events, "a") == Ended(KEY, GATEWAY, "length")
        assert_idle(core)

    def test_a_batch(self) -> None:
        core = make_core(40, token_budget=32)
        prompts = {f"r{n}": make_prompt(5 + 13 * n, seed=n) for n in range(6)}
        events = handle_all(core, *(Add(make_spec(name, p, max_tokens=9)) for name, p in prompts.items()))
        events += run_until_idle(core)
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected(prompt, 9)
        assert_idle(core)

    def test_a_prefix_hit_changes_nothing_but_the_count(self) -> None:
        core = make_core(20)
        for name, cached in [("a", 0), ("b", 32), ("c", 32)]:
            events = handle_all(core, Add(make_spec(name, PROMPT))) + run_until_idle(core)
            assert token_ids_of(events, name) == expected(PROMPT, 4)
            assert end_of(events, name).cached_tokens == cached
        longer = (*PROMPT, *make_prompt(60, seed=3))
        events = handle_all(core, Add(make_spec("d", longer))) + run_until_idle(core)
        assert token_ids_of(events, "d") == expected(longer, 4)
        assert end_of(events, "d").cached_tokens == 32

    def test_a_later_attempt_goes_on_where_the_first_stopped(self) -> None:
        core = make_core()
        output = expected(PROMPT, 10)
        spec = make_spec("a", PROMPT, emitted=output[:6], max_tokens=10, attempt=2)
        events = handle_all(core, Add(spec)) + run_until_idle(core)
        assert [(e.index, e.token_id) for e in events if isinstance(e, TokenSampled)] == list(enumerate(output))[6:]

    def test_preemption_does_not_change_the_output(self) -> None:
        core = make_core(8, decode_reserve_tokens=0)
        prompts = {f"r{n}": make_prompt(20 + n, seed=n) for n in range(4)}
        events = handle_all(core, *(Add(make_spec(name, p, max_tokens=70)) for name, p in prompts.items()))
        preempted = 0
        while core.has_work:
            events += core.step(0.0)
            preempted = max(preempted, core._scheduler.num_preempted)
        assert preempted >= 2
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected(prompt, 70)
            assert end_of(events, name).cached_tokens == 0
        assert_idle(core)

    def test_stop_ids_end_it_from_min_tokens_on_and_are_emitted(self) -> None:
        output = expected(PROMPT, 8)
        assert len(set(output)) == 8
        core = make_core()
        spec = make_spec("a", PROMPT, max_tokens=8, min_tokens=4, stop=[output[2], output[5]])
        events = handle_all(core, Add(spec)) + run_until_idle(core)
        assert token_ids_of(events, "a") == output[:6]
        assert end_of(events, "a").reason == "stop"
        assert_idle(core)

    def test_max_model_len_ends_it(self) -> None:
        core = make_core(max_model_len=45)
        assert core.max_model_len == 45
        events = handle_all(core, Add(make_spec("a", PROMPT, max_tokens=100))) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected(PROMPT, 5)
        assert end_of(events, "a").reason == "length"


class TestRefusals:
    @pytest.mark.parametrize(
        ("spec", "reason", "detail"),
        [
            (make_spec("a", make_prompt(160)), "refused", "160 tokens and an answer do not fit into 160"),
            (make_spec("a", ()), "failed", "the prompt is empty"),
            (make_spec("a", (1, VOCAB_SIZE)), "failed", "a token id is not in the vocabulary"),
            (make_spec("a", (-1, 2), cached=False), "failed", "a token id is not in the vocabulary"),
            (make_spec("a", PROMPT, max_tokens=0), "length", "the output is complete already"),
            (make_spec("a", PROMPT, emitted=[1, 2], max_tokens=2), "length", "the output is complete already"),
            (make_spec("a", PROMPT, emitted=[1, 2], stop=[2]), "stop", "the output is complete already"),
            (
                make_spec("a", make_prompt(155), emitted=range(5), max_tokens=9),
                "length",
                "the output is complete already",
            ),
            (
                make_spec("a", make_prompt(155), emitted=range(6), max_tokens=9),
                "refused",
                "161 tokens and an answer do not fit into 160",
            ),
        ],
    )
    def test_specs_that_are_not_run(self, spec: SequenceSpec, reason: str, detail: str) -> None:
        core = make_core()
        assert handle_all(core, Add(spec)) == [Ended(spec.key, GATEWAY, reason, detail)]  # type: ignore[arg-type]
        assert handle_all(core, Reserve(spec)) == [ReserveRefused(spec.key, detail)]
        assert not core.has_work
        assert_idle(core)

    def test_more_hashes_than_blocks(self) -> None:
        spec = make_spec("a", make_prompt(48))
        short = SequenceSpec(
            request_id=spec.request_id,
            attempt=1,
            gateway_id=GATEWAY,
            prompt_token_ids=spec.prompt_token_ids[:47],
            block_hashes=spec.block_hashes,
            root_hash=spec.root_hash,
            sampling=spec.sampling,
        )
        detail = "there are more block hashes than full blocks"
        assert handle_all(make_core(), Add(short)) == [Ended(KEY, GATEWAY, "failed", detail)]

    def test_the_longest_that_fits_is_run(self) -> None:
        core = make_core()
        events = handle_all(core, Add(make_spec("a", make_prompt(159)))) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected(make_prompt(159), 1)
        assert end_of(events, "a").reason == "length"

    @pytest.mark.parametrize("again", [Add(make_spec("a", PROMPT)), Reserve(make_spec("a", PROMPT))])
    @pytest.mark.parametrize("state", ["waiting", "running", "held", "reserved"])
    def test_a_key_that_is_alive_is_ended(self, again: Add | Reserve, state: str) -> None:
        core = core_in_state(state)
        events = handle_all(core, again)
        detail = f"started again while {state}"
        assert events[0] == Ended(KEY, GATEWAY, "failed", detail)
        assert events[1:] == ([ReserveRefused(KEY, detail)] if isinstance(again, Reserve) else [])
        assert_idle(core)

    def test_impossible_configurations(self) -> None:
        with pytest.raises(ValueError, match="must be positive, not 0 and 64"):
            make_core(max_num_seqs=0)
        with pytest.raises(ValueError, match="must be positive, not 8 and 0"):
            make_core(token_budget=0)
        with pytest.raises(ValueError, match="watermark"):
            make_core(watermark=1.0)
        with pytest.raises(ValueError, match="multiple of 16"):
            make_core(block_size=8)


def core_in_state(state: str) -> EngineCore:
    """A core in which sequence `a` of 40 prompt tokens is in `state`."""
    core = make_core(token_budget=32)
    spec = make_spec("a", PROMPT, timeout_s=100.0)
    match state:
        case "waiting":
            handle_all(core, Add(spec))
        case "running":
            handle_all(core, Add(spec))
            core.step(0.0)
        case "held":
            handle_all(core, Add(spec, hold_after_prefill=True))
            run_until_idle(core)
        case "reserved":
            handle_all(core, Reserve(spec), Scatter(KEY, 0, 0, 20, kv_of(PROMPT, 0, 20)))
    (sequence,) = core._scheduler.sequences.values()
    assert sequence.state.value == state
    return core


STATES = ["waiting", "running", "held", "reserved"]


class TestEveryCommandInEveryState:
    @pytest.mark.parametrize("state", STATES)
    def test_release_is_silent_idempotent_and_complete(self, state: str) -> None:
        core = core_in_state(state)
        assert handle_all(core, Release(KEY), Release(KEY)) == []
        assert_idle(core)
        assert core.next_deadline is None
        assert run_until_idle(core) == []

    @pytest.mark.parametrize("state", STATES)
    def test_deadline(self, state: str) -> None:
        core = core_in_state(state)
        assert core.next_deadline == 100.0
        assert core.step(100.0) == [Ended(KEY, GATEWAY, "deadline", "the deadline passed")]
        assert_idle(core)
        assert core.next_deadline is None

    @pytest.mark.parametrize(("state", "num_computed"), zip(STATES, [0, 32, 40, 0], strict=True))
    def test_gather(self, state: str, num_computed: int) -> None:
        core = core_in_state(state)
        for end in (1, 32, 33, 40, 41):
            out = buffer(end)
            ok = end <= num_computed
            assert handle_all(core, Gather(KEY, 3, 0, end, out)) == [Gathered(KEY, 3, ok)]
            np.testing.assert_array_equal(out, kv_of(PROMPT, 0, end) if ok else buffer(end))

    @pytest.mark.parametrize("state", ["waiting", "running", "held"])
    def test_scatter_is_for_reserved_sequences(self, state: str) -> None:
        core = core_in_state(state)
        assert handle_all(core, Scatter(KEY, 3, 0, 16, buffer(16))) == [Scattered(KEY, 3, ok=False)]
        handle_all(core, Release(KEY))
        assert_idle(core)

    @pytest.mark.parametrize("state", ["waiting", "running", "held"])
    def test_join_is_for_reserved_sequences(self, state: str) -> None:
        core = core_in_state(state)
        assert handle_all(core, Join(KEY, 5)) == [Ended(KEY, GATEWAY, "failed", f"joined while {state}")]
        assert_idle(core)

    def test_unknown_keys(self) -> None:
        commands: list[Command] = [
            Release(KEY),
            Gather(KEY, 1, 0, 1, buffer(1)),
            Scatter(KEY, 2, 0, 1, buffer(1)),
            Join(KEY, 5),
        ]
        core = make_core()
        assert handle_all(core, *commands) == [
            Gathered(KEY, 1, ok=False),
            Scattered(KEY, 2, ok=False),
            Ended(KEY, GatewayId(""), "failed", "the sequence is gone"),
        ]
        assert_idle(core)


class TestPrefillRole:
    def test_life(self) -> None:
        core = make_core(token_budget=32)
        events = handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True)) + run_until_idle(core)
        (token_id,) = expected(PROMPT, 1)
        assert events == [
            ChunkComputed(KEY, 32),
            TokenSampled(KEY, GATEWAY, 0, token_id),
            ChunkComputed(KEY, 40),
            PrefillComputed(KEY, GATEWAY, token_id, cached_tokens=0),
        ]
        assert core.audit() == ({"sequences": 1, "blocks_active": 3, "blocks_reserved": 0, "pins": 0}, [])
        handle_all(core, Release(KEY))
        assert_idle(core)

    def test_the_cached_prefix_counts_in_the_first_chunk(self) -> None:
        core = make_core(20)
        handle_all(core, Add(make_spec("warm", PROMPT[:33])))
        run_until_idle(core)
        events = handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True)) + run_until_idle(core)
        assert [e for e in events if isinstance(e, ChunkComputed)] == [ChunkComputed(KEY, 40)]
        assert events[-1] == PrefillComputed(KEY, GATEWAY, expected(PROMPT, 1)[0], cached_tokens=32)

    @pytest.mark.parametrize("reason", ["stop", "length"])
    def test_an_end_at_the_first_token_holds_nothing(self, reason: str) -> None:
        core = make_core()
        (token_id,) = expected(PROMPT, 1)
        spec = make_spec("a", PROMPT, max_tokens=1 if reason == "length" else 9, stop=[token_id] * (reason == "stop"))
        events = handle_all(core, Add(spec, hold_after_prefill=True)) + run_until_idle(core)
        assert events == [TokenSampled(KEY, GATEWAY, 0, token_id), Ended(KEY, GATEWAY, reason)]  # type: ignore[arg-type]
        assert_idle(core)

    def test_a_waiting_one_blocked_by_held_ones_is_no_work_until_a_release(self) -> None:
        core = make_core(3)
        handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True))
        handle_all(core, Add(make_spec("b", make_prompt(40, seed=1)), hold_after_prefill=True))
        run_until_idle(core)
        assert core.load().num_waiting == 1
        handle_all(core, Release(KEY))
        assert token_ids_of(run_until_idle(core), "b") == expected(make_prompt(40, seed=1), 1)


class TestDecodeRole:
    def test_life(self) -> None:
        core = make_core()
        output = expected(PROMPT, 4)
        assert handle_all(core, Reserve(make_spec("a", PROMPT))) == [Reserved(KEY, cached_tokens=0)]
        assert core.audit()[0] == {"sequences": 1, "blocks_active": 0, "blocks_reserved": 3, "pins": 0}
        assert not core.has_work
        assert handle_all(core, Scatter(KEY, 0, 0, 20, kv_of(PROMPT, 0, 20))) == [Scattered(KEY, 0, ok=True)]
        assert core.audit()[0] == {"sequences": 1, "blocks_active": 2, "blocks_reserved": 1, "pins": 0}
        handle_all(core, Scatter(KEY, 1, 20, 40, kv_of(PROMPT, 20, 40)))
        assert core.drain_kv_events() == ()
        events = handle_all(core, Join(KEY, output[0]))
        assert events == [Joined(KEY), TokenSampled(KEY, GATEWAY, 0, output[0])]
        hashes = tuple(chain_hashes(ROOT, PROMPT))
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
        events = handle_all(core, Join(KEY, expected(PROMPT, 1)[0])) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected(PROMPT, 4)

    def test_only_the_missing_suffix_is_taken(self) -> None:
        core = make_core(20)
        handle_all(core, Add(make_spec("warm", PROMPT, max_tokens=1)))
        run_until_idle(core)
        assert handle_all(core, Reserve(make_spec("a", PROMPT))) == [Reserved(KEY, cached_tokens=32)]
        assert handle_all(core, Scatter(KEY, 0, 31, 40, buffer(9))) == [Scattered(KEY, 0, ok=False)]
        handle_all(core, Scatter(KEY, 1, 32, 40, kv_of(PROMPT, 32, 40)))
        events = handle_all(core, Join(KEY, expected(PROMPT, 1)[0])) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected(PROMPT, 4)
        assert end_of(events, "a").cached_tokens == 32

    @pytest.mark.parametrize(("start", "end"), [(-1, 3), (0, 41), (5, 5), (6, 5)])
    def test_ranges_outside_the_sequence_are_not_scattered(self, start: int, end: int) -> None:
        core = core_in_state("reserved")
        assert handle_all(core, Scatter(KEY, 7, start, end, buffer(41))) == [Scattered(KEY, 7, ok=False)]

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
            events += handle_all(core, Join(key_of(name), expected(prompt, 1)[0]))
        events += run_until_idle(core)
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected(prompt, 50)
        assert_idle(core)


class TestHandOver:
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
        assert token_ids_of(events, "a") == expected(prompt, 40)
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
    return [*handle_all(decode, Join(spec.key, computed.token_id)), *run_until_idle(decode)]


class TestFaults:
    def test_a_failing_step_ends_its_sequences_and_no_others(self) -> None:
        runner = FailingRunner()
        core = make_core(runner=runner)
        held = make_prompt(20, seed=1)
        handle_all(core, Add(make_spec("h", held), hold_after_prefill=True))
        run_until_idle(core)
        handle_all(core, Add(make_spec("a", PROMPT)), Add(make_spec("b", make_prompt(10, seed=2))))
        runner.failing.add("run")
        detail = "step: RuntimeError: run is broken"
        assert core.step(0.0) == [
            Ended(KEY, GATEWAY, "failed", detail),
            Ended(key_of("b"), GATEWAY, "failed", detail),
        ]
        runner.failing.clear()
        assert core.audit() == ({"sequences": 1, "blocks_active": 2, "blocks_reserved": 0, "pins": 0}, [])
        events = handle_all(core, Add(make_spec("c", PROMPT))) + run_until_idle(core)
        assert token_ids_of(events, "c") == expected(PROMPT, 4)
        assert end_of(events, "c").cached_tokens == 0

    def test_a_runner_that_samples_too_little(self) -> None:
        class Mute(FakeModelRunner):
            def run(self, plan: StepPlan) -> list[int]:
                return super().run(plan)[1:]

        core = make_core(runner=Mute(10, 16, 4096, VOCAB_SIZE))
        handle_all(core, Add(make_spec("a", PROMPT)))
        detail = "step: RuntimeError: 0 tokens were sampled instead of 1"
        assert core.step(0.0) == [Ended(KEY, GATEWAY, "failed", detail)]
        assert_idle(core)

    def test_a_failing_copy_ends_its_sequence(self) -> None:
        runner = FailingRunner()
        core = make_core(runner=runner)
        handle_all(core, Reserve(make_spec("a", PROMPT)))
        runner.failing.add("scatter")
        assert handle_all(core, Scatter(KEY, 4, 0, 40, buffer(40))) == [
            Scattered(KEY, 4, ok=False),
            Ended(KEY, GATEWAY, "failed", "scatter: RuntimeError: scatter is broken"),
        ]
        assert_idle(core)
        handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True))
        run_until_idle(core)
        runner.failing.add("gather")
        assert handle_all(core, Gather(KEY, 4, 0, 40, buffer(40))) == [
            Gathered(KEY, 4, ok=False),
            Ended(KEY, GATEWAY, "failed", "gather: RuntimeError: gather is broken"),
        ]
        assert_idle(core)

    def test_a_buffer_that_is_too_small_ends_its_sequence(self) -> None:
        core = core_in_state("reserved")
        events = handle_all(core, Scatter(KEY, 1, 20, 40, buffer(19)))
        assert events[0] == Scattered(KEY, 1, ok=False)
        assert end_of(events, "a").reason == "failed"
        assert_idle(core)


class TestReports:
    def test_load(self) -> None:
        core = make_core(20, token_budget=32, max_num_seqs=3)
        assert core.load() == Load(blocks_total=20)
        handle_all(core, Add(make_spec("a", make_prompt(20), max_tokens=16)))
        core.step(0.0)
        handle_all(core, Reserve(make_spec("r", make_prompt(40, seed=1))))
        handle_all(core, Add(make_spec("b", make_prompt(60, seed=2))), Add(make_spec("c", make_prompt(9, seed=3))))
        core.step(0.0)
        assert core.load() == Load(
            num_running=2,
            num_waiting=2,
            uncomputed_prompt_tokens=44 + 9,
            blocks_total=20,
            blocks_active=3,
            blocks_cached=0,
            blocks_reserved=1 + 3 + 3,
            steps=2,
        )

    def test_the_next_deadline_is_the_earliest_of_the_living(self) -> None:
        core = make_core()
        core.handle(Add(make_spec("a", PROMPT, timeout_s=5.0)), 10.0)
        core.handle(Reserve(make_spec("b", make_prompt(9), timeout_s=2.0)), 11.0)
        core.handle(Add(make_spec("c", make_prompt(9))), 0.0)
        assert core.next_deadline == 13.0
        core.handle(Release(key_of("b")), 11.0)
        assert core.next_deadline == 15.0
        run_until_idle(core, now=12.0)
        assert core.next_deadline is None

    def test_a_request_that_is_late_already_is_not_computed(self) -> None:
        core = make_core()
        core.handle(Add(make_spec("a", PROMPT, timeout_s=0.0)), 10.0)
        assert core.step(10.0) == [Ended(KEY, GATEWAY, "deadline", "the deadline passed")]
        assert core.load().steps == 0

    def test_integrity_covers_the_core(self) -> None:
        core = core_in_state("held")
        core._landed[KEY] = []
        core._deadlines.discard(KEY)
        assert core.audit()[1] == [
            "landed ranges are kept for other sequences than the reserved ones",
            "0 deadlines are watched, 1 sequences have one",
        ]

    def test_the_configured_length_bounds_the_models(self) -> None:
        config = WorkerConfig(worker_id="w", roles=("decode",), model_path="fake", max_model_len=50)
        assert EngineCore(FakeModelRunner(100, 16, 4096, VOCAB_SIZE), config=config).max_model_len == 50
        assert EngineCore(FakeModelRunner(2, 16, 4096, VOCAB_SIZE), config=config).max_model_len == 32
