"""Chunks in flight: steps of prompts that are launched before the results of others are known, on a worker of stages in
simulated time. The same tokens, what waits for what, and how much quicker that is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from disagg.engine.commands import (
    Add,
    ChunkPlanned,
    Command,
    End,
    Ended,
    Event,
    Gather,
    Gathered,
    Gathering,
    Pin,
    PrefillComputed,
    Release,
    TokenSampled,
)
from disagg.engine.config import Scheduling
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.serving import SHARE
from disagg.engine.fake_runner import FakeModelRunner, fake_generate
from disagg.engine.plan import StepPlan
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import StepCoefficients, StepSample
from tests.support.engine import (
    BLOCK,
    VOCAB_SIZE,
    assert_idle,
    assert_sound,
    end_of,
    expected_output,
    handle_all,
    key_of,
    kv_of,
    make_core,
    make_prompt,
    make_spec,
    new_buffer,
    run_until_idle,
    token_ids_of,
)
from tests.support.stages import Clock, StagedRunner

CHUNK = 64
"""Tokens of a step."""
PROMPT = make_prompt(5 * CHUNK)
NO_CONTEXT_COST = [StepSample(1.0 + n, n, n * start + n * (n + 1) // 2) for n in (16, 64) for start in (0, 1000)]
"""Steps whose time depends on their tokens alone, so that all chunks of a prompt are as long."""


def staged(num_stages: int = 4, num_blocks: int = 400, **options: Any) -> tuple[EngineCore, StagedRunner]:
    """A worker of stages that take a second for each step, by default a prefill worker, and its runner."""
    names = ("tail_tokens", "scheduling", "roles")
    core_options = {"roles": ("prefill",)} | {name: options.pop(name) for name in names if name in options}
    runner = StagedRunner(num_stages, num_blocks, **options)
    core = make_core(runner=runner, token_budget=CHUNK, calibration=NO_CONTEXT_COST, **core_options)
    return core, runner


def hold(name: str, prompt: tuple[int, ...], **options: Any) -> Add:
    return Add(make_spec(name, prompt, **options), hold_after_prefill=True)


def steps(core: EngineCore, number: int) -> list[Event]:
    return [event for _ in range(number) for event in core.step(0.0)]


def shapes(runner: StagedRunner) -> list[list[tuple[str, int, int]]]:
    """Of each launched step the prompts, with the start and end of their chunks."""
    return [[(e.sequence.key.request_id, e.start, e.end) for e in step.plan.entries] for step in runner.launched]


class TestRate:
    """Prompts of 16 chunks on 4 stages, beside one stage that takes as long as all four."""

    def elapsed(self, core: EngineCore, clock: Clock, num_prompts: int, num_tokens: int = 16 * CHUNK) -> float:
        handle_all(core, *(hold(f"r{n}", make_prompt(num_tokens, seed=n)) for n in range(num_prompts)))
        events: list[Event] = []
        while core.has_work:
            events += core.step(clock.now)
        for number in range(num_prompts):
            expected = expected_output(make_prompt(num_tokens, seed=number), 1)
            assert token_ids_of(events, f"r{number}") == expected
        assert sum(isinstance(event, PrefillComputed) for event in events) == num_prompts
        return clock.now

    def alone(self, num_prompts: int, **options: Any) -> float:
        """With one stage, whose steps are not queued."""
        clock = Clock()

        def wait(seconds: float) -> None:
            clock.now += seconds

        runner = FakeModelRunner(
            1000, 16, 4096, VOCAB_SIZE, step_time_s=lambda plan: 4.0 * options.get("step_s", one)(plan), sleep=wait
        )
        core = make_core(
            runner=runner, roles=("prefill",), token_budget=CHUNK, tail_tokens=options.get("tail_tokens", 0)
        )
        return self.elapsed(core, clock, num_prompts)

    @pytest.mark.parametrize(
        ("num_prompts", "seconds", "ratio"), [(1, 19, 3.368), (2, 35, 3.657), (4, 67, 3.821), (8, 131, 3.908)]
    )
    def test_the_stages_compute_at_the_same_time(self, num_prompts: int, seconds: int, ratio: float) -> None:
        core, runner = staged(num_blocks=1000)
        found = self.elapsed(core, runner.clock, num_prompts)
        assert found == seconds
        assert round(self.alone(num_prompts) / found, 3) == ratio
        assert runner.most_under_way == 4

    def test_a_short_last_step_leaves_no_stage_without_work(self) -> None:
        """Steps take a twentieth of a second and as long as their tokens; each prompt ends in one of 16 tokens."""
        core, runner = staged(num_blocks=1000, tail_tokens=16, step_s=by_tokens)
        found = self.elapsed(core, runner.clock, 8)
        num_tokens = 8 * 16 * CHUNK
        assert sum(step.plan.num_tokens for step in runner.launched) == num_tokens
        least = sum(by_tokens(step.plan) for step in runner.launched) + 3 * by_tokens(runner.launched[-1].plan)
        assert found < 1.02 * least
        assert self.alone(8, step_s=by_tokens, tail_tokens=16) / found > 3.8

    def test_a_prompt_that_comes_while_another_is_under_way_waits_for_one_stage(self) -> None:
        core, runner = staged()
        core.watch_steps(lambda: None)
        handle_all(core, hold("a", PROMPT[:CHUNK]))
        assert [type(event) for event in core.step(0.0)] == [ChunkPlanned]
        core.plan_step(1.0)
        assert core.is_waiting_for_step
        handle_all(core, hold("b", make_prompt(CHUNK, seed=1)))
        run_until_idle(core)
        assert [step.ends for step in runner.launched] == [4.0, 5.0]


def one(plan: StepPlan) -> float:
    return 1.0


def by_tokens(plan: StepPlan) -> float:
    return 0.05 + plan.num_tokens / CHUNK


class TestOrder:
    def test_chunks_follow_each_other_before_the_first_is_computed(self) -> None:
        core, runner = staged()
        handle_all(core, hold("a", PROMPT))
        events = steps(core, 1) + handle_all(core, hold("b", make_prompt(20, seed=1)), now=9.0) + steps(core, 3)
        assert [event for event in events if not isinstance(event, ChunkPlanned)] == []
        a, b = core._scheduler.sequences[key_of("a")], core._scheduler.sequences[key_of("b")]
        assert (a.num_computed_tokens, a.num_launched_tokens, b.num_launched_tokens) == (CHUNK, 3 * CHUNK, 0)
        events += run_until_idle(core)
        assert shapes(runner) == [
            *([("a", n * CHUNK, (n + 1) * CHUNK)] for n in range(5)),
            [("b", 0, 20)],
        ]
        assert token_ids_of(events, "a") == expected_output(PROMPT, 1)
        assert token_ids_of(events, "b") == expected_output(make_prompt(20, seed=1), 1)
        assert runner.runs == []

    def test_a_chunk_is_told_once_it_is_launched_and_results_come_in_order(self) -> None:
        core, _ = staged(num_stages=2)
        handle_all(core, *(hold(name, make_prompt(CHUNK, seed=n)) for n, name in enumerate("abcd")))
        events = run_until_idle(core)
        told = [(type(event).__name__, event.key.request_id) for event in events]
        planned, computed = ("ChunkPlanned", "{}"), [("TokenSampled", "{}"), ("PrefillComputed", "{}")]
        order = [planned, planned, *computed, planned, *computed, planned, *computed, *computed]
        names = iter("abcd"), iter("aabbccdd")
        assert told == [(kind, next(names[kind != "ChunkPlanned"])) for kind, _ in order]

    def test_as_many_are_under_way_as_there_are_stages_and_one_more(self) -> None:
        """Where results are not noticed before they are asked for."""
        core, runner = staged(num_stages=3, notices=False)
        handle_all(core, hold("a", PROMPT))
        run_until_idle(core)
        assert runner.most_under_way == 4

    def test_a_last_token_alone_is_a_decode_in_form_only(self) -> None:
        """Where a chunk leaves one token, which has the form of a decode."""
        core, runner = staged()
        prompt = make_prompt(2 * CHUNK + 1)
        events = handle_all(core, hold("a", prompt)) + run_until_idle(core)
        assert [len(step.plan.decodes) for step in runner.launched] == [0, 0, 1]
        assert token_ids_of(events, "a") == expected_output(prompt, 1)

    def test_a_sequence_that_decodes_has_its_steps_one_by_one(self) -> None:
        """And no prompt is launched ahead beside it."""
        core, runner = staged()
        core = make_core(runner=runner, token_budget=CHUNK)
        events = handle_all(core, Add(make_spec("d", make_prompt(10, seed=3), max_tokens=6)))
        events += steps(core, 2)
        events += handle_all(core, hold("a", PROMPT)) + run_until_idle(core)
        assert token_ids_of(events, "d") == expected_output(make_prompt(10, seed=3), 6)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 1)
        assert [len(plan.decodes) for plan in runner.runs] == [0, 1, 1, 1, 1, 1]
        assert len(runner.launched) == 2

    def test_what_decodes_waits_for_the_prompts_under_way(self) -> None:
        runner = StagedRunner(4, 400)
        core = make_core(runner=runner, token_budget=CHUNK)
        events = handle_all(core, hold("a", PROMPT)) + steps(core, 3)
        events += handle_all(core, Add(make_spec("d", make_prompt(10, seed=3), max_tokens=3)))
        events += run_until_idle(core)
        assert token_ids_of(events, "d") == expected_output(make_prompt(10, seed=3), 3)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 1)
        assert len(runner.launched) == 5, "who waits behind them lets them pass"

    @pytest.mark.parametrize("scheduling", ["decode_first", "slack", "prefill_first", "static"])
    def test_every_mode(self, scheduling: Scheduling) -> None:
        core, runner = staged(scheduling=scheduling)
        prompts = {f"r{n}": make_prompt(30 + 50 * n, seed=n) for n in range(6)}
        events = handle_all(core, *(hold(name, prompt) for name, prompt in prompts.items())) + run_until_idle(core)
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected_output(prompt, 1)
        assert runner.most_under_way == 4
        assert runner.runs == []

    def test_windows_keep_room_for_all_steps_under_way(self) -> None:
        windows = ((20, 4 + 5 * CHUNK // 16),)
        core, runner = staged(windows=windows, notices=False)
        events = handle_all(core, hold("a", PROMPT)) + run_until_idle(core)
        assert token_ids_of(events, "a") == fake_generate(PROMPT, 1, VOCAB_SIZE, windows=(20,))
        assert runner.most_under_way == 5
        handle_all(core, Release(key_of("a")))
        assert_idle(core)
        with pytest.raises(ValueError, match="the pool of the window of 20 tokens has 23 blocks"):
            staged(windows=((20, 3 + 5 * CHUNK // 16),))

    def test_windows_of_a_decode_worker_keep_room_for_one_step(self) -> None:
        pool = 4 + CHUNK // 16
        assert staged(windows=((20, pool),), roles=("decode",))[0].is_idle
        with pytest.raises(ValueError, match=f"the pool of the window of 20 tokens has {pool - 1} blocks"):
            staged(windows=((20, pool - 1),), roles=("decode",))


class TestTimes:
    def test_a_step_is_known_when_it_was_planned_and_when_it_was_computed(self) -> None:
        core, runner = staged()
        handle_all(core, hold("a", PROMPT))
        found = []
        while core.has_work:
            core.step(runner.clock.now)
            found += [(step.plan.prefills[0].start // CHUNK, step.began, step.ended_at) for step in core.finished]
        assert found == [(0, 0.0, 4.0), (1, 1.0, 5.0), (2, 2.0, 6.0), (3, 3.0, 7.0), (4, 4.0, 8.0)]


class TestEnds:
    """While chunks are in flight."""

    def test_a_cancelled_prompt_gives_its_blocks_to_the_next_one(self) -> None:
        """The cache has room for one; the other begins while the stages behind the first still write the old one's."""
        core, runner = staged(num_blocks=1 + 5 * CHUNK // 16)
        handle_all(core, hold("a", PROMPT), hold("b", make_prompt(5 * CHUNK, seed=1)))
        steps(core, 3)
        old = set(core._scheduler.sequences[key_of("a")].block_table)
        assert len(runner.stages[1].todo) == 3
        handle_all(core, End(key_of("a"), "cancelled", ""))
        events = steps(core, 1)
        assert set(core._scheduler.sequences[key_of("b")].block_table) & old
        assert len(runner.stages[1].todo) > 1, "the old steps were not computed there before"
        events += run_until_idle(core)
        assert token_ids_of(events, "b") == expected_output(make_prompt(5 * CHUNK, seed=1), 1)
        handle_all(core, Release(key_of("b")))
        assert_idle(core)

    def test_nothing_of_it_is_found_in_the_cache(self) -> None:
        core, _ = staged()
        handle_all(core, hold("a", PROMPT))
        steps(core, 3)
        handle_all(core, Release(key_of("a")))
        events = run_until_idle(core) + handle_all(core, hold("b", PROMPT)) + run_until_idle(core)
        assert token_ids_of(events, "b") == expected_output(PROMPT, 1)
        assert core.totals().cached_tokens == 0
        handle_all(core, Release(key_of("b")))
        assert_idle(core)

    def test_a_deadline(self) -> None:
        core, runner = staged()
        handle_all(core, hold("a", PROMPT, timeout_s=2.5))
        handle_all(core, hold("b", make_prompt(CHUNK, seed=1)), now=1.5)
        events = [event for _ in range(10) for event in core.step(runner.clock.now)]
        assert end_of(events, "a").reason == "deadline"
        assert token_ids_of(events, "b") == expected_output(make_prompt(CHUNK, seed=1), 1)
        assert shapes(runner) == [*([("a", n * CHUNK, (n + 1) * CHUNK)] for n in range(3)), [("b", 0, CHUNK)]]

    def test_the_same_attempt_again_gets_nothing_of_the_old_chunks(self) -> None:
        core, _ = staged()
        handle_all(core, hold("a", PROMPT))
        steps(core, 3)
        assert end_of(handle_all(core, hold("a", PROMPT)), "a").reason == "failed"
        events = handle_all(core, hold("a", PROMPT)) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 1)

    def test_a_chunk_that_fails_ends_its_prompt_and_no_other(self) -> None:
        core, _ = staged(failing={1: "result"})
        other = make_prompt(CHUNK, seed=1)
        events = handle_all(core, hold("a", PROMPT), hold("b", other)) + run_until_idle(core)
        assert end_of(events, "a").detail == "step: RuntimeError: result is broken"
        assert token_ids_of(events, "b") == expected_output(other, 1)
        handle_all(core, Release(key_of("b")))
        assert_idle(core)

    def test_a_chunk_that_cannot_be_launched(self) -> None:
        core, _ = staged(failing={2: "enqueue"})
        other = make_prompt(CHUNK, seed=1)
        events = handle_all(core, hold("a", PROMPT), hold("b", other)) + run_until_idle(core)
        assert end_of(events, "a").detail == "step: RuntimeError: enqueue is broken"
        assert token_ids_of(events, "b") == expected_output(other, 1)
        handle_all(core, Release(key_of("b")))
        assert_idle(core)

    def test_a_first_token_may_end_the_request(self) -> None:
        core, _ = staged()
        events = handle_all(core, hold("a", PROMPT, max_tokens=1)) + run_until_idle(core)
        assert end_of(events, "a").reason == "length"
        assert_idle(core)


