"""A recording has everything that the core's decisions depend on, and no token ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest
from typing_extensions import override

from disagg.cli.replay.wording import entry_text
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Adapter, AdapterState, BlocksSnapshot, StepUpdate, TokenLogprobs, TokenOut
from disagg.proto.token_ids import num_token_ids, pack_token_ids
from disagg.router.api import CallDemand, RateCharge, TenantLimits
from disagg.router.config import RouterConfig
from disagg.router.recording.entries import HIDDEN, Admitted, ChargedElsewhere, Handled, decode
from disagg.router.recording.recorded_core import RecordedCore
from disagg.router.requests.events import AdapterRemoved, Command, Dispatch, Event, FromWorker, LimitsChanged, Submit
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.world import gateway as simulated_gateway
from disagg.simulator.world.settings import Fault
from disagg.simulator.world.surroundings import GATEWAY
from tests.support.placing import samples
from tests.support.recordings import GATEWAY_ID, ListSink, file_of, header_of, read, replayed
from tests.support.router import PLAIN, Scenario, end_update, routed_request, tokens_update, worker_info, worker_report
from tests.support.simulation import asked, cluster_spec, simulated

PROMPT = tuple(range(70_000, 70_040))
ANSWER = tuple(range(80_000, 80_020))
STOP = 80_100


class QueriedCore(RecordedCore):
    """Operators look at everything, all the time."""

    @override
    def handle(self, event: Event, now: float) -> list[Command]:
        commands = super().handle(event, now)
        for trace in self.recent(2):
            if trace.placement is not None:
                trace.placement.options()
        self.next_wakeup()
        self.view(now)
        return commands


def recorded(config: RouterConfig = PLAIN) -> tuple[Scenario, ListSink]:
    """A scenario whose core is recorded; no worker is up yet."""
    scenario, sink = Scenario(config=config), ListSink()
    scenario.core = RecordedCore(config, GATEWAY_ID, sink)
    return scenario, sink


def test_a_simulated_run_replays_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lost workers, pairs that are formed late, and another order of sets. The recorded core was looked at all
    the time, which changed nothing."""
    sink = ListSink()

    def make(config: RouterConfig, gateway_id: GatewayId) -> RecordedCore:
        assert gateway_id == GATEWAY
        return QueriedCore(config, gateway_id, sink)

    monkeypatch.setattr(simulated_gateway, "RouterCore", make)
    spec = cluster_spec(
        prefill=3,
        decode=3,
        num_blocks=200,
        router=RouterConfig(warm_pairs=1),
        overheads=Overheads(message_s=0.0005, pair_s=0.01),
        faults=[
            Fault(at_s=0.5, worker_id="decode-1", back_after_s=0.5),
            Fault(at_s=0.8, worker_id="prefill-2", back_after_s=0.5),
        ],
    )
    result = simulated(spec, asked(*[(0.02 * i, 50 + 37 * i % 500, 5 + i % 50) for i in range(200)]))
    assert result.counters["worker_lost"] > 0
    file = tmp_path / "run.events"
    file.write_bytes(file_of(header_of(spec.router, GATEWAY), sink.entries))
    environment = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    command = [sys.executable, "-m", "disagg.cli", "replay", str(file), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["identical"], found["ended"], found["num_events"]) == (True, "stopped", len(sink.entries))
    assert (found["num_requests"], found["outcomes"]) == (200, {"length": 200})
    assert found["num_commands"] > 2000


