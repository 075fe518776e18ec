"""Log-probabilities of prompts: gathered over chunks, cached or preempted, and given with the first token."""

from __future__ import annotations

from itertools import pairwise

from disagg.engine.commands import Add, Event, PrefillComputed, TokenSampled
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.prompt_logprobs import MAX_ROWS
from disagg.engine.fake_runner import fake_logprobs
from disagg.engine.plan import StepPlan
from disagg.proto.messages import SequenceSpec, TokenLogprobs
from tests.support.engine import (
    VOCAB_SIZE,
    assert_idle,
    end_of,
    expected_output,
    handle_all,
    logprobs_of,
    make_core,
    make_prompt,
    make_spec,
    run_until_idle,
    token_ids_of,
)

LONG = make_prompt(300)


def wanted(name: str, prompt: tuple[int, ...], num_top: int = 2, max_tokens: int = 4) -> SequenceSpec:
    return make_spec(name, prompt, logprobs=0, prompt_logprobs=num_top, max_tokens=max_tokens)


def expected(prompt: tuple[int, ...], num_top: int = 2) -> tuple[TokenLogprobs, ...]:
    return tuple(fake_logprobs(before, num_top, VOCAB_SIZE, token) for before, token in pairwise(prompt))


def prompt_of(events: list[Event], name: str) -> tuple[TokenLogprobs, ...]:
    """What came with the first token; further tokens have none."""
    first, *others = logprobs_of(events, name)
    assert first is not None
    assert all(other is not None and other.prompt == () for other in others)
    return first.prompt


def plans_of(core: EngineCore) -> tuple[list[StepPlan], list[Event]]:
    plans: list[StepPlan] = []
    events: list[Event] = []
    while core.has_work:
        events += core.step(0.0)
        plans.append(core.last_plan)
    return plans, events


def test_a_prompt_in_chunks_of_bounded_length() -> None:
    core = make_core(40, token_budget=256)
    handle_all(core, Add(wanted("a", LONG)))
    plans, events = plans_of(core)
    chunks = [entry.num_tokens for plan in plans for entry in plan.prefills]
    assert chunks == [MAX_ROWS, MAX_ROWS, 300 - 2 * MAX_ROWS]
    assert prompt_of(events, "a") == expected(LONG)
    assert token_ids_of(events, "a") == expected_output(LONG, 4)
    assert_idle(core)


def test_one_sequence_of_a_step_gathers_and_others_fill_it() -> None:
    core = make_core(80, token_budget=256)
    handle_all(core, Add(wanted("a", LONG)), Add(wanted("b", LONG[:100])), Add(make_spec("c", make_prompt(90, 5))))
    plans, events = plans_of(core)
    assert max(sum(entry.sequence.spec.sampling.prompt_logprobs >= 0 for entry in plan.prefills) for plan in plans) == 1
    assert prompt_of(events, "a") == expected(LONG)
    assert prompt_of(events, "b") == expected(LONG[:100])
    assert end_of(events, "c").reason == "length"
    assert_idle(core)


def test_what_is_cached_is_computed_again_and_used_by_others() -> None:
    core = make_core(80)
    handle_all(core, Add(make_spec("first", LONG)))
    run_until_idle(core)
    handle_all(core, Add(wanted("a", LONG)))
    events = run_until_idle(core)
    assert prompt_of(events, "a") == expected(LONG)
    assert end_of(events, "a").cached_tokens == 0
    handle_all(core, Add(make_spec("last", LONG)))
    assert end_of(run_until_idle(core), "last").cached_tokens == 288
    assert_idle(core)


def test_the_shortest_prompts() -> None:
    core = make_core()
    handle_all(core, Add(wanted("one", (5,))), Add(wanted("two", (5, 6), 0)))
    events = run_until_idle(core)
    assert prompt_of(events, "one") == ()
    assert prompt_of(events, "two") == expected((5, 6), 0)


def test_a_prompt_whose_last_token_is_a_step_of_its_own() -> None:
    """It is planned as a decode."""
    core = make_core(40, token_budget=16)
    handle_all(core, Add(wanted("a", LONG[:17])))
    assert prompt_of(run_until_idle(core), "a") == expected(LONG[:17])


def test_preempted_sequences_keep_what_they_gathered() -> None:
    """Two that do not fit together: one is preempted after its first token, which came with its prompt's."""
    core = make_core(10, token_budget=64, decode_reserve_tokens=1)
    first, second = make_prompt(60, 1), make_prompt(60, 2)
    handle_all(core, Add(wanted("a", first, max_tokens=40)), Add(wanted("b", second, max_tokens=40)))
    events = run_until_idle(core)
    assert core.totals().preemptions > 0
    assert prompt_of(events, "a") == expected(first)
    assert prompt_of(events, "b") == expected(second)
    assert_idle(core)


def test_a_prefill_worker_gives_them_to_the_client_and_to_its_peer() -> None:
    core = make_core(40)
    handle_all(core, Add(wanted("a", LONG), hold_after_prefill=True))
    events = run_until_idle(core)
    (sampled,) = [event for event in events if isinstance(event, TokenSampled)]
    (computed,) = [event for event in events if isinstance(event, PrefillComputed)]
    assert sampled.logprobs is not None
    assert sampled.logprobs.prompt == expected(LONG)
    assert computed.logprobs == sampled.logprobs


def test_a_retry_behind_emitted_tokens_has_none() -> None:
    core = make_core(40)
    emitted = expected_output(LONG, 2)
    handle_all(core, Add(make_spec("a", LONG, logprobs=0, prompt_logprobs=2, emitted=emitted, max_tokens=4)))
    assert prompt_of(run_until_idle(core), "a") == ()
