"""Decode steps that are launched before the last one's tokens are known: the same answers, and what waits for what."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.engine.commands import Add, Ended, Event, Join, Joined, Release, Reserve, Scatter, Scattered, TokenSampled
from disagg.engine.config import Scheduling
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.steps import plan_decodes_ahead
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.engine.plan import StepPlan, StepResult
from tests.support.engine import (
    GATEWAY,
    add_to,
    assert_idle,
    end_of,
    expected_output,
    handle_all,
    key_of,
    kv_of,
    make_core,
    make_prompt,
    make_scheduler,
    make_spec,
    run_until_idle,
    shape_of,
    token_ids_of,
)
from tests.support.queueing import QueueingRunner

PROMPT = make_prompt(40)


def indices(events: list[Event], request_id: str = "a") -> list[int]:
    return [e.index for e in events if isinstance(e, TokenSampled) and e.key == key_of(request_id)]


def decoding(runner: QueueingRunner, num_steps: int, **options: Any) -> EngineCore:
    """A core whose one sequence `a` is in its answer, `num_steps` after the prompt's."""
    core = make_core(runner=runner)
    handle_all(core, Add(make_spec("a", PROMPT, **options)))
    for _ in range(1 + num_steps):
        core.step(0.0)
    return core


def join(core: EngineCore, request_id: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[Event], list[int]]:
    """Hand a prompt over; the events, and what the answer must be."""
    output, key = expected_output(prompt, max_tokens), key_of(request_id)
    events = handle_all(
        core,
        Reserve(make_spec(request_id, prompt, max_tokens=max_tokens)),
        Scatter(key, 0, 0, len(prompt), kv_of(prompt, 0, len(prompt))),
        Join(key, output[0]),
    )
    return events, output


