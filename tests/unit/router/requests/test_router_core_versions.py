"""Workers of two versions of a model at once: no pair is mixed, and an answer ends with the version it began with. And
another configuration for a router that runs."""

from __future__ import annotations

import msgspec

from disagg.proto.ids import RequestId
from disagg.proto.messages import WorkerInfo
from disagg.router.api import RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.placement.placement import version_of
from disagg.router.recording.recorded_core import RecordedCore
from disagg.router.requests.events import ConfigChanged, Submit, WorkerUp
from tests.support.recordings import GATEWAY_ID, ListSink, file_of, header_of, read, replayed
from tests.support.router import Scenario, end_update, routed_request, tokens_update, worker_info

CONFIG = RouterConfig(policy="round_robin", watermark=0.0)
GRACE_S = CONFIG.no_worker_grace_s


def of(version: str, name: str) -> WorkerInfo:
    return msgspec.structs.replace(worker_info(name), fingerprint=version)


def both_versions() -> Scenario:
    return Scenario(of("1", "p0"), of("1", "d0"), of("2", "p1"), of("2", "d1"), config=CONFIG)


def placed(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("dispatch")]
    return line


def test_no_pair_is_made_of_two_versions() -> None:
    it = both_versions()
    lines = [placed(it.submit(f"r{number}")) for number in range(8)]
    pairs = {(line.split()[1], line.split()[4]) for line in lines}
    assert pairs == {("p0", "d0"), ("p1", "d1")}
    assert not it.core._fleet.forms_pair("p0", "d1")  # type: ignore[arg-type]


def test_a_prefill_worker_whose_version_has_no_decode_worker_gets_nothing() -> None:
    it = Scenario(of("1", "p0"), of("1", "d0"), of("2", "p1"), config=CONFIG)
    assert {placed(it.submit(f"r{number}")) for number in range(4)} == {
        f"dispatch p0 r{number}/0 -> d0" for number in range(4)
    }


def test_an_answer_goes_on_with_its_own_version_only() -> None:
    it = both_versions()
    it.up(of("1", "d2"))
    it.start(routed_request("r0"), "p0", "d0")
    it.update("p0", tokens_update("r0", 0, 0, 7))
    lines = it.lost("d0")
    assert placed(lines) == "dispatch p0 r0/1 -> d2"
    it.update("p0", end_update("r0", 1, "refused"))
    it.lost("d2")
    it.lost("p0")
    assert not any(line.startswith("dispatch") for line in it.at(it.now + GRACE_S - 0.1))
    assert it.at(it.now + 0.2) == ["fail r0 UnavailableError no_version_capacity"]
    assert it.core.holdings()["requests"] == 0


def test_an_answer_waits_for_a_worker_of_its_version() -> None:
    it = both_versions()
    it.start(routed_request("r0"), "p0", "d0")
    it.update("p0", tokens_update("r0", 0, 0, 7))
    it.lost("p0")
    it.lost("d0")
    it.now += 1.0
    it.up(of("1", "p0"))
    assert placed(it.up(of("1", "d0"))) == "dispatch p0 r0/2 -> d0", "d0 alone was the first retry"


def test_a_request_without_a_token_goes_on_with_any_version() -> None:
    it = both_versions()
    it.start(routed_request("r0"), "p0", "d0")
    assert placed(it.lost("p0")) == "dispatch p1 r0/1 -> d1"


def test_another_policy_places_what_comes_next() -> None:
    it = Scenario(of("1", "p0"), of("1", "d0"), of("1", "d1"), config=CONFIG)
    it.start(routed_request("r0"), "p0", "d0")
    assert it.handle(ConfigChanged(msgspec.structs.replace(CONFIG, policy="least_loaded", ttft_slo_s=9.0))) == []
    view = it.core.view(it.now)
    assert view.placement.policy == "least_loaded"
    assert it.core.holdings()["requests"] == 1
    assert [placed(it.submit(f"r{number}")).split()[4] for number in (1, 2)] == ["d1", "d0"]
    trace = it.core.trace(routed_request("r1").request_id)
    assert trace is not None
    assert trace.ttft_slo_s == 9.0
    assert it.core.check_integrity() == []


def test_the_same_configuration_changes_nothing() -> None:
    it = Scenario(of("1", "p0"), of("1", "d0"), config=CONFIG)
    policy = it.core._policy
    assert it.handle(ConfigChanged(CONFIG)) == []
    assert it.core._policy is policy


def test_a_recording_has_the_configuration() -> None:
    sink = ListSink()
    core = RecordedCore(CONFIG, GATEWAY_ID, sink)
    for name in ("p0", "d0"):
        core.handle(WorkerUp(worker_info(name)), 0.0)
    core.handle(ConfigChanged(msgspec.structs.replace(CONFIG, policy="joint", max_queued=5)), 1.0)
    core.handle(Submit(routed_request("r0"), 2.0), 2.0)
    _, entries = read(file_of(header_of(CONFIG), sink.entries))
    assert all(each.is_same for each in replayed(header_of(CONFIG), entries[:-1]))
    assert type(getattr(entries[2], "event", None)).__name__ == "ConfigChanged"


def resumed(name: str, version: str) -> RoutedRequest:
    """An answer of which a client has two tokens, made by that version."""
    return msgspec.structs.replace(routed_request(name, max_tokens=8), resumed_token_ids=(7, 8), model_version=version)


def test_a_resumed_answer_goes_to_workers_of_its_version_only() -> None:
    it = both_versions()
    version = version_of(of("2", "p1"))
    lines = [placed(it.submit(resumed(f"r{number}", version))) for number in range(4)]
    assert {(line.split()[1], line.split()[4]) for line in lines} == {("p1", "d1")}
    assert it.core.trace(RequestId("r0")).model_version == version  # type: ignore[union-attr]


def test_a_resumed_answer_whose_version_is_gone_is_refused() -> None:
    it = both_versions()
    assert it.submit(resumed("r0", version_of(of("3", "p0")))) == []
    assert it.at(it.now + GRACE_S - 0.1) == []
    assert it.at(it.now + 0.2) == ["fail r0 UnavailableError no_version_capacity"]
    assert it.core.holdings()["requests"] == 0
