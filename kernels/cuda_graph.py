"""Computations of a GPU, captured once as a CUDA graph and replayed with one call.

    capturer = GraphCapturer(device)
    result, captured = capturer.capture(run)      warm-up on a side stream, capture, first replay
    result = captured.replay()                    from what the input tensors hold now, on the current stream

The graphs of a capturer share one pool of memory, so that fifty batch sizes need hardly more than the largest of them;
they must be replayed one at a time, and a result be read (or queued to be read, on the same stream) before the next
replay.

A graph freezes pointers, shapes and launch grids. So `run` reads its inputs from tensors that stay where they are,
waits for nothing from the device, and launches grids that suit any input: lengths are read by the kernels. Kernels that
compile or tune themselves do so in the warm-up, where that is allowed.

Other threads use the GPU meanwhile (KV transfers): what they do is neither captured nor forbidden, because only the
capturing thread's calls are checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from typing_extensions import override

from disagg.kernels.capture import Captured, CaptureError, Capturer

T = TypeVar("T")

NUM_WARM_UPS = 2
"""Number of runs before the capture: the first compiles and loads kernels, the second finds them."""

_cuda: Any = torch.cuda
"""`torch.cuda` without types: torch's stubs lack types for graphs and streams."""


@dataclass(frozen=True, slots=True, eq=False)
class CudaGraph(Captured[T]):
    """A `Captured` computation. It owns its outputs' memory, which the next replay of the same capturer overwrites."""

    graph: Any
    outputs: T

    @override
    def replay(self) -> T:
        """Queue the graph on the current stream and return at once."""
        self.graph.replay()
        return self.outputs


class GraphCapturer(Capturer):
    """Captures CUDA graphs. Owner: the thread that computes.

    Raises:
        CaptureError: the device is not a CUDA device that torch can use.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise CaptureError(f"CUDA graphs need a CUDA device, not {device}")
        self._device = device
        with torch.cuda.device(device):
            self._pool = _cuda.graph_pool_handle()
            self._stream = _cuda.Stream(device)

    @override
    def capture(self, run: Callable[[], T]) -> tuple[T, Captured[T]]:
        """`run` is called `NUM_WARM_UPS` + 1 times, so what it writes must not depend on how often.

        Raises:
            CaptureError: `run` synchronizes with the host, or does something else that a graph cannot hold.
        """
        with torch.cuda.device(self._device):
            graph, current = _cuda.CUDAGraph(), _cuda.current_stream(self._device)
            try:
                self._warm_up(run)
                with _cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    outputs = run()
            except RuntimeError as error:
                self._leave(current)
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise CaptureError(f"the computation cannot be a CUDA graph: {error}") from error
            captured = CudaGraph(graph, outputs)
            return captured.replay(), captured

    @override
    def compute(self, run: Callable[[], T], kind: Hashable) -> T:
        """Runs it directly, because launches are asynchronous anyway."""
        return run()

    def _leave(self, stream: Any) -> None:
        """Return to the state before a capture that failed. Torch's own exit stops at the first error, on the stream of
        the capture and with memory still allocated from its pool, which is not used again."""
        _cuda.set_stream(stream)
        end_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
        with contextlib.suppress(RuntimeError):  # where torch did get as far
            if end_pool is not None:
                end_pool(stream.device_index, self._pool)
        self._pool = _cuda.graph_pool_handle()

    def _warm_up(self, run: Callable[[], object]) -> None:
        """Run on the stream of the capture, because libraries keep their work space per stream."""
        current = _cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                run()
        current.wait_stream(self._stream)


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes that are captured: powers of two, the last one at least `max_num_seqs`.

    A step of B rows is padded to the next size. At small sizes a step's time hardly depends on the rows, at large ones
    decode attention skips the padded rows, so that finer sizes would buy little and cost memory and start-up time.

    Raises:
        ValueError: `max_num_seqs` is less than one.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs must be at least 1, not {max_num_seqs}")
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)
