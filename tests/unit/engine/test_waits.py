"""How long sequences wait for their first step, and what the engine counts since its start."""

from __future__ import annotations

from disagg.engine.commands import Add, Join, PrefillComputed, Reserve
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.reports import EngineTotals
from tests.support.engine import end_of, handle_all, key_of, make_core, make_prompt, make_spec, move_kv, run_until_idle

KEY = key_of("a")
PROMPT = make_prompt(40)


def test_a_sequence_waits_from_its_arrival_to_its_first_step() -> None:
    core = make_core(token_budget=32)
    handle_all(core, Add(make_spec("a", PROMPT, max_tokens=2)), now=1.0)
    core.step(3.5)
    assert end_of(run_until_idle(core, now=9.0), "a").queue_s == 2.5


def test_the_prefill_worker_says_it_with_the_prompt() -> None:
    core = make_core(token_budget=32)
    handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True), now=1.0)
    core.step(1.25)
    (computed,) = (event for event in run_until_idle(core, now=9.0) if isinstance(event, PrefillComputed))
    assert computed.queue_s == 0.25


def joined(core: EngineCore, now: float) -> None:
    source = make_core()
    spec = make_spec("a", PROMPT, max_tokens=3)
    handle_all(source, Add(spec, hold_after_prefill=True))
    run_until_idle(source)
    handle_all(core, Reserve(spec))
    move_kv(source, core, KEY, [(0, 40)])
    handle_all(core, Join(KEY, 5), now=now)


def test_after_a_join_the_wait_begins_anew() -> None:
    core = make_core()
    joined(core, 7.0)
    core.step(7.125)
    assert end_of(run_until_idle(core, now=9.0), "a").queue_s == 0.125


def test_one_that_never_had_a_step_waited_for_nothing() -> None:
    core = make_core()
    handle_all(core, Add(make_spec("a", PROMPT, timeout_s=1.0)))
    assert end_of(core.step(2.0), "a").queue_s == 0.0


def test_totals_only_grow() -> None:
    core = make_core(20)
    assert core.totals() == EngineTotals(0, 0, 0)
    handle_all(core, Add(make_spec("a", PROMPT, max_tokens=3)))
    run_until_idle(core)
    assert core.totals() == EngineTotals(output_tokens=3, cached_tokens=0, preemptions=0)
    handle_all(core, Add(make_spec("b", PROMPT, max_tokens=1)))
    run_until_idle(core)
    assert core.totals() == EngineTotals(output_tokens=4, cached_tokens=32, preemptions=0)


def test_preemptions_are_counted() -> None:
    core = make_core(6, decode_reserve_tokens=1, watermark=0.0)
    handle_all(core, *(Add(make_spec(name, make_prompt(30, seed), max_tokens=40)) for seed, name in enumerate("abc")))
    run_until_idle(core)
    assert core.totals().preemptions > 0
    assert core.totals().output_tokens == 120
