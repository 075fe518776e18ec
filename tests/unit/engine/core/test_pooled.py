"""Pooled requests in the engine core: prompts that end with a vector instead of an answer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from disagg.engine.commands import Add, Ended, Reserve, ReserveRefused, TokenSampled
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FAKE_HIDDEN_SIZE, FakeModelRunner, fake_vector
from disagg.engine.plan import StepPlan, StepResult
from disagg.proto.messages import Pooling, SequenceSpec
from tests.support.engine import (
    BLOCK,
    VOCAB_SIZE,
    assert_idle,
    end_of,
    expected_output,
    handle_all,
    key_of,
    make_core,
    make_prompt,
    make_spec,
    run_until_idle,
    token_ids_of,
)

LAST = Pooling(kind="last")
SCORE = Pooling(kind="score", score_ids=(5, 6))


def pooled(request_id: str, prompt: Sequence[int], pooling: Pooling = LAST, **changes: object) -> SequenceSpec:
    spec = make_spec(request_id, prompt, max_tokens=1)
    return msgspec.structs.replace(spec, pooling=pooling, **changes)


def vector_of(ended: Ended) -> list[float]:
    assert ended.reason == "stop", ended.detail
    numbers: list[float] = np.frombuffer(ended.vector, dtype="<f4").tolist()
    return numbers


class Planned(FakeModelRunner):
    """Keeps the plans that it ran."""

    def __init__(self) -> None:
        super().__init__(40, BLOCK, 4096, VOCAB_SIZE)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().run(plan)


@pytest.mark.parametrize("pooling", [LAST, SCORE, Pooling(kind="last", dimensions=3, normalize=False)])
@pytest.mark.parametrize("num_tokens", [1, 15, 33, 150])
def test_the_vector_is_that_of_the_prompt_and_nothing_is_sampled(pooling: Pooling, num_tokens: int) -> None:
    prompt = make_prompt(num_tokens)
    core = make_core(token_budget=32)
    events = handle_all(core, Add(pooled("a", prompt, pooling))) + run_until_idle(core)
    assert not any(isinstance(event, TokenSampled) for event in events)
    vector = vector_of(end_of(events, "a"))
    assert vector == fake_vector(prompt, pooling)
    assert len(vector) == {"score": 1}.get(pooling.kind, pooling.dimensions or FAKE_HIDDEN_SIZE)
    assert_idle(core)


def test_a_prompt_as_long_as_the_model_allows_has_a_vector_and_a_longer_one_none() -> None:
    core = make_core(max_model_len=48)
    events = handle_all(core, Add(pooled("a", make_prompt(48))), Add(pooled("b", make_prompt(49))))
    events += run_until_idle(core)
    assert vector_of(end_of(events, "a")) == fake_vector(make_prompt(48), LAST)
    assert end_of(events, "b").reason == "refused"
    assert end_of(events, "b").detail == "49 tokens do not fit into 48"


def test_many_share_a_step_with_answers() -> None:
    runner = Planned()
    core = make_core(runner=runner, token_budget=64)
    prompts = {name: make_prompt(10, seed) for seed, name in enumerate("abcd")}
    answer = make_spec("x", make_prompt(8, seed=9), max_tokens=3)
    events = handle_all(core, Add(answer), *(Add(pooled(name, prompt)) for name, prompt in prompts.items()))
    events += run_until_idle(core)
    assert [len(plan.prefills) for plan in runner.plans] == [5, 0, 0]
    assert [plan.pools for plan in runner.plans] == [True, False, False]
    assert {name: vector_of(end_of(events, name)) for name in prompts} == {
        name: fake_vector(prompt, LAST) for name, prompt in prompts.items()
    }
    assert token_ids_of(events, "x") == expected_output(make_prompt(8, seed=9), 3)
    assert_idle(core)


def test_the_shared_head_of_prompts_is_cached_unless_all_hidden_states_are_read() -> None:
    head = make_prompt(32)
    for pooling, cached in ((LAST, 32), (SCORE, 32), (Pooling(kind="mean"), 0), (Pooling(kind="cls"), 0)):
        core = make_core()
        events = handle_all(core, Add(pooled("a", (*head, 1, 2), pooling))) + run_until_idle(core)
        events += handle_all(core, Add(pooled("b", (*head, 3, 4), pooling))) + run_until_idle(core)
        assert end_of(events, "b").cached_tokens == cached
        assert vector_of(end_of(events, "b")) == fake_vector((*head, 3, 4), pooling)


def test_of_one_prompt_of_a_step_all_rows_are_kept() -> None:
    runner = Planned()
    core = make_core(runner=runner, token_budget=512)
    mean = Pooling(kind="mean")
    handle_all(core, Add(pooled("a", make_prompt(200), mean)), Add(pooled("b", make_prompt(20, 1), mean)))
    run_until_idle(core)
    assert [[(e.sequence.key, e.num_tokens) for e in plan.entries] for plan in runner.plans] == [
        [(key_of("a"), 128)],
        [(key_of("a"), 72)],
        [(key_of("b"), 20)],
    ]


@pytest.mark.parametrize(
    ("spec", "detail"),
    [
        (pooled("a", (1, 2), emitted_token_ids=(3,)), "a pooled request has output tokens"),
        (pooled("a", (1, 2), Pooling(kind="score")), "pooling by score with score_ids ()"),
        (pooled("a", (1, 2), Pooling(kind="last", score_ids=(1, 2))), "pooling by last with score_ids (1, 2)"),
        (
            pooled("a", (1, 2), Pooling(kind="score", score_ids=(1, VOCAB_SIZE))),
            f"pooling by score with score_ids (1, {VOCAB_SIZE})",
        ),
    ],
)
def test_a_malformed_one_is_refused(spec: SequenceSpec, detail: str) -> None:
    core = make_core()
    (ended,) = handle_all(core, Add(spec))
    assert isinstance(ended, Ended)
    assert (ended.reason, ended.detail) == ("failed", detail)
    assert_idle(core)


def test_none_is_handed_over() -> None:
    core = make_core()
    detail = "a pooled request is not handed over"
    assert handle_all(core, Reserve(pooled("a", (1, 2)))) == [ReserveRefused(key_of("a"), detail)]
    (ended,) = handle_all(core, Add(pooled("a", (1, 2)), hold_after_prefill=True))
    assert isinstance(ended, Ended)
    assert ended.detail == detail
    assert_idle(core)


def test_a_step_without_its_vector_fails_it_alone() -> None:
    class Forgetful(FakeModelRunner):
        def run(self, plan: StepPlan) -> StepResult:
            return msgspec.structs.replace(super().run(plan), vectors={})

    core = make_core(runner=Forgetful(40, BLOCK, 4096, VOCAB_SIZE))
    events = handle_all(core, Add(pooled("a", (1, 2))), Add(make_spec("x", (3, 4), max_tokens=1)))
    events += run_until_idle(core)
    assert (end_of(events, "a").reason, end_of(events, "a").detail) == ("failed", "step: it gave no vector")
    assert end_of(events, "x").reason == "length"
    assert_idle(core)


def test_a_preempted_one_is_computed_again() -> None:
    core: EngineCore = make_core(6, token_budget=48, decode_reserve_tokens=0)
    ahead = make_spec("ahead", make_prompt(30, seed=1), max_tokens=40, priority=1)
    prompt = make_prompt(60)
    handle_all(core, Add(ahead))
    core.step(0.0)
    events = handle_all(core, Add(pooled("a", prompt))) + run_until_idle(core)
    assert vector_of(end_of(events, "a")) == fake_vector(prompt, LAST)
    assert_idle(core)
