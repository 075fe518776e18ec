"""The inputs of a GPU's captured steps, on a CPU: what is copied where, and that padding changes no result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from disagg.engine.batch_arrays import BatchArrays, WindowArrays
from disagg.engine.runner.model import replay
from disagg.engine.runner.model.device_inputs import DeviceStepInputs
from disagg.kernels.capture import CaptureError
from disagg.kernels.cuda_graph import GraphCapturer, bucket_sizes
from tests.support.stepping import assert_logits_close, decode, make_runner, make_sequence, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

CPU = torch.device("cpu")


def arrays(num_seqs: int, width: int, first: int) -> BatchArrays:
    """Rows whose numbers count up from `first`."""
    row = np.arange(first, first + num_seqs)
    return BatchArrays(
        token_ids_T=row.astype(np.int64),
        positions_T=row.astype(np.int64) + 100,
        slot_mapping_T=row.astype(np.int64) + 200,
        block_tables_SM=(row[:, None] * 10 + np.arange(width)).astype(np.int32),
        context_lens_S=row.astype(np.int32) + 300,
        prefills=(),
        sample_rows=None,
    )


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 4)), (256, (1, 2, 4, 8, 16, 32, 64, 128, 256))]
)
def test_buckets_are_powers_of_two_up_to_the_next_one(most: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(most) == sizes


def test_no_sequences_have_no_buckets() -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1, not 0"):
        bucket_sizes(0)


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(CaptureError, match="need a CUDA device, not cpu"):
        GraphCapturer(CPU)


def test_a_step_is_padded_to_its_bucket() -> None:
    inputs = DeviceStepInputs(6, 5, CPU)
    assert [inputs.bucket(num_seqs) for num_seqs in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]
    batch = inputs.batch(4)
    assert inputs.fill(arrays(3, 2, first=1)) == 4
    assert batch.token_ids_T.tolist() == [1, 2, 3, 0]
    assert batch.positions_T.tolist() == [101, 102, 103, 0]
    assert batch.slot_mapping_T.tolist() == [201, 202, 203, -1]
    assert batch.context_lens_S.tolist() == [301, 302, 303, 0]
    assert batch.block_tables_SM[:, :2].tolist() == [[10, 11], [20, 21], [30, 31], [0, 0]]
    assert (batch.num_decodes, batch.prefills, batch.sample_rows) == (4, None, None)


def test_rows_have_the_slots_of_their_adapters_and_padding_has_none() -> None:
    inputs = DeviceStepInputs(6, 5, CPU)
    batch = inputs.batch(4, has_adapters=True)
    assert batch.adapters is not None
    assert inputs.batch(4).adapters is None
    inputs.fill(dataclasses.replace(arrays(3, 2, first=1), adapter_slots_T=np.array([5, -1, 0], dtype=np.int32)))
    assert batch.adapters.slots_T.tolist() == batch.adapters.sampled_R.tolist() == [5, -1, 0, -1]
    inputs.fill(arrays(3, 2, first=1))
    assert batch.adapters.slots_T.tolist() == [-1, -1, -1, -1]
    assert batch.block_tables_SM[:, :2].tolist() == [[10, 11], [20, 21], [30, 31], [0, 0]]


def test_windows_have_slots_and_tables_of_their_own() -> None:
    inputs = DeviceStepInputs(6, 5, CPU, num_windows=2)
    batch = inputs.batch(4)
    for first in (1, 5):
        windows = tuple(
            WindowArrays(each.slot_mapping_T, each.block_tables_SM, ())
            for each in (arrays(3, 2, first + 20), arrays(3, 2, first + 40))
        )
        assert inputs.fill(dataclasses.replace(arrays(3, 2, first), windows=windows)) == 4
        assert batch.block_tables_SM[:, 0].tolist() == [10 * first, 10 * first + 10, 10 * first + 20, 0]
        for window, more in zip(batch.windows, (20, 40), strict=True):
            start = first + more
            assert window.slot_mapping_T.tolist() == [start + 200, start + 201, start + 202, -1]
            rows = [[10 * row, 10 * row + 1] for row in range(start, start + 3)]
            assert window.block_tables_SM[:, :2].tolist() == [*rows, [0, 0]]
    inputs.fill_padding(4)
    assert all(window.slot_mapping_T.tolist() == [-1] * 4 for window in batch.windows)


def test_steps_of_all_sizes_are_at_one_place() -> None:
    inputs = DeviceStepInputs(8, 3, CPU)
    small, large = inputs.batch(2), inputs.batch(8)
    assert inputs.fill(arrays(8, 3, first=0)) == 8
    assert large.token_ids_T.tolist() == list(range(8))
    assert inputs.fill(arrays(2, 1, first=5)) == 2
    assert small.token_ids_T.tolist() == large.token_ids_T[:2].tolist() == [5, 6]
    assert small.block_tables_SM[:, 0].tolist() == [50, 60]
    inputs.fill_padding(2)
    assert (small.slot_mapping_T.tolist(), small.context_lens_S.tolist()) == ([-1, -1], [0, 0])


@pytest.mark.parametrize(("role", "captured"), [("prefill", []), ("decode", [4, 2, 1])])
def test_a_worker_that_only_prefills_captures_no_decode_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, captured: list[int]
) -> None:
    class PlayedCapturer:
        def capture(self, run: Callable[[], Any]) -> tuple[Any, None]:
            return run(), None

    monkeypatch.setattr(replay, "capturer", lambda _: PlayedCapturer())
    monkeypatch.setattr(replay, "StepInputs", DeviceStepInputs)
    runner = make_runner(make_checkpoint("llama", tmp_path), max_num_seqs=3, roles=(role,))
    runner.capture_steps()
    assert runner._replayed is not None
    assert list(runner._replayed._captured) == [(size, False) for size in captured]


@pytest.mark.parametrize(("kind", "num_seqs"), [("qwen3", 1), ("qwen3", 3), ("gemma3", 3)])
def test_padded_rows_change_no_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, num_seqs: int
) -> None:
    """The steps of a GPU, replayed by what replays a CPU's, against the CPU's own; also with windows."""
    folder = make_checkpoint(kind, tmp_path)
    prompts = [[(7 * i + 3 * row) % VOCAB_SIZE for i in range(17 + 9 * row)] for row in range(num_seqs)]
    found = []
    for inputs in (replay.StepInputs, DeviceStepInputs):
        monkeypatch.setattr(replay, "StepInputs", inputs)
        runner = make_runner(folder, max_num_seqs=3)
        runner.capture_steps()
        sequences = [
            make_sequence(prompt, [9 - 3 * row, 8 - 3 * row, 7 - 3 * row]) for row, prompt in enumerate(prompts)
        ]
        for sequence in sequences:
            sequence.token_ids.append(int(prefill(runner, sequence).argmax()))
        found.append(torch.stack(decode(runner, sequences, 6)))
    assert_logits_close(found[1], found[0])
    assert torch.equal(found[1].argmax(-1), found[0].argmax(-1))
