from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from disagg.engine.commands import (
    Add,
    Command,
    Ended,
    Gather,
    Gathered,
    Join,
    Release,
    Reserve,
    ReserveRefused,
    Scatter,
    Scattered,
    TokenSampled,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner, fake_logprobs
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.engine.plan import StepPlan, StepResult
from disagg.proto.ids import GatewayId
from disagg.proto.messages import Load, Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.support.engine import (
    GATEWAY,
    IDLE,
    VOCAB_SIZE,
    FailingRunner,
    assert_idle,
    core_in_state,
    end_of,
    expected_output,
    handle_all,
    key_of,
    kv_of,
    logprobs_of,
    make_core,
    make_prompt,
    make_spec,
    new_buffer,
    run_until_idle,
    token_ids_of,
)

KEY = key_of("a")
PROMPT = make_prompt(40)


class TestColocated:
    @pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 103])
    @pytest.mark.parametrize("token_budget", [5, 32, 200])
    def test_output(self, num_tokens: int, token_budget: int) -> None:
        core = make_core(token_budget=token_budget)
        prompt = make_prompt(num_tokens)
        events = handle_all(core, Add(make_spec("a", prompt, max_tokens=20))) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(prompt, 20)
        assert end_of(events, "a") == Ended(KEY, GATEWAY, "length")
        assert_idle(core)

    def test_a_batch(self) -> None:
        core = make_core(40, token_budget=32)
        prompts = {f"r{n}": make_prompt(5 + 13 * n, seed=n) for n in range(6)}
        events = handle_all(core, *(Add(make_spec(name, p, max_tokens=9)) for name, p in prompts.items()))
        events += run_until_idle(core)
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected_output(prompt, 9)
        assert_idle(core)

    def test_logprobs_come_with_the_tokens_of_those_that_ask(self) -> None:
        core = make_core(40, token_budget=32)
        prompts = {name: make_prompt(30, seed=seed) for seed, name in enumerate("abc")}
        asked = {"a": 3, "b": -1, "c": 0}
        events = handle_all(core, *(Add(make_spec(name, p, logprobs=asked[name])) for name, p in prompts.items()))
        events += run_until_idle(core)
        for name, prompt in prompts.items():
            output = expected_output(prompt, 4)
            expected = [fake_logprobs(each, asked[name], VOCAB_SIZE) if asked[name] >= 0 else None for each in output]
            assert logprobs_of(events, name) == expected
            assert token_ids_of(events, name) == output

    def test_a_prefix_hit_changes_nothing_but_the_count(self) -> None:
        core = make_core(20)
        for name, cached in [("a", 0), ("b", 32), ("c", 32)]:
            events = handle_all(core, Add(make_spec(name, PROMPT))) + run_until_idle(core)
            assert token_ids_of(events, name) == expected_output(PROMPT, 4)
            assert end_of(events, name).cached_tokens == cached
        longer = (*PROMPT, *make_prompt(60, seed=3))
        events = handle_all(core, Add(make_spec("d", longer))) + run_until_idle(core)
        assert token_ids_of(events, "d") == expected_output(longer, 4)
        assert end_of(events, "d").cached_tokens == 32

    def test_a_later_attempt_goes_on_where_the_first_stopped(self) -> None:
        core = make_core()
        output = expected_output(PROMPT, 10)
        spec = make_spec("a", PROMPT, emitted=output[:6], max_tokens=10, attempt=2)
        events = handle_all(core, Add(spec)) + run_until_idle(core)
        assert [(e.index, e.token_id) for e in events if isinstance(e, TokenSampled)] == list(enumerate(output))[6:]

    def test_preemption_does_not_change_the_output(self) -> None:
        core = make_core(8, decode_reserve_tokens=0)
        prompts = {f"r{n}": make_prompt(20 + n, seed=n) for n in range(4)}
        events = handle_all(core, *(Add(make_spec(name, p, max_tokens=70)) for name, p in prompts.items()))
        preempted = 0
        while core.has_work:
            events += core.step(0.0)
            preempted = max(preempted, core._scheduler.num_preempted)
        assert preempted >= 2
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected_output(prompt, 70)
            assert end_of(events, name).cached_tokens == 0
        assert_idle(core)

    def test_stop_ids_end_it_from_min_tokens_on_and_are_emitted(self) -> None:
        output = expected_output(PROMPT, 8)
        assert len(set(output)) == 8
        core = make_core()
        spec = make_spec("a", PROMPT, max_tokens=8, min_tokens=4, stop=[output[2], output[5]])
        events = handle_all(core, Add(spec)) + run_until_idle(core)
        assert token_ids_of(events, "a") == output[:6]
        assert end_of(events, "a").reason == "stop"
        assert_idle(core)

    def test_max_model_len_ends_it(self) -> None:
        core = make_core(max_model_len=45)
        assert core.max_model_len == 45
        events = handle_all(core, Add(make_spec("a", PROMPT, max_tokens=100))) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(PROMPT, 5)
        assert end_of(events, "a").reason == "length"


