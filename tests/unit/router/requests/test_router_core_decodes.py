"""The setting of where answers decode, changed while requests run."""

from __future__ import annotations

from disagg.router.config import RouterConfig
from disagg.router.recording.recorded_core import RecordedCore
from disagg.router.requests.events import SetDecodes, Submit, WorkerUp
from tests.support.placing import samples
from tests.support.recordings import GATEWAY_ID, ListSink, file_of, header_of, read, replayed
from tests.support.router import Scenario, routed_request, tokens_update, worker_info

SPEED = samples(base_ms=5.0, prefill_token_ms=0.4, decode_ms=0.5)
ELASTIC = RouterConfig(policy="elastic", tpot_slo_s=0.02, ttft_slo_s=2.0, watermark=0.0, kv_barrier_ms=0.0)


def cluster(config: RouterConfig = ELASTIC) -> Scenario:
    return Scenario(*(worker_info(name, calibration=SPEED) for name in ("w0", "w1")), config=config)


def test_the_setting_changes_and_is_counted_once() -> None:
    it = cluster()
    assert it.core.view(0.0).placement[:3] == ("elastic", "spread", True)
    assert it.handle(SetDecodes("gather")) == []
    assert it.handle(SetDecodes("gather")) == []
    view = it.core.view(0.0)
    assert (view.placement.decodes, view.stats.num_decodes_changes) == ("gather", 1)


def test_a_split_holds_for_the_next_placement() -> None:
    it = cluster()
    assert it.handle(SetDecodes("split:1")) == []
    assert it.submit("r0") == ["dispatch w1 r0/0 -> w0"]
    assert it.handle(SetDecodes("spread")) == []
    assert it.core.view(0.0).stats.num_decodes_changes == 2


def test_a_request_in_flight_stays_where_it_is() -> None:
    it = cluster()
    assert it.submit("r0") == ["dispatch w0 r0/0 alone"]
    assert it.handle(SetDecodes("gather")) == []
    assert it.core.holdings()["sequences"] == 1
    assert it.update("w0", tokens_update("r0", 0, 0, 7)) == ["emit r0 [7]"]


def test_policies_without_the_setting_ignore_it() -> None:
    it = cluster(RouterConfig(policy="joint"))
    it.handle(SetDecodes("gather"))
    view = it.core.view(0.0)
    assert (view.placement.policy, view.placement.decodes, view.stats.num_decodes_changes) == ("joint", None, 0)


def test_a_recording_has_the_change() -> None:
    sink = ListSink()
    core = RecordedCore(ELASTIC, GATEWAY_ID, sink)
    for name in ("w0", "w1"):
        core.handle(WorkerUp(worker_info(name, calibration=SPEED)), 0.0)
    core.handle(SetDecodes("gather"), 1.0)
    core.handle(Submit(routed_request("r0"), 2.0), 2.0)
    _, entries = read(file_of(header_of(ELASTIC), sink.entries))
    assert all(each.is_same for each in replayed(header_of(ELASTIC), entries[:-1]))
    assert [type(getattr(entry, "event", None)).__name__ for entry in entries[:4]] == [
        "WorkerUp",
        "WorkerUp",
        "SetDecodes",
        "Submit",
    ]


def test_a_worker_shows_its_step_times_once_they_are_measured() -> None:
    it = Scenario(worker_info("w0", calibration=SPEED), worker_info("w1"), config=ELASTIC)
    first, second = it.core.view(0.0).workers
    assert second.steps is None
    assert first.steps is not None
    assert [round(value, 3) for value in first.steps] == [5.0, 0.4, 0.0, 0.5, 0.0, 0.0, 0.0]
