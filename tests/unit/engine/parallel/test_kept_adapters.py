"""Adapters that a follower keeps between a read and its slot: as many as rank 0 may still ask for, and no more."""

from __future__ import annotations

import queue
from typing import Any, cast

import pytest

from disagg.engine.parallel.adapters import KeptAdapters
from disagg.engine.parallel.interfaces import ShardRunner
from disagg.engine.plan import LoadedAdapter
from disagg.engine.rank_messages import Answer, Done, ReadAdapter
from disagg.proto.messages import Adapter

ANSWER_S = 60.0


class _Runner:
    """Reads any adapter."""

    def read_adapter(self, adapter: Adapter) -> LoadedAdapter:
        return LoadedAdapter(fingerprint=adapter.fingerprint, num_bytes=1)


def test_what_an_operator_had_checked_goes_first() -> None:
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    kept = KeptAdapters(cast(ShardRunner, cast(Any, _Runner())), answers.put, num_slots=2)
    for call, name in enumerate(("checked", "first", "second", "asked")):
        kept.read(ReadAdapter(call=call, adapter=Adapter(name=name, path=name, fingerprint=name)))
        assert answers.get(timeout=ANSWER_S) == Done(call=call, ok=True)
    for name in ("first", "second", "asked"):
        assert kept.take(name).fingerprint == name
    with pytest.raises(KeyError):
        kept.take("checked")