class TestAnswers:
    def test_every_step_but_the_first_is_launched_behind_another(self) -> None:
        runner = QueueingRunner()
        core = make_core(runner=runner)
        events = handle_all(core, Add(make_spec("a", PROMPT, max_tokens=10))) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 10)
        assert (runner.num_queued, runner.num_behind) == (9, 8)
        assert [len(plan.prefills) for plan in runner.runs] == [1]
        assert core.totals().output_tokens == 10
        assert core.load().steps == 10
        assert_idle(core)

    def test_tokens_come_a_call_later(self) -> None:
        core = make_core(runner=QueueingRunner())
        handle_all(core, Add(make_spec("a", PROMPT, max_tokens=4)))
        assert [indices(core.step(0.0)) for _ in range(5)] == [[0], [], [1], [2], [3]]
        assert not core.has_work

    def test_what_was_finished_and_when_it_was_planned(self) -> None:
        core = make_core(runner=QueueingRunner())
        handle_all(core, Add(make_spec("a", PROMPT, max_tokens=4)))
        found = []
        for now in range(5):
            core.step(float(now))
            found.append((core.last_plan.num_tokens, core.last_began if core.last_plan.entries else None))
        assert found == [(40, 0.0), (0, None), (1, 1.0), (1, 2.0), (1, 3.0)]

    def test_a_batch_whose_answers_end_one_by_one(self) -> None:
        """Each end is known ahead, so that no row is computed in vain and none waits."""
        runner = QueueingRunner(40)
        core = make_core(runner=runner, token_budget=400)
        prompts = {f"r{n}": make_prompt(20 + n, seed=n) for n in range(5)}
        specs = [make_spec(name, prompt, max_tokens=3 + 4 * n) for n, (name, prompt) in enumerate(prompts.items())]
        events = handle_all(core, *map(Add, specs)) + run_until_idle(core)
        for n, (name, prompt) in enumerate(prompts.items()):
            assert token_ids_of(events, name) == expected_output(prompt, 3 + 4 * n)
        assert (runner.num_queued, runner.num_behind, len(runner.runs)) == (18, 17, 1)
        assert_idle(core)

    def test_a_stop_id_costs_one_row_of_one_step(self) -> None:
        output = expected_output(PROMPT, 8)
        runner = QueueingRunner(20)
        core = make_core(runner=runner)
        other = make_prompt(20, seed=1)
        events = handle_all(
            core,
            Add(make_spec("a", PROMPT, max_tokens=50, stop=[output[5]])),
            Add(make_spec("b", other, max_tokens=12)),
        )
        events += run_until_idle(core)
        assert token_ids_of(events, "a") == output[:6]
        assert end_of(events, "a").reason == "stop"
        assert token_ids_of(events, "b") == expected_output(other, 12)
        assert (runner.num_queued, runner.num_behind) == (11, 10), "b never waited for a"
        assert core.totals().output_tokens == 6 + 12
        assert_idle(core)

    def test_a_stop_of_the_only_answer_is_computed_once_in_vain(self) -> None:
        output = expected_output(PROMPT, 8)
        runner = QueueingRunner()
        core = make_core(runner=runner)
        events = handle_all(core, Add(make_spec("a", PROMPT, max_tokens=50, stop=[output[5]]))) + run_until_idle(core)
        assert token_ids_of(events, "a") == output[:6]
        assert runner.num_queued == 6
        assert core.totals().output_tokens == 6
        assert_idle(core)

    def test_the_longest_sequence_is_known_ahead(self) -> None:
        runner = QueueingRunner(max_model_len=45)
        core = make_core(runner=runner, max_model_len=45)
        events = handle_all(core, Add(make_spec("a", PROMPT, max_tokens=100))) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 5)
        assert runner.num_queued == 4

    @pytest.mark.parametrize("swap_bytes", [0, 8192])
    def test_preemptions_wait_for_what_is_known(self, swap_bytes: int) -> None:
        runner = QueueingRunner(8)
        core = make_core(runner=runner, decode_reserve_tokens=0, swap_bytes=swap_bytes)
        prompts = {f"r{n}": make_prompt(20 + n, seed=n) for n in range(4)}
        events = handle_all(core, *(Add(make_spec(name, p, max_tokens=70)) for name, p in prompts.items()))
        events += run_until_idle(core)
        assert core.totals().preemptions >= 2
        assert runner.num_behind > 20
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected_output(prompt, 70)
        assert_idle(core)

    @pytest.mark.parametrize("scheduling", ["decode_first", "slack", "prefill_first", "static"])
    def test_every_mode(self, scheduling: Scheduling) -> None:
        runner = QueueingRunner(40)
        core = make_core(runner=runner, max_num_seqs=3, token_budget=32, scheduling=scheduling)
        prompts = {f"r{n}": make_prompt(5 + 13 * n, seed=n) for n in range(6)}
        events = handle_all(core, *(Add(make_spec(name, p, max_tokens=9)) for name, p in prompts.items()))
        events += run_until_idle(core)
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected_output(prompt, 9)
        assert runner.num_behind > 0
        assert_idle(core)

    def test_a_static_batch_goes_on_while_others_wait(self) -> None:
        runner = QueueingRunner(20)
        core = make_core(runner=runner, scheduling="static")
        handle_all(core, Add(make_spec("a", PROMPT, max_tokens=9)))
        core.step(0.0)
        events = handle_all(core, Add(make_spec("b", PROMPT[:30], max_tokens=9))) + run_until_idle(core)
        assert token_ids_of(events, "b") == expected_output(PROMPT[:30], 9)
        assert (runner.num_queued, runner.num_behind) == (16, 14)


