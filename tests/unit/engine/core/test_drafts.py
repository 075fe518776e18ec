"""Drafts are computed beside the last known token and kept as far as they are right: the same answers in fewer steps,
in each role and mode, where rows or blocks are short, and however a sequence ends or leaves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.commands import Add, End, Export, Exported, Extend, Held, Hold, Join, Release, Reserve
from disagg.engine.config import Scheduling
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import NO_TOKEN, StepPlan, StepResult
from disagg.proto.messages import SequenceSpec
from tests.support.drafting import KnownDrafts, draft
from tests.support.engine import (
    BLOCK,
    IDLE,
    VOCAB_SIZE,
    assert_idle,
    end_of,
    expected_output,
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

PROMPT = make_prompt(20)
KEY = key_of("a")
NUM_TOKENS = 24
OUTPUT = expected_output(PROMPT, 60)


class Recording(FakeModelRunner):
    """Keeps the plans that it runs."""

    def __init__(self, num_blocks: int = 10) -> None:
        super().__init__(num_blocks, BLOCK, 4096, VOCAB_SIZE)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().run(plan)


def core_of(right: float = 1.0, *, most: int = 4, num_blocks: int = 10, **options: Any) -> EngineCore:
    core = make_core(runner=Recording(num_blocks), **options)
    draft(core, KnownDrafts({"a": OUTPUT}, most=most, right=right, vocab_size=VOCAB_SIZE))
    return core


def plans_of(core: EngineCore) -> list[StepPlan]:
    runner = core._runner
    assert isinstance(runner, Recording)
    return runner.plans


def spec_of(**options: Any) -> SequenceSpec:
    return make_spec("a", PROMPT, **{"max_tokens": NUM_TOKENS, **options})


def decode_until(core: EngineCore, num_tokens: int, **options: Any) -> list[Any]:
    events = handle_all(core, Add(spec_of(**options)))
    while len(token_ids_of(events, "a")) < num_tokens:
        events += core.step(0.0)
    return events


def test_a_step_computes_the_last_token_and_drafts_and_gives_one_token_more_than_are_right() -> None:
    core = core_of()
    events = decode_until(core, 1)
    step = core.step(0.0)
    assert shape_of(core.last_plan) == ([("a", at, 1) for at in range(20, 25)], [])
    assert [entry.drafts for entry in core.last_plan.decodes] == [tuple(OUTPUT[1 : 1 + n]) for n in range(5)]
    assert token_ids_of(events + step, "a") == OUTPUT[:6]
    events += step + run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[:NUM_TOKENS]
    assert [len(plan.decodes) for plan in plans_of(core)[1:]] == [5, 5, 5, 5, 3]
    assert core.totals().output_tokens == NUM_TOKENS
    assert_idle(core)


@pytest.mark.parametrize(
    ("right", "counts", "runs"),
    [(1.0, (18, 18), (0, 0, 1, 0, 4, *[0] * 11)), (0.0, (82, 0), (NUM_TOKENS - 2, *[0] * 15))],
)
def test_drafts_are_counted_also_those_of_the_last_step(
    right: float, counts: tuple[int, int], runs: tuple[int, ...]
) -> None:
    core = core_of(right)
    end = end_of(handle_all(core, Add(spec_of())) + run_until_idle(core), "a")
    totals = core.totals()
    assert (end.num_drafted, end.num_accepted) == (totals.drafted_tokens, totals.accepted_tokens) == counts
    assert totals.draft_runs == runs


def test_the_load_tells_tokens_and_rows_of_a_step() -> None:
    core = core_of()
    events = handle_all(core, Add(spec_of(max_tokens=200)))
    assert (core.load().tokens_per_step, core.load().rows_per_step) == (1.0, 1.0)
    core.step(0.0)
    core.step(0.0)
    assert (core.load().tokens_per_step, core.load().rows_per_step) == (5.0, 5.0)
    wrong = core_of(right=0.0)
    events = decode_until(wrong, 3)
    assert len(token_ids_of(events, "a")) == 3
    assert (wrong.load().tokens_per_step, wrong.load().rows_per_step) == (1.0, 5.0)


def test_tokens_of_prompts_are_not_among_those_of_a_step() -> None:
    core = core_of(max_num_seqs=8)
    decode_until(core, 1)
    handle_all(core, Add(make_spec("b", PROMPT)))
    core.step(0.0)  # the first token of b beside the second one of a
    assert (core.load().tokens_per_step, core.load().rows_per_step) == (1.0, 1.0)


def test_wrong_drafts_change_nothing_and_are_overwritten() -> None:
    core = core_of(right=0.0)
    events = handle_all(core, Add(spec_of())) + run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[:NUM_TOKENS]
    assert len(plans_of(core)) == NUM_TOKENS
    assert [len(plan.decodes) for plan in plans_of(core)[1:4]] == [5, 5, 5]
    assert_idle(core)


def test_only_accepted_tokens_are_published() -> None:
    """A block's last token is a wrong draft first."""
    core = core_of(right=0.0)
    decode_until(core, 10)
    core.drain_kv_events()
    core.step(0.0)  # rows 29 to 33, of which one counts
    assert core.drain_kv_events() == ()
    core.step(0.0)
    core.step(0.0)
    assert len(core.drain_kv_events()) == 1


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_the_answer_ends_at_its_length_among_drafts(max_tokens: int) -> None:
    core = core_of()
    events = handle_all(core, Add(spec_of(max_tokens=max_tokens))) + run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[:max_tokens]
    assert end_of(events, "a").reason == "length"
    assert_idle(core)


