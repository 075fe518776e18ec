"""A prompt whose KV another worker has is dispatched with a fetch, and what came of it counts in later placements."""

from __future__ import annotations

import msgspec
import pytest

from disagg.proto.ids import WorkerId
from disagg.proto.messages import BlocksSnapshot, FetchFrom, FetchOutcome, StepSample, StepUpdate, WorkerInfo
from disagg.router.config import RouterConfig
from disagg.router.placement.forecast import prefill_ms
from disagg.router.recording.entries import Entry, Handled, decode
from disagg.router.recording.recorded_core import RecordedCore
from disagg.router.requests.events import FromWorker
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.fetch_links import FAILED_S, REFUSED_S
from tests.support.recordings import GATEWAY_ID, ListSink, header_of, replayed
from tests.support.router import (
    EMPTY,
    Scenario,
    end_update,
    fetched_update,
    routed_request,
    tokens_update,
    worker_info,
    worker_report,
)

CONFIG = RouterConfig(local_prefill="never", policy="joint", migrations=0)
STEPS = (StepSample(1.0 + 128 * 0.5, 128), StepSample(1.0 + 16 * 0.5, 16))
"""Half a millisecond a token."""
REQUEST = routed_request("r0", 600)


def worker(name: str) -> WorkerInfo:
    return msgspec.structs.replace(worker_info(name, calibration=STEPS), fetches=True)


def cluster(*names: str) -> Scenario:
    """Of the prompt of `REQUEST` d0 has the first 32 blocks."""
    scenario = Scenario(*(worker(name) for name in names), config=CONFIG)
    scenario.holds("d0", REQUEST, 32)
    return scenario


def fetch_of(scenario: Scenario, attempt: str) -> FetchFrom | None:
    return scenario.dispatched[attempt].message.fetch


def test_the_dispatch_names_the_source_and_d_stays_who_has_the_prefix() -> None:
    scenario = cluster("p0", "d0", "d1")
    assert scenario.submit(REQUEST) == ["dispatch p0 r0/0 -> d0"]
    fetch = fetch_of(scenario, "r0/0")
    assert fetch is not None
    assert (fetch.peer.worker_id, fetch.peer.address, fetch.end_token) == ("d0", "d0:1", 512)
    p0 = scenario.core._fleet.worker(WorkerId("p0"))
    assert fetch.timeout_ms == prefill_ms(p0, 0, 600) - prefill_ms(p0, 512, 600)


def test_without_a_holder_nothing_is_fetched() -> None:
    scenario = Scenario(worker("p0"), worker("d0"), config=CONFIG)
    scenario.start(REQUEST, "p0", "d0")
    assert fetch_of(scenario, "r0/0") is None


def test_what_came_is_kept_with_the_trace() -> None:
    scenario = cluster("p0", "d0")
    scenario.start(REQUEST, "p0", "d0")
    update = fetched_update("r0", "d0", "done", tokens=512, kv_bytes=32768, transfer_s=0.06)
    assert scenario.update("p0", update) == []
    trace = scenario.core.trace(REQUEST.request_id)
    assert trace is not None
    assert trace.marks[0].fetched == update.fetched[0]
    assert scenario.core.counters.total() == 0


@pytest.mark.parametrize(("outcome", "pause_s"), [("refused", REFUSED_S), ("failed", FAILED_S), ("late", REFUSED_S)])
def test_a_source_that_did_not_send_is_not_asked_again_for_a_while(outcome: FetchOutcome, pause_s: float) -> None:
    scenario = Scenario(worker("p0"), worker("d0"), config=CONFIG)
    requests = [routed_request(f"r{number}", 600) for number in range(4)]
    held = tuple(block for request in requests for block in request.block_hashes[:32])
    scenario.report(worker_report("d0", 0, BlocksSnapshot(hashes=held)))
    asked = []
    for request, now in zip(requests, (0.0, 0.0, pause_s - 0.01, pause_s), strict=True):
        scenario.now = now
        scenario.start(request, "p0", "d0")
        asked.append(fetch_of(scenario, f"{request.request_id}/0") is not None)
        if now == 0.0 and asked[-1]:
            scenario.update("p0", fetched_update(request.request_id, "d0", outcome))
        scenario.cancel(request.request_id)
    assert asked == [True, False, False, True]