class TestWhatWaits:
    @pytest.mark.parametrize(
        ("changes", "num_queued"),
        [
            ({}, 9),
            ({"temperature": 0.8, "seed": 3}, 9),
            ({"logprobs": 0}, 0),
            ({"logit_bias": ((3, 1.0),)}, 0),
            ({"repetition_penalty": 1.1}, 0),
            ({"presence_penalty": 0.5}, 0),
            ({"frequency_penalty": 0.5}, 0),
            ({"min_tokens": 5}, 9),
            ({"min_tokens": 5, "stop_token_ids": (1000,)}, 5),
        ],
    )
    def test_what_depends_on_ids_that_are_not_known(self, changes: dict[str, Any], num_queued: int) -> None:
        """Nine of the ten tokens are decoded; stop ids are masked for those before `min_tokens`."""
        runner = QueueingRunner()
        core = make_core(runner=runner)
        spec = make_spec("a", PROMPT, max_tokens=10)
        spec = msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, **changes))
        events = handle_all(core, Add(spec)) + run_until_idle(core)
        assert len(token_ids_of(events, "a")) == 10
        assert runner.num_queued == num_queued
        assert_idle(core)

    def test_one_that_waits_holds_up_its_batch(self) -> None:
        runner = QueueingRunner(20)
        core = make_core(runner=runner, token_budget=100)
        specs = [make_spec("a", PROMPT, max_tokens=10), make_spec("b", PROMPT[:30], max_tokens=4, logprobs=1)]
        events = handle_all(core, *map(Add, specs)) + run_until_idle(core)
        assert (runner.num_queued, runner.num_behind) == (6, 5)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 10)

    def test_more_sequences_than_can_be_launched(self) -> None:
        runner = QueueingRunner(20, max_decodes=1)
        core = make_core(runner=runner, token_budget=100)
        specs = [make_spec("a", PROMPT, max_tokens=10), make_spec("b", PROMPT[:30], max_tokens=4)]
        events = handle_all(core, *map(Add, specs)) + run_until_idle(core)
        assert (runner.num_queued, runner.num_behind) == (6, 5)
        assert token_ids_of(events, "b") == expected_output(PROMPT[:30], 4)

    def test_a_prompt_that_comes_is_computed_when_the_step_under_way_is_known(self) -> None:
        runner = QueueingRunner(20)
        core = decoding(runner, 3, max_tokens=20)
        assert core.has_work
        events = handle_all(core, Add(make_spec("b", make_prompt(20, seed=1), max_tokens=2)))
        assert indices(core.step(0.0)) == [3], "the step under way, and nothing else"
        events = core.step(0.0)
        assert (indices(events), indices(events, "b")) == ([4], [0])
        assert [len(plan.entries) for plan in runner.runs] == [1, 2]

    def test_a_batch_that_grows_over_what_can_be_launched(self) -> None:
        runner = QueueingRunner(20, max_decodes=1)
        core = decoding(runner, 2, max_tokens=20)
        events, output = join(core, "b", make_prompt(20, seed=1), max_tokens=3)
        assert indices(core.step(0.0)) == [2], "the step under way, and nothing else"
        events += run_until_idle(core)
        assert token_ids_of(events, "b") == output
        assert [len(plan.decodes) for plan in runner.runs] == [0, 2, 2]

    def test_an_unfinished_prompt(self) -> None:
        """As one that comes back from host memory without its last tokens."""
        scheduler = make_scheduler()
        add_to(scheduler, "a", 40)
        (entry,) = scheduler.schedule().entries
        assert plan_decodes_ahead(scheduler, 8) == StepPlan()
        scheduler.apply(StepPlan(prefills=(entry,)), StepResult([7]))
        assert shape_of(plan_decodes_ahead(scheduler, 8)) == ([("a", 40, 1)], [])

    def test_a_prompt_without_a_place_holds_up_nobody(self) -> None:
        runner = QueueingRunner(20)
        core = make_core(runner=runner, max_num_seqs=1)
        first, second = make_spec("a", PROMPT, max_tokens=9), make_spec("b", PROMPT[:30], max_tokens=9)
        events = handle_all(core, Add(first), Add(second)) + run_until_idle(core)
        assert token_ids_of(events, "b") == expected_output(PROMPT[:30], 9)
        assert (runner.num_queued, runner.num_behind) == (16, 14)

    def test_a_prompt_without_room_holds_up_nobody(self) -> None:
        """It is looked at again when blocks came back."""
        runner = QueueingRunner(10)
        core = make_core(runner=runner)
        first, second = make_spec("a", PROMPT, max_tokens=60), make_spec("b", make_prompt(100, seed=1), max_tokens=9)
        events = handle_all(core, Add(first), Add(second)) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 60)
        assert token_ids_of(events, "b") == expected_output(make_prompt(100, seed=1), 9)
        assert (runner.num_queued, runner.num_behind) == (59 + 8, 58 + 7)

    def test_a_suspended_sequence_without_room_holds_up_nobody(self) -> None:
        runner = QueueingRunner(8)
        core = make_core(runner=runner, decode_reserve_tokens=0, swap_bytes=8192, roles=("decode",))
        prompts = {"a": make_prompt(40), "b": make_prompt(50, seed=1)}
        events: list[Event] = []
        for name, prompt in prompts.items():
            events += join(core, name, prompt, max_tokens=60)[0]
        events += run_until_idle(core)
        assert core.totals().preemptions == 1
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected_output(prompt, 60)
        assert runner.num_queued - runner.num_behind == 3, "at the start, behind the preemption, and behind the return"
        assert_idle(core)

    def test_the_last_token_of_a_prompt_to_hand_over_is_run(self) -> None:
        """Whether it is planned as a prompt or as a decode: its sequence stays."""
        runner = QueueingRunner()
        core = make_core(runner=runner, token_budget=32)
        handle_all(core, Add(make_spec("a", PROMPT[:33], max_tokens=10), hold_after_prefill=True))
        run_until_idle(core)
        assert runner.num_queued == 0
        assert [(len(plan.prefills), len(plan.decodes)) for plan in runner.runs] == [(1, 0), (0, 1)]
        handle_all(core, Release(key_of("a")))
        assert_idle(core)


