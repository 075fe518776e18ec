"""The worker processes of one shape of a cluster, forked from a template that has torch and the weights: any of them
can be killed and started again, and slowed down while something is done to its sequences.

Two prefill and two decode workers; `plain-0` has both roles, and computes each forced token in a step of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disagg.cluster.hosts.processes import DEFAULT_LOGGING, WORKER_MODULE, Child, start_child, stop_children
from disagg.cluster.system.process_tools import thread_environment
from disagg.cluster.templates.templates import Templates
from disagg.engine.config import KvCacheDtype, SpeculationOptions, TransferLimits, WorkerConfig
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE, PAUSE_VARIABLE
from disagg.proto.messages import RoleName, WorkerInfo
from tests.support.registry import Registry
from tests.support.secret import SECRET
from tests.support.waiting import LONG_WAIT_S

PREFILLS, DECODES, PLAIN = ("prefill-0", "prefill-1"), ("decode-0", "decode-1"), "plain-0"
NUM_DECODE_BLOCKS = 96
CHUNK_TOKENS, RESERVE_TOKENS = 64, 16
REPORT_IDLE_S = 0.05
_TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
_SLOW_MS = {"prefill": 2000, "decode": 40, "plain": 0}
"""How long each step waits: of decode workers always, so that answers last for what is done to them meanwhile, also on
a busy machine, one of many rows takes no longer than one of few, and drafts are worth their rows; of prefill workers
while one is to be killed in its step."""


def worker_config(name: str, folder: Path, tp: int = 1, kv: KvCacheDtype = "auto") -> WorkerConfig:
    """Chunks and messages so small that most prompts are computed and moved in several."""
    kind = name.partition("-")[0]
    roles: dict[str, tuple[RoleName, ...]] = {"plain": ("prefill", "decode"), "prefill": ("prefill",)}
    options: dict[str, Any] = {"num_blocks": NUM_DECODE_BLOCKS if kind == "decode" else 512}
    return WorkerConfig(
        worker_id=name,
        roles=roles.get(kind, ("decode",)),
        model_path=str(folder),
        dtype="float32",
        kv_cache_dtype=kv,
        tp=tp,
        transport="shm",
        max_model_len=1500,
        token_budget=CHUNK_TOKENS,
        decode_reserve_tokens=RESERVE_TOKENS,
        report_idle_s=REPORT_IDLE_S,
        skip_forced=kind != "plain",
        speculation=SpeculationOptions(method="off" if kind == "plain" else "lookup"),
        failpoints=True,
        transfer=TransferLimits(chunk_bytes=40 * _TOKEN_BYTES, staging_bytes=120 * _TOKEN_BYTES, heartbeat_s=0.1),
        **options,
    )


class Fleet:
    """Owner of the processes; see `running_fleet`."""

    def __init__(self, configs: Sequence[WorkerConfig], logs: Path, templates: Templates, registry: Registry) -> None:
        self._configs = {config.worker_id: config for config in configs}
        self._logs = logs
        self._templates = templates
        self._registry = registry
        self.children: list[Child] = []
        self.infos: dict[str, WorkerInfo] = {}
        self._killed: list[str] = []
        for kind in ("prefill", "plain"):
            self.quicken(kind)

    def start(self) -> None:
        """Start all workers that do not run; returns when they listen."""
        names, self._killed = self._killed if self.infos else list(self._configs), []
        self.quicken("decode")  # while it measures its steps
        for name in names:
            kind = name.partition("-")[0]
            self._registry.forget(name)
            environment = {
                **thread_environment(1),
                FAILPOINTS_VARIABLE: f"engine.step=hang(ms={_SLOW_MS[kind]})",
                PAUSE_VARIABLE: str(self._pause_file(kind)),
            }
            self.children.append(
                start_child(
                    name,
                    WORKER_MODULE,
                    self._configs[name],
                    self._registry.address,
                    SECRET,
                    self._logs,
                    environment,
                    self._templates,
                )
            )
        self.infos |= zip(names, self._registry.wait(names, LONG_WAIT_S), strict=True)
        self.slow_down("decode")

    def kill(self, name: str) -> None:
        """End a worker without a word; `start` starts it again."""
        self._killed.append(name)
        os.kill(self.infos[name].pid, signal.SIGKILL)

    def running(self) -> list[WorkerInfo]:
        """The workers that were not killed."""
        return [info for name, info in self.infos.items() if name not in self._killed]

    def slow_down(self, kind: str) -> None:
        """Have every step of `prefill` or `decode` wait."""
        self._pause_file(kind).unlink()

    def quicken(self, kind: str) -> None:
        """End that."""
        self._pause_file(kind).touch()

    def _pause_file(self, kind: str) -> Path:
        return self._logs / f"{kind}.quick"


@contextmanager
def running_fleet(configs: Sequence[WorkerConfig], logs: Path, templates: Templates) -> Iterator[Fleet]:
    """Workers of these configurations; those that were not killed must end by themselves, and none may log a bug."""
    with Registry() as registry:
        fleet = Fleet(configs, logs, templates, registry)
        try:
            fleet.start()
            yield fleet
        finally:
            killed = stop_children(fleet.children)
            logged = {child.log for child in fleet.children}
            problems = [line for log in logged for line in log.read_text().splitlines() if "Traceback" in line]
    assert not killed
    assert not problems


@contextmanager
def template_of(folder: Path, logs: Path) -> Iterator[Templates]:
    """The template of all workers of a checkpoint."""
    templates = Templates(logs, DEFAULT_LOGGING)
    try:
        templates.prepare(worker_config(PLAIN, folder))
        yield templates
    finally:
        templates.close()


def ranks_of(shape: str) -> dict[str, int]:
    """Worker -> ranks, for a level of the factor `ranks`."""
    prefill, decode = map(int, shape.split("-"))
    return dict.fromkeys(PREFILLS, prefill) | dict.fromkeys(DECODES, decode)