class TestCopies:
    def test_the_copy_of_a_chunk_is_ordered_behind_its_step_and_not_waited_for(self) -> None:
        """It is asked for while the chunk is under way, and no stage computes anything earlier for it."""
        core, _ = staged(copies_later=True)
        handle_all(core, hold("a", PROMPT))
        steps(core, 2)
        out = new_buffer(CHUNK)
        (event,) = handle_all(core, Gather(key_of("a"), 0, CHUNK, 2 * CHUNK, out))
        assert isinstance(event, Gathering)
        assert not event.copying.is_done()
        assert core._scheduler.sequences[key_of("a")].num_computed_tokens == 0
        steps(core, 1)
        event.copying.wait()
        assert out.tolist() == kv_of(PROMPT, CHUNK, 2 * CHUNK).tolist()

    def test_a_copy_of_a_prefix_limits_the_next_one_by_the_step_under_way(self) -> None:
        """All chunks of a prompt are launched. A step of 64 tokens takes 65 ms."""
        core, _ = staged(copies_later=True, notices=False)
        handle_all(core, hold("earlier", PROMPT[:CHUNK]))
        run_until_idle(core)
        handle_all(core, Pin(make_spec("pinned", PROMPT[:CHUNK])), hold("a", PROMPT[::-1][: 2 * CHUNK]))
        steps(core, 2)
        core._exchange._serving._token_ms = SHARE * 65.0 / (3.5 * BLOCK)
        assert handle_all(core, Gather(key_of("pinned"), 0, 0, BLOCK, new_buffer(BLOCK))) == []
        (event,) = core.plan_step(0.0)
        assert not core.planned.entries
        assert isinstance(event, Gathering)
        assert event.most_tokens == 3 * BLOCK

    def test_what_no_step_computes_is_not_copied(self) -> None:
        core, _ = staged()
        handle_all(core, hold("a", PROMPT))
        steps(core, 2)
        gather = Gather(key_of("a"), 0, 0, 2 * CHUNK + 1, new_buffer(2 * CHUNK + 1))
        assert handle_all(core, gather) == [Gathered(key_of("a"), 0, ok=False)]


