"""From a recording of a router's events back to the times that made it. The recordings are of simulated clusters."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from disagg.loadtests.workload.workload import RandomWorkload
from disagg.proto.errors import ConfigError
from disagg.router.requests.events import Command, Event, WorkerReported
from disagg.router.requests.router_core import RouterCore
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.durations.drafts import Drafts
from disagg.simulator.durations.fitted import fit
from disagg.simulator.durations.overheads import Overheads, Sharing
from disagg.simulator.durations.recorded import Trace, calibrate, trace
from disagg.step_times.interface import StepWork
from tests.support.simulation import NO_LOCAL, LinearTimes, cluster_spec, planned

TIMES = LinearTimes(base_s=0.006, token_s=5e-4, decode_s=6e-4, context_s=1e-6)
OVERHEADS = Overheads(message_s=0.001, step_s=0.0003)
SHARING = Sharing(
    prefill_by_prefill=0.08,
    prefill_by_decode=0.05,
    decode_by_prefill=0.06,
    decode_by_decode=0.2,
    update_s=6e-4,
    token_s=3e-4,
)
LENGTHS = RandomWorkload(isl=(16, 700), osl=(32, 200))


def record(
    monkeypatch: pytest.MonkeyPatch,
    rate_per_s: float,
    sharing: Sharing | None,
    pools: dict[str, Any],
    drafts: tuple[float, float] = (1.0, 1.0),
) -> Trace:
    """What the router of a simulated cluster is given, whose workers report these tokens and rows of a step."""
    spec = cluster_spec(**pools, times=TIMES, overheads=OVERHEADS, sharing=sharing, router=NO_LOCAL, jump_s=0.0)
    events: list[tuple[float, Event]] = []
    handle = RouterCore.handle

    def recorded(core: RouterCore, event: Event, now: float) -> list[Command]:
        if isinstance(event, WorkerReported):
            load = replace(event.report.load, tokens_per_step=drafts[0], rows_per_step=drafts[1])
            event = WorkerReported(replace(event.report, load=load))
        events.append((now, event))
        return handle(core, event, now)

    with monkeypatch.context() as patch:
        patch.setattr(RouterCore, "handle", recorded)
        result = SimulatedCluster(spec, planned(LENGTHS, rate_per_s=rate_per_s, num_requests=100)).run()
    assert not result.problems
    return trace(events)


def recordings(monkeypatch: pytest.MonkeyPatch, sharing: Sharing | None) -> list[Trace]:
    return [
        record(monkeypatch, rate_per_s, sharing, pools)
        for pools in ({"prefill": 1, "decode": 1}, {"colocated": 2})
        for rate_per_s in (1.0, 2.0)
    ]


def test_steps_sharing_and_overheads_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, sharing, overheads, drafts = calibrate(recordings(monkeypatch, SHARING), is_one_machine=True)
    assert drafts is None
    assert sharing is not None
    assert msgspec.structs.asdict(sharing) == pytest.approx(msgspec.structs.asdict(SHARING), rel=0.12, abs=2e-5)
    assert overheads.step_s == pytest.approx(OVERHEADS.step_s, rel=0.1)
    assert overheads.message_s == pytest.approx(OVERHEADS.message_s, rel=0.5)
    found = fit(samples)
    for work in (
        StepWork(0, 0, 1, 300),
        StepWork(0, 0, 4, 1600),
        StepWork(512, 131_328, 0, 0),
        StepWork(64, 2080, 0, 0),
    ):
        assert found.step_s(StepWork(*work)) == pytest.approx(TIMES.step_s(StepWork(*work)), rel=0.03)


def test_workers_with_machines_of_their_own_take_nothing_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, sharing, overheads, _ = calibrate(recordings(monkeypatch, None), is_one_machine=False)
    assert sharing is None
    assert overheads.step_s == pytest.approx(OVERHEADS.step_s, rel=0.05)
    for sample in samples:
        work = StepWork(*msgspec.structs.astuple(sample)[1:])
        assert sample.ms == pytest.approx(TIMES.step_s(work) * 1e3, rel=1e-3)


def test_the_drafts_of_a_recording_are_those_of_the_reports_of_workers_that_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = {"prefill": 1, "decode": 1}
    one = record(monkeypatch, 2.0, None, pools, (1.5, 3.0))
    found = calibrate([one, one], is_one_machine=False)
    assert found.drafts == Drafts(tokens_per_step=1.5, rows_per_step=3.0)


def test_a_recording_without_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^recording: 0 measured steps are too few; at least 8 are needed$"):
        calibrate([trace([])], is_one_machine=True)