class TestWhileAStepIsUnderWay:
    def test_a_sequence_that_goes_leaves_its_blocks_to_others(self) -> None:
        """They are written to behind the step that still reads them."""
        runner = QueueingRunner(4)
        core = decoding(runner, 2, max_tokens=20)
        handle_all(core, Release(key_of("a")))
        assert core.is_idle
        assert core.has_work, "the step is still under way"
        events, output = join(core, "b", make_prompt(60, seed=1), max_tokens=3)
        events += run_until_idle(core)
        assert token_ids_of(events, "b") == output
        assert [event for event in events if getattr(event, "key", None) == key_of("a")] == []
        assert_idle(core)

    def test_one_that_joins_is_in_the_next_step(self) -> None:
        runner = QueueingRunner(20)
        core = decoding(runner, 2, max_tokens=20)
        events, output = join(core, "b", make_prompt(20, seed=1), max_tokens=3)
        events += core.step(0.0)
        assert indices(events) == [2]
        events += core.step(0.0)
        assert (indices(events), indices(events, "b")) == ([2, 3], [0, 1])
        events += run_until_idle(core)
        assert token_ids_of(events, "b") == output
        assert runner.num_behind == runner.num_queued - 1

    def test_a_deadline(self) -> None:
        runner = QueueingRunner(20)
        core = make_core(runner=runner, token_budget=100)
        specs = [make_spec("a", PROMPT, max_tokens=20, timeout_s=5.0), make_spec("b", PROMPT[:30], max_tokens=20)]
        handle_all(core, *map(Add, specs))
        events = [event for _ in range(4) for event in core.step(0.0)]
        late = core.step(6.0)
        assert end_of(late, "a").reason == "deadline"
        assert indices(late) == []
        events += late + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 3)
        assert token_ids_of(events, "b") == expected_output(PROMPT[:30], 20)
        assert runner.num_behind == runner.num_queued - 1
        assert_idle(core)

    def test_an_attempt_that_is_started_again(self) -> None:
        """The new sequence is another one: it gets nothing of the old one's step."""
        core = decoding(QueueingRunner(20), 2, max_tokens=20)
        spec = make_spec("a", PROMPT, max_tokens=3)
        assert [event.reason for event in handle_all(core, Add(spec)) if isinstance(event, Ended)] == ["failed"]
        events = handle_all(core, Add(spec)) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 3)
        assert_idle(core)


