"""Random schedules: the core against a world of workers whose streams, faults and incarnations hypothesis drives.

Every worker has its own stream of updates, delivered whenever, so that tokens of P and D overtake each other. What must
hold: no token is lost, doubled or made up; every request ends exactly once; a worker that is given up on is told;
a draining one gets nothing new; nothing is held when all is over. And a recording of it all, which has no token ids,
replays to the same commands.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.proto.errors import DeadlineError, RequestCancelledError
from disagg.proto.ids import AttemptKey, Incarnation, RequestId, WorkerId
from disagg.proto.messages import SequenceSpec, StepUpdate
from disagg.router.api import NO_LIMITS, TenantLimits, TokenBatch
from disagg.router.config import RouterConfig
from disagg.router.recording.entries import decode
from disagg.router.recording.recorded_core import RecordedCore
from disagg.router.requests.events import (
    CancelMigration,
    CancelOn,
    CancelRequest,
    Command,
    ConnectPair,
    Dispatch,
    DrainWorker,
    Emit,
    Event,
    Fail,
    Finish,
    FromWorker,
    Migrate,
    ResumeWorker,
    Submit,
    Tick,
    WorkerIsDrained,
    WorkerLost,
    WorkerRecovered,
    WorkerReported,
    WorkerSuspected,
    WorkerUp,
)
from tests.support.recordings import GATEWAY_ID, ListSink, header_of, replayed
from tests.support.router import (
    EMPTY,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    stayed_update,
    tokens_update,
    worker_info,
    worker_report,
)

LIMITS = {
    "": NO_LIMITS,
    "a": TenantLimits(is_sole=False),
    "b": TenantLimits(is_sole=False, weight=2.0, tokens_per_minute=2000),
    "capped": TenantLimits(is_sole=False, running=1, queued=2),
}
NAMES = ("p0", "p1", "d0", "d1", "c0")
STOP = 5


def true_token(request_id: str, index: int, length: int, stops: bool) -> int:
    return STOP if stops and index == length - 1 else 100 + 1000 * int(request_id[1:]) + index


@dataclass
class Part:
    """An attempt on one worker."""

    spec: SequenceSpec
    peer: str | None
    peer_incarnation: str
    phase: str
    """prefill, transfer, decode"""
    next_index: int
    moves_to: tuple[str, str] | None = None
    """A worker and its incarnation."""


@dataclass
class FakeWorker:
    incarnation: int = 0
    is_up: bool = False
    is_draining: bool = False
    is_drained: bool = False
    is_suspected: bool = False
    stream: deque[StepUpdate] = field(default_factory=deque)
    parts: dict[AttemptKey, Part] = field(default_factory=dict)


@dataclass
class Client:
    length: int
    stops: bool
    deadline: float | None
    tokens: list[int] = field(default_factory=list)
    end: str = ""


class RouterMachine(RuleBasedStateMachine):
    config = RouterConfig(max_refusals=4, max_queued=12)

    def __init__(self) -> None:
        super().__init__()
        self.sink = ListSink()
        self.core = RecordedCore(self.config, GATEWAY_ID, self.sink)
        self.now = 0.0
        self.workers = {name: FakeWorker() for name in NAMES}
        self.clients: dict[str, Client] = {}
        self.num_moves = 0
        self.ghosts: deque[tuple[str, int, StepUpdate]] = deque()
        """What lost incarnations still wanted to say."""
        for name in ("p0", "p1", "d0", "d1"):
            self.come_up(name)

    # ------------------------------------------------------------ the world

    def handle(self, event: Event) -> None:
        for command in self.core.handle(event, self.now):
            self.carry_out(command)
        assert self.core.check_integrity() == []

    def carry_out(self, command: Command) -> None:
        match command:
            case Dispatch(worker_id=worker_id, message=message):
                worker, spec = self.workers[worker_id], message.spec
                client = self.clients[spec.request_id]
                assert worker.is_up
                assert not client.end
                assert len(client.tokens) < client.length
                assert list(spec.emitted_token_ids) == client.tokens
                assert len(spec.block_hashes) == spec.num_known_tokens // 16
                peer = message.decode_peer
                assert (peer is None) == (worker_id[0] != "p")
                assert peer is None or peer.incarnation == str(self.workers[peer.worker_id].incarnation)
                used = [worker] if peer is None else [worker, self.workers[peer.worker_id]]
                assert not any(each.is_draining or each.is_suspected for each in used)
                part = Part(
                    spec,
                    peer.worker_id if peer else None,
                    peer.incarnation if peer else "",
                    "prefill",
                    len(spec.emitted_token_ids),
                )
                worker.parts[spec.key] = part
            case Migrate(worker_id=worker_id, message=message):
                worker, peer = self.workers[worker_id], message.decode_peer
                target = self.workers[peer.worker_id]
                assert worker.is_up
                assert worker.is_draining
                assert target.is_up
                assert not target.is_draining
                assert not target.is_suspected
                assert peer.incarnation == str(target.incarnation)
                key = AttemptKey(message.request_id, message.attempt)
                if (moving := worker.parts.get(key)) is not None:  # else its end is on its way
                    assert moving.phase == "decode"
                    assert moving.moves_to is None
                    moving.moves_to = (peer.worker_id, peer.incarnation)
                    self.num_moves += 1
            case CancelMigration(worker_id=worker_id, key=key):
                self.stay(worker_id, key)
            case CancelOn(worker_id=worker_id, key=key):
                assert self.workers[worker_id].is_up
                self.workers[worker_id].parts.pop(key, None)
            case Emit(request_id=request_id, batch=TokenBatch(token_ids)):
                client = self.clients[request_id]
                assert not client.end
                client.tokens.extend(token_ids)
            case Finish(request_id=request_id, completion=completion):
                client = self.clients[request_id]
                assert completion.reason == ("stop" if client.stops else "length")
                assert completion.num_output_tokens == len(client.tokens) == client.length
                self.end(request_id, "answered")
            case Fail(request_id=request_id, error=error):
                client = self.clients[request_id]
                if isinstance(error, DeadlineError):
                    assert client.deadline is not None
                    assert client.deadline <= self.now
                self.end(request_id, type(error).__name__)
            case ConnectPair(prefill_id=prefill_id, decode_peer=peer):
                assert self.workers[prefill_id].is_up
                assert peer.incarnation == str(self.workers[peer.worker_id].incarnation)
            case WorkerIsDrained(worker_id=worker_id, incarnation=incarnation):
                worker = self.workers[worker_id]
                assert worker.is_draining
                assert not worker.is_drained
                assert str(worker.incarnation) == incarnation
                assert not worker.parts
                worker.is_drained = True
            case _:
                raise AssertionError(command)

    def end(self, request_id: str, how: str) -> None:
        client = self.clients[request_id]
        assert not client.end, f"{request_id} ended twice"
        client.end = how

    def say(self, name: str, *updates: StepUpdate) -> None:
        for update in updates:
            self.workers[name].stream.append(update)

    def advance(self, name: str, key: AttemptKey, num_tokens: int = 1) -> None:
        """The worker does its next step for an attempt."""
        worker = self.workers[name]
        part = worker.parts[key]
        match part.phase:
            case "prefill":
                self.say(name, prefilled_update(*key))
                self.generate(name, part, 1)
                if key in worker.parts:
                    part.phase = "transfer" if part.peer else "decode"
            case "transfer":
                self.commit(name, part)
            case "decode":
                self.generate(name, part, num_tokens)

    def generate(self, name: str, part: Part, num_tokens: int) -> None:
        request_id, attempt = part.spec.key
        client = self.clients[request_id]
        end = min(client.length, part.next_index + num_tokens)
        ids = [true_token(request_id, index, client.length, client.stops) for index in range(part.next_index, end)]
        self.say(name, tokens_update(request_id, attempt, part.next_index, *ids))
        part.next_index = end
        if end == client.length:
            self.say(name, end_update(request_id, attempt, "stop" if client.stops else "length"))
            del self.workers[name].parts[part.spec.key]

    def commit(self, name: str, part: Part) -> None:
        request_id, attempt = part.spec.key
        del self.workers[name].parts[part.spec.key]
        assert part.peer is not None
        decode = self.workers[part.peer]
        if not decode.is_up or str(decode.incarnation) != part.peer_incarnation:
            self.say(name, end_update(request_id, attempt, "failed"))
            return
        index = part.next_index - 1
        client = self.clients[request_id]
        token = true_token(request_id, index, client.length, client.stops)
        self.say(part.peer, handed_over_update(request_id, attempt), tokens_update(request_id, attempt, index, token))
        decode.parts[part.spec.key] = Part(part.spec, None, "", "decode", part.next_index)

    def stay(self, name: str, key: AttemptKey, *, refused: bool = False) -> None:
        part = self.workers[name].parts.get(key)
        if part is not None and part.moves_to is not None:
            part.moves_to = None
            self.say(name, stayed_update(*key, refused=refused))

    def arrive(self, name: str, key: AttemptKey, *, is_acknowledged: bool = True) -> None:
        """The target has the sequence, and its acknowledgement reaches the source, or not."""
        part = self.workers[name].parts[key]
        assert part.moves_to is not None
        target_name, incarnation = part.moves_to
        target = self.workers[target_name]
        if not target.is_up or str(target.incarnation) != incarnation:
            self.stay(name, key)
            return
        request_id, attempt = key
        client, index = self.clients[request_id], part.next_index - 1
        token = true_token(request_id, index, client.length, client.stops)
        del self.workers[name].parts[key]
        if (WorkerId(target_name), key) in set(self.core._fleet.assignments.entries()):
            said = handed_over_update(request_id, attempt), tokens_update(request_id, attempt, index, token)
            self.say(target_name, *said)
            target.parts[key] = Part(part.spec, None, "", "decode", part.next_index)
        self.say(name, end_update(request_id, attempt, "moved" if is_acknowledged else "failed"))

    def moving(self) -> list[tuple[str, AttemptKey]]:
        return [(name, key) for name, key in self.parts() if self.workers[name].parts[key].moves_to is not None]

    def parts(self) -> list[tuple[str, AttemptKey]]:
        return [(name, key) for name in NAMES for key in self.workers[name].parts]

    def speaking(self) -> list[str]:
        return [name for name in NAMES if self.workers[name].is_up and self.workers[name].stream]

    def deliver_from(self, name: str) -> None:
        worker = self.workers[name]
        self.handle(FromWorker(WorkerId(name), Incarnation(str(worker.incarnation)), worker.stream.popleft()))

    def come_up(self, name: str) -> None:
        worker = self.workers[name]
        worker.incarnation += 1
        worker.is_up = True
        worker.is_draining = worker.is_drained = worker.is_suspected = False
        self.handle(WorkerUp(worker_info(name, incarnation=str(worker.incarnation), token_budget=64, max_num_seqs=3)))

    # ------------------------------------------------------------ rules

    @rule(
        prompt=st.integers(1, 120),
        length=st.integers(1, 6),
        stops=st.booleans(),
        patience=st.sampled_from([None, None, 0.3, 2.0]),
        priority=st.sampled_from([0, 0, 1]),
        tenant=st.sampled_from(["", "a", "b", "capped"]),
    )
    def submit(self, prompt: int, length: int, stops: bool, patience: float | None, priority: int, tenant: str) -> None:
        request_id = f"r{len(self.clients)}"
        deadline = None if patience is None else self.now + patience
        self.clients[request_id] = Client(length, stops, deadline)
        request = routed_request(
            request_id,
            prompt,
            max_tokens=length + 20 if stops else length,
            stop=[STOP],
            deadline=deadline,
            priority=priority,
        )
        self.handle(Submit(msgspec.structs.replace(request, tenant=tenant, limits=LIMITS[tenant]), self.now))

    @precondition(lambda self: self.speaking())
    @rule(pick=st.integers(0, 99), count=st.integers(1, 3))
    def deliver(self, pick: int, count: int) -> None:
        names = self.speaking()
        name = names[pick % len(names)]
        for _ in range(min(count, len(self.workers[name].stream))):
            self.deliver_from(name)

    @precondition(lambda self: self.ghosts)
    @rule()
    def deliver_from_a_lost_incarnation(self) -> None:
        name, incarnation, update = self.ghosts.popleft()
        self.handle(FromWorker(WorkerId(name), Incarnation(str(incarnation)), update))

    @precondition(lambda self: self.parts())
    @rule(pick=st.integers(0, 99), num_tokens=st.integers(1, 3))
    def step(self, pick: int, num_tokens: int) -> None:
        parts = self.parts()
        self.advance(*parts[pick % len(parts)], num_tokens)

    @precondition(lambda self: self.parts())
    @rule(pick=st.integers(0, 99), reason=st.sampled_from(["failed", "refused"]))
    def give_up(self, pick: int, reason: str) -> None:
        parts = self.parts()
        name, key = parts[pick % len(parts)]
        refuses = reason == "refused" and self.workers[name].parts[key].phase == "prefill"
        del self.workers[name].parts[key]
        self.say(name, end_update(*key, "refused" if refuses else "failed"))

    @precondition(lambda self: self.moving())
    @rule(pick=st.integers(0, 99), how=st.sampled_from(["arrive", "arrive", "arrive", "unheard", "stay", "refused"]))
    def step_of_a_move(self, pick: int, how: str) -> None:
        moving = self.moving()
        name, key = moving[pick % len(moving)]
        match how:
            case "arrive":
                self.arrive(name, key)
            case "unheard":
                self.arrive(name, key, is_acknowledged=False)
            case _:
                self.stay(name, key, refused=how == "refused")

    @rule(name=st.sampled_from(NAMES))
    def lose_or_return(self, name: str) -> None:
        worker = self.workers[name]
        if not worker.is_up:
            self.come_up(name)
            return
        worker.is_up = False
        self.ghosts.extend((name, worker.incarnation, update) for update in worker.stream)
        worker.stream.clear()
        worker.parts.clear()
        self.handle(WorkerLost(WorkerId(name), Incarnation(str(worker.incarnation))))

    @rule(name=st.sampled_from(NAMES))
    def hang_or_go_on(self, name: str) -> None:
        """What it was told while it hung comes first when it goes on; what it had to say may still come."""
        worker = self.workers[name]
        if not worker.is_up:
            return
        incarnation = (WorkerId(name), Incarnation(str(worker.incarnation)))
        worker.is_suspected = not worker.is_suspected
        self.handle(
            WorkerSuspected(*incarnation, "was silent") if worker.is_suspected else WorkerRecovered(*incarnation)
        )
        assert not (worker.is_suspected and worker.parts)

    @rule(name=st.sampled_from(NAMES))
    def drain(self, name: str) -> None:
        worker = self.workers[name]
        worker.is_draining = worker.is_draining or worker.is_up
        self.handle(DrainWorker(WorkerId(name), Incarnation(str(worker.incarnation))))

    @rule(name=st.sampled_from(NAMES))
    def stop_draining(self, name: str) -> None:
        worker = self.workers[name]
        worker.is_draining = worker.is_drained = False
        self.handle(ResumeWorker(WorkerId(name), Incarnation(str(worker.incarnation))))

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        request_id = f"r{pick % len(self.clients)}"
        before = self.clients[request_id].end
        self.handle(CancelRequest(RequestId(request_id)))
        assert self.clients[request_id].end == before or self.clients[request_id].end == RequestCancelledError.__name__
        assert self.clients[request_id].end

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.handle(Tick())

    @rule(name=st.sampled_from(NAMES), sequence=st.integers(0, 3))
    def report(self, name: str, sequence: int) -> None:
        self.handle(WorkerReported(worker_report(name, sequence, incarnation=str(self.workers[name].incarnation))))

    # ------------------------------------------------------------ what must hold

    @invariant()
    def clients_see_the_true_tokens(self) -> None:
        for request_id, client in self.clients.items():
            true = [true_token(request_id, i, client.length, client.stops) for i in range(len(client.tokens))]
            assert client.tokens == true
        assert sorted(self.core._requests) == sorted(name for name, client in self.clients.items() if not client.end)

    @invariant()
    def workers_run_only_what_is_assigned(self) -> None:
        """So a worker that is given up on was told, and one that still runs was not forgotten."""
        assert {(WorkerId(name), key) for name, key in self.parts()} <= set(self.core._fleet.assignments.entries())

    @invariant()
    def a_draining_worker_is_drained_when_nothing_is_booked_on_it(self) -> None:
        assigned = {worker_id for worker_id, _ in self.core._fleet.assignments.entries()}
        for name, worker in self.workers.items():
            if worker.is_up and worker.is_draining:
                assert worker.is_drained == (name not in assigned)

    @invariant()
    def places_are_kept_as_counted(self) -> None:
        tenants = self.core._tenants
        assert tenants.check_integrity() == []
        assert tenants._places.num_used == sum(each.num_running for each in tenants._tenants.values())
        assert all(each.share.claimed >= 0 for each in tenants._tenants.values())

    @invariant()
    def wakeups_lie_ahead(self) -> None:
        wakeup = self.core.next_wakeup()
        assert wakeup is None or wakeup > self.now

    def teardown(self) -> None:
        """Everybody is well and goes on until all is said."""
        for name in NAMES:
            if self.workers[name].is_up and self.workers[name].is_draining:
                self.lose_or_return(name)
            if not self.workers[name].is_up:
                self.come_up(name)
            if self.workers[name].is_suspected:
                self.hang_or_go_on(name)
        for _ in range(10_000):
            if self.moving():
                self.arrive(*self.moving()[0])
            elif self.parts():
                self.advance(*self.parts()[0])
            elif self.speaking():
                self.deliver_from(self.speaking()[0])
            elif (wakeup := self.core.next_wakeup()) is not None:
                self.now = wakeup
                self.handle(Tick())
            else:
                break
        assert all(client.end for client in self.clients.values())
        assert self.core.holdings() == EMPTY
        assert self.parts() == []
        for tenant in self.core._tenants._tenants.values():
            assert (tenant.num_waiting, tenant.num_running, tenant.num_boosted, tenant.share.claimed) == (0, 0, 0, 0.0)
        entries = [decode(entry) for entry in self.sink.entries]
        assert [each.is_same for each in replayed(header_of(self.config), entries)] == [True] * len(entries)


class PairsOnlyMachine(RouterMachine):
    config = RouterConfig(max_refusals=4, max_queued=12, local_prefill="never", policy="prefix")


class RandomMachine(RouterMachine):
    config = RouterConfig(max_refusals=4, max_queued=12, policy="random")


class MovingMachine(RouterMachine):
    """Begins with answers that decode, and drains one of their workers."""

    def __init__(self) -> None:
        super().__init__()
        for _ in range(3):
            self.submit(20, 6, True, None, 0, "")
        while any(part.phase != "decode" for name, key in self.parts() if (part := self.workers[name].parts[key])):
            self.advance(*next(each for each in self.parts() if self.workers[each[0]].parts[each[1]].phase != "decode"))
            for name in self.speaking():
                self.deliver_from(name)
        while self.speaking():
            self.deliver_from(self.speaking()[0])
        self.drain(self.parts()[0][0])
        assert self.num_moves

    @precondition(lambda self: self.parts())
    @rule(pick=st.integers(0, 99))
    def drain_a_busy_one(self, pick: int) -> None:
        parts = self.parts()
        name = parts[pick % len(parts)][0]
        for other in NAMES:
            if other != name:
                self.stop_draining(other)
        self.drain(name)


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestMoving = MovingMachine.TestCase
TestMoving.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestPairsOnly = PairsOnlyMachine.TestCase
TestPairsOnly.settings = settings(max_examples=20, stateful_step_count=60, deadline=None)
TestRandom = RandomMachine.TestCase
TestRandom.settings = settings(max_examples=20, stateful_step_count=60, deadline=None)


class LongRouterMachine(RouterMachine):
    """The same, for more runs."""


class LongMovingMachine(MovingMachine):
    """The same, for more runs."""


TestLongRouter = pytest.mark.slow(LongRouterMachine.TestCase)
TestLongRouter.settings = settings(max_examples=240, stateful_step_count=60, deadline=None)
TestLongMoving = pytest.mark.slow(LongMovingMachine.TestCase)
TestLongMoving.settings = settings(max_examples=240, stateful_step_count=60, deadline=None)
