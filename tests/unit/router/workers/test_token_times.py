"""The predicted time of a token, against a worker that computes drafts."""

from __future__ import annotations

import msgspec
import pytest

from disagg.engine.commands import Add, TokenSampled
from disagg.proto.ids import AttemptKey, RequestId, WorkerId
from disagg.proto.messages import BlocksSnapshot, Load, StepCoefficients, StepSample
from disagg.router.workers.assignments import Assignment
from tests.support.drafting import KnownDrafts, draft
from tests.support.engine import VOCAB_SIZE, expected_output, make_core, make_prompt, make_spec
from tests.support.placing import Placing, samples
from tests.support.router import worker_info, worker_report

NUM_TOKENS, NUM_MEASURED = 1500, 64
TIMES = StepCoefficients(2.0, 1.0, 0.0, 0.5, 0.002)
CALIBRATION = samples(base_ms=2.0, prefill_token_ms=1.0, decode_ms=0.5, context_ms=0.002)


@pytest.mark.parametrize("num_sequences", [1, 3, 8])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.7, 1.0])
def test_the_predicted_time_of_a_token_is_the_measured_one(num_sequences: int, right: float) -> None:
    """Rows without accepted drafts make tokens slower, accepted ones faster; the router predicts both."""
    core = make_core(1000, max_num_seqs=64)
    prompts = {f"r{number}": make_prompt(20, number) for number in range(num_sequences)}
    answers = {name: expected_output(prompt, NUM_TOKENS) for name, prompt in prompts.items()}
    draft(core, KnownDrafts(answers, most=4, right=right, vocab_size=VOCAB_SIZE))
    for name, prompt in prompts.items():
        core.handle(Add(make_spec(name, prompt, max_tokens=NUM_TOKENS)), 0.0)
    for _ in range(200):  # those with prompts are forgotten
        core.step(0.0)
    ms = num_given = context = 0.0
    for _ in range(NUM_MEASURED):
        context += sum(sequence.num_tokens for sequence in core._scheduler.running.values()) / num_sequences
        num_given += sum(isinstance(event, TokenSampled) for event in core.step(0.0)) / num_sequences
        ms += TIMES.step_ms(core.last_plan.measured(0.0))
    assert core.load().num_running == num_sequences

    it = Placing("joint")
    it.fleet.up(worker_info("d0", calibration=CALIBRATION), 0.0)
    it.fleet.report(worker_report("d0", 0, BlocksSnapshot(hashes=()), load=core.load()), 0.0)
    worker = it.fleet.worker(WorkerId("d0"))
    for name in prompts:
        assignment = Assignment(context=round(context / NUM_MEASURED))
        it.fleet.open(worker, AttemptKey(RequestId(name), 0), assignment, -1)
    assert worker.token_ms == pytest.approx(ms / num_given, rel=0.05)


EXPERTS = StepCoefficients(5.0, 0.05, 0.0, 0.1, 1e-3, experts_ms=40.0, expert_share=1 / 16)
EXPERT_STEPS = tuple(
    StepSample(EXPERTS.ms_of(*work), *work)
    for work in (
        *((num, num * (num + 1) // 2, 0, 0) for num in (16, 128, 512)),
        *((0, 0, num, num * context) for num in (1, 8, 32) for context in (64, 512)),
    )
)


@pytest.mark.parametrize("load", [Load(), Load(tokens_per_step=1.5, rows_per_step=3.0)], ids=["plain", "drafts"])
def test_a_further_sequence_adds_less_the_more_experts_are_read_already(load: Load) -> None:
    it = Placing("joint")
    info = msgspec.structs.replace(worker_info("d0", calibration=EXPERT_STEPS), expert_share=1 / 16)
    it.fleet.up(info, 0.0)
    it.fleet.report(worker_report("d0", 0, BlocksSnapshot(hashes=()), load=load), 0.0)
    worker = it.fleet.worker(WorkerId("d0"))
    before_ms = worker.token_ms
    for number in range(8):
        expected = worker.token_ms + worker.joining_ms + 100 * worker.attending_ms
        it.fleet.open(worker, AttemptKey(RequestId(f"r{number}"), 0), Assignment(context=100), -1)
        rows = (number + 1) * load.rows_per_step
        step_ms = 5.0 + rows * (0.1 + 100 * 1e-3) + 40.0 * (1 - (15 / 16) ** rows)
        if number:  # an idle worker's first sequence reads what no other one does
            assert worker.token_ms == pytest.approx(expected)
        assert worker.token_ms == pytest.approx(step_ms / load.tokens_per_step, rel=0.01)
        assert worker.around_ms == pytest.approx(45.0 + (number + 1) * (0.1 + 100 * 1e-3), rel=0.01)
        times = worker.coefficients
        assert times.ms_of(0, 0, number + 1, (number + 1) * 100) == pytest.approx(worker.token_ms)
    assert before_ms < worker.token_ms


def test_a_prompt_reads_all_experts() -> None:
    it = Placing("joint")
    it.fleet.up(msgspec.structs.replace(worker_info("p0", calibration=EXPERT_STEPS), expert_share=1 / 16), 0.0)
    it.fleet.report(worker_report("p0", 0, BlocksSnapshot(hashes=())), 0.0)
    assert it.fleet.worker(WorkerId("p0")).around_ms == pytest.approx(45.0, rel=0.01)
