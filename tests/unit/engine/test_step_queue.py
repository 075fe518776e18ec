"""The steps of a GPU that are queued, on a CPU: ids that stay on the device, draws, and a core that serves with them.

What a step computes happens at once here; what is tested is which numbers it reads. That nothing happens too early is
for the tests of `tests/support/queueing.py`'s runner, and for those on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.engine.commands import Add, Ended, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.plan import NO_TOKEN, QueuedStep, ScheduledSequence, StepPlan, StepQueue, StepResult
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.runner import model_runner
from disagg.engine.runner.model import device_draws, replay
from disagg.engine.runner.model.device_draws import DeviceDraws
from disagg.engine.runner.model.device_inputs import DeviceStepInputs
from disagg.engine.runner.model.step_queue import DeviceStepQueue
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.engine.runner.sampler import Sampler
from disagg.kernels.ops import Filters
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.support.captured import CallingCapturer, draw_on_host
from tests.support.stepping import decode, decodes_of, make_sequence, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

CPU = torch.device("cpu")
MAX_NUM_SEQS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def new_runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TorchModelRunner]:
    """Makes runners whose decode steps read where a GPU's do. Those that shall go ahead have a step_queue."""
    monkeypatch.setattr(replay, "StepInputs", DeviceStepInputs)
    monkeypatch.setattr(replay, "capturer", lambda _: CallingCapturer())
    monkeypatch.setattr(device_draws, "draw_rows", draw_on_host)

    def make(*, ahead: bool = True) -> TorchModelRunner:
        config = WorkerConfig(
            worker_id="w",
            roles=("prefill", "decode"),
            model_path=str(folder),
            dtype="float32",
            num_blocks=30,
            max_num_seqs=MAX_NUM_SEQS,
        )
        runner = TorchModelRunner(config)
        if ahead:
            assert runner._replayed is not None
            draws = DeviceDraws(8, VOCAB_SIZE, CPU)
            runner._step_queue = DeviceStepQueue(runner._replayed, runner._batches, draws, CPU)
        return runner

    return make


def step_queue_of(runner: TorchModelRunner) -> StepQueue:
    assert runner.step_queue is not None
    return runner.step_queue


def prompt(seed: int, num_tokens: int) -> list[int]:
    return [(seed * i * i + 3 * i + seed) % VOCAB_SIZE for i in range(num_tokens)]


def sequences(runner: TorchModelRunner) -> list[Sequence]:
    """Three, each with its first token."""
    made = [
        make_sequence(prompt(1, 18), [9, 2, 10]),
        make_sequence(prompt(2, 15), [21, 0, 11]),
        make_sequence(prompt(3, 47), [17, 5, 4, 3]),
    ]
    for sequence in made:
        sequence.token_ids.append(int(prefill(runner, sequence).argmax()))
    return made


def test_a_cpu_queues_nothing(folder: Path) -> None:
    config = WorkerConfig(worker_id="w", roles=("decode",), model_path=str(folder), num_blocks=4)
    assert TorchModelRunner(config).step_queue is None


def test_rows_find_their_tokens_wherever_they_were(new_runner: Callable[..., TorchModelRunner]) -> None:
    """Sequences change rows, leave and come back, one step after the other, none of whose ids the host has read."""
    runner = new_runner()
    expected = sequences(runner)
    decode(runner, expected, 7)
    found = sequences(runner)
    step_queue = step_queue_of(runner)
    assert step_queue.max_decodes == 8
    num_ids = [sequence.num_tokens for sequence in found]
    under_way: tuple[list[int], QueuedStep] | None = None
    for rows in ([0, 1, 2], [2, 0, 1], [1, 2], [2, 1, 0], [0], [0, 2], [2, 1, 0]):
        entries = tuple(ScheduledSequence(found[row], num_ids[row] - 1, 1, samples=True) for row in rows)
        launched = step_queue.enqueue(StepPlan(decodes=entries), under_way[1] if under_way else None)
        for row in rows:
            num_ids[row] += 1
        if under_way:
            settle(found, *under_way)
        under_way = rows, launched
    assert under_way is not None
    settle(found, *under_way)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids[: mine.num_tokens]
    assert [sequence.num_tokens for sequence in found] == num_ids == [18 + 1 + 6, 15 + 1 + 5, 47 + 1 + 6]


def settle(found: list[Sequence], rows: list[int], launched: QueuedStep) -> None:
    """Read what was launched."""
    for row, token_id in zip(rows, launched.result().token_ids, strict=True):
        found[row].token_ids.append(token_id)


def spec(name: str, num_tokens: int, **sampling: Any) -> SequenceSpec:
    return SequenceSpec(
        request_id=RequestId(name),
        attempt=0,
        gateway_id=GatewayId("g"),
        prompt_token_ids=pack_token_ids(prompt(num_tokens, num_tokens)),
        sampling=Sampling(**{"temperature": 0.0, "max_tokens": 20, **sampling}),
    )


