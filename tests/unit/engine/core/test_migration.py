"""Sequences that leave a batch while they decode, and come back to it or join another one."""

from __future__ import annotations

from typing import Any

import pytest

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
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    Scattered,
    Unhold,
)
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner
from disagg.proto.messages import SequenceSpec, Targets
from tests.support.engine import (
    assert_idle,
    end_of,
    expected_output,
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
from tests.support.queueing import QueueingRunner

PROMPT = make_prompt(40)
KEY = key_of("a")
NUM_TOKENS = 30
OUTPUT = expected_output(PROMPT, NUM_TOKENS)


def decoding(num_tokens: int, *, ahead: bool = False, **options: Any) -> tuple[EngineCore, list[Event]]:
    """A core whose one sequence has so many output tokens (ahead: and one more that is under way)."""
    core = make_core(runner=QueueingRunner() if ahead else None)
    events = handle_all(core, Add(make_spec("a", PROMPT, max_tokens=NUM_TOKENS, **options)))
    while len(token_ids_of(events, "a")) < num_tokens:
        events += core.step(0.0)
    return core, events


def exported(core: EngineCore, now: float = 0.0) -> SequenceSpec:
    [event] = handle_all(core, Export(KEY), now=now)
    assert isinstance(event, Exported)
    assert event.spec is not None
    return event.spec


def known(spec: SequenceSpec) -> int:
    return spec.num_known_tokens


def test_the_spec_has_all_tokens_but_the_one_that_is_not_computed() -> None:
    core, _ = decoding(9, timeout_s=20.0)
    spec = exported(core, now=8.0)
    assert spec.emitted_token_ids == tuple(OUTPUT[:8])
    assert len(spec.block_hashes) == 3
    assert spec.timeout_s == 12.0
    assert spec.key == KEY


def test_targets_are_as_old_as_the_sequence() -> None:
    core = make_core()
    targets = Targets(ttft_s=2.0, tpot_s=0.02, age_s=0.5, streamed_s=0.25, output_tokens=64.0)
    spec = make_spec("a", PROMPT, max_tokens=NUM_TOKENS)
    handle_all(
        core, Add(type(spec)(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {"targets": targets}))
    )
    core.step(0.0)
    assert exported(core, now=3.0).targets == targets.after(3.0)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sequence_is_held_with_what_it_grew_by_and_joins_another_batch(ahead: bool) -> None:
    source, target = decoding(9, ahead=ahead)[0], make_core()
    spec = exported(source)
    assert handle_all(target, Reserve(spec)) == [Reserved(KEY, 0)]
    events = [*source.step(0.0), *source.step(0.0)]
    events += handle_all(source, Hold(KEY, known(spec)))
    while not any(isinstance(event, Held) for event in events):
        events += source.step(0.0)
    [held] = [event for event in events if isinstance(event, Held)]
    num_held = 8 + len(held.token_ids)
    assert held == Held(KEY, True, tuple(OUTPUT[8:num_held]), OUTPUT[num_held])
    assert source.step(0.0) == []
    assert not source.planned.entries
    assert handle_all(target, Extend(KEY, held.token_ids)) == []
    end = known(spec) + len(held.token_ids)
    moved = move_kv(source, target, KEY, [(0, 20), (20, end)])
    assert all(event.ok for event in moved if isinstance(event, Scattered))
    assert end_of(handle_all(source, End(KEY, "moved")), "a").reason == "moved"
    assert_idle(source)
    rest = handle_all(target, Join(KEY, held.token_id)) + run_until_idle(target)
    assert token_ids_of(rest, "a") == OUTPUT[num_held:]
    assert end_of(rest, "a").reason == "length"
    assert_idle(target)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_between", [0, 1, 2])
def test_a_sequence_that_is_put_back_goes_on_as_if_nothing_had_happened(ahead: bool, num_between: int) -> None:
    core, events = decoding(9, ahead=ahead)
    events += handle_all(core, Hold(KEY, 48))
    for _ in range(num_between):
        events += core.step(0.0)
    events += handle_all(core, Unhold(KEY), Unhold(KEY))
    events += run_until_idle(core)
    assert token_ids_of(events, "a") == OUTPUT
    assert_idle(core)


def test_a_held_sequence_keeps_its_place() -> None:
    core = make_core(max_num_seqs=1)
    handle_all(core, Add(make_spec("a", PROMPT, max_tokens=NUM_TOKENS)))
    core.step(0.0)
    handle_all(core, Hold(KEY, 40), Add(make_spec("b", make_prompt(20, 1), max_tokens=2)))
    assert core.step(0.0) == []
    [refused] = handle_all(core, Reserve(make_spec("c", make_prompt(20, 2))))
    assert refused == ReserveRefused(key_of("c"), "the batch is full")
    handle_all(core, End(KEY, "moved"))
    assert end_of(run_until_idle(core), "b").reason == "length"
    assert_idle(core)


def test_only_a_sequence_that_decodes_is_described_or_held() -> None:
    core = make_core(token_budget=16)
    handle_all(core, Add(make_spec("a", PROMPT)))
    assert handle_all(core, Export(KEY), Hold(KEY, 0)) == [
        Exported(KEY, make_spec("a", PROMPT).gateway_id, None),
        Held(KEY, False),
    ]
    core.step(0.0)  # 16 of 40 tokens
    assert [type(e) for e in handle_all(core, Hold(KEY, 0))] == [Held]
    other = key_of("x")
    assert handle_all(core, Export(other), Hold(other, 0), Unhold(other), End(other, "moved"), Extend(other, (1,))) == [
        Exported(other, make_spec("a", PROMPT).gateway_id.__class__(""), None),
        Held(other, False),
    ]
    run_until_idle(core)
    assert_idle(core)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sequence_that_ends_before_it_is_held(ahead: bool) -> None:
    core, events = decoding(NUM_TOKENS - 1, ahead=ahead)
    core.plan_step(0.0)
    events += core.handle(Hold(KEY, 40), 0.0)  # in the step that is planned, or under way
    events += core.run_step()
    while not any(isinstance(event, Held) for event in events):
        events += core.step(0.0)
    assert [event for event in events if isinstance(event, Held)] == [Held(KEY, False)]
    assert token_ids_of(events, "a") == OUTPUT
    assert_idle(core)


def test_a_held_sequence_ends_by_its_deadline_or_a_release() -> None:
    core, _ = decoding(9, timeout_s=5.0)
    handle_all(core, Hold(KEY, 40))
    assert end_of(core.step(6.0), "a").reason == "deadline"
    assert_idle(core)
    core, _ = decoding(9)
    handle_all(core, Hold(KEY, 40), Release(KEY))
    assert_idle(core)


@pytest.mark.parametrize(
    ("token_ids", "detail"),
    [
        ((1, FakeModelRunner(1, 16, 64).vocab_size), "a token id is not in the vocabulary"),
        ((1,) * NUM_TOKENS, "the output is complete already"),
        ((1,) * 60, "100 tokens and an answer do not fit into 100"),
    ],
)
def test_an_extension_that_cannot_be_ends_the_reservation(token_ids: tuple[int, ...], detail: str) -> None:
    core = make_core(max_model_len=100)
    handle_all(core, Reserve(make_spec("a", PROMPT, max_tokens=NUM_TOKENS)))
    [ended] = handle_all(core, Extend(KEY, token_ids))
    assert isinstance(ended, Ended)
    assert (ended.reason, ended.detail) == ("failed", detail)
    assert_idle(core)


def test_an_extension_without_blocks_ends_the_reservation() -> None:
    core = make_core(num_blocks=6, decode_reserve_tokens=0)
    other = make_spec("b", make_prompt(40, 1))
    handle_all(core, Reserve(other), Reserve(make_spec("a", PROMPT, max_tokens=60)))
    [ended] = handle_all(core, Extend(KEY, (1,) * 30))
    assert isinstance(ended, Ended)
    assert ended.detail == "not enough free KV blocks"
    handle_all(core, Release(other.key))
    assert_idle(core)


def test_the_kv_of_an_extension_must_land_too() -> None:
    core = make_core()
    handle_all(core, Reserve(make_spec("a", PROMPT, max_tokens=NUM_TOKENS)), Extend(KEY, (1, 2)))
    handle_all(core, Scatter(KEY, 0, 0, 40, kv_of(PROMPT, 0, 40)))
    assert end_of(handle_all(core, Join(KEY, 3)), "a").detail == "joined with the KV of 40 of 42 tokens"
    assert_idle(core)
