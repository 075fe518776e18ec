"""Sequences whose KV goes to host memory and comes back: who, in which order, what if there is no such memory."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.blocks.swap import Piece, SwapIn, SwapOut, SwapPool
from disagg.engine.commands import (
    Add,
    Ended,
    Event,
    Gather,
    Gathered,
    Join,
    Joined,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    TokenSampled,
)
from disagg.engine.config import Scheduling
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.core.scheduler_audit import scheduler_findings
from disagg.proto.messages import RoleName
from tests.support.engine import (
    GATEWAY,
    FailingRunner,
    add_to,
    assert_idle,
    assert_sound,
    end_of,
    expected_output,
    handle_all,
    key_of,
    kv_of,
    make_core,
    make_prompt,
    make_scheduler,
    make_sequence,
    make_spec,
    new_buffer,
    run_until_idle,
    shape_of,
    states_of,
    step_scheduler,
    step_with_effects,
    token_ids_of,
)

SLOT_BYTES = 128 * 8
"""Of the fake model."""
LOST = "its KV blocks were needed by a sequence with more output"


def pressed_scheduler(num_slots: int = 10, *, slot_tokens: int = 16, recomputes: bool = True) -> Scheduler:
    """Two sequences whose known tokens just fill all four blocks; `a` is ahead by one token."""
    swap = SwapPool(num_slots, slot_tokens, 100)
    scheduler = make_scheduler(4, decode_reserve_tokens=0, swap=swap, recomputes=recomputes)
    for name, arrival in [("a", 1.0), ("b", 2.0)]:
        add_to(scheduler, name, 31, max_tokens=40, arrival=arrival)
        step_scheduler(scheduler)
    return scheduler


def run_alone(scheduler: Scheduler) -> None:
    """`a` goes away."""
    scheduler.drop(scheduler.sequences[key_of("a")])


class TestSuspend:
    def test_the_kv_of_the_victim_is_copied_before_its_blocks_are_written(self) -> None:
        scheduler = pressed_scheduler()
        b = scheduler.sequences[key_of("b")]
        table = tuple(b.block_table)
        plan, effects, _ = step_with_effects(scheduler)
        assert shape_of(plan) == ([("a", 32, 1)], [])
        assert effects == [SwapOut(b, (table,), (Piece(0, 0, 16), Piece(1, 16, 31)))]
        assert set(scheduler.sequences[key_of("a")].block_table) & set(table)
        assert states_of(scheduler) == {"a": "running", "b": "suspended"}
        assert (b.block_table, b.num_computed_tokens, b.swapped_tokens) == ([], 0, 31)
        assert (scheduler.num_preempted, scheduler.swap.num_bytes, scheduler.totals["preemptions"]) == (1, 200, 1)

    def test_effects_are_handed_over_once(self) -> None:
        scheduler = pressed_scheduler()
        scheduler.schedule()
        assert len(scheduler.take_effects()) == 1
        assert scheduler.take_effects() == []

    def test_one_without_computed_tokens_has_nothing_to_keep(self) -> None:
        scheduler = make_scheduler(
            3, decode_reserve_tokens=0, token_budget=17, swap=SwapPool(9, 16, 1), recomputes=False
        )
        add_to(scheduler, "a", 16, max_tokens=40, arrival=1.0)
        add_to(scheduler, "b", 32, arrival=2.0)
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("a", 0, 16)])
        assert states_of(scheduler) == {"a": "running", "b": "running"}
        plan, effects, events = step_with_effects(scheduler)
        assert (shape_of(plan), effects, len(events)) == (([("a", 16, 1)], []), [], 1)
        assert states_of(scheduler) == {"a": "running", "b": "waiting"}

    @pytest.mark.parametrize("num_slots", [0, 1])
    def test_without_room_in_host_memory_it_is_computed_again_here(self, num_slots: int) -> None:
        scheduler = pressed_scheduler(num_slots)
        assert step_with_effects(scheduler)[1] == []
        assert states_of(scheduler) == {"a": "running", "b": "waiting"}
        assert scheduler.swap.num_bytes == 0

    @pytest.mark.parametrize("num_slots", [0, 1])
    def test_where_prompts_are_not_computed_it_ends_to_be_computed_elsewhere(self, num_slots: int) -> None:
        scheduler = pressed_scheduler(num_slots, recomputes=False)
        plan, _, events = step_with_effects(scheduler)
        assert events[0] == Ended(key_of("b"), GATEWAY, "preempted", LOST)
        assert (shape_of(plan), states_of(scheduler)) == (([("a", 32, 1)], []), {"a": "running"})
        assert (scheduler.num_preempted, scheduler.totals["preemptions"]) == (0, 1)

    def test_a_prompt_that_is_half_computed_is_kept_too(self) -> None:
        scheduler = make_scheduler(6, decode_reserve_tokens=0, token_budget=32, swap=SwapPool(9, 64, 1))
        add_to(scheduler, "a", 32, max_tokens=60, arrival=1.0)
        step_scheduler(scheduler)
        add_to(scheduler, "b", 48, max_tokens=60, arrival=2.0)
        assert shape_of(step_scheduler(scheduler)[0]) == ([("a", 32, 1)], [("b", 0, 16)])
        b = scheduler.sequences[key_of("b")]
        scheduler._preempt(b)
        (effect,) = scheduler.take_effects()
        assert isinstance(effect, SwapOut)
        assert (effect.pieces, b.num_uncomputed_prompt_tokens) == ((Piece(0, 0, 16),), 32)
        run_alone(scheduler)
        step_scheduler(scheduler)
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("b", 16, 32)])


class TestResume:
    def test_it_comes_back_before_anything_new_and_decodes_in_the_next_step(self) -> None:
        scheduler = pressed_scheduler()
        step_scheduler(scheduler)
        scheduler.blocks.prefix.drain_events()
        add_to(scheduler, "c", 16, arrival=0.0, max_tokens=1)
        run_alone(scheduler)
        plan, effects, _ = step_with_effects(scheduler)
        b = scheduler.sequences[key_of("b")]
        (swap_in,) = effects
        assert isinstance(swap_in, SwapIn)
        assert swap_in.sequence is b
        assert shape_of(plan) == ([], [("c", 0, 16)])
        assert (b.state.value, b.num_computed_tokens, b.swapped_tokens) == ("running", 31, 0)
        assert (scheduler.num_preempted, scheduler.swap.num_bytes) == (0, 0)
        assert shape_of(step_scheduler(scheduler)[0]) == ([("b", 31, 1)], [])

    def test_until_then_nothing_new_is_reserved(self) -> None:
        scheduler = pressed_scheduler()
        step_scheduler(scheduler)
        reserve = make_sequence(make_spec("r", make_prompt(1)))
        assert scheduler.reserve(reserve) == "preempted sequences go first"
        run_alone(scheduler)
        step_scheduler(scheduler)
        assert scheduler.reserve(reserve) is None

    def test_a_more_urgent_one_that_waits_goes_first(self) -> None:
        scheduler = pressed_scheduler()
        step_scheduler(scheduler)
        add_to(scheduler, "c", 48, priority=1, arrival=9.0, max_tokens=1)
        run_alone(scheduler)
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("c", 0, 48)])
        assert states_of(scheduler) == {"b": "suspended"}

    @pytest.mark.parametrize(
        ("evicted", "slot_tokens", "copied"),
        [
            (0, 16, [(32, 40)]),
            (1, 16, [(16, 32), (32, 40)]),
            (2, 16, [(0, 16), (16, 32), (32, 40)]),
            (0, 32, [(32, 40)]),
            (1, 32, [(0, 32), (32, 40)]),
            (0, 64, [(0, 40)]),
        ],
    )
    def test_what_is_still_cached_is_not_copied_back(
        self, evicted: int, slot_tokens: int, copied: list[tuple[int, int]]
    ) -> None:
        """`b` has two full blocks. A slot is copied as a whole: one that is cached in part comes back in full."""
        scheduler = make_scheduler(6, decode_reserve_tokens=0, swap=SwapPool(9, slot_tokens, 1))
        add_to(scheduler, "b", 40, max_tokens=30)
        step_scheduler(scheduler)
        scheduler._preempt(scheduler.running[key_of("b")])
        taken = scheduler.blocks.allocate(scheduler.blocks.num_free + evicted, reserved=False)
        scheduler.blocks.release(taken)
        scheduler.take_effects()
        _, effects, _ = step_with_effects(scheduler)
        (swap_in,) = effects
        assert isinstance(swap_in, SwapIn)
        assert [(piece.start, piece.end) for piece in swap_in.pieces] == copied
        b = scheduler.running[key_of("b")]
        assert (b.num_computed_tokens, len(b.block_table)) == (40, 3)
        assert scheduler.blocks.num_active == 3

    def test_where_others_computed_all_of_it_meanwhile_nothing_is_copied(self) -> None:
        scheduler = make_scheduler(10, decode_reserve_tokens=0, token_budget=32, swap=SwapPool(9, 16, 1))
        add_to(scheduler, "b", 70, seed=1, max_tokens=8)
        step_scheduler(scheduler)
        b = scheduler.running[key_of("b")]
        scheduler._preempt(b)
        scheduler.take_effects()
        add_to(scheduler, "other", 70, seed=1, max_tokens=1, priority=1)
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("other", 32, 32)])
        plan, effects, _ = step_with_effects(scheduler)
        assert (shape_of(plan), effects) == (([], [("other", 64, 6)]), [SwapIn(b, ())])
        assert (b.num_computed_tokens, scheduler.swap.num_bytes) == (64, 0)
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("b", 64, 6)])

    def test_it_has_its_place_in_the_batch_from_the_moment_it_has_blocks(self) -> None:
        scheduler = make_scheduler(10, max_num_seqs=1, decode_reserve_tokens=0, swap=SwapPool(9, 16, 1))
        add_to(scheduler, "b", 20, max_tokens=8)
        step_scheduler(scheduler)
        scheduler._preempt(scheduler.running[key_of("b")])
        scheduler.take_effects()
        add_to(scheduler, "c", 20, arrival=1.0)
        plan, _, _ = step_with_effects(scheduler)
        assert (shape_of(plan), states_of(scheduler)) == (([], []), {"b": "running", "c": "waiting"})

    @pytest.mark.parametrize("scheduling", ["prefill_first", "static"])
    def test_other_modes_wait_for_the_copy_too(self, scheduling: Scheduling) -> None:
        scheduler = make_scheduler(10, decode_reserve_tokens=0, swap=SwapPool(9, 16, 1), scheduling=scheduling)
        add_to(scheduler, "b", 20, max_tokens=8)
        step_scheduler(scheduler)
        scheduler._preempt(scheduler.running[key_of("b")])
        scheduler.take_effects()
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [])
        assert shape_of(step_scheduler(scheduler)[0]) == ([("b", 20, 1)], [])


def test_integrity_findings() -> None:
    scheduler = pressed_scheduler()
    scheduler.schedule()
    b = scheduler.sequences[key_of("b")]
    assert scheduler_findings(scheduler) == []
    b.swapped_tokens = 0
    scheduler.resuming[b.key] = b
    assert scheduler_findings(scheduler) == [
        "1 sequences have blocks again and no copy into them is due",
        "host memory is kept for other sequences than the suspended ones",
        "b/1 is suspended with the KV of 0 tokens in host memory",
    ]


PROMPTS = {f"r{n}": make_prompt(20 + n, seed=n) for n in range(4)}
"""With 70 tokens of output each they need 24 blocks."""


def pressed_core(
    *, swap_bytes: int = 64 * SLOT_BYTES, roles: tuple[RoleName, ...] = ("decode",), runner: FailingRunner | None = None
) -> EngineCore:
    """A core of eight blocks that was given `PROMPTS`."""
    core = make_core(8, decode_reserve_tokens=0, swap_bytes=swap_bytes, roles=roles, runner=runner)
    for name, prompt in PROMPTS.items():
        handle_all(core, Add(make_spec(name, prompt, max_tokens=70, timeout_s=50.0)))
    return core


def run_until_suspended(core: EngineCore) -> str:
    """The name of a sequence that is suspended now."""
    for _ in range(1000):
        core.step(0.0)
        assert_sound(core)
        for name, state in states_of(core._scheduler).items():
            if state == "suspended":
                return name
    raise AssertionError("nobody was suspended")


class TestCore:
    def test_suspension_does_not_change_the_output(self) -> None:
        core = pressed_core()
        events = run_until_idle(core)
        for name, prompt in PROMPTS.items():
            assert token_ids_of(events, name) == expected_output(prompt, 70)
            assert (end_of(events, name).reason, end_of(events, name).cached_tokens) == ("length", 0)
        totals = core.totals()
        assert totals.preemptions >= 2
        assert totals.swapped_out_blocks >= totals.swapped_in_blocks > 0
        assert totals.output_tokens == 4 * 70
        assert_idle(core)

    def test_no_token_is_computed_twice(self) -> None:
        core = pressed_core()
        num_computed = 0
        while core.has_work:
            core.step(0.0)
            num_computed += core.last_plan.num_tokens
        assert core.totals().preemptions >= 2
        assert num_computed == sum(len(prompt) + 69 for prompt in PROMPTS.values())

    def test_what_is_suspended_is_counted(self) -> None:
        core = pressed_core()
        assert core.audit()[0]["swap_bytes"] == 0
        run_until_suspended(core)
        load, counts = core.load(), core.audit()[0]
        assert (load.num_suspended, load.num_running, load.num_waiting) == (1, 3, 0)
        assert counts["swap_bytes"] == SLOT_BYTES

    def test_a_suspended_one_can_be_cancelled(self) -> None:
        core = pressed_core()
        name = run_until_suspended(core)
        assert handle_all(core, Release(key_of(name))) == []
        assert core.audit()[0]["swap_bytes"] == 0
        events = run_until_idle(core)
        assert sum(isinstance(event, Ended) for event in events) == 3
        assert_idle(core)

    def test_the_deadline_of_a_suspended_one_comes(self) -> None:
        core = pressed_core()
        run_until_suspended(core)
        assert [event.reason for event in core.step(50.0) if isinstance(event, Ended)] == ["deadline"] * 4
        assert_idle(core)

    def test_its_kv_cannot_be_gathered(self) -> None:
        core = pressed_core()
        key = key_of(run_until_suspended(core))
        assert handle_all(core, Gather(key, 1, 0, 1, new_buffer(1))) == [Gathered(key, 1, ok=False)]

    @pytest.mark.parametrize("swap_bytes", [0, SLOT_BYTES, 64 * SLOT_BYTES])
    @pytest.mark.parametrize("fails", [False, True])
    def test_a_worker_that_computes_prompts_does_so_again(self, swap_bytes: int, fails: bool) -> None:
        runner = FailingRunner(8)
        runner.failing |= {"gather"} if fails else set()
        core = pressed_core(swap_bytes=swap_bytes, roles=("prefill", "decode"), runner=runner)
        events = run_until_idle(core)
        for name, prompt in PROMPTS.items():
            assert token_ids_of(events, name) == expected_output(prompt, 70)
        assert core.totals().preemptions >= 2
        assert (core.totals().swapped_out_blocks > 0) == (swap_bytes > 0 and not fails)
        assert_idle(core)

    @pytest.mark.parametrize(("swap_bytes", "fails"), [(0, False), (64 * SLOT_BYTES, True)])
    def test_a_decode_worker_lets_the_router_place_what_it_could_not_keep(self, swap_bytes: int, fails: bool) -> None:
        runner = FailingRunner(8)
        runner.failing |= {"gather"} if fails else set()
        core = pressed_core(swap_bytes=swap_bytes, runner=runner)
        events = run_until_idle(core)
        reasons = {name: end_of(events, name).reason for name in PROMPTS}
        assert sorted(reasons.values()) == ["length", "preempted", "preempted", "preempted"]
        for name, prompt in PROMPTS.items():
            output = token_ids_of(events, name)
            assert output == expected_output(prompt, 70)[: len(output)]
            assert (len(output) == 70) == (reasons[name] == "length")
        assert_idle(core)

    def test_a_copy_back_that_fails_ends_its_sequence_and_no_other(self) -> None:
        runner = FailingRunner(8)
        core = pressed_core(runner=runner)
        runner.failing.add("scatter")
        events = run_until_idle(core)
        failed = [event for event in events if isinstance(event, Ended) and event.reason == "failed"]
        assert {event.detail for event in failed} == {"swap: RuntimeError: scatter is broken"}
        done = [event for event in events if isinstance(event, Ended) and event.reason == "length"]
        assert len(failed) + len(done) == 4
        assert len(done) >= 1
        assert_idle(core)

    @pytest.mark.parametrize("operation", ["gather", "scatter"])
    def test_a_device_that_is_lost_while_kv_goes_to_the_host_or_back_ends_the_worker(self, operation: str) -> None:
        runner = FailingRunner(8)
        runner.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        runner.failing.add(operation)
        with pytest.raises(torch.AcceleratorError):
            run_until_idle(pressed_core(runner=runner))

    @pytest.mark.parametrize("swap_bytes", [0, SLOT_BYTES])
    def test_what_a_preempted_one_leaves_is_used_by_who_comes_before_it(self, swap_bytes: int) -> None:
        """`low` takes its own blocks away, since the others are promised; the one that waits gets them at once."""
        core = make_core(4, decode_reserve_tokens=0, swap_bytes=swap_bytes)
        handle_all(core, Add(make_spec("low", make_prompt(31), max_tokens=10)))
        core.step(0.0)
        handle_all(core, Reserve(make_spec("r", make_prompt(32, seed=1), max_tokens=1)))
        handle_all(core, Add(make_spec("urgent", make_prompt(20, seed=2), max_tokens=5, priority=1)))
        events = run_until_idle(core)
        assert token_ids_of(events, "urgent") == expected_output(make_prompt(20, seed=2), 5)
        handle_all(core, Release(key_of("r")))
        assert end_of(run_until_idle(core), "low").reason == "length"
        assert_idle(core)

    def test_the_room_of_one_that_could_not_come_back_is_used_at_once(self) -> None:
        runner = FailingRunner(4)
        core = make_core(decode_reserve_tokens=0, swap_bytes=SLOT_BYTES, runner=runner)
        for name, priority in [("a", 1), ("b", 0)]:
            handle_all(core, Add(make_spec(name, make_prompt(31, seed=priority), max_tokens=40, priority=priority)))
        while not core.audit()[0]["swap_bytes"]:
            core.step(0.0)
        handle_all(core, Add(make_spec("c", make_prompt(48, seed=2))), Release(key_of("a")))
        runner.failing.add("scatter")
        events = run_until_idle(core)
        assert (end_of(events, "b").reason, end_of(events, "c").reason) == ("failed", "length")

    def test_memory_of_the_host_is_used_again(self) -> None:
        core = pressed_core()
        run_until_idle(core)
        num_buffers = len(core._swapper._buffers)
        for name, prompt in PROMPTS.items():
            handle_all(core, Add(make_spec(name, prompt, max_tokens=70)))
        run_until_idle(core)
        assert len(core._swapper._buffers) == num_buffers <= 3

    def test_a_negative_size_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"^worker\.swap_bytes: must not be negative, not -1$"):
            make_core(swap_bytes=-1)


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(5, 12),
    num_slots=st.integers(0, 3),
    decodes_only=st.booleans(),
    decode_reserve_tokens=st.sampled_from([0, 16, 512]),
    watermark=st.sampled_from([0.0, 0.2]),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1)), min_size=2, max_size=7),
)
def test_whatever_is_short_everybody_finishes(
    num_blocks: int,
    num_slots: int,
    decodes_only: bool,
    decode_reserve_tokens: int,
    watermark: float,
    lengths: list[tuple[int, int, int]],
) -> None:
    """Blocks and host memory are short. What ends as preempted is placed again with its output, as the router would."""
    core = make_core(
        num_blocks,
        decode_reserve_tokens=decode_reserve_tokens,
        watermark=watermark,
        swap_bytes=num_slots * SLOT_BYTES,
        roles=("decode",) if decodes_only else ("prefill", "decode"),
    )
    outputs: dict[str, list[int]] = {}
    for number in range(len(lengths)):
        outputs[f"r{number}"] = []
        _place(core, lengths, f"r{number}", [], attempt=1)
    num_placed = len(lengths)
    while core.has_work:
        for event in core.step(0.0):
            name = str(event.key.request_id)
            if isinstance(event, TokenSampled):
                outputs[name].append(event.token_id)
            elif isinstance(event, Ended) and event.reason == "preempted":
                num_placed += 1
                _place(core, lengths, name, outputs[name], attempt=num_placed)
        assert_sound(core)
        assert num_placed <= 7 * 40, "attempts without end"
    for number, (num_prompt, max_tokens, _) in enumerate(lengths):
        assert outputs[f"r{number}"] == expected_output(make_prompt(num_prompt, seed=number), max_tokens)
    assert_idle(core)


def _place(core: EngineCore, lengths: Seq[tuple[int, int, int]], name: str, emitted: list[int], attempt: int) -> None:
    num_prompt, max_tokens, priority = lengths[int(name[1:])]
    prompt = make_prompt(num_prompt, seed=int(name[1:]))
    spec = make_spec(name, prompt, max_tokens=max_tokens, emitted=emitted, attempt=attempt, priority=priority)
    assert handle_all(core, Add(spec)) == []


@pytest.mark.parametrize("num_slots", [0, 1, 9])
def test_reserved_and_suspended_sequences_do_not_starve_each_other(num_slots: int) -> None:
    """Hand-overs come as fast as the worker takes them, and some are suspended: both kinds keep ending."""
    core = make_core(8, decode_reserve_tokens=0, swap_bytes=num_slots * SLOT_BYTES, roles=("decode",))
    waiting = [f"r{number}" for number in range(12)]
    prompts = {name: make_prompt(20, seed=number) for number, name in enumerate(waiting)}
    outputs: dict[str, list[int]] = {name: [] for name in waiting}
    num_refused = 0
    for turn in range(5000):
        if not waiting and core.is_idle:
            break
        events: list[Event] = []
        if waiting and turn % 3 == 0:
            name = waiting[0]
            events = _hand_over(core, name, prompts[name], outputs[name], attempt=turn + 1)
            if events:
                waiting.pop(0)
            num_refused += not events
        for event in [*events, *core.step(0.0)]:
            name = str(event.key.request_id)
            if isinstance(event, TokenSampled):
                outputs[name].append(event.token_id)
            elif isinstance(event, Ended) and event.reason == "preempted":
                waiting.insert(0, name)
        assert_sound(core)
    assert core.totals().preemptions > 0
    assert num_refused > 0
    assert outputs == {name: expected_output(prompt, 60) for name, prompt in prompts.items()}
    assert_idle(core)


def _hand_over(core: EngineCore, name: str, prompt: tuple[int, ...], output: list[int], attempt: int) -> list[Event]:
    """Token 0 of the attempt comes with it; no events where it was refused."""
    spec = make_spec(name, prompt, max_tokens=60, emitted=output, attempt=attempt)
    key, known = spec.key, [*prompt, *output]
    (answer,) = handle_all(core, Reserve(spec))
    if isinstance(answer, ReserveRefused):
        return []
    assert isinstance(answer, Reserved)
    handle_all(core, Scatter(key, 0, answer.cached_tokens, len(known), kv_of(known, answer.cached_tokens, len(known))))
    joined, *events = handle_all(core, Join(key, expected_output(prompt, len(output) + 1)[-1]))
    assert joined == Joined(key)
    return events
