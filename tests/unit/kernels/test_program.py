"""Recorded calls of the C++ kernels: replayed from new inputs they compute what the calls would, and nothing else."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor

from disagg.kernels.capture import CaptureError
from disagg.kernels.cpu.calls import Pool, ProgramCapturer, Recording, new_output
from disagg.kernels.cpu.ops import NativeOps

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def given(out: Tensor | None) -> Tensor:
    assert out is not None
    return out


class Chain:
    """Ops one behind the other, whose intermediates die on the way."""

    def __init__(self, ops: NativeOps, num_rows: int, dtype: torch.dtype) -> None:
        self.ops = ops
        self.x, self.weight = numbers(1, num_rows, 64, dtype=dtype), numbers(2, 64, dtype=dtype)

    def run(self) -> tuple[Tensor, Tensor]:
        total = self.x
        for _ in range(5):
            found = self.ops.add_rms_norm(total, self.x, self.weight, EPS)
            assert found is not None
            normed, total = found
        return given(self.ops.silu_mul(normed.view(-1, 32))), total


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replay_computes_from_what_the_inputs_hold_then(native: NativeOps, dtype: torch.dtype) -> None:
    chain = Chain(native, 3, dtype)
    expected = chain.run()
    first, tape = ProgramCapturer(native.library).capture(chain.run)
    assert [torch.equal(a, b) for a, b in zip(first, expected, strict=True)] == [True, True]
    for seed in (7, 8):
        chain.x.copy_(numbers(seed, 3, 64, dtype=dtype))
        expected = chain.run()
        assert [torch.equal(a, b) for a, b in zip(tape.replay(), expected, strict=True)] == [True, True]


def test_captures_of_one_capturer_share_memory_that_does_not_grow(native: NativeOps) -> None:
    capturer = ProgramCapturer(native.library)
    chains = [Chain(native, num_rows, torch.float32) for num_rows in (4, 3, 4, 3, 1)]
    tapes = [capturer.capture(chains[0].run)[1]]
    nbytes = capturer.nbytes
    assert nbytes == 4 * 1024 + 512  # two sums and two norms of four rows, though ten were computed, and the output
    tapes += [capturer.capture(chain.run)[1] for chain in chains[1:3]]
    assert capturer.nbytes == nbytes
    for index in (2, 0, 1, 2, 1, 0):
        assert all(torch.equal(a, b) for a, b in zip(tapes[index].replay(), chains[index].run(), strict=True))


def test_a_tape_keeps_what_it_points_into(native: NativeOps) -> None:
    expected = [out.clone() for out in Chain(native, 3, torch.float32).run()]
    _, tape = ProgramCapturer(native.library).capture(Chain(native, 3, torch.float32).run)
    gc.collect()
    rest = [torch.full((3, 64), 9.0) for _ in range(50)]  # would take freed memory
    assert [torch.equal(a, b) for a, b in zip(tape.replay(), expected, strict=True)] == [True, True]
    assert all((x == 9.0).all() for x in rest)


@pytest.mark.parametrize(
    ("name", "op"),
    [("add", lambda x: x + 1), ("empty", lambda x: torch.empty_like(x)), ("clone", lambda x: x.t().reshape(-1))],
)
def test_what_a_tape_would_not_do_again_cannot_be_captured(native: NativeOps, name: str, op: object) -> None:
    assert callable(op)
    capturer = ProgramCapturer(native.library)
    x = numbers(1, 4, 64)
    with pytest.raises(CaptureError, match=rf"{name}.* is not one of the C\+\+ kernels"):
        capturer.capture(lambda: op(given(native.silu_mul(x))))
    expected = given(native.silu_mul(x))
    assert torch.equal(capturer.capture(lambda: given(native.silu_mul(x)))[1].replay(), expected)


def test_other_looks_at_the_same_memory_can(native: NativeOps) -> None:
    x = numbers(1, 4, 64)
    captured = ProgramCapturer(native.library).capture(lambda: given(native.silu_mul(x[1:3, :32].view(1, 2, 32)[0])))[1]
    x.mul_(2)
    assert torch.equal(captured.replay(), given(native.silu_mul(x[1:3, :32])))


def test_calls_that_are_written_down_are_made_afterwards(native: NativeOps) -> None:
    capturer = ProgramCapturer(native.library)
    ids, table = torch.tensor([1, 2, 0]), numbers(1, 3, 32)
    norm = torch.ones(32)

    def run() -> Tensor:
        rows = given(native.embed(ids, table))
        ids.copy_(torch.tensor([2, 2, 1]))  # no kernel has looked at them yet
        return given(native.silu_mul(given(native.rms_norm(rows, norm, EPS))))

    capturer.compute(lambda: given(native.embed(ids, table)), "rows")
    nbytes = capturer.nbytes
    found = capturer.compute(run, "rows").clone()
    expected = given(native.silu_mul(given(native.rms_norm(table[[2, 2, 1]], norm, EPS))))
    assert torch.equal(found, expected)
    assert capturer.nbytes == nbytes + 512 + 256  # the norm, and the output
    ids[1] = 3
    with pytest.raises(IndexError, match=r"^token 1: its id is not in the vocabulary$"):
        capturer.compute(lambda: given(native.embed(ids, table)), "rows")


def test_only_the_first_of_a_kind_is_looked_through(native: NativeOps) -> None:
    capturer = ProgramCapturer(native.library)
    x = numbers(1, 4, 64)
    before = x.clone()

    def run() -> Tensor:
        return given(native.silu_mul(x)) + 1

    for _ in range(2):
        with pytest.raises(CaptureError, match=r"add.* is not one of the C\+\+ kernels"):
            capturer.compute(run, "a")
    assert torch.equal(x, before)
    capturer.compute(lambda: given(native.silu_mul(x)), "a")
    capturer.compute(run, "a")  # whoever says the same kind promises the same ops
    with pytest.raises(CaptureError):
        capturer.compute(run, "b")


def test_an_invalid_input_of_a_replay_is_the_error_of_its_op(native: NativeOps) -> None:
    ids, table = torch.tensor([1, 2, 0]), numbers(1, 3, 32)
    norm = torch.ones(32)
    tape = ProgramCapturer(native.library).capture(
        lambda: given(native.rms_norm(given(native.embed(ids, table)), norm, EPS))
    )[1]
    before = tape.replay().clone()
    ids[1] = 3
    with pytest.raises(IndexError, match=r"^token 1: its id is not in the vocabulary$"):
        tape.replay()
    ids[1] = 2
    assert torch.equal(tape.replay(), before)


def test_other_threads_are_not_recorded(native: NativeOps) -> None:
    x = numbers(1, 4, 64)
    outputs: list[Tensor] = []
    pool = Pool()
    with Recording(pool) as recording:
        other = threading.Thread(target=lambda: outputs.append(given(native.silu_mul(x))))
        other.start()
        other.join()
        assert recording.calls == []
        native.silu_mul(x)
    assert len(recording.calls) == 1
    assert pool.nbytes == 512
    native.silu_mul(x)
    assert len(recording.calls) == 1


def test_outputs_are_aligned_and_reused_when_they_are_gone() -> None:
    pool = Pool()
    with Recording(pool):
        first = new_output((3, 5), torch.bfloat16)
        view = first[1:]
        address = first.data_ptr()
        assert (first.shape, first.dtype, address % 64) == ((3, 5), torch.bfloat16, 0)
        del first
        assert new_output((2, 5), torch.bfloat16).data_ptr() != address  # a view still looks at it
        del view
        assert new_output((1, 16), torch.float32).data_ptr() == address
        assert new_output((0, 16), torch.float32).shape == (0, 16)
    assert pool.nbytes == 2 * 64
