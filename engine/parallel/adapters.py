"""Adapters on the ranks of a worker: each reads its own part, on a thread of its own, before rank 0 says into which
slot it is put.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import get_args

from disagg.engine.adapters.folder import AdapterError, Fault
from disagg.engine.parallel.interfaces import ShardRunner
from disagg.engine.plan import LoadedAdapter
from disagg.engine.rank_messages import Answer, Done, ReadAdapter


class KeptAdapters:
    """What a follower has read and not put into a slot yet: at most one for each of `num_slots` slots, and one that an
    operator has had read, after which rank 0 puts all earlier ones. What was only checked goes when others come.
    `answer` takes answers on any thread."""

    def __init__(self, runner: ShardRunner, answer: Callable[[Answer], None], num_slots: int) -> None:
        self._runner = runner
        self._most = num_slots + 1
        self._answer = answer
        self._kept: dict[str, LoadedAdapter] = {}
        self._lock = threading.Lock()

    def read(self, command: ReadAdapter) -> None:
        """Read an adapter beside whatever this rank computes."""
        threading.Thread(target=self._read, args=(command,), name="adapter", daemon=True).start()

    def take(self, fingerprint: str) -> LoadedAdapter:
        """What was read. Raises `KeyError` for another one, which rank 0 does not ask for."""
        with self._lock:
            return self._kept.pop(fingerprint)

    def _read(self, command: ReadAdapter) -> None:
        try:
            loaded = self._runner.read_adapter(command.adapter)
        except AdapterError as error:
            self._answer(Done(call=command.call, ok=False, error=f"{error.fault}: {error}"))
            return
        except Exception as error:
            self._answer(Done(call=command.call, ok=False, error=f"missing: {type(error).__name__}: {error}"))
            return
        with self._lock:
            self._kept.pop(loaded.fingerprint, None)
            self._kept[loaded.fingerprint] = loaded
            if len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
        self._answer(Done(call=command.call, ok=True))


def rank_fault(rank: int, error: str) -> AdapterError:
    """The error of a rank that could not read an adapter."""
    name, _, detail = error.partition(": ")
    fault: Fault = name if name in get_args(Fault) else "missing"  # type: ignore[assignment]  # it is one of them
    return AdapterError(fault, f"rank {rank}: {detail or error}")
