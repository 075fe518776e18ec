"""A row that nothing can be sampled from ends its own sequence: in every way in which steps are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from disagg.engine.commands import Add, Ended, Event, PrefillComputed, Release, TokenSampled
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.policy import UNSAMPLABLE, faulty_end
from disagg.engine.plan import ModelRunner
from disagg.engine.runner.token_masks import GrammarState
from disagg.proto.errors import GRAMMAR_TOO_LARGE
from disagg.proto.messages import SequenceSpec
from tests.support.engine import (
    GATEWAY,
    assert_idle,
    assert_sound,
    end_of,
    handle_all,
    key_of,
    make_core,
    make_prompt,
    make_sequence,
    make_spec,
    run_until_idle,
    token_ids_of,
)
from tests.support.rank_connections import fake_group
from tests.support.sampling import QueueingSampledRunner, SampledRunner

BAD: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1e-38},
    "drawn with a penalty": {"repetition_penalty": 1e-38, "temperature": 1.0},
    "bias": {"logit_bias": ((0, 3e38), (0, 3e38))},
    "mask of all": {"min_tokens": 3, "stop_token_ids": tuple(range(1000))},
    "logprobs": {"repetition_penalty": 1e-38, "logprobs": 3},
    "frequency": {"frequency_penalty": -3e38, "presence_penalty": -3e38},
}
"""Settings that leave nothing finite, some of which no gateway lets through."""

GOOD: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    "penalized": {"temperature": 1.2, "seed": 9, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "logprobs": {"logprobs": 2},
}


def spec_of(name: str, prompt_seed: int, num_tokens: int = 20, max_tokens: int = 6, **sampling: Any) -> SequenceSpec:
    spec = make_spec(name, make_prompt(num_tokens, prompt_seed), max_tokens=max_tokens)
    return msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, **sampling))


def innocents(**changes: Any) -> list[SequenceSpec]:
    return [spec_of(name, number, **{**GOOD[name], **changes}) for number, name in enumerate(GOOD)]


def new_core(runner: ModelRunner | None = None) -> EngineCore:
    return make_core(100, runner=runner or SampledRunner(100), token_budget=256)


def answers(core: EngineCore, specs: Sequence[SequenceSpec]) -> list[Event]:
    events = handle_all(core, *(Add(spec) for spec in specs)) + run_until_idle(core)
    assert_idle(core)
    return events


def tokens(events: Sequence[Event]) -> dict[str, list[int]]:
    return {name: token_ids_of(events, name) for name in GOOD}


def check_innocents(events: Sequence[Event], expected: dict[str, list[int]]) -> None:
    assert tokens(events) == expected
    assert all(len(each) == 6 for each in expected.values())
    assert {end_of(events, name).reason for name in GOOD} == {"length"}


@pytest.mark.parametrize("bad", BAD)
def test_a_request_that_leaves_nothing_to_sample_ends_alone(bad: str) -> None:
    expected = tokens(answers(new_core(), innocents()))
    events = answers(new_core(), [spec_of("bad", 40, **BAD[bad]), *innocents()])
    check_innocents(events, expected)
    assert end_of(events, "bad") == Ended(key_of("bad"), GATEWAY, "invalid", UNSAMPLABLE)
    assert len(token_ids_of(events, "bad")) == (bad == "frequency")  # nothing is counted before the first token


def test_a_grammar_that_went_beyond_a_limit_is_told_as_such() -> None:
    sequence = make_sequence(spec_of("bad", 40))
    sequence.grammar_state = GrammarState(None)
    assert faulty_end(sequence, "request") == ("invalid", GRAMMAR_TOO_LARGE)


@pytest.mark.parametrize("bad", BAD)
def test_so_it_does_alone_in_its_step(bad: str) -> None:
    events = answers(new_core(), [spec_of("bad", 40, **BAD[bad])])
    assert end_of(events, "bad") == Ended(key_of("bad"), GATEWAY, "invalid", UNSAMPLABLE)


@pytest.mark.parametrize("bad", BAD)
def test_so_it_does_in_a_worker_of_several_ranks(bad: str) -> None:
    """Which lives on: no rank waits for another, and nothing is a fault of the worker's."""
    expected = tokens(answers(new_core(), innocents()))
    with fake_group(2, num_blocks=100, make=SampledRunner) as group:
        core = new_core(group.runner)
        check_innocents(answers(core, [spec_of("bad", 40, **BAD[bad]), *innocents()]), expected)
        check_innocents(answers(core, innocents()), expected)
    assert group.faults == group.lost == []


def test_a_model_that_breaks_for_all_rows_does_not_end_a_worker_of_several_ranks() -> None:
    with fake_group(2, num_blocks=100, make=SampledRunner) as group:
        core = new_core(group.runner)
        runner = group.runner._local
        assert isinstance(runner, SampledRunner)
        runner.broken = set(GOOD)
        events = answers(core, innocents())
        assert {end_of(events, name).reason for name in GOOD} == {"failed"}
    assert group.faults == group.lost == []


