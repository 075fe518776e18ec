"""Lines follow the models that a gateway serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from disagg.proto.messages import Load
from disagg.router.api import ClusterView, WorkerView
from disagg.router.gateway.batches.lines import NO_MODEL
from disagg.router.gateway.batches.room import Room
from disagg.router.gateway.batches.service import BatchService
from disagg.router.gateway.config import BatchOptions
from tests.support.router import worker_info


def _view(num_places: int) -> ClusterView:
    info = msgspec.structs.replace(worker_info("w"), roles=("prefill", "decode"), max_num_seqs=num_places)
    return ClusterView((WorkerView(info, Load()),), 0, 0)


def test_models_that_come_have_room_of_their_own_and_lines_for_those_that_go_end_at_once(tmp_path: Path) -> None:
    views: dict[str, Callable[[], ClusterView]] = {"b": lambda: _view(20), "a": lambda: _view(30)}
    options = BatchOptions(folder=str(tmp_path), max_running=100)
    service = BatchService(options, "gateway", "1", views, wakes_workers=False, ttft_s=None, tpot_s=None)
    assert service.models() == ["b", "a"]
    assert [service.room(model, 0, 90).num_answers for model in (0, 1, NO_MODEL)] == [10, 10, 10]
    del views["b"]
    views["new"] = lambda: _view(40)
    assert service.models() == ["b", "a", "new"]
    assert service.room(0, 3, 5) == Room(95, 95)  # ends at once, with the error of a model that is not served
    assert [service.room(model, 0, 0).num_answers for model in (1, 2)] == [27, 36]
    views["b"] = lambda: _view(10)
    assert service.models() == ["b", "a", "new"]
    assert service.room(0, 0, 0).num_answers == 9
    assert service.room(NO_MODEL, 0, 101) == Room(0, 0)
    service.close()