SPECS = [
    spec("greedy", 20),
    spec("drawn", 33, temperature=0.9, seed=5),
    spec("seed of 64 bits", 15, temperature=1.3, seed=2**64 - 3, top_k=9, max_tokens=27),
    spec("filtered", 9, temperature=1.0, seed=-4, top_p=0.7, min_p=0.01, max_tokens=12),
    spec("penalized", 12, temperature=1.0, seed=8, repetition_penalty=1.3, max_tokens=5),
    spec("forced", 25, temperature=0.7, min_tokens=6, stop_token_ids=tuple(range(0, VOCAB_SIZE, 3)), max_tokens=30),
]


def served(runner: TorchModelRunner, specs: list[SequenceSpec]) -> dict[str, tuple[list[int], str]]:
    """What a core answers to requests that come at once, and that nothing is left."""
    config = WorkerConfig(
        worker_id="w", roles=("prefill", "decode"), model_path="", max_num_seqs=MAX_NUM_SEQS, token_budget=64
    )
    core = EngineCore(runner, config=config)
    events = [event for each in specs for event in core.handle(Add(each), now=0.0)]
    while core.has_work:
        events += core.step(0.0)
        assert core.check_integrity() == []
    answers: dict[str, list[int]] = {}
    ends = {}
    for event in events:
        if isinstance(event, TokenSampled):
            answers.setdefault(event.key.request_id, []).append(event.token_id)
        elif isinstance(event, Ended):
            ends[event.key.request_id] = event.reason
    assert core.audit()[0]["blocks_active"] == 0
    return {name: (token_ids, ends[RequestId(name)]) for name, token_ids in answers.items()}


@pytest.mark.parametrize("names", [["greedy"], ["greedy", "drawn", "filtered"], [each.request_id for each in SPECS]])
def test_a_core_answers_the_same(new_runner: Callable[..., TorchModelRunner], names: list[str]) -> None:
    specs = [each for each in SPECS if each.request_id in names]
    runner, launches = new_runner(), []
    assert runner._step_queue is not None
    launch = runner._step_queue.enqueue

    def counted(plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
        launches.append(after is not None)
        return launch(plan, after)

    runner._step_queue.enqueue = counted  # type: ignore[method-assign]
    found = served(runner, specs)
    assert found == served(new_runner(ahead=False), specs)
    assert {name: len(answer) for name, (answer, reason) in found.items() if reason == "length"}.items() <= {
        each.request_id: each.sampling.max_tokens for each in specs
    }.items()
    assert sum(launches) > 10


def test_warm_up_draws_and_launches(
    new_runner: Callable[..., TorchModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing left to compile for a request: logits of both kinds were drawn from."""
    drawn: list[tuple[int, ...]] = []

    def draw(logits_RV: Tensor, vocab_size: int, filters: Filters) -> Tensor:
        drawn.append(tuple(logits_RV.shape))
        return draw_on_host(logits_RV, vocab_size, filters)

    monkeypatch.setattr(device_draws, "draw_rows", draw)
    runner = new_runner()
    assert runner._step_queue is not None
    runner._sampler = Sampler(VOCAB_SIZE, runner._step_queue._draws)
    model_runner.warm_up(runner)
    assert drawn == [(1, VOCAB_SIZE)] * 3


def test_a_row_that_nothing_can_be_sampled_from(
    new_runner: Callable[..., TorchModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named when its step is read. The step behind it was computed from token 0 and changes no other row."""
    runner = new_runner()
    a, b, _ = sequences(runner)
    step_queue = step_queue_of(runner)
    with monkeypatch.context() as patch:
        patch.setattr(replay, "argmax_rows", lambda logits_SV, _: torch.tensor([5] + [-1] * (len(logits_SV) - 1)))
        bad = step_queue.enqueue(decodes_of([a, b], 0), None)
    behind = step_queue.enqueue(decodes_of([b, a], 1), bad)
    assert runner._replayed is not None
    assert bad.result() == StepResult([5, NO_TOKEN], faults={1: "model"})
    inputs = runner._replayed._inputs
    assert isinstance(inputs, DeviceStepInputs)
    assert inputs.batch(2).token_ids_T.tolist() == [0, 5]
    assert len(behind.result().token_ids) == 2


def test_a_row_of_a_sequence_that_has_ended_fails_nobody(
    new_runner: Callable[..., TorchModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with it is wrong in the step behind as well, in which others may have joined."""
    runner = new_runner()
    a, b, _ = sequences(runner)
    step_queue = step_queue_of(runner)
    monkeypatch.setattr(replay, "argmax_rows", lambda logits_SV, _: torch.tensor([-1] + [5] * (len(logits_SV) - 1)))
    bad = step_queue.enqueue(decodes_of([a], 0), None)
    entries = (ScheduledSequence(a, a.num_tokens, 1, samples=True), ScheduledSequence(b, b.num_tokens - 1, 1, True))
    behind = step_queue.enqueue(StepPlan(decodes=entries), bad)
    assert bad.result() == StepResult([NO_TOKEN], faults={0: "model"})
    a.state = SequenceState.ENDED
    assert behind.result() == StepResult([NO_TOKEN, 5])
