"""What the GPU path calls, against the bindings of a torch that is built for CUDA: `make test-gpu-bindings`. Needs no
GPU: a call whose arguments fit ends with the error that there is none, one whose arguments do not with a TypeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from disagg.engine.kv_transfer.transports import nccl
from disagg.engine.plan import is_fatal

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built for CPUs")

_dist: Any = torch.distributed
_cuda: Any = torch.cuda
_C: Any = torch._C


def test_our_options_make_a_group() -> None:
    with pytest.raises(ValueError, match="no GPUs found"):
        nccl._new_group(_dist.HashStore(), 0)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("broadcast", ("Sequence[torch.Tensor]", "BroadcastOptions")),
        ("eager_connect_single_device", ("torch.device",)),
        ("abort", ()),
        ("allreduce", ("Sequence[torch.Tensor]",)),
        ("gather", ("output_tensors", "input_tensors", "GatherOptions")),
    ],
)
def test_methods_of_a_group(method: str, arguments: tuple[str, ...]) -> None:
    described = getattr(_dist.ProcessGroupNCCL, method).__doc__
    assert [argument for argument in arguments if argument not in described] == []


def test_options_of_exchanges() -> None:
    options = _dist.BroadcastOptions()
    assert (options.rootRank, options.asyncOp) == (0, True)
    assert _dist.GatherOptions().rootRank == 0


def test_an_error_of_the_runtime_has_its_code() -> None:
    with pytest.raises(torch.AcceleratorError) as raised:
        _cuda.CUDAGraph()
    error: Any = raised.value
    assert error.error_code == 35  # cudaErrorInsufficientDriver: there is none
    assert is_fatal(error)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _cuda.ExternalStream(1, device=0),
        lambda: _cuda.Stream(torch.device("cuda", 0)),
        lambda: _cuda.current_stream(torch.device("cuda", 0)),
        lambda: torch.zeros(1, pin_memory=True),
    ],
)
def test_calls_that_end_at_the_missing_driver(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError):
        call()


def test_captures() -> None:
    parameters = inspect.signature(_cuda.graph.__init__).parameters
    assert {"pool", "stream", "capture_error_mode"} <= set(parameters)
    assert "arg1: tuple" in _C._cuda_endAllocateToPool.__doc__


def test_scaled_matrix_products() -> None:
    names = [argument.name for argument in torch.ops.aten._scaled_mm.default._schema.arguments]
    assert names[:2] == ["self", "mat2"]
    assert {"scale_a", "scale_b", "bias", "out_dtype", "use_fast_accum"} <= set(names)
