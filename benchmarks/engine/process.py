"""An engine in a process of its own, on the cores of its configuration, and the tasks that it takes over a pipe.

    python -m benchmarks.engine.process, then lines of JSON:

    in   `WorkerConfig`               out  {"kernels": ...}
    in   one of `Task`, any number    out  its result
    in   the end of the input         the process ends

The parent's side is `Engine`. Between tasks the process waits for input and uses no core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.engine.ceilings import Ceilings, measure
from benchmarks.engine.rig import EngineRig, LoopResult, LoopShape
from disagg.cluster.system.cores import pin_process
from disagg.cluster.system.process_tools import freeze_start, thread_environment
from disagg.engine.config import WorkerConfig
from disagg.kernels import dispatch
from disagg.kernels.cpu import build
from tests.support.reports import REPOSITORY

STOP_TIMEOUT_S = 20.0

T = TypeVar("T")


class CeilingsTask(msgspec.Struct, frozen=True, tag="ceilings"):
    """The ceilings of the engine's cores; answered with `Ceilings`."""


class DecodeTask(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Decode steps by `EngineRig.decode`; answered with a list."""

    batch: int
    context: int
    num_steps: int


class PrefillTask(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """One prompt by `EngineRig.prefill`; answered with one number."""

    num_tokens: int
    num_prompts: int


class LoopTask(msgspec.Struct, frozen=True, kw_only=True, tag="loop"):
    """A closed loop by `EngineRig.closed_loop`; answered with a `LoopResult`."""

    shape: LoopShape


Task = CeilingsTask | DecodeTask | PrefillTask | LoopTask


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The engine is ready."""

    kernels: str
    """What computes, in `dispatch.describe`'s words."""


# ---------------------------------------------------------------- the parent's side


class Engine:
    """The process, seen from its parent. One task at a time; a loop is begun and ended apart, so that several engines
    work at once."""

    def __init__(self, process: subprocess.Popen[bytes], config: WorkerConfig) -> None:
        self._process = process
        self._send(_as_told(config))
        self.kernels = self._receive(Started).kernels

    def decode(self, batch: int, context: int, num_steps: int) -> list[float]:
        """Milliseconds of each step."""
        self._send(DecodeTask(batch=batch, context=context, num_steps=num_steps))
        return self._receive(list[float])

    def prefill(self, num_tokens: int, num_prompts: int = 1) -> float:
        """Milliseconds."""
        self._send(PrefillTask(num_tokens=num_tokens, num_prompts=num_prompts))
        return self._receive(float)

    def ceilings(self) -> Ceilings:
        """Ceilings of the engine's cores, measured now."""
        self._send(CeilingsTask())
        return self._receive(Ceilings)

    def begin_loop(self, shape: LoopShape) -> None:
        """Begin a closed loop, and do not wait for it."""
        self._send(LoopTask(shape=shape))

    def end_loop(self) -> LoopResult:
        """Wait for the loop that was begun."""
        return self._receive(LoopResult)

    def _send(self, message: msgspec.Struct | dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        self._process.stdin.flush()

    def _receive(self, kind: type[T]) -> T:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine's process ended with status {self._process.wait()}")
        return msgspec.json.decode(line, type=kind)


def _as_told(config: WorkerConfig) -> dict[str, object]:
    """The fields that are not as by default: other sources may not know the others."""
    defaults = WorkerConfig(worker_id="", roles=(), model_path="")
    fields = msgspec.structs.asdict(config)
    return {name: value for name, value in fields.items() if value != getattr(defaults, name)}


@contextmanager
def running_engine(config: WorkerConfig, packages: Path | None = None, level: str = "") -> Iterator[Engine]:
    """An engine on the cores of `config`, until the block ends; that of other sources where `packages` is their `src`,
    and as on a processor of a `level`.

    Raises:
        RuntimeError: if the process does not start, or a task fails; the reason is on its stderr.
    """
    command = [sys.executable, "-m", "benchmarks.engine.process"]
    env = {**os.environ, **thread_environment(config.num_threads)}  # as workers have it
    if packages is not None:
        env["PYTHONPATH"] = str(packages)
    if level:
        env[build.LEVEL] = level
    with subprocess.Popen(command, cwd=REPOSITORY, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Engine(process, config)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


# ---------------------------------------------------------------- the process


def _carry_out(rig: EngineRig, task: Task, num_threads: int) -> object:
    match task:
        case CeilingsTask():
            return measure(num_threads)
        case DecodeTask():
            return rig.decode(task.batch, task.context, task.num_steps)
        case PrefillTask():
            return rig.prefill(task.num_tokens, task.num_prompts)
        case LoopTask():
            return rig.closed_loop(task.shape)


def _say(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Obey."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    pin_process(config.cores)
    rig = EngineRig(config)
    freeze_start()  # as workers do
    _say(Started(kernels=dispatch.describe()))
    decoder = msgspec.json.Decoder(Task)
    for line in sys.stdin.buffer:
        _say(_carry_out(rig, decoder.decode(line), config.num_threads))


if __name__ == "__main__":
    main()