class TestRefusals:
    @pytest.mark.parametrize(
        ("spec", "reason", "detail"),
        [
            (make_spec("a", make_prompt(160)), "refused", "160 tokens and an answer do not fit into 160"),
            (make_spec("a", ()), "failed", "the prompt is empty"),
            (make_spec("a", (1, VOCAB_SIZE)), "failed", "a token id is not in the vocabulary"),
            (make_spec("a", (1,), emitted=(VOCAB_SIZE,)), "failed", "a token id is not in the vocabulary"),
            (make_spec("a", (1,), emitted=(-1, 2), cached=False), "failed", "a token id is not in the vocabulary"),
            *(
                (
                    make_spec("a", PROMPT, logit_bias=[(5, 1.0), bias]),
                    "failed",
                    "a logit bias is not a finite number for a token of the vocabulary",
                )
                for bias in ((VOCAB_SIZE, 1.0), (-1, 1.0), (6, math.nan), (6, -math.inf))
            ),
            *(
                (
                    msgspec.structs.replace(make_spec("a", PROMPT), sampling=sampling),
                    "failed",
                    "a sampling parameter is not finite, or does not fit 32 bits",
                )
                for sampling in (
                    Sampling(temperature=math.inf),
                    Sampling(frequency_penalty=math.nan),
                    Sampling(top_k=1 << 31),
                )
            ),
            (make_spec("a", PROMPT, max_tokens=0), "length", "the output is complete already"),
            (make_spec("a", PROMPT, emitted=[1, 2], max_tokens=2), "length", "the output is complete already"),
            (make_spec("a", PROMPT, emitted=[1, 2], stop=[2]), "stop", "the output is complete already"),
            (
                make_spec("a", make_prompt(155), emitted=range(5), max_tokens=9),
                "length",
                "the output is complete already",
            ),
            (
                make_spec("a", make_prompt(155), emitted=range(6), max_tokens=9),
                "refused",
                "161 tokens and an answer do not fit into 160",
            ),
        ],
    )
    def test_specs_that_are_not_run(self, spec: SequenceSpec, reason: str, detail: str) -> None:
        core = make_core()
        assert handle_all(core, Add(spec)) == [Ended(spec.key, GATEWAY, reason, detail)]  # type: ignore[arg-type]
        assert handle_all(core, Reserve(spec)) == [ReserveRefused(spec.key, detail)]
        assert not core.has_work
        assert_idle(core)

    def test_more_hashes_than_blocks(self) -> None:
        spec = make_spec("a", make_prompt(48))
        short = SequenceSpec(
            request_id=spec.request_id,
            attempt=1,
            gateway_id=GATEWAY,
            prompt_token_ids=pack_token_ids(make_prompt(47)),
            block_hashes=spec.block_hashes,
            root_hash=spec.root_hash,
            sampling=spec.sampling,
        )
        detail = "there are more block hashes than full blocks"
        assert handle_all(make_core(), Add(short)) == [Ended(KEY, GATEWAY, "failed", detail)]

    def test_the_longest_that_fits_is_run(self) -> None:
        core = make_core()
        events = handle_all(core, Add(make_spec("a", make_prompt(159)))) + run_until_idle(core)
        assert token_ids_of(events, "a") == expected_output(make_prompt(159), 1)
        assert end_of(events, "a").reason == "length"

    @pytest.mark.parametrize("again", [Add(make_spec("a", PROMPT)), Reserve(make_spec("a", PROMPT))])
    @pytest.mark.parametrize("state", ["waiting", "running", "held", "reserved", "suspended"])
    def test_a_key_that_is_alive_is_ended(self, again: Add | Reserve, state: str) -> None:
        core = core_in_state(state)
        events = handle_all(core, again)
        detail = f"started again while {state}"
        assert events[0] == Ended(KEY, GATEWAY, "failed", detail)
        assert events[1:] == ([ReserveRefused(KEY, detail)] if isinstance(again, Reserve) else [])
        assert_idle(core)

    def test_impossible_configurations(self) -> None:
        with pytest.raises(ValueError, match=r"^worker\.max_num_seqs: must be at least 1, not 0$"):
            make_core(max_num_seqs=0)
        with pytest.raises(ValueError, match=r"^worker\.token_budget: must be at least 1, not 0$"):
            make_core(token_budget=0)
        with pytest.raises(ValueError, match="watermark"):
            make_core(watermark=1.0)
        with pytest.raises(ValueError, match="multiple of 16"):
            make_core(block_size=8)


