"""Steps by slack: what the next one may take, worked out by hand.

A step takes 5 ms, 0.5 for each prompt token and 1 for each decode; contexts cost nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from disagg.engine.commands import Add, Event
from disagg.engine.config import Scheduling
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.core.slack import STARVED_STEPS, Decode, Slack
from disagg.engine.request import Sequence
from disagg.proto.messages import StepSample, Targets, experts_read
from tests.support.engine import (
    assert_idle,
    end_of,
    make_core,
    make_prompt,
    make_scheduler,
    make_sequence,
    make_spec,
    shape_of,
    step_scheduler,
    token_ids_of,
)

PACE = Targets(tpot_s=0.010, output_tokens=100.0)


def with_(**changes: float) -> Targets:
    return Targets(**{**{name: getattr(PACE, name) for name in Targets.__struct_fields__}, **changes})


def samples() -> Iterator[StepSample]:
    for num_tokens in (16, 128, 512):
        for start in (0, 512):
            attended = num_tokens * start + num_tokens * (num_tokens + 1) // 2
            yield StepSample(5.0 + 0.5 * num_tokens, num_tokens, attended)
    for num_decodes in (1, 8, 32):
        for context in (64, 512):
            yield StepSample(5.0 + num_decodes, 0, 0, num_decodes, num_decodes * context)


def new_scheduler(*, scheduling: Scheduling = "slack", max_itl_ms: float | None = None, budget: int = 256) -> Scheduler:
    slack: Slack[Sequence] | None = Slack(tuple(samples()), max_itl_ms, 16) if scheduling == "slack" else None
    return make_scheduler(400, token_budget=budget, scheduling=scheduling, slack=slack)


def ask(
    scheduler: Scheduler,
    name: str,
    num_tokens: int,
    targets: Targets | None = None,
    *,
    max_tokens: int = 100,
    now: float = 0.0,
    priority: int = 0,
) -> Sequence:
    prompt = make_prompt(num_tokens, seed=sum(name.encode()))
    spec = make_spec(name, prompt, max_tokens=max_tokens, priority=priority, targets=targets)
    sequence = make_sequence(spec, arrival=now)
    scheduler.add(sequence)
    return sequence


def plan(scheduler: Scheduler, now: float) -> tuple[list[str], dict[str, int]]:
    """A step that begins now: who decodes, and tokens by prompt."""
    scheduler.advance(now)
    decodes, prefills = shape_of(step_scheduler(scheduler)[0])
    return [name for name, _, _ in decodes], {name: num_tokens for name, _, num_tokens in prefills}


class TestRoom:
    def test_a_chunk_takes_what_the_answer_has_saved(self) -> None:
        scheduler = new_scheduler()
        ask(scheduler, "a", 16, PACE)
        assert plan(scheduler, 0.0) == ([], {"a": 16})
        ask(scheduler, "b", 640)
        # The first token is out at 0.010. One token, 99 to come, each at 6 ms: 0.98 * 990 - 1.2 * 594 = 257 ms for a
        # step of 6 ms without prompts, so that 502 tokens would fit: the budget limits them.
        assert plan(scheduler, 0.010) == (["a"], {"b": 240})
        # 98 to come: 970.2 - 130 - 1.2 * 588 = 134.6 ms, 128 of them for prompt tokens.
        assert plan(scheduler, 0.140) == (["a"], {"b": 240})
        # 970.2 - 250 - 1.2 * 97 * 6 = 21.8 ms, less 6: 31 tokens, of which whole blocks are taken.
        assert plan(scheduler, 0.260) == (["a"], {"b": 16})
        # 970.2 - 350 - 1.2 * 96 * 6 is negative, and 96 * 6 is not too late: decodes only.
        assert plan(scheduler, 0.360) == (["a"], {})

    def test_without_answers_there_is_no_limit_but_the_budget(self) -> None:
        scheduler = new_scheduler()
        ask(scheduler, "a", 640, PACE)
        assert plan(scheduler, 0.0) == ([], {"a": 256})

    def test_the_least_slack_counts(self) -> None:
        scheduler = new_scheduler()
        ask(scheduler, "a", 16, PACE)
        plan(scheduler, 0.0)
        ask(scheduler, "b", 16, with_(tpot_s=0.0084))
        plan(scheduler, 0.010)
        ask(scheduler, "c", 640)
        assert scheduler.has_time()
        # b at 0.023: 0.98 * 99 * 8.4 - 1.2 * 99 * 7 < 0. a alone would leave 970.2 - 13 - 1.2 * 98 * 7 = 134.
        assert plan(scheduler, 0.023) == (["a", "b"], {})
        assert not scheduler.has_time()

    def test_an_unknown_length_is_guessed_short(self) -> None:
        """A tenth of 200 tokens that are expected: one out, 19 to come, 186.2 - 1.2 * 114 = 49.4 ms, less 6."""
        scheduler = new_scheduler()
        ask(scheduler, "a", 16, with_(output_tokens=200.0), max_tokens=400)
        plan(scheduler, 0.0)
        ask(scheduler, "b", 640)
        assert plan(scheduler, 0.010) == (["a"], {"b": 80})

    def test_an_answer_that_outgrew_its_expected_length_is_expected_to_go_on(self) -> None:
        scheduler = new_scheduler()
        ask(scheduler, "a", 16, with_(output_tokens=20.0))
        plan(scheduler, 0.0)
        for step in range(20):
            plan(scheduler, 0.010 + 0.006 * step)
        ask(scheduler, "b", 640)
        # 21 tokens out, 0.3 to come: 9.8 * 20.3 - 120 - 1.2 * 0.3 * 6 = 76.78 ms, less 6: 141 tokens.
        assert plan(scheduler, 0.130) == (["a"], {"b": 128})

    def test_a_whole_answer_may_have_a_deadline(self) -> None:
        scheduler = new_scheduler()
        sequence = ask(scheduler, "a", 16, Targets(output_tokens=100.0))
        plan(scheduler, 0.0)
        ask(scheduler, "b", 640)
        sequence.deadline = 0.010 + 1.2 * 0.594 + 0.031
        assert plan(scheduler, 0.010) == (["a"], {"b": 48})

    def test_a_lost_answer_holds_nothing_back(self) -> None:
        scheduler = new_scheduler()
        ask(scheduler, "a", 16, PACE)
        plan(scheduler, 0.0)
        plan(scheduler, 0.010)
        ask(scheduler, "b", 640)
        # 98 tokens at 6 ms are more than 990 - 500: the budget is the limit.
        assert plan(scheduler, 0.510) == (["a"], {"b": 240})

    def test_a_retry_continues_with_the_pace_of_the_whole_answer(self) -> None:
        scheduler = new_scheduler()
        targets = with_(age_s=2.0, streamed_s=0.100, output_tokens=50.0)
        spec = make_spec("a", make_prompt(16), max_tokens=50, emitted=range(9), targets=targets)
        core = make_core(100, scheduling="slack")
        core.handle(Add(spec), 5.0)
        (sequence,) = core._scheduler.sequences.values()
        assert sequence.first_at == pytest.approx(4.9)
        scheduler.add(sequence)
        plan(scheduler, 5.0)
        ask(scheduler, "b", 640)
        # 10 tokens out since 4.9, 40 to come: 480.2 - 120 - 1.2 * 240 = 72.2 ms, less 6: 132 tokens.
        assert plan(scheduler, 5.020) == (["a"], {"b": 128})


class TestPause:
    def test_a_pause_is_limited(self) -> None:
        scheduler = new_scheduler(max_itl_ms=30.0)
        ask(scheduler, "a", 16, PACE)
        plan(scheduler, 0.0)
        ask(scheduler, "b", 640)
        assert plan(scheduler, 0.010) == (["a"], {"b": 48})

    def test_a_limit_of_less_than_a_block_is_kept(self) -> None:
        scheduler = new_scheduler(max_itl_ms=10.0)
        ask(scheduler, "a", 16, PACE)
        plan(scheduler, 0.0)
        ask(scheduler, "b", 640)
        assert plan(scheduler, 0.010) == (["a"], {"b": 8})

    def test_where_the_decodes_take_longer_alone_a_block_is_computed(self) -> None:
        scheduler = new_scheduler(max_itl_ms=4.0)
        ask(scheduler, "a", 16)
        plan(scheduler, 0.0)
        ask(scheduler, "b", 640)
        assert plan(scheduler, 0.010) == (["a"], {"b": 16})

    def test_a_prompt_joins_one_that_ends_only_if_that_saves_more_than_it_costs(self) -> None:
        """A step costs 5 ms, so that 20 tokens behind one prompt are worth it for two."""
        for second, joins in ((20, True), (21, False)):
            scheduler = new_scheduler()
            for name, num_tokens in (("a", 40), ("b", second), ("c", 40)):
                ask(scheduler, name, num_tokens, with_(ttft_s=1.0))
            assert plan(scheduler, 0.0) == ([], {"a": 40, "b": second} if joins else {"a": 40})

    def test_short_prompts_share_steps(self) -> None:
        """Of ten of 4 tokens: m of them wait 2 ms more, and 10 - m save 5."""
        scheduler = new_scheduler()
        for name in "abcdefghij":
            ask(scheduler, name, 4, with_(ttft_s=1.0))
        assert list(plan(scheduler, 0.0)[1]) == list("abcdefgh")


class TestOrder:
    def test_prompts_that_cannot_meet_their_target_go_last_until_they_are_overdue(self) -> None:
        """A prompt of 200 tokens takes 105 ms, so that a target of 500 ms is out of reach from 395 ms on."""
        targets = with_(ttft_s=0.500)
        scheduler = new_scheduler(budget=64)
        for name, now in (("old", 0.0), ("new", 0.3)):
            ask(scheduler, name, 200, targets, now=now)
        assert plan(scheduler, 0.390)[1] == {"old": 64}, "it can still be in time"
        scheduler = new_scheduler(budget=64)
        for name, now in (("old", 0.0), ("new", 0.3)):
            ask(scheduler, name, 200, targets, now=now)
        assert [plan(scheduler, now)[1] for now in (0.396, 0.43)] == [{"new": 64}, {"new": 64}]
        ask(scheduler, "newer", 200, targets, now=0.9)
        assert plan(scheduler, 0.99)[1] == {"new": 64}
        assert plan(scheduler, 1.0)[1] == {"old": 64}, "overdue at twice its target"

    def test_a_begun_prompt_that_cannot_meet_its_target_counts_as_overdue_as_well(self) -> None:
        targets = with_(ttft_s=0.500)
        scheduler = new_scheduler(budget=64)
        ask(scheduler, "old", 200, targets)
        assert plan(scheduler, 0.396)[1] == {"old": 64}, "nothing else waits"
        ask(scheduler, "new", 200, targets, now=0.9)
        assert plan(scheduler, 0.99)[1] == {"new": 64}
        assert plan(scheduler, 1.0)[1] == {"old": 64}, "overdue at twice its target"

    def test_a_higher_priority_goes_first_also_where_it_cannot_meet_its_target(self) -> None:
        targets = with_(ttft_s=0.500)
        scheduler = new_scheduler()
        ask(scheduler, "urgent", 200, targets, priority=1)
        ask(scheduler, "other", 200, targets, now=0.4)
        assert list(plan(scheduler, 0.45)[1]) == ["urgent", "other"]

    def test_the_time_of_a_request_counts_from_its_arrival_at_the_gateway(self) -> None:
        scheduler = new_scheduler()
        ask(scheduler, "old", 200, with_(ttft_s=0.5, age_s=0.45))
        ask(scheduler, "new", 200, with_(ttft_s=0.5, age_s=0.10))
        assert list(plan(scheduler, 0.0)[1]) == ["new"]

    def test_an_overdue_prompt_gets_a_block_after_eight_steps_without(self) -> None:
        scheduler = new_scheduler()
        ask(scheduler, "a", 16, with_(tpot_s=0.0065), max_tokens=100)
        plan(scheduler, 0.0)
        ask(scheduler, "b", 640, Targets(ttft_s=0.020))
        steps = [plan(scheduler, 0.010 + 0.006 * step)[1] for step in range(2 * STARVED_STEPS + 2)]
        assert [index for index, prompts in enumerate(steps) if prompts] == [STARVED_STEPS, 2 * STARVED_STEPS + 1]
        assert steps[STARVED_STEPS] == {"b": 16}


def mixed_load(scheduling: Scheduling, *, with_timeouts: bool = False) -> list[Any]:
    """Shapes of all steps of sequences that come over time."""
    scheduler, draw = new_scheduler(scheduling=scheduling, budget=64), random.Random(3)
    shapes, now = [], 0.0
    for number in range(60):
        sequence = ask(scheduler, f"r{number}", draw.randint(1, 300), max_tokens=draw.randint(1, 40), now=now)
        sequence.deadline = now + 0.5 if with_timeouts else None
        for _ in range(draw.randint(0, 12)):
            now += 0.01
            scheduler.advance(now)
            shapes.append(shape_of(step_scheduler(scheduler)[0]))
    while scheduler.sequences:
        now += 0.01
        scheduler.advance(now)
        shapes.append(shape_of(step_scheduler(scheduler)[0]))
    return shapes


@pytest.mark.parametrize("with_timeouts", [False, True])
def test_without_targets_plans_are_those_of_chunked_prefill(with_timeouts: bool) -> None:
    shapes = mixed_load("slack", with_timeouts=with_timeouts)
    assert len(shapes) > 300
    assert shapes == mixed_load("decode_first")


def test_a_chunk_is_the_longest_that_fits() -> None:
    lengths = range(16, 513, 16)
    steps = [StepSample(5.0 + 0.5 * n + 5e-4 * n * (n + 1), n, n * (n + 1) // 2) for n in lengths]
    slack: Slack[Sequence] = Slack(steps, None, 16)
    for start in (0, 100, 5000):
        for room_ms in (0.1, 7.0, 300.0):
            most = slack.num_tokens(start, room_ms)
            assert slack.prompt_ms(start, int(most)) <= room_ms < slack.prompt_ms(start, int(most) + 1)
    assert slack.num_tokens(0, 0.0) == slack.num_tokens(0, -5.0) == 0
    assert slack.num_tokens(0, math.inf) == math.inf


def test_answers_are_those_of_every_mode_and_everybody_ends() -> None:
    """With targets that none can meet, some that all can, and blocks for few."""
    draw = random.Random(5)
    outputs: dict[str, list[list[int]]] = {}
    modes: tuple[Scheduling, ...] = ("decode_first", "slack")
    for scheduling in modes:
        core = make_core(24, scheduling=scheduling, token_budget=48, decode_reserve_tokens=2, max_num_seqs=4)
        draw.seed(5)
        now = 0.0
        events: list[Event] = []
        for number in range(30):
            targets = draw.choice(
                [None, PACE, Targets(ttft_s=0.05, tpot_s=0.001), Targets(ttft_s=5.0, tpot_s=1.0, output_tokens=5.0)]
            )
            prompt = make_prompt(draw.randint(1, 90), seed=number)
            core.handle(Add(make_spec(f"r{number}", prompt, max_tokens=draw.randint(1, 20), targets=targets)), now)
            for _ in range(draw.randint(0, 6)):
                now += 0.02
                events += core.step(now)
                core.observe(core.last_plan.measured(20.0))
        while core.has_work:
            now += 0.02
            events += core.step(now)
        assert_idle(core)
        outputs[scheduling] = [token_ids_of(events, f"r{number}") for number in range(30)]
    assert outputs["slack"] == outputs["decode_first"]
    assert all(outputs["slack"])


@pytest.mark.parametrize(
    "targets", [Targets(tpot_s=math.nan), Targets(ttft_s=-1.0), Targets(age_s=math.inf), Targets(output_tokens=1e30)]
)
def test_targets_that_cannot_be_end_the_attempt(targets: Targets) -> None:
    core = make_core(scheduling="slack")
    ended = end_of(core.handle(Add(make_spec("a", make_prompt(10), targets=targets)), 0.0), "a")
    assert (ended.reason, ended.detail) == ("failed", "targets are not finite and at least 0")
    assert_idle(core)


class TestExperts:
    """Beside all of the above, 32 ms to read all experts, of which a row chooses a quarter."""

    SHARE = 0.25

    def slack(self, max_itl_ms: float | None = None) -> Slack[Sequence]:
        steps = [
            structs.replace(each, ms=each.ms + 32.0 * experts_read(self.SHARE, each.prefill_tokens + each.num_decodes))
            for each in samples()
        ]
        return Slack(steps, max_itl_ms, 16, self.SHARE)

    def test_a_step_takes_what_its_rows_read(self) -> None:
        slack = self.slack(max_itl_ms=60.0)
        decodes = [Decode(make_sequence(make_spec("a", make_prompt(16))), 1, 17) for _ in range(2)]
        budget = slack.step_budget(decodes, 0.0)
        assert budget.step_ms == pytest.approx(5.0 + 2 * 1.0 + 32.0 * (1 - 0.75**2), rel=1e-3)
        # A prompt in the same step reads the other experts, too.
        assert budget.most_ms == pytest.approx(60.0 - (5.0 + 2 * 1.0 + 32.0), rel=1e-3)

    def test_a_prompt_alone_reads_all_of_them(self) -> None:
        assert self.slack().step_budget([], 0.0).step_ms == pytest.approx(5.0 + 32.0, rel=1e-3)