@pytest.mark.parametrize(
    ("outcome", "kv_bytes", "transfer_s", "observed"),
    [("done", 32768, 0.3, (32768, 250.0)), ("done", 32768, 0.01, (32768, 0.0)), ("late", 0, 0.0, (32768, 1.016384)),
     ("late", 4096, 0.3, (32768, 250.0)), ("refused", 0, 0.3, None), ("failed", 4096, 0.3, None)],
)  # fmt: skip
def test_a_transfer_is_observed_without_what_came_before_it(
    outcome: FetchOutcome, kv_bytes: int, transfer_s: float, observed: tuple[int, float] | None
) -> None:
    """The connection is formed in 50 ms. One that is late would have taken at least as long as predicted."""
    scenario = cluster("p0", "d0")
    scenario.start(REQUEST, "p0", "d0")
    scenario.now = 0.5
    scenario.update("p0", fetched_update("r0", "d0", outcome, kv_bytes=kv_bytes, transfer_s=transfer_s))
    links = LinkModel()
    assert scenario.core._fleet.fetch_links._has_observed == (observed is not None)
    if observed is not None:
        links.placed(WorkerId("d0"), WorkerId("p0"), 0.0)
        links.observe(WorkerId("d0"), WorkerId("p0"), observed[0], observed[1], 0.5)
        found = scenario.core._fleet.fetch_links._links.exposed_ms(WorkerId("d0"), WorkerId("p0"), 1 << 20)
        assert found == pytest.approx(links.exposed_ms(WorkerId("d0"), WorkerId("p0"), 1 << 20))


def test_a_message_that_is_not_of_this_fetch_is_counted_and_dropped() -> None:
    scenario = cluster("p0", "d0", "d1")
    scenario.start(REQUEST, "p0", "d0")
    for sender, source in (("d0", "d0"), ("p0", "d1")):
        scenario.update(sender, fetched_update("r0", source, "failed"))
    assert scenario.core.counters["wrong_worker"] == 2
    scenario.update("p0", fetched_update("r0", "d0", "done"))
    scenario.update("p0", fetched_update("r0", "d0", "done"))  # a second time
    assert scenario.core.counters["wrong_worker"] == 3
    scenario.update("p0", fetched_update("other", "d0", "done"))
    assert scenario.core.counters["unknown_request"] == 1


def test_the_answer_comes_whatever_became_of_the_fetch() -> None:
    scenario = cluster("p0", "d0")
    scenario.start(REQUEST, "p0", "d0")
    scenario.update("p0", fetched_update("r0", "d0", "failed"))
    scenario.hand_over("r0", "p0", "d0", 7)
    assert scenario.update("d0", tokens_update("r0", 0, 1, 8), end_update("r0", 0, "length")) == [
        "emit r0 [8]",
        "finish r0 length 2 cached=0",
    ]
    assert scenario.core.holdings() == EMPTY


def test_a_recording_with_fetches_replays() -> None:
    scenario, sink = Scenario(config=CONFIG), ListSink()
    scenario.core = RecordedCore(CONFIG, GATEWAY_ID, sink)
    for name in ("p0", "d0"):
        scenario.up(worker(name))
    other = routed_request("r1", 600)
    held = BlocksSnapshot(hashes=REQUEST.block_hashes[:32] + other.block_hashes[:32])
    scenario.report(worker_report("d0", 0, held))
    scenario.start(REQUEST, "p0", "d0")
    assert fetch_of(scenario, "r0/0") is not None
    scenario.update("p0", fetched_update("r0", "d0", "done", tokens=512, kv_bytes=32768, transfer_s=0.2))
    scenario.cancel("r0")
    scenario.start(other, "p0", "d0")
    assert fetch_of(scenario, "r1/0") is not None
    entries = [decode(entry) for entry in sink.entries]
    assert [each.is_same for each in replayed(header_of(CONFIG), entries)] == [True] * len(entries)
    changed = [_with_refusal(entry) for entry in entries]
    assert not all(each.is_same for each in replayed(header_of(CONFIG), changed))


def _with_refusal(entry: Entry) -> Entry:
    if not (isinstance(entry, Handled) and isinstance(entry.event, FromWorker) and entry.event.update.fetched):
        return entry
    (message,) = entry.event.update.fetched
    update = StepUpdate(fetched=(msgspec.structs.replace(message, outcome="refused"),))
    event = FromWorker(entry.event.worker_id, entry.event.incarnation, update)
    return msgspec.structs.replace(entry, event=event)