@pytest.mark.parametrize("index", range(10))
def test_a_stop_id_ends_the_answer_among_drafts(index: int) -> None:
    core = core_of()
    events = handle_all(core, Add(spec_of(stop=[OUTPUT[index]]))) + run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[: index + 1]
    assert end_of(events, "a").reason == "stop"
    assert_idle(core)


def test_the_longest_sequence_ends_among_drafts() -> None:
    runner = Recording()
    runner.max_model_len = 28
    core = make_core(runner=runner)
    draft(core, KnownDrafts({"a": OUTPUT}, most=15, right=1.0, vocab_size=VOCAB_SIZE))
    events = handle_all(core, Add(spec_of())) + run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[:8]
    assert max(entry.end for plan in plans_of(core) for entry in plan.decodes) == 27
    assert_idle(core)


def test_drafts_take_free_rows_of_the_batch_only() -> None:
    core = core_of(max_num_seqs=3)
    events = handle_all(core, Add(spec_of())) + run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[:NUM_TOKENS]
    assert {len(plan.decodes) for plan in plans_of(core)[1:-1]} == {3}
    full = core_of(max_num_seqs=1)
    assert token_ids_of(handle_all(full, Add(spec_of())) + run_until_idle(full), "a") == OUTPUT[:NUM_TOKENS]
    assert {len(plan.decodes) for plan in plans_of(full)[1:]} == {1}


def test_a_step_with_prompts_has_none() -> None:
    core = core_of()
    decode_until(core, 2)
    handle_all(core, Add(make_spec("b", make_prompt(90, 1), max_tokens=1)))
    before = len(plans_of(core))
    run_until_idle(core)
    with_prompts = [plan for plan in plans_of(core)[before:] if plan.prefills]
    assert len(with_prompts) == 2
    assert all(len(plan.decodes) == 1 for plan in with_prompts)


def test_no_block_is_taken_from_others_for_them() -> None:
    """Five blocks, of which `a` has two and the others are reserved for `b`."""
    core = core_of(num_blocks=5, decode_reserve_tokens=1)
    events = decode_until(core, 8, max_tokens=20)
    events += handle_all(core, Reserve(make_spec("b", make_prompt(48, 1), max_tokens=1)))
    while len(token_ids_of(events, "a")) < 13:
        events += core.step(0.0)
    widths = [len(plan.decodes) for plan in plans_of(core)]
    assert max(entry.end for plan in plans_of(core) for entry in plan.decodes) <= 32
    assert widths[-1] < 5
    handle_all(core, Release(key_of("b")))
    events += run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[:20]
    assert core.totals().preemptions == 0
    assert_idle(core)


@pytest.mark.parametrize("command", [End(KEY, "cancelled", ""), Release(KEY)])
@pytest.mark.parametrize("between", [False, True])
def test_an_answer_that_is_given_up_holds_nothing(command: End | Release, between: bool) -> None:
    core = core_of()
    decode_until(core, 6)
    if between:
        core.plan_step(0.0)
    events = handle_all(core, command)
    assert token_ids_of(core.run_step() + events, "a") == []
    assert_idle(core)


@pytest.mark.parametrize(("faulty", "num_tokens"), [(0, 0), (1, 1), (3, 3)])
def test_a_faulty_row_that_is_reached_ends_the_answer_behind_the_tokens_before_it(faulty: int, num_tokens: int) -> None:
    core = core_of()
    events = decode_until(core, 6)
    run, start = core._runner.run, len(token_ids_of(events, "a"))

    def fail(plan: StepPlan) -> StepResult:
        token_ids = list(run(plan).token_ids)
        token_ids[faulty] = NO_TOKEN
        return StepResult(token_ids, faults={faulty: "model"})

    core._runner.run = fail  # type: ignore[method-assign]
    step = core.step(0.0)
    assert token_ids_of(step, "a") == OUTPUT[start : start + num_tokens]
    assert end_of(step, "a").reason == "failed"
    assert_idle(core)