def test_no_token_id_is_recorded_but_for_stop_ids() -> None:
    scenario, sink = recorded()
    scenario.up("p0")
    scenario.up("d0")
    request = routed_request("r0", PROMPT, max_tokens=30, stop=(STOP,), logprobs=1)
    scenario.start(request, "p0", "d0")
    scenario.submit(msgspec.structs.replace(routed_request("resumed", PROMPT), resumed_token_ids=(5, 6)))
    logprobs = (TokenLogprobs(-0.5, (70_001,), (-0.25,)), TokenLogprobs(-1.0))
    scenario.update("p0", StepUpdate(tokens=(TokenOut(RequestId("r0"), 0, 0, (ANSWER[0], STOP), logprobs),)))
    scenario.update("d0", end_update("r0", 0, "stop"))
    scenario.update("d0", tokens_update("r0", 0, 2, STOP))  # too late: its stop ids are no longer needed
    entries = read(file_of(header_of(PLAIN), sink.entries))[1]
    events = [entry.event for entry in entries if isinstance(entry, Handled)]
    submitted, resumed = (event.request for event in events if isinstance(event, Submit))
    assert resumed.resumed_token_ids == (HIDDEN, HIDDEN)
    assert num_token_ids(submitted.prompt_token_ids) == len(PROMPT)
    assert not any(submitted.prompt_token_ids)
    assert (submitted.block_hashes, submitted.root_hash) == (request.block_hashes, b"")
    hidden = TokenLogprobs(0.0)
    assert [event.update.tokens for event in events if isinstance(event, FromWorker)] == [
        (TokenOut(RequestId("r0"), 0, 0, (HIDDEN, STOP), (hidden, hidden)),),
        (),
        (TokenOut(RequestId("r0"), 0, 2, (HIDDEN,)),),
    ]
    assert bytes(pack_token_ids(PROMPT[:2])) not in b"".join(sink.entries)
    assert [each.is_same for each in replayed(header_of(PLAIN), entries)] == [True] * len(entries)


def test_requests_with_adapters_replay_where_they_were_placed() -> None:
    config = RouterConfig(local_prefill="never", policy="joint")
    scenario, sink = recorded(config)
    for name in ("p0", "p1", "d0", "d1"):
        scenario.up(worker_info(name, calibration=samples(base_ms=5.0, prefill_token_ms=0.1, decode_ms=1.0)))
    loaded = AdapterState(fingerprint="aa", bytes=1000, load_ms=80.0, uses=0)
    scenario.report(worker_report("p1", 0, BlocksSnapshot(hashes=()), adapters=(loaded,)))
    adapter = Adapter(name="sql", path="sql", fingerprint="aa")
    for number in range(4):
        scenario.submit(routed_request(f"r{number}", 500, adapter=adapter))
        scenario.at(0.01 * number)
    assert scenario.dispatched["r0/0"].worker_id == "p1"
    scenario.handle(AdapterRemoved(adapter))
    entries = read(file_of(header_of(config), sink.entries))[1]
    assert [each.is_same for each in replayed(header_of(config), entries)] == [True] * len(entries)
    assert entry_text(entries[-1]) == "the adapter sql is not served any more"


def test_an_answer_is_continued_with_the_hashes_that_were_computed_then() -> None:
    """The replay has no tokens to hash; what it finds in caches and dispatches must be the same."""
    scenario, sink = recorded()
    scenario.up("p0")
    scenario.up("d0")
    scenario.start(routed_request("r0", PROMPT, max_tokens=100), "p0", "d0")
    scenario.up("d1")
    scenario.hand_over("r0", "p0", "d0", ANSWER[0])
    scenario.update("d0", tokens_update("r0", 0, 1, *ANSWER[1:]))
    assert scenario.lost("d0") == ["dispatch p0 r0/1 -> d1"]
    spec = scenario.dispatched["r0/1"].message.spec
    assert len(spec.block_hashes) == (len(PROMPT) + len(ANSWER)) // 16
    header, entries = header_of(PLAIN), [decode(entry) for entry in sink.entries]
    outcomes = replayed(header, entries)
    assert [each.is_same for each in outcomes] == [True] * len(entries)
    (again,) = [command for command in outcomes[-1].commands if isinstance(command, Dispatch)]
    assert again.message.spec.block_hashes == spec.block_hashes
    assert again.message.spec.emitted_token_ids == (HIDDEN,) * len(ANSWER)
    last = entries[-1]
    assert isinstance(last, Handled)
    without = Handled(last.now, last.event, last.num_commands, last.digest)
    assert not replayed(header, [*entries[:-1], without])[-1].is_same
    surplus = Handled(last.now, last.event, last.num_commands, last.digest, last.hashed * 2)
    assert not replayed(header, [*entries[:-1], surplus])[-1].is_same


def test_an_answer_whose_worker_is_lost_after_its_stop_id_ends_in_the_replay_too() -> None:
    scenario, sink = recorded()
    for name in ("p0", "d0"):
        scenario.up(name)
    for request_id, last in (("r0", STOP), ("r1", ANSWER[1])):
        scenario.start(routed_request(request_id, PROMPT, max_tokens=9, stop=(STOP,)), "p0", "d0")
        scenario.hand_over(request_id, "p0", "d0", ANSWER[0])
        scenario.update("d0", tokens_update(request_id, 0, 1, last))
    assert scenario.lost("d0") == ["finish r0 stop 2 cached=0"]
    scenario.up("d1")
    entries = [decode(entry) for entry in sink.entries]
    outcomes = replayed(header_of(PLAIN), entries)
    assert [each.is_same for each in outcomes] == [True] * len(entries)
    assert [type(command).__name__ for command in outcomes[-1].commands] == ["ConnectPair", "Dispatch"]