class TestCopies:
    """Into the cache, queued behind a step that is under way."""

    PROMPT = make_prompt(20, seed=3)
    RANGES = ((0, 8), (8, 20))

    def scatter(self, core: EngineCore, seq: int, buffers: list[Any]) -> list[Event]:
        start, end = self.RANGES[seq]
        buffers.append(kv_of(self.PROMPT, start, end))
        return handle_all(core, Scatter(key_of("b"), seq, start, end, buffers[-1]))

    def test_a_buffer_is_given_back_when_it_was_read(self) -> None:
        """What fills it from then on changes nothing; who joins meanwhile computes behind the copies."""
        core = decoding(QueueingRunner(), 2, max_tokens=12)
        output = expected_output(self.PROMPT, 5)
        buffers: list[Any] = []
        events = handle_all(core, Reserve(make_spec("b", self.PROMPT, max_tokens=5)))
        events += self.scatter(core, 0, buffers) + self.scatter(core, 1, buffers)
        events += handle_all(core, Join(key_of("b"), output[0]))
        assert [event for event in events if isinstance(event, Scattered)] == []
        assert core.audit()[0]["copies"] == 2
        while core.has_work:
            found = core.step(0.0)
            for scattered in (event for event in found if isinstance(event, Scattered)):
                assert scattered.ok
                buffers[scattered.seq][:] = 255
            events += found
        assert [event.seq for event in events if isinstance(event, Scattered)] == [0, 1]
        assert token_ids_of(events, "b") == output
        assert token_ids_of(events, "a")[-9:] == expected_output(PROMPT, 12)[-9:]
        assert_idle(core)

    def test_without_a_step_under_way_the_answer_comes_at_once(self) -> None:
        core = make_core(runner=QueueingRunner())
        handle_all(core, Reserve(make_spec("b", self.PROMPT, max_tokens=5)))
        assert self.scatter(core, 0, []) == [Scattered(key_of("b"), 0, ok=True)]
        assert core.audit()[0]["copies"] == 0

    def test_an_engine_without_work_waits_for_its_copies(self) -> None:
        """The sequence that decoded and the one that was reserved are gone before the copy is made."""
        core = decoding(QueueingRunner(), 2, max_tokens=12)
        handle_all(core, Reserve(make_spec("b", self.PROMPT, max_tokens=5)))
        assert self.scatter(core, 0, []) == []
        handle_all(core, Release(key_of("b")), Release(key_of("a")))
        assert core.is_idle
        events: list[Event] = []
        while core.has_work:
            events += core.step(0.0)
        assert events == [Scattered(key_of("b"), 0, ok=True)]
        assert_idle(core)

    def scatter_with_digest(self, core: EngineCore, seq: int, *, is_corrupt: bool = False) -> list[Event]:
        start, end = self.RANGES[seq]
        data = kv_of(self.PROMPT, start, end)
        return handle_all(core, Scatter(key_of("b"), seq, start, end, data, digest=UNKEYED(data) ^ int(is_corrupt)))

    def test_a_join_waits_for_the_digests_of_the_copies_before_it_and_for_nothing_else(self) -> None:
        """In the call that finishes the step under way; the next step has it."""
        runner = QueueingRunner()
        core = decoding(runner, 2, max_tokens=12)
        output = expected_output(self.PROMPT, 5)
        handle_all(core, Reserve(make_spec("b", self.PROMPT, max_tokens=5)))
        events = self.scatter_with_digest(core, 0) + self.scatter_with_digest(core, 1)
        assert events + handle_all(core, Join(key_of("b"), output[0])) == []
        assert (core.audit()[0]["copies"], core.audit()[1]) == (2, [])
        found = [event for event in core.step(0.0) if event.key == key_of("b")]
        scattered = [Scattered(key_of("b"), 0, ok=True), Scattered(key_of("b"), 1, ok=True)]
        assert found[:3] == [*scattered, Joined(key_of("b"))]
        assert token_ids_of(found + run_until_idle(core), "b") == output
        assert_idle(core)

    @pytest.mark.parametrize("is_queued", [True, False])
    def test_what_does_not_have_its_digest_is_not_joined(self, is_queued: bool) -> None:
        core = decoding(QueueingRunner(), 2, max_tokens=12) if is_queued else make_core(runner=QueueingRunner())
        handle_all(core, Reserve(make_spec("b", self.PROMPT, max_tokens=5)))
        events = self.scatter_with_digest(core, 0) + self.scatter_with_digest(core, 1, is_corrupt=True)
        events += handle_all(core, Join(key_of("b"), 7)) + run_until_idle(core)
        assert [event for event in events if event.key == key_of("b")] == [
            Scattered(key_of("b"), 0, ok=True),
            Scattered(key_of("b"), 1, ok=False, intact=False),
            Ended(key_of("b"), GATEWAY, "failed", "joined with the KV of 8 of 20 tokens"),
        ]
        assert_idle(core)

    @pytest.mark.parametrize(("is_corrupt", "reason"), [(False, "length"), (True, "failed")])
    def test_a_join_that_waited_may_end_its_sequence_when_its_deadline_has_passed(
        self, is_corrupt: bool, reason: str
    ) -> None:
        """The token is the last one, or the KV is not that of its digest; nothing looks at the deadline then."""
        runner = QueueingRunner()
        core = decoding(runner, num_steps=2, max_tokens=12)
        prompt, key = make_prompt(20, seed=3), key_of("b")
        data = kv_of(prompt, 0, len(prompt))
        handle_all(core, Reserve(make_spec("b", prompt, max_tokens=1, timeout_s=1.0)))
        handle_all(
            core,
            Scatter(key, 0, 0, len(prompt), data, digest=UNKEYED(data) ^ is_corrupt),
            Join(key, expected_output(prompt, 1)[0]),
        )
        runner.wait_for_device()
        assert [event.reason for event in core.step(2.0) if isinstance(event, Ended)] == [reason]
        assert core.audit()[1] == []

    def test_a_join_that_waits_goes_with_its_sequence(self) -> None:
        """And another reservation of the same attempt gets nothing of the old one's copies."""
        core = decoding(QueueingRunner(), 2, max_tokens=12)
        handle_all(core, Reserve(make_spec("b", self.PROMPT, max_tokens=5)))
        self.scatter_with_digest(core, 0)
        self.scatter_with_digest(core, 1)
        handle_all(core, Join(key_of("b"), 7), Release(key_of("b")), Reserve(make_spec("b", self.PROMPT, max_tokens=5)))
        assert core.audit()[1] == []
        found = [event for event in run_until_idle(core) if event.key == key_of("b")]
        assert found == [Scattered(key_of("b"), 0, ok=True), Scattered(key_of("b"), 1, ok=True)]
        assert handle_all(core, Join(key_of("b"), 7)) == [
            Ended(key_of("b"), GATEWAY, "failed", "joined with the KV of 0 of 20 tokens")
        ]
        assert_idle(core)

    def test_an_error_of_the_device_ends_the_worker(self) -> None:
        core = decoding(QueueingRunner(), 2, max_tokens=12)
        handle_all(core, Reserve(make_spec("b", self.PROMPT, max_tokens=5)))
        self.scatter(core, 0, [])
        copying = core._exchange._landing._under_way[0].copying

        def lost() -> bool:
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

        copying.is_done = lost  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="illegal memory access"):
            core.step(0.0)