def test_a_faulty_row_that_is_not_reached_counts_for_nothing() -> None:
    core = core_of(right=0.0)
    events = decode_until(core, 6)
    run = core._runner.run

    def fail(plan: StepPlan) -> StepResult:
        token_ids = list(run(plan).token_ids)
        faults = dict.fromkeys(range(1, len(token_ids)), "model")
        return StepResult([token_ids[0]] + [NO_TOKEN] * len(faults), faults=faults)  # type: ignore[arg-type]

    core._runner.run = fail  # type: ignore[method-assign]
    events += run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT[:NUM_TOKENS]
    assert_idle(core)


def test_a_decode_worker_drafts_from_its_first_step_on() -> None:
    p, d = core_of(roles=("prefill",)), core_of(roles=("decode",))
    handle_all(p, Add(spec_of(), hold_after_prefill=True)) + run_until_idle(p)
    handle_all(d, Reserve(spec_of()))
    move_kv(p, d, KEY, [(0, 20)])
    events = handle_all(d, Join(KEY, OUTPUT[0])) + run_until_idle(d)
    assert token_ids_of(events, "a") == OUTPUT[:NUM_TOKENS]
    assert [len(plan.decodes) for plan in plans_of(d)] == [5, 5, 5, 5, 3]
    handle_all(p, Release(KEY))
    assert_idle(p)
    assert_idle(d)


@pytest.mark.parametrize("right", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("planned", [False, True])
def test_a_sequence_moves_between_two_steps_with_drafts(right: float, planned: bool) -> None:
    source, target = core_of(right), core_of(right)
    events = decode_until(source, 6)
    num_known = len(token_ids_of(events, "a"))
    [exported] = handle_all(source, Export(KEY))
    assert isinstance(exported, Exported)
    assert exported.spec is not None
    assert exported.spec.emitted_token_ids == tuple(OUTPUT[: num_known - 1])
    if planned:
        source.plan_step(0.0)
    answers = handle_all(source, Hold(KEY, 20 + num_known - 1))
    events += source.run_step() if planned else []
    held = [event for event in answers + events if isinstance(event, Held)]
    num_held = len(token_ids_of(events, "a"))
    assert (num_held > num_known) == planned
    assert held == [Held(KEY, True, tuple(OUTPUT[num_known - 1 : num_held - 1]), OUTPUT[num_held - 1])]
    handle_all(target, Reserve(exported.spec))
    move_kv(source, target, KEY, [(0, 19 + num_known)])
    handle_all(target, Extend(KEY, held[0].token_ids))
    if num_held > num_known:
        move_kv(source, target, KEY, [(19 + num_known, 19 + num_held)])
    events = handle_all(target, Join(KEY, held[0].token_id)) + run_until_idle(target)
    assert token_ids_of(events, "a") == OUTPUT[num_held - 1 : NUM_TOKENS]
    handle_all(source, End(KEY, "moved", ""))
    assert_idle(source)
    assert_idle(target)


@settings(max_examples=100, deadline=None)
@given(
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    most=st.integers(1, 15),
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=5),
    num_blocks=st.integers(6, 14),
    max_num_seqs=st.integers(1, 12),
    token_budget=st.integers(8, 40),
    swap_bytes=st.sampled_from([0, 600, 1 << 20]),
    scheduling=st.sampled_from(["decode_first", "slack", "prefill_first", "static"]),
    seed=st.integers(0, 1000),
)
def test_answers_are_those_without_drafts(
    right: float,
    most: int,
    lengths: list[tuple[int, int]],
    num_blocks: int,
    max_num_seqs: int,
    token_budget: int,
    swap_bytes: int,
    scheduling: Scheduling,
    seed: int,
) -> None:
    """With preemptions, by copies and by computing again."""
    prompts = {f"r{i}": make_prompt(num_prompt, i) for i, (num_prompt, _) in enumerate(lengths)}
    outputs = {f"r{i}": expected_output(prompts[f"r{i}"], count) for i, (_, count) in enumerate(lengths)}
    core = make_core(
        num_blocks,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        swap_bytes=swap_bytes,
        scheduling=scheduling,
        decode_reserve_tokens=4,
    )
    draft(core, KnownDrafts(outputs, most=most, right=right, vocab_size=VOCAB_SIZE, seed=seed))
    specs = [make_spec(name, prompt, max_tokens=len(outputs[name])) for name, prompt in prompts.items()]
    events = handle_all(core, *map(Add, specs)) + run_until_idle(core)
    assert core.audit() == (IDLE, [])
    assert {name: token_ids_of(events, name) for name in outputs} == outputs