@dataclass
class Script:
    """A random order of commands, the same for both modes: what is done before each of the steps."""

    seed: int
    num_turns: int = 60
    prompts: dict[AttemptKey, tuple[int, ...]] = field(default_factory=dict)
    turns: list[list[Command]] = field(default_factory=list)
    ended: set[AttemptKey] = field(default_factory=set)
    """Attempts that are ended by a command or a deadline."""

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        for turn in range(self.num_turns):
            commands: list[Command] = []
            if chance.random() < 0.4 and turn < self.num_turns - 10:
                name, family = f"r{turn}", chance.randrange(3)
                prompt = make_prompt(chance.choice([1, 16, 17, 63, 64, 65, 129, 200, 400]), seed=family)
                timeout_s = chance.choice([None, None, None, 6.0])
                max_tokens = chance.choice([1, 4, 4])
                self.prompts[key_of(name)] = prompt
                if timeout_s is not None:
                    self.ended.add(key_of(name))
                cached = chance.random() < 0.7
                commands.append(
                    hold(name, prompt, timeout_s=timeout_s, max_tokens=max_tokens, cached=cached, logprobs=family - 1)
                )
            if self.prompts and chance.random() < 0.25:
                key = chance.choice(sorted(self.prompts))
                self.ended.add(key)
                commands.append(Release(key) if chance.random() < 0.5 else End(key, "cancelled", ""))
            self.turns.append(commands)

    def play(self, runner: FakeModelRunner) -> dict[AttemptKey, list[Event]]:
        """The events of each attempt, but for plans, and for what was in the cache and when."""
        core = make_core(runner=runner, roles=("prefill",), token_budget=CHUNK, max_num_seqs=6)
        events: list[Event] = []
        for turn, commands in enumerate([*self.turns, *([[]] * 1000)]):
            for command in commands:
                events += core.handle(command, float(turn))
            stepped = core.step(float(turn))
            for event in stepped:
                if isinstance(event, PrefillComputed):
                    core.handle(Release(event.key), float(turn))
            events += stepped
            assert_sound(core)
            if turn > self.num_turns and not core.has_work:
                break
        handle_all(core, *map(Release, self.prompts))
        assert_idle(core)
        found: dict[AttemptKey, list[Event]] = {key: [] for key in self.prompts}
        for event in events:
            if not isinstance(event, ChunkPlanned):
                found[event.key].append(_bare(event))
        return found


