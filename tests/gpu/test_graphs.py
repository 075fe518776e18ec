"""Decode steps that are captured and replayed: what they compute, what they leave alone, and that nothing waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.engine.plan import StepPlan
from disagg.engine.request import Sequence
from disagg.engine.runner.model.batch import to_batch
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.kernels.capture import CaptureError
from disagg.kernels.cuda_graph import CudaGraph, GraphCapturer, bucket_sizes
from tests.support.stepping import assert_logits_close, last_token, make_runner, make_sequence, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

MAX_NUM_SEQS = 6
PROMPT = [(5 * i * i + 3 * i + 2) % VOCAB_SIZE for i in range(60)]


@pytest.fixture(scope="module", params=["qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, and ones with windows and soft caps, with windows, sinks and experts, with latent attention."""
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def prepared(folder: Path, device: torch.device, num_seqs: int, **changes: Any) -> tuple[Any, list[Sequence]]:
    """A runner with its captures, and sequences that are about to decode."""
    runner = make_runner(folder, device=str(device), max_num_seqs=MAX_NUM_SEQS, **changes)
    runner.capture_steps()
    sequences = [make_sequence(PROMPT[: 20 + 7 * row], [4 * row + i for i in range(4)]) for row in range(num_seqs)]
    for sequence in sequences:
        sequence.token_ids.append(int(prefill(runner, sequence).argmax()))
    return runner, sequences


def plan_of(sequences: list[Sequence]) -> StepPlan:
    return StepPlan(decodes=tuple(last_token(sequence) for sequence in sequences))


@pytest.mark.parametrize("num_seqs", [1, 3, 6])
def test_a_replayed_step_equals_the_computed_one(folder: Path, device: torch.device, num_seqs: int) -> None:
    runner, sequences = prepared(folder, device, num_seqs)
    for _ in range(3):
        plan = plan_of(sequences)
        replayed = runner.forward(plan)
        computed = runner._decoder.forward(to_batch(runner.arrays(plan), runner._decoder.attention))
        assert_logits_close(replayed, computed)
        assert torch.equal(runner.forward(plan), replayed), "a replay gives the same bits"
        for sequence, row in zip(sequences, replayed, strict=True):
            sequence.token_ids.append(int(row.argmax()))


@pytest.mark.gpu
def test_every_bucket_is_captured_at_start(folder: Path, device: torch.device) -> None:
    runner, _ = prepared(folder, device, 1)
    assert len(runner._replayed._captured) == len(bucket_sizes(MAX_NUM_SEQS)) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [3, 5])
def test_padded_rows_write_nothing(folder: Path, device: torch.device, num_seqs: int) -> None:
    runner, sequences = prepared(folder, device, num_seqs)
    cache = runner._cache.tensor_NL2KBD
    before = cache.clone()
    plan = plan_of(sequences)
    runner.forward(plan)
    changed = (cache != before).any(dim=(1, 2, 3, 5)).nonzero()
    wanted = {divmod(int(slot), runner.block_size) for slot in runner.arrays(plan).slot_mapping_T}
    assert {tuple(place) for place in changed.tolist()} <= wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_in_a_decode_step_waits_for_the_device(folder: Path, device: torch.device, dtype: str) -> None:
    runner, sequences = prepared(folder, device, 3, dtype=dtype)
    arrays = runner.arrays(plan_of(sequences))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # a call that synchronizes raises
    try:
        runner._replayed.forward(arrays)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_what_asks_the_host_is_refused(device: torch.device) -> None:
    numbers = torch.arange(8, device=device)
    capturer = GraphCapturer(device)
    doubled, captured = capturer.capture(lambda: numbers * 2)
    assert doubled.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    numbers += 1
    assert isinstance(captured, CudaGraph)
    assert captured.replay().tolist() == [2, 4, 6, 8, 10, 12, 14, 16]
    with pytest.raises(CaptureError, match="cannot be a CUDA graph"):
        GraphCapturer(device).capture(lambda: numbers * int(numbers.sum()))
    assert captured.replay().tolist() == [2, 4, 6, 8, 10, 12, 14, 16]


@pytest.mark.gpu
def test_other_threads_may_use_the_device_during_a_capture(folder: Path, device: torch.device) -> None:
    """As the threads of KV transfers do: they copy, allocate, and ask whether an event has come."""
    import threading

    cuda: Any = torch.cuda
    stop, problems = threading.Event(), []

    def copy_all_the_time() -> None:
        stream = cuda.Stream(device)
        try:
            while not stop.is_set():
                with torch.cuda.stream(stream):
                    event = cuda.Event()
                    torch.ones(1 << 16, device=device).clone()
                    event.record(stream)
                while not event.query():
                    pass
        except RuntimeError as error:
            problems.append(error)

    thread = threading.Thread(target=copy_all_the_time)
    thread.start()
    try:
        runner, _ = prepared(folder, device, 1)
    finally:
        stop.set()
        thread.join()
    assert problems == []
    assert isinstance(runner, TorchModelRunner)
    assert runner._replayed is not None
    assert len(runner._replayed._captured) == 4