STATES = ["waiting", "running", "held", "reserved", "suspended"]


class TestEveryCommandInEveryState:
    @pytest.mark.parametrize("state", STATES)
    def test_release_is_silent_idempotent_and_complete(self, state: str) -> None:
        core = core_in_state(state)
        assert handle_all(core, Release(KEY), Release(KEY)) == []
        assert_idle(core)
        assert core.next_deadline is None
        assert run_until_idle(core) == []

    @pytest.mark.parametrize("state", STATES)
    def test_deadline(self, state: str) -> None:
        core = core_in_state(state)
        assert core.next_deadline == 100.0
        assert core.step(100.0) == [Ended(KEY, GATEWAY, "deadline", "the deadline passed")]
        assert_idle(core)
        assert core.next_deadline is None

    @pytest.mark.parametrize(("state", "num_computed"), list(zip(STATES, [0, 32, 40, 0, 0], strict=True)))
    def test_gather(self, state: str, num_computed: int) -> None:
        core = core_in_state(state)
        for end in (1, 32, 33, 40, 41):
            out = new_buffer(end)
            ok = end <= num_computed
            gathered = handle_all(core, Gather(KEY, 3, 0, end, out))
            np.testing.assert_array_equal(out, kv_of(PROMPT, 0, end) if ok else new_buffer(end))
            assert gathered == [Gathered(KEY, 3, ok, UNKEYED(out) if ok else 0)]

    @pytest.mark.parametrize("state", ["waiting", "running", "held", "suspended"])
    def test_scatter_is_for_reserved_sequences(self, state: str) -> None:
        core = core_in_state(state)
        assert handle_all(core, Scatter(KEY, 3, 0, 16, new_buffer(16))) == [Scattered(KEY, 3, ok=False)]
        handle_all(core, Release(KEY))
        assert_idle(core)

    @pytest.mark.parametrize("state", ["waiting", "running", "held", "suspended"])
    def test_join_is_for_reserved_sequences(self, state: str) -> None:
        core = core_in_state(state)
        assert handle_all(core, Join(KEY, 5)) == [Ended(KEY, GATEWAY, "failed", f"joined while {state}")]
        assert_idle(core)

    def test_unknown_keys(self) -> None:
        commands: list[Command] = [
            Release(KEY),
            Gather(KEY, 1, 0, 1, new_buffer(1)),
            Scatter(KEY, 2, 0, 1, new_buffer(1)),
            Join(KEY, 5),
        ]
        core = make_core()
        assert handle_all(core, *commands) == [
            Gathered(KEY, 1, ok=False),
            Scattered(KEY, 2, ok=False),
            Ended(KEY, GatewayId(""), "failed", "the sequence is gone"),
        ]
        assert_idle(core)


