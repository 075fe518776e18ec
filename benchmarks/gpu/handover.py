"""What a hand-over of KV takes on one GPU: each stage alone, and all of them together in a pair of processes.

    through the host   gather, digest, copy to pinned memory  ──transport──>  copy to the device, digest, scatter
    device to device   gather, digest  ──NIXL or NCCL──>  digest, scatter

The shapes are those of Llama-3-8B in bf16: 512 tokens are 64 MiB, which is a chunk, 8192 are 1 GiB. A stage on the
device is compared with a copy of as many bytes there, a copy to or from the host with the measured rate of pinned
memory. Two processes on one GPU take turns, and NCCL of two processes on one GPU goes through sockets: what the pairs
show is that it is right, and what the host costs.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.report import RowFile
from benchmarks.gpu.timing import Ceilings, attempt, call_ms, parse, read_ceilings, row_file, wall_ms
from disagg.engine.device_environment import device_environment, one_gpu_environment
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.engine.kv_transfer.transports.nixl_agent import MODULES
from disagg.engine.runner.model.device_inputs import Mark
from disagg.engine.runner.model.host_staging import MAX_PIECES, GatheredPart, HostStaging
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.engine.runner.model.kv_digests import DigestSums
from disagg.kernels.dispatch import gather_kv, scatter_kv
from disagg.proto.messages import ONE_RANK, KvLayout

MOVE_TARGET, HOST_TARGET = 0.90, 0.90
DEVICE_TO_DEVICE_GB_S = 300.0
BUSY_TARGET = 0.90
"""Of the time of P's GPU, for its steps."""
PAIR_LIMIT_S = 25.0


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """The tensors and pairs that are measured."""

    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"
    sizes: tuple[int, ...] = (512, 8192)
    """Tokens that a stage moves at once."""
    ranges: tuple[tuple[int, int], ...] = ((5, 4091),)
    """Tokens [start, end) that begin and end within a block."""
    chunk_tokens: int = 512
    pair_tokens: int = 8192
    """Tokens that a pair moves, in chunks."""

    @property
    def layout(self) -> KvLayout:
        """Layout of the KV of one token."""
        per_layer = 2 * self.num_kv_heads * self.head_dim * getattr(torch, self.dtype).itemsize
        return KvLayout.dense(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            bytes_per_token=self.num_layers * per_layer,
        )

    def make_cache(
        self, device: torch.device, num_tokens: int, staging: HostStaging | None = None
    ) -> tuple[KvCache, list[int]]:
        """A cache of random KV, and the table of a sequence of so many tokens, in random order."""
        num_blocks = -(-num_tokens // self.block_size)
        cache = KvCache(self.layout, num_blocks + 1, self.block_size, device, host_staging=staging)
        cache.tensor_NL2KBD.normal_()
        return cache, torch.randperm(num_blocks).tolist()


TINY = TensorSizes(
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
    dtype="float32",
    sizes=(16, 48),
    ranges=((5, 41),),
    chunk_tokens=16,
    pair_tokens=64,
)


def shape_for(device: torch.device) -> TensorSizes:
    """Tiny on a CPU."""
    return TensorSizes() if device.type == "cuda" else TINY


# ---------------------------------------------------------------- stages


def measure_stages(
    rows: RowFile, shape: TensorSizes, device: torch.device, start: int, end: int, ceilings: Ceilings
) -> None:
    """Each stage of one range of tokens, alone."""
    cache, table = shape.make_cache(device, end)
    nbytes = (end - start) * shape.layout.bytes_per_token
    piece, other = (torch.randint(256, (nbytes,), dtype=torch.uint8, device=device) for _ in range(2))
    on_host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    where = f"{nbytes / (1 << 20):.4g} MiB" if start == 0 else f"tokens {start} to {end}"

    def add(stage: str, run: Callable[[], object], limit_ms: float, target: float | None, limit: str) -> None:
        ms = call_ms(run, device, repeats=5)
        rows.add(
            f"{stage}, {where}",
            nbytes / ms / 1e6,
            "GB/s",
            share=limit_ms / ms if limit_ms else None,
            target=target,
            detail=f"{ms:.3f} ms; {limit} {limit_ms:.3f} ms",
        )

    kv = cache.tensor_NL2KBD
    copy_ms = call_ms(lambda: other.copy_(piece), device, repeats=5)
    add("gather", lambda: gather_kv(kv, table, start, end, piece), copy_ms, MOVE_TARGET, "copy")
    add("digest", lambda: DigestSums.of([piece], UNKEYED), nbytes / ceilings.read_gb_s / 1e6, None, "reading it")
    add("scatter", lambda: scatter_kv(kv, table, start, end, piece), copy_ms, MOVE_TARGET, "copy")
    out_ms, in_ms = (nbytes / rate / 1e6 if rate else 0.0 for rate in (ceilings.to_host_gb_s, ceilings.to_device_gb_s))
    add("to the host", lambda: on_host.copy_(piece, non_blocking=True), out_ms, HOST_TARGET, "pinned memory")
    add("to the device", lambda: piece.copy_(on_host, non_blocking=True), in_ms, HOST_TARGET, "pinned memory")


# ---------------------------------------------------------------- beside steps


def measure_beside_steps(rows: RowFile, shape: TensorSizes, device: torch.device) -> None:
    """What P's steps lose while KV leaves through the host: as many steps of products, which take about as long as the
    prefill of a chunk, alone, with a gather behind each, and with one that the host waits for and hashes."""
    staging = HostStaging(device)
    cache, table = shape.make_cache(device, shape.pair_tokens, staging)
    nbytes = shape.chunk_tokens * shape.layout.bytes_per_token
    buffers = [torch.from_numpy(staging.new_buffer(nbytes)) for _ in range(MAX_PIECES)]
    size, products = (8192, 8) if device.type == "cuda" else (64, 1)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    mark = Mark(pinned=device.type == "cuda")
    chunks = [(start, start + shape.chunk_tokens) for start in range(0, shape.pair_tokens, shape.chunk_tokens)]

    def steps(copy: Callable[[int, int, Tensor], GatheredPart | None]) -> None:
        under_way: deque[GatheredPart] = deque()
        for number, (start, end) in enumerate(chunks):
            for _ in range(products):
                torch.mm(a, b)
            mark.set()
            mark.wait()
            if len(under_way) == len(buffers):
                under_way.popleft().wait()
            if (part := copy(start, end, buffers[number % len(buffers)])) is not None:
                under_way.append(part)
        for part in under_way:
            part.wait()

    def begin(start: int, end: int, out: Tensor) -> GatheredPart:
        return cache.start_gather(table, start, end, out, ONE_RANK, digests=True)

    def make(start: int, end: int, out: Tensor) -> None:
        cache.gather_part(table, start, end, out, ONE_RANK)

    alone, beside, waiting = (
        wall_ms(functools.partial(steps, each), repeats=3) / len(chunks) for each in (lambda *_: None, begin, make)
    )
    for name, ms, target in (
        ("steps with a copy behind each", beside, BUSY_TARGET),
        ("the same, waited for and hashed by the host", waiting, None),
    ):
        rows.add(name, ms, "ms", share=alone / ms, target=target, detail=f"a step alone {alone:.3f} ms")


# ---------------------------------------------------------------- pairs


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two processes on the device that hand KV over."""

    label: str
    transport: str
    target_gb_s: float | None = None
    bytes_only: bool = False
    """Whether only buffers move, without a cache."""


PAIRS = (
    Pair(label="shm, buffers alone", transport="shm", bytes_only=True),
    Pair(label="shm, through the host", transport="shm"),
    Pair(label="NIXL, through the host", transport="auto"),
    Pair(label="NIXL, from device to device", transport="nixl", target_gb_s=DEVICE_TO_DEVICE_GB_S),
    Pair(label="NCCL, one device, by sockets", transport="nccl"),
)


def measure_pair(rows: RowFile, shape: TensorSizes, device: torch.device, pair: Pair, peers: Peers) -> None:
    """All stages together, one chunk behind the other, as workers do."""
    name = f"pair, {pair.label}"
    if pair.transport == "nccl" and device.type == "cpu":
        rows.add(name, None, "", detail="NCCL needs a GPU")
        return
    if pair.transport in ("auto", "nixl") and not has_nixl():
        rows.add(name, None, "", detail="NIXL is not installed")
        return
    sent, received = peers.run(pair)
    if sent["digests"] != received["digests"]:
        raise RuntimeError("what arrived has other digests than what was sent")
    nbytes = received["nbytes"]
    rate = nbytes / received["seconds"] / 1e9
    target = pair.target_gb_s
    rows.add(
        name,
        rate,
        "GB/s",
        share=None if target is None else rate / target,
        target=None if target is None else 1.0,
        detail=f"{shape.pair_tokens} tokens in {shape.pair_tokens * shape.layout.bytes_per_token / rate / 1e6:.1f} ms, "
        f"by {received['transport']}; digests equal",
    )


def has_nixl() -> bool:
    """Whether its package is there."""
    return any(importlib.util.find_spec(module) is not None for module in MODULES)


class Peers:
    """A sender and a receiver, which try one transport after the other: to start them takes longer than what they
    measure. Where one fails both are ended, and others take their place for the next transport."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, pair: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
        """What sender and receiver saw.

        Raises:
            RuntimeError: one of them failed, or took too long.
        """
        if not self._processes:
            self._processes = [self._start(side) for side in ("receiver", "sender")]
        watchdog = threading.Timer(PAIR_LIMIT_S, self._kill)
        watchdog.start()
        try:
            received, sent = self._tell(pair)
        except (OSError, ValueError) as error:
            self.close()
            raise RuntimeError(f"a process of the pair ended, or was ended after {PAIR_LIMIT_S:.0f} s") from error
        finally:
            watchdog.cancel()
        return sent, received

    def close(self) -> None:
        """End both."""
        self._kill()
        for process in self._processes:
            process.communicate()
        self._processes = []

    def _start(self, side: str) -> subprocess.Popen[str]:
        environ = os.environ | device_environment(str(self._device))
        environ |= one_gpu_environment(side) if self._device.type == "cuda" else {}
        environ |= ucx_log_environment(os.environ.get("DISAGG_GPU_CHECK_LOGS"))
        program = [sys.executable, "-m", "benchmarks.gpu.handover_peer", side, str(self._device)]
        return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True)

    def _tell(self, pair: Pair) -> list[dict[str, Any]]:
        receiver, sender = self._processes
        order = {"transport": pair.transport, "bytes_only": pair.bytes_only}
        _write(receiver, order)
        _write(sender, {**order, **_read(receiver)})
        return [_read(process) for process in (receiver, sender)]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def ucx_log_environment(folder: str | None) -> dict[str, str]:
    """What makes UCX write by which way it moves bytes, to a file in the folder of logs, if there is one. Standard
    output is for the answers."""
    return {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/ucx-%p.log"} if folder else {}


def _write(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Raises ValueError where it has ended."""
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def main() -> None:
    """The section `handover`."""
    arguments = parse(main.__doc__)
    device, rows = torch.device(arguments.device), row_file(arguments, "handover")
    ceilings, shape = read_ceilings(arguments.ceilings), shape_for(device)
    for start, end in (*((0, size) for size in shape.sizes), *shape.ranges):
        name = f"stages, tokens {start} to {end}"
        attempt(rows, name, functools.partial(measure_stages, rows, shape, device, start, end, ceilings))
    attempt(rows, "beside steps", functools.partial(measure_beside_steps, rows, shape, device))
    peers = Peers(device)
    for pair in PAIRS:
        attempt(rows, f"pair, {pair.label}", functools.partial(measure_pair, rows, shape, device, pair, peers))
    peers.close()


if __name__ == "__main__":
    main()