def test_calls_of_tenants_are_part_of_it() -> None:
    limits = TenantLimits(requests_per_minute=2, is_sole=False)
    scenario, sink = recorded()
    call = CallDemand(tenant="a", limits=limits, num_answers=2, num_tokens=10)
    assert scenario.core.admit(call, 0.0) is None
    scenario.core.refund("a", 5, 1, 0.5)
    assert scenario.core.admit(call, 1.0) is not None
    scenario.handle(LimitsChanged({"a": TenantLimits(requests_per_minute=600)}))
    assert scenario.core.admit(call, 1.0) is None
    entries = [decode(entry) for entry in sink.entries]
    assert [bool(entry.digest) for entry in entries if isinstance(entry, Admitted)] == [False, True, False]
    assert [each.is_same for each in replayed(header_of(PLAIN), entries)] == [True] * 5
    assert [each.is_same for each in replayed(header_of(PLAIN), entries[2:])] == [False]


def test_what_other_models_charged_is_part_of_it() -> None:
    limits = TenantLimits(requests_per_minute=2, is_sole=False)
    scenario, sink = recorded()
    charge = RateCharge(tenant="a", limits=limits, num_answers=2, num_tokens=10)
    scenario.core.charged_elsewhere([charge], 0.0)
    assert scenario.core.admit(CallDemand(tenant="a", limits=limits, num_answers=1, num_tokens=1), 1.0) is not None
    entries = [decode(entry) for entry in sink.entries]
    assert entries[0] == ChargedElsewhere(0.0, (charge,))
    assert [each.is_same for each in replayed(header_of(PLAIN), entries)] == [True] * 2
    assert [each.is_same for each in replayed(header_of(PLAIN), entries[1:])] == [False]
    assert entry_text(entries[0]) == "other models of the gateway charged tenant 'a'"


def test_what_the_core_raised_is_raised_again() -> None:
    scenario, sink = recorded()
    scenario.up("p0")
    scenario.up("d0")
    scenario.submit("r0")
    with pytest.raises(ValueError, match="r0 is in use"):
        scenario.submit("r0")
    scenario.cancel("r0")
    entries = [decode(entry) for entry in sink.entries]
    outcomes = replayed(header_of(PLAIN), entries)
    assert [each.is_same for each in outcomes] == [True] * len(entries)
    assert str(outcomes[3].error) == "request id r0 is in use"


def test_another_decision_is_found_where_it_is_made() -> None:
    scenario, sink = recorded()
    for name in ("p0", "d0", "d1"):
        scenario.up(name)
    scenario.submit("r0")
    scenario.submit("r1")
    entries = [decode(entry) for entry in sink.entries]
    assert len(replayed(header_of(PLAIN), entries)) == len(entries)
    swapped = [*entries[:-2], entries[-1], entries[-2]]
    assert [each.is_same for each in replayed(header_of(PLAIN), swapped)] == [True, True, True, False]


def test_a_configuration_with_integers_replays() -> None:
    """A file has floats where the configuration means floats; a dispatch must have the same number in both."""
    config = RouterConfig(pair_timeout_s=2, local_prefill="never")
    scenario, sink = recorded(config)
    scenario.up("p0")
    scenario.up("d0")
    scenario.submit("r0")
    reader, entries = read(file_of(header_of(config), sink.entries))
    assert [each.is_same for each in replayed(reader.header, entries)] == [True] * 3


def test_what_cannot_be_recorded_ends_the_recording_and_not_the_request() -> None:
    class Failing(ListSink):
        @override
        def fail(self, error: Exception) -> None:
            self.is_open = False

    sink, scenario = Failing(), Scenario()
    scenario.core = RecordedCore(PLAIN, GATEWAY_ID, sink)
    scenario.up("p0")
    scenario.up("d0")
    assert scenario.handle(LimitsChanged(MappingProxyType({}))) == []  # no type of msgpack
    assert not sink.is_open
    assert scenario.submit("r0") == ["dispatch p0 r0/0 -> d0"]
    assert len(sink.entries) == 2