def accelerator_error(text: str, code: int) -> RuntimeError:
    error = torch.AcceleratorError(f"CUDA error: {text}")
    error.error_code = code  # type: ignore[attr-defined]  # torch sets it
    return error


FATAL = (
    accelerator_error("an illegal memory access was encountered", 700),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`"),
)
PASSING = (
    accelerator_error("out of memory", 2),
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("a request's field reads CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
)


class TestFaults:
    def test_a_failing_step_ends_its_sequences_and_no_others(self) -> None:
        runner = FailingRunner()
        core = make_core(runner=runner)
        held = make_prompt(20, seed=1)
        handle_all(core, Add(make_spec("h", held), hold_after_prefill=True))
        run_until_idle(core)
        handle_all(core, Add(make_spec("a", PROMPT)), Add(make_spec("b", make_prompt(10, seed=2))))
        runner.failing.add("run")
        detail = "step: RuntimeError: run is broken"
        assert core.step(0.0) == [
            Ended(KEY, GATEWAY, "failed", detail),
            Ended(key_of("b"), GATEWAY, "failed", detail),
        ]
        runner.failing.clear()
        assert core.audit() == ({**IDLE, "sequences": 1, "blocks_active": 2}, [])
        events = handle_all(core, Add(make_spec("c", PROMPT))) + run_until_idle(core)
        assert token_ids_of(events, "c") == expected_output(PROMPT, 4)
        assert end_of(events, "c").cached_tokens == 0

    def test_a_runner_that_samples_too_little(self) -> None:
        class Mute(FakeModelRunner):
            def run(self, plan: StepPlan) -> StepResult:
                return StepResult(super().run(plan).token_ids[1:])

        core = make_core(runner=Mute(10, 16, 4096, VOCAB_SIZE))
        handle_all(core, Add(make_spec("a", PROMPT)))
        detail = "step: RuntimeError: 0 tokens were sampled instead of 1"
        assert core.step(0.0) == [Ended(KEY, GATEWAY, "failed", detail)]
        assert_idle(core)

    def test_a_failing_copy_ends_its_sequence(self) -> None:
        runner = FailingRunner()
        core = make_core(runner=runner)
        handle_all(core, Reserve(make_spec("a", PROMPT)))
        runner.failing.add("scatter")
        assert handle_all(core, Scatter(KEY, 4, 0, 40, new_buffer(40))) == [
            Scattered(KEY, 4, ok=False),
            Ended(KEY, GATEWAY, "failed", "scatter: RuntimeError: scatter is broken"),
        ]
        assert_idle(core)
        handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True))
        run_until_idle(core)
        runner.failing.add("gather")
        assert handle_all(core, Gather(KEY, 4, 0, 40, new_buffer(40))) == [
            Gathered(KEY, 4, ok=False),
            Ended(KEY, GATEWAY, "failed", "gather: RuntimeError: gather is broken"),
        ]
        assert_idle(core)

    @pytest.mark.parametrize("error", FATAL, ids=str)
    def test_an_error_that_a_device_gives_for_ever_is_raised(self, error: Exception) -> None:
        runner = FailingRunner()
        runner.error = error
        core = make_core(runner=runner)
        handle_all(core, Add(make_spec("held", PROMPT), hold_after_prefill=True), Reserve(make_spec("a", PROMPT)))
        run_until_idle(core)
        handle_all(core, Add(make_spec("b", PROMPT)))
        runner.failing = {"run", "gather", "scatter"}
        operations: tuple[Callable[[], object], ...] = (
            lambda: core.step(0.0),
            lambda: core.handle(Gather(key_of("held"), 1, 0, 40, new_buffer(40)), 0.0),
            lambda: core.handle(Scatter(KEY, 1, 0, 40, new_buffer(40)), 0.0),
        )
        for operation in operations:
            with pytest.raises(RuntimeError) as raised:
                operation()
            assert raised.value is error

    @pytest.mark.parametrize("error", PASSING, ids=str)
    def test_a_device_that_is_out_of_memory_ends_the_step_only(self, error: Exception) -> None:
        runner = FailingRunner()
        runner.error = error
        core = make_core(runner=runner)
        handle_all(core, Add(make_spec("a", PROMPT)))
        runner.failing = {"run"}
        assert end_of(core.step(0.0), "a").reason == "failed"
        assert_idle(core)

    def test_a_buffer_that_is_too_small_ends_its_sequence(self) -> None:
        core = core_in_state("reserved")
        events = handle_all(core, Scatter(KEY, 1, 20, 40, new_buffer(19)))
        assert events[0] == Scattered(KEY, 1, ok=False)
        assert end_of(events, "a").reason == "failed"
        assert_idle(core)


class TestReports:
    def test_load(self) -> None:
        core = make_core(20, token_budget=32, max_num_seqs=3)
        assert core.load() == Load(blocks_total=20)
        handle_all(core, Add(make_spec("a", make_prompt(20), max_tokens=16)))
        core.step(0.0)
        handle_all(core, Reserve(make_spec("r", make_prompt(40, seed=1))))
        handle_all(core, Add(make_spec("b", make_prompt(60, seed=2))), Add(make_spec("c", make_prompt(9, seed=3))))
        core.step(0.0)
        assert core.load() == Load(
            num_running=2,
            num_waiting=2,
            uncomputed_prompt_tokens=44 + 9,
            blocks_total=20,
            blocks_active=3,
            blocks_cached=0,
            blocks_reserved=1 + 3 + 3,
            steps=2,
        )

    def test_the_next_deadline_is_the_earliest_of_the_living(self) -> None:
        core = make_core()
        core.handle(Add(make_spec("a", PROMPT, timeout_s=5.0)), 10.0)
        core.handle(Reserve(make_spec("b", make_prompt(9), timeout_s=2.0)), 11.0)
        core.handle(Add(make_spec("c", make_prompt(9))), 0.0)
        assert core.next_deadline == 13.0
        core.handle(Release(key_of("b")), 11.0)
        assert core.next_deadline == 15.0
        run_until_idle(core, now=12.0)
        assert core.next_deadline is None

    def test_a_request_that_is_late_already_is_not_computed(self) -> None:
        core = make_core()
        core.handle(Add(make_spec("a", PROMPT, timeout_s=0.0)), 10.0)
        assert core.step(10.0) == [Ended(KEY, GATEWAY, "deadline", "the deadline passed")]
        assert core.load().steps == 0

    def test_integrity_covers_the_core(self) -> None:
        core = core_in_state("held")
        core._exchange._landing.landed[KEY] = {}
        core._deadlines.discard(KEY)
        assert core.audit()[1] == [
            "landed ranges are kept for other sequences than the reserved ones",
            "0 deadlines are watched, 1 sequences have one",
        ]

    def test_the_configured_length_bounds_the_models(self) -> None:
        config = WorkerConfig(worker_id="w", roles=("decode",), model_path="fake", max_model_len=50)
        assert EngineCore(FakeModelRunner(100, 16, 4096, VOCAB_SIZE), config=config).max_model_len == 50
        assert EngineCore(FakeModelRunner(2, 16, 4096, VOCAB_SIZE), config=config).max_model_len == 32


@pytest.mark.parametrize("timeout_s", [math.nan, -1.0])
def test_a_timeout_that_is_no_duration_is_a_failure(timeout_s: float) -> None:
    core = make_core()
    spec = msgspec.structs.replace(make_spec("a", make_prompt(5), max_tokens=3), timeout_s=timeout_s)
    assert [type(event) for event in core.handle(Add(spec), 0.0)] == [Ended]
    assert [type(event) for event in core.handle(Reserve(spec), 0.0)] == [ReserveRefused]
    assert core.audit() == (IDLE, [])