def _bare(event: Event) -> Event:
    match event:
        case PrefillComputed(key, gateway_id, token_id, _, logprobs):
            return PrefillComputed(key, gateway_id, token_id, 0, logprobs)
        case Ended(key, gateway_id, reason, detail):
            return Ended(key, gateway_id, reason, detail)
    return event


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("windows", [(), (20,)])
def test_random_orders_of_commands_give_the_events_of_synchronous_steps(
    num_stages: int, windows: tuple[int, ...]
) -> None:
    """Of attempts that nothing ends but their tokens, exactly; what others get before their end is what it would be."""
    num_ahead = 0
    for seed in range(8):
        script = Script(seed)
        pools = tuple((window, 60) for window in windows)
        runner = StagedRunner(num_stages, 30, windows=pools, notices=seed % 2 == 0)
        ahead = script.play(runner)
        alone = script.play(FakeModelRunner(30, 16, 4096, VOCAB_SIZE, windows=pools))
        num_ahead += runner.most_under_way >= num_stages
        for key, prompt in script.prompts.items():
            if key not in script.ended:
                assert ahead[key] == alone[key] != []
            tokens = [event.token_id for event in ahead[key] if isinstance(event, TokenSampled)]
            assert tokens == fake_generate(prompt, len(tokens), VOCAB_SIZE, windows=windows)
            assert len(tokens) <= 1
        assert runner.under_way == []
    assert num_ahead > 4


