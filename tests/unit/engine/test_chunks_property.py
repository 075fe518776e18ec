"""Every prompt comes to its end: whatever the size of a block, the budget of a step, the tail, and what is cached."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from disagg.engine.commands import Add, PrefillComputed, Release
from disagg.engine.fake_runner import FakeModelRunner
from tests.support.engine import (
    VOCAB_SIZE,
    assert_idle,
    end_of,
    expected_output,
    handle_all,
    make_core,
    make_prompt,
    make_spec,
    token_ids_of,
)

lengths = st.one_of(st.integers(1, 80), st.integers(200, 320), st.integers(480, 600))


@settings(max_examples=60, deadline=None, derandomize=True)
@example(block_size=256, tail=32, budget=512, prompts=[(256, 0), (40, 1)], hold=True)
@example(block_size=240, tail=32, budget=512, prompts=[(270, 0), (271, 0)], hold=True)
@given(
    block_size=st.sampled_from([16, 32, 48, 128, 224, 240, 256, 512]),
    tail=st.sampled_from([0, 1, 8, 32, 64]),
    budget=st.integers(4, 600),
    prompts=st.lists(st.tuples(lengths, st.integers(0, 1)), min_size=1, max_size=4),
    hold=st.booleans(),
)
def test_every_prompt_ends(
    block_size: int, tail: int, budget: int, prompts: list[tuple[int, int]], *, hold: bool
) -> None:
    """Some of them share a prefix. A step computes something as long as anything is left."""
    runner = FakeModelRunner(4 * (600 // block_size + 2), block_size, 4096, VOCAB_SIZE)
    core = make_core(runner=runner, token_budget=budget, tail_tokens=tail, max_num_seqs=4)
    specs = [make_spec(f"r{i}", make_prompt(*prompt), max_tokens=2) for i, prompt in enumerate(prompts)]
    events = handle_all(core, *(Add(spec, hold_after_prefill=hold) for spec in specs))
    while core.has_work:
        stepped = core.step(0.0)
        assert core.last_plan.entries, "a step computed nothing, and there is work"
        for event in stepped:
            if isinstance(event, PrefillComputed):
                handle_all(core, Release(event.key))
        events += stepped
    assert_idle(core)
    for spec, prompt in zip(specs, prompts, strict=True):
        answer = expected_output(make_prompt(*prompt), 1 if hold else 2)
        assert token_ids_of(events, spec.request_id) == answer
        if not hold:
            assert end_of(events, spec.request_id).reason == "length"