class TestFailures:
    def test_a_launcher_that_goes_away(self) -> None:
        """What is under way is finished, and the rest is run."""
        runner = QueueingRunner()
        core = decoding(runner, 3, max_tokens=9)
        runner.is_launching = False
        events = run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 9)[3:]
        assert (runner.num_queued, len(runner.runs)) == (3, 1 + 5)

    def test_a_step_that_cannot_be_launched_ends_its_sequences_behind_the_tokens_of_the_last_one(self) -> None:
        core = make_core(runner=QueueingRunner(failing={3: "enqueue"}))
        events = handle_all(core, Add(make_spec("a", PROMPT, max_tokens=20))) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 4)
        assert end_of(events, "a").detail == "step: RuntimeError: enqueue is broken"
        assert_idle(core)

    def test_a_step_that_fails_ends_its_sequences_and_what_is_behind_it_is_dropped(self) -> None:
        runner = QueueingRunner(failing={3: "result"})
        core = make_core(runner=runner)
        events = handle_all(core, Add(make_spec("a", PROMPT, max_tokens=20))) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 4)
        assert end_of(events, "a").detail == "step: RuntimeError: result is broken"
        assert runner.num_queued == 5
        assert core.last_plan == StepPlan((core.last_plan.decodes[0],)), "the one behind it was finished"
        assert_idle(core)

    def test_who_joined_behind_a_step_that_fails_goes_on(self) -> None:
        runner = QueueingRunner(20, failing={2: "result"})
        core = decoding(runner, 3, max_tokens=20)
        events, output = join(core, "b", make_prompt(20, seed=1), max_tokens=5)
        events += run_until_idle(core)
        assert end_of(events, "a").reason == "failed"
        assert token_ids_of(events, "b") == output
        assert_idle(core)

    def test_who_left_a_step_that_fails_hears_nothing_of_it(self) -> None:
        core = make_core(runner=QueueingRunner(20, failing={1: "result"}), token_budget=100)
        specs = [make_spec("a", PROMPT, max_tokens=20), make_spec("b", PROMPT[:30], max_tokens=20)]
        handle_all(core, *map(Add, specs))
        for _ in range(3):
            core.step(0.0)
        handle_all(core, Release(key_of("a")))
        assert [event.key for event in run_until_idle(core) if isinstance(event, Ended)] == [key_of("b")]
        assert_idle(core)