class TestChunks:
    def test_they_shrink_with_the_context_so_that_steps_take_as_long(self) -> None:
        """A step takes 1 s, 1 ms for each token, and a microsecond for each pair: at 7,000 tokens before them a full
        step would take 9.3 times as long as at the beginning."""
        coefficients = StepCoefficients(1000.0, 1.0, 0.001, 0.0, 0.0)

        def step_ms(plan: StepPlan) -> float:
            return coefficients.step_ms(plan.measured(0.0))

        shapes = [StepSample(0.0, n, n * start + n * (n + 1) // 2) for n, start in ((64, 0), (512, 0), (512, 7000))]
        calibration = [msgspec.structs.replace(shape, ms=coefficients.step_ms(shape)) for shape in shapes]
        runner = StagedRunner(4, 600, max_model_len=9000, step_s=step_ms)
        core = make_core(
            runner=runner, roles=("prefill",), token_budget=512, max_model_len=9000, calibration=calibration
        )
        handle_all(core, hold("a", make_prompt(8000)))
        run_until_idle(core)
        chunks = [step.plan.num_tokens for step in runner.launched]
        assert chunks[:4] == [512, 384, 320, 288]
        assert chunks == sorted(chunks, reverse=True)
        fit = core._model.coefficients
        full_ms = fit.prompt_ms(0, 512)
        for step in runner.launched[:-1]:
            (entry,) = step.plan.prefills
            most_ms = fit.prompt_ms(entry.start, entry.num_tokens + 9)
            assert fit.prompt_ms(entry.start, entry.num_tokens - 8) <= full_ms <= most_ms, "to the closest block"
