"""Forced tokens are appended with the sampled one before them and computed in one step: the same answers in fewer
steps, in each role and mode, where places or blocks are short, and however a sequence ends or leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.commands import (
    Add,
    End,
    Ended,
    Event,
    Export,
    Exported,
    Extend,
    Held,
    Hold,
    Join,
    PrefillComputed,
    Release,
    Reserve,
    TokenSampled,
)
from disagg.engine.config import Scheduling
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.plan import NO_TOKEN, StepPlan, StepResult
from tests.support.engine import (
    IDLE,
    assert_idle,
    end_of,
    handle_all,
    key_of,
    make_core,
    make_prompt,
    make_spec,
    move_kv,
    run_until_idle,
    shape_of,
    token_ids_of,
)
from tests.support.forcing import GRAMMAR, ForcingRunner, forced_token

PROMPT = make_prompt(20)
KEY = key_of("a")
FORCED = {2, 3, 4, 5, 8, 12}
NUM_TOKENS = 14


def core_of(*, skips: bool = True, forced: set[int] = FORCED, num_blocks: int = 10, **options: Any) -> EngineCore:
    return make_core(runner=ForcingRunner(forced, skips=skips, num_blocks=num_blocks), **options)


def plans_of(core: EngineCore) -> list[StepPlan]:
    runner = core._runner
    assert isinstance(runner, ForcingRunner)
    return runner.plans


def spec_of(name: str = "a", prompt: Sequence[int] = PROMPT, **options: Any) -> Any:
    return make_spec(name, prompt, **{"max_tokens": NUM_TOKENS, "grammar": GRAMMAR, **options})


def answer(core: EngineCore, **options: Any) -> list[int]:
    events = handle_all(core, Add(spec_of(**options))) + run_until_idle(core)
    assert_idle(core)
    return token_ids_of(events, "a")


OUTPUT = answer(core_of(skips=False))


def decode_until(core: EngineCore, num_tokens: int, **options: Any) -> list[Event]:
    events = handle_all(core, Add(spec_of(**options)))
    while len(token_ids_of(events, "a")) < num_tokens:
        events += core.step(0.0)
    return events


def test_the_answer_without_skipping_has_the_forced_tokens_and_a_step_for_each_token() -> None:
    core = core_of(skips=False)
    assert answer(core) == OUTPUT
    assert len(plans_of(core)) == NUM_TOKENS
    assert [OUTPUT[index] for index in sorted(FORCED)] == [forced_token(index) for index in sorted(FORCED)]


def test_forced_tokens_come_with_the_sampled_one_and_are_computed_with_it_in_one_step() -> None:
    core = core_of()
    events = handle_all(core, Add(spec_of()))
    lengths = []
    while core.has_work:
        step = core.step(0.0)
        lengths.append(len([event for event in step if isinstance(event, TokenSampled)]))
        events += step
    assert token_ids_of(events, "a") == OUTPUT
    assert lengths == [1, 5, 1, 2, 1, 1, 2, 1]
    assert [shape_of(plan)[0] for plan in plans_of(core)[1:4]] == [
        [("a", 20, 1)],
        [("a", at, 1) for at in range(21, 26)],
        [("a", 26, 1)],
    ]
    assert [[e.samples for e in plan.decodes] for plan in plans_of(core)[2:3]] == [[False] * 4 + [True]]
    assert end_of(events, "a").reason == "length"
    assert_idle(core)


def test_steps_count_entries_as_decodes_and_no_prompt_is_left() -> None:
    core = core_of()
    decode_until(core, 6)
    assert core.load().uncomputed_prompt_tokens == 0
    core.step(0.0)
    sample = core.last_plan.measured(1.0)
    assert (sample.prefill_tokens, sample.num_decodes, sample.decode_context) == (0, 5, 22 + 23 + 24 + 25 + 26)
    assert core.totals().output_tokens == 7


@pytest.mark.parametrize("scheduling", ["decode_first", "slack", "prefill_first", "static"])
def test_every_mode_gives_the_same_answers_beside_others(scheduling: Scheduling) -> None:
    core = core_of(scheduling=scheduling)
    rows = [spec_of(), spec_of("b", make_prompt(30, 1), grammar=""), spec_of("c", make_prompt(90, 2))]
    events = handle_all(core, *map(Add, rows)) + run_until_idle(core)
    plain = core_of(skips=False)
    expected = handle_all(plain, *map(Add, rows)) + run_until_idle(plain)
    for name in "abc":
        assert token_ids_of(events, name) == token_ids_of(expected, name)
    assert len(plans_of(core)) < len(plans_of(plain))
    assert_idle(core)


def test_a_batch_with_few_free_places_computes_what_fits() -> None:
    core = core_of(max_num_seqs=3)
    assert answer(core) == OUTPUT
    assert [len(plan.decodes) for plan in plans_of(core)[2:5]] == [3, 2, 1]
    assert [[e.samples for e in plan.decodes] for plan in plans_of(core)[2:4]] == [[False] * 3, [False, True]]
    full = core_of(max_num_seqs=1)
    assert answer(full) == OUTPUT
    assert len(plans_of(full)) == NUM_TOKENS


def test_a_token_of_the_budget_is_left_for_prompts() -> None:
    core = core_of(token_budget=4, max_num_seqs=4)
    decode_until(core, 6)
    handle_all(core, Add(spec_of("b", make_prompt(9, 1), grammar="", max_tokens=1)))
    core.step(0.0)
    assert shape_of(core.last_plan) == ([("a", 21, 1), ("a", 22, 1), ("a", 23, 1)], [("b", 0, 1)])


def test_no_block_is_taken_from_others_for_them() -> None:
    """Six blocks: `a` has two, which end three tokens behind a sampled one; `b` has the others until it ends."""
    forced = set(range(9, 16))
    core = core_of(num_blocks=6, forced=forced, decode_reserve_tokens=1)
    events = decode_until(core, 8, max_tokens=20)
    events += handle_all(core, Add(spec_of("b", make_prompt(60, 1), grammar="", max_tokens=3)))
    events += run_until_idle(core)
    assert core.totals().preemptions == 0
    widths = [sum(entry.sequence.key == KEY for entry in plan.decodes) for plan in plans_of(core)[8:]]
    assert widths == [1, 1, 1, 6, 1, 1, 1]
    assert token_ids_of(events, "a") == answer(core_of(skips=False, forced=forced), max_tokens=20)
    assert_idle(core)


def test_the_last_block_is_left_for_a_sequence_that_needs_it_next() -> None:
    """Five blocks: `a` and `b` have two each, and `b` is two tokens from its third one, which is its last."""
    forced = set(range(9, 16))
    core = core_of(num_blocks=5, forced=forced, decode_reserve_tokens=1)
    events = decode_until(core, 8, max_tokens=18)
    events += handle_all(core, Add(spec_of("b", make_prompt(30, 1), grammar="", max_tokens=5)))
    events += run_until_idle(core)
    assert core.totals().preemptions == 0
    assert token_ids_of(events, "a") == answer(core_of(skips=False, forced=forced), max_tokens=18)
    widths = [sum(entry.sequence.key == KEY for entry in plan.decodes) for plan in plans_of(core)[8:]]
    assert widths == [1, 1, 1, 1, 1, 4, 1]
    assert_idle(core)


@pytest.mark.parametrize("max_tokens", range(1, NUM_TOKENS + 1))
def test_the_answer_ends_at_its_length_within_forced_tokens(max_tokens: int) -> None:
    core = core_of()
    events = handle_all(core, Add(spec_of(max_tokens=max_tokens))) + run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[:max_tokens]
    assert end_of(events, "a").reason == "length"
    assert_idle(core)


def test_the_longest_sequence_ends_within_forced_tokens() -> None:
    runner = ForcingRunner(FORCED)
    runner.max_model_len = 24
    core = make_core(runner=runner)
    events = handle_all(core, Add(spec_of())) + run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[:4]
    assert end_of(events, "a").reason == "length"
    assert_idle(core)


@pytest.mark.parametrize("index", sorted(FORCED))
def test_a_stop_id_ends_the_answer_within_forced_tokens(index: int) -> None:
    core = core_of()
    events = handle_all(core, Add(spec_of(stop=[forced_token(index)]))) + run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[: index + 1]
    assert end_of(events, "a").reason == "stop"
    assert_idle(core)


@pytest.mark.parametrize("options", [{"logprobs": 1}, {"min_tokens": 3, "stop": [5000]}, {"grammar": ""}])
def test_each_token_has_its_step_where_that_gives_more(options: dict[str, Any]) -> None:
    core = core_of()
    events = handle_all(core, Add(spec_of(**options))) + run_until_idle(core)
    sampled = [event for event in events if isinstance(event, TokenSampled)]
    assert len(plans_of(core)) == len(sampled) == NUM_TOKENS
    assert all((event.logprobs is not None) == ("logprobs" in options) for event in sampled)


@pytest.mark.parametrize("command", [End(KEY, "cancelled", ""), Release(KEY)])
@pytest.mark.parametrize("between", [False, True])
def test_an_answer_that_is_given_up_holds_nothing(command: End | Release, between: bool) -> None:
    """Before a step with forced tokens is planned, or between its plan and its computation."""
    core = core_of()
    decode_until(core, 6)
    if between:
        core.plan_step(0.0)
    events = handle_all(core, command)
    assert [event for event in core.run_step() + events if isinstance(event, TokenSampled)] == []
    assert_idle(core)


def test_a_step_that_fails_ends_the_sequence_once() -> None:
    core = core_of()
    decode_until(core, 6)
    core._runner.run = lambda plan: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    ended = end_of(core.step(0.0), "a")
    assert (ended.reason, ended.detail) == ("failed", "step: ZeroDivisionError: division by zero")
    assert_idle(core)


def test_nothing_of_a_faulty_row_is_published() -> None:
    """The row behind four forced tokens, which fill a block, gives no token."""
    forced = {11, 12, 13, 14}
    core = core_of(forced=forced)
    decode_until(core, 15, max_tokens=20)
    core.drain_kv_events()
    core._runner.run = lambda plan: StepResult([NO_TOKEN], faults={0: "model"})  # type: ignore[method-assign]
    assert len(core.planned.entries) == 0
    assert end_of(core.step(0.0), "a").reason == "failed"
    assert len(core.last_plan.decodes) == 5
    assert core.last_plan.decodes[0].start // 16 < core.last_plan.decodes[-1].end // 16
    assert core.drain_kv_events() == ()
    assert_idle(core)


# ---------------------------------------------------------------- hand-over, retry, moves


def test_a_prefill_worker_hands_over_one_token_and_the_other_goes_on() -> None:
    forced = FORCED | {0, 1}
    expected = answer(core_of(skips=False, forced=forced))
    p, d = core_of(forced=forced, roles=("prefill",)), core_of(forced=forced, roles=("decode",))
    events = handle_all(p, Add(spec_of(), hold_after_prefill=True)) + run_until_idle(p)
    (computed,) = [event for event in events if isinstance(event, PrefillComputed)]
    assert token_ids_of(events, "a") == [computed.token_id] == expected[:1]
    handle_all(d, Reserve(spec_of()))
    move_kv(p, d, KEY, [(0, 20)])
    events = handle_all(d, Join(KEY, computed.token_id)) + run_until_idle(d)
    assert token_ids_of(events, "a") == expected
    # Token 0 came along; of the forced ones behind it the first is sampled.
    assert [len(plan.decodes) for plan in plans_of(d)] == [1, 5, 1, 2, 1, 1, 2][: len(plans_of(d))]
    handle_all(p, Release(KEY))
    assert_idle(p)
    assert_idle(d)


@pytest.mark.parametrize("num_released", range(1, NUM_TOKENS))
def test_another_attempt_goes_on_behind_any_token(num_released: int) -> None:
    core = core_of()
    emitted = OUTPUT[:num_released]
    events = handle_all(core, Add(spec_of(emitted=emitted, attempt=2))) + run_until_idle(core)
    assert token_ids_of(events, "a", attempt=2) == OUTPUT[num_released:]
    assert_idle(core)


@pytest.mark.parametrize("max_num_seqs", [8, 3, 1])
def test_a_sequence_moves_once_its_forced_tokens_are_computed(max_num_seqs: int) -> None:
    source, target = core_of(max_num_seqs=max_num_seqs), core_of()
    events = decode_until(source, 6)
    [exported] = handle_all(source, Export(KEY))
    assert isinstance(exported, Exported)
    assert exported.spec is not None
    assert exported.spec.emitted_token_ids == tuple(OUTPUT[:1])
    assert handle_all(source, Hold(KEY, 21)) == []
    held: list[Held] = []
    num_steps = 0
    while not held:
        step = source.step(0.0)
        num_steps += 1
        held = [event for event in step if isinstance(event, Held)]
        events += step
    assert num_steps == {8: 1, 3: 2, 1: 4}[max_num_seqs]
    num_held = 6 if max_num_seqs == 1 else 7  # one by one: it leaves before the last forced one is computed
    assert token_ids_of(events, "a") == OUTPUT[:num_held]
    assert held == [Held(KEY, True, tuple(OUTPUT[1 : num_held - 1]), OUTPUT[num_held - 1])]
    handle_all(target, Reserve(exported.spec))
    move_kv(source, target, KEY, [(0, 21)])
    handle_all(target, Extend(KEY, held[0].token_ids))
    move_kv(source, target, KEY, [(21, 19 + num_held)])
    events = handle_all(target, Join(KEY, held[0].token_id)) + run_until_idle(target)
    assert token_ids_of(events, "a") == OUTPUT[num_held - 1 :]
    handle_all(source, End(KEY, "moved", ""))
    assert_idle(source)
    assert_idle(target)


def test_a_sequence_that_is_to_leave_gets_no_forced_tokens() -> None:
    core = core_of()
    decode_until(core, 2 - 1)
    core.plan_step(0.0)
    assert handle_all(core, Hold(KEY, 20)) == []
    events = core.run_step()
    assert token_ids_of(events, "a") == OUTPUT[1:2]
    assert [event for event in events if isinstance(event, Held)] == [Held(KEY, True, (OUTPUT[0],), OUTPUT[1])]


# ---------------------------------------------------------------- preemption


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_a_preempted_sequence_computes_its_forced_tokens_when_it_is_back(swap_bytes: int) -> None:
    """Eight blocks for two sequences that need five each; the later one is preempted with forced tokens uncomputed."""
    forced = set(range(13, 20)) | set(range(29, 35))
    rows = [spec_of(max_tokens=50), spec_of("b", make_prompt(24, 3), max_tokens=50)]
    core = core_of(forced=forced, num_blocks=8, decode_reserve_tokens=1, swap_bytes=swap_bytes)
    events = handle_all(core, *map(Add, rows)) + run_until_idle(core)
    plain = core_of(forced=forced, num_blocks=8, skips=False)
    expected = handle_all(plain, *map(Add, rows)) + run_until_idle(plain)
    assert core.totals().preemptions > 0
    assert (core.totals().swapped_in_blocks > 0) == (swap_bytes > 0)
    for name in "ab":
        assert token_ids_of(events, name) == token_ids_of(expected, name)
    assert_idle(core)


@settings(max_examples=60, deadline=None)
@given(
    forced=st.sets(st.integers(0, 39)),
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=5),
    num_blocks=st.integers(6, 14),
    max_num_seqs=st.integers(1, 8),
    token_budget=st.integers(8, 40),
    swap_bytes=st.sampled_from([0, 600, 1 << 20]),
    scheduling=st.sampled_from(["decode_first", "slack", "prefill_first", "static"]),
)
def test_answers_are_those_without_skipping(
    forced: set[int],
    lengths: list[tuple[int, int]],
    num_blocks: int,
    max_num_seqs: int,
    token_budget: int,
    swap_bytes: int,
    scheduling: Scheduling,
) -> None:
    options: dict[str, Any] = {
        "forced": forced,
        "num_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "token_budget": token_budget,
        "swap_bytes": swap_bytes,
        "scheduling": scheduling,
        "decode_reserve_tokens": 4,
    }
    rows = [
        spec_of(f"r{i}", make_prompt(num_prompt, i), max_tokens=num_output)
        for i, (num_prompt, num_output) in enumerate(lengths)
    ]
    found = []
    for skips in (True, False):
        core = core_of(skips=skips, **options)
        events = handle_all(core, *map(Add, rows)) + run_until_idle(core)
        assert core.audit() == (IDLE, [])
        assert sum(isinstance(event, Ended) for event in events) == len(rows)
        found.append([token_ids_of(events, row.request_id) for row in rows])
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == [num_output for _, num_output in lengths]