@pytest.mark.parametrize("bad", [name for name in BAD if name != "frequency"])
def test_so_it_does_on_the_prefill_side(bad: str) -> None:
    """Nothing is held for a hand-over that cannot be, and the others are."""
    expected = {name: token_ids[:1] for name, token_ids in tokens(answers(new_core(), innocents())).items()}
    core = new_core()
    commands = [Add(spec, hold_after_prefill=True) for spec in [spec_of("bad", 40, **BAD[bad]), *innocents()]]
    events = handle_all(core, *commands) + run_until_idle(core)
    assert end_of(events, "bad") == Ended(key_of("bad"), GATEWAY, "invalid", UNSAMPLABLE)
    assert tokens(events) == expected
    computed = {event.key.request_id: event.token_id for event in events if isinstance(event, PrefillComputed)}
    assert computed == {name: token_ids[0] for name, token_ids in expected.items()}
    handle_all(core, *(Release(key_of(name)) for name in GOOD))
    assert_idle(core)


def plain(**changes: Any) -> list[SequenceSpec]:
    """Innocents whose steps are queued."""
    return innocents(logprobs=-1, repetition_penalty=1.0, frequency_penalty=0.0, **changes)


def serve(core: EngineCore, specs: Sequence[SequenceSpec], at_step: int, do: Callable[[], object]) -> list[Event]:
    events = handle_all(core, *(Add(spec) for spec in specs))
    for number in range(100):
        if not core.has_work:
            break
        if number == at_step:
            do()
        events += core.step(0.0)
        assert_sound(core)
    assert_idle(core)
    return events


def test_a_row_of_the_model_ends_its_sequence_in_steps_that_are_queued_ahead() -> None:
    """One whose row is bad in the middle of its answer; the step behind it is under way by then."""
    runner = QueueingSampledRunner(100)
    expected = tokens(serve(new_core(runner), plain(max_tokens=12), 100, lambda: None))
    assert runner.num_behind > 8
    runner = QueueingSampledRunner(100)
    specs = [spec_of("bad", 40, max_tokens=12), *plain(max_tokens=12)]
    events = serve(new_core(runner), specs, 5, lambda: runner.broken.add("bad"))
    assert runner.num_behind > 8
    assert tokens(events) == expected
    ended = end_of(events, "bad")
    assert (ended.reason, ended.detail) == ("failed", "step: the model's logits are not finite")
    assert 3 <= len(token_ids_of(events, "bad")) <= 6


def test_a_request_that_leaves_nothing_to_sample_beside_steps_that_are_queued_ahead() -> None:
    expected = tokens(serve(new_core(QueueingSampledRunner(100)), plain(max_tokens=12), 100, lambda: None))
    core = new_core(QueueingSampledRunner(100))
    joins = Add(spec_of("bad", 40, **BAD["penalty"]))
    events = serve(core, plain(max_tokens=12), 5, lambda: handle_all(core, joins))
    assert tokens(events) == expected
    assert end_of(events, "bad").reason == "invalid"


def test_a_row_that_the_model_breaks_fails_its_sequence_and_publishes_nothing_of_the_step() -> None:
    runner = SampledRunner(100)
    core = new_core(runner)
    runner.broken = {"bad"}
    expected = tokens(answers(new_core(), innocents()))
    core.drain_kv_events()
    events = answers(core, [spec_of("bad", 40), *innocents()])
    check_innocents(events, expected)
    ended = end_of(events, "bad")
    assert (ended.reason, ended.detail) == ("failed", "step: the model's logits are not finite")
    hashes = spec_of("bad", 40).block_hashes
    assert hashes
    assert not set(hashes) & set(core.prefix_snapshot().hashes)


def test_a_model_that_breaks_for_all_rows_fails_the_step() -> None:
    """Prompts that sample nothing yet included: the device, or what all rows share, is at fault."""
    runner = SampledRunner(100)
    core = make_core(100, runner=runner, token_budget=64)
    runner.broken = {"a", "b"}
    specs = [spec_of("a", 1), spec_of("b", 2), spec_of("long", 3, num_tokens=60)]
    events = handle_all(core, *(Add(spec) for spec in specs)) + core.step(0.0)
    detail = "step: BadLogitsError: the model's logits are not finite in any of 2 rows"
    assert events == [Ended(key_of(name), GATEWAY, "failed", detail) for name in ("a", "b", "long")]
    assert_idle(core)


def test_one_broken_row_alone_fails_no_prompt_beside_it() -> None:
    runner = SampledRunner(100)
    core = make_core(100, runner=runner, token_budget=64)
    runner.broken = {"a"}
    events = handle_all(core, Add(spec_of("a", 1)), Add(spec_of("long", 3, num_tokens=60))) + run_until_idle(core)
    assert end_of(events, "a").reason == "failed"
    assert end_of(events, "long").reason == "length"
    assert sum(isinstance(event, TokenSampled) for event in events) == 6
    assert_idle(core)
