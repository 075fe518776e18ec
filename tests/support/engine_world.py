"""A router core before real decode engines on a made-up clock: what the engines accept, refuse, preempt and report is
theirs. Prefill workers are toys that compute one prompt after the other. Deterministic; nothing sleeps.

    Submit ──> dispatch ──Reserve──> refused: reported to the router      reserved: P computes, the KV moves, D joins
    D steps while it has work: `STEP_MS` + `DECODE_MS` a sequence; reports come every `REPORT_S`
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from disagg.engine.commands import Ended, Event, Join, Release, Reserve, Reserved, ReserveRefused, Scatter, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import Buffer, StepPlan, StepResult
from disagg.proto.ids import AttemptKey, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import ONE_RANK, Dispatch, Load, ParallelShape, SequenceSpec, StepUpdate
from disagg.router.api import RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.queueing.tenants import Tenants
from disagg.router.requests import events
from disagg.router.requests.record import new_record, new_trace
from disagg.router.requests.router_core import RouterCore
from tests.support.engine import BLOCK
from tests.support.placing import samples
from tests.support.router import (
    end_update,
    handed_over_update,
    prefilled_update,
    tokens_update,
    worker_info,
    worker_report,
)

STEP_MS, DECODE_MS, TOKEN_MS, REPORT_S, HOP_S = 10.0, 0.5, 0.1, 0.02, 0.001
TOKEN = 7
"""Every output token."""
_VOCAB_SIZE = 1 << 20
_NO_KV: Buffer = np.empty(0, dtype=np.uint8)


class QuickRunner(FakeModelRunner):
    """Answers with `TOKEN` and computes nothing."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult([TOKEN] * sum(entry.samples for entry in plan.entries))

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        data: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> None:
        """There is no KV."""


@dataclass
class Decode:
    """One decode worker: the engine and where it stands."""

    name: str
    core: EngineCore
    is_stepping: bool = False
    num_reports: int = 0


@dataclass
class _Prefill:
    name: str
    prompts: deque[tuple[SequenceSpec, Decode]] = field(default_factory=deque)
    """The first one is being computed."""


class EngineWorld:
    """Prefill workers p0, p1, ... and decode workers d0, d1, ... of one shape.

    Args:
        config: of the router.
        num_prefills: how many P there are.
        num_decodes: how many D there are.
        num_blocks: KV blocks of each D, of 16 tokens.
        max_num_seqs: as in `WorkerConfig`.
        token_budget: as in `WorkerConfig`; of D.
        decode_reserve_tokens: as in `WorkerConfig`.
        watermark: as in `WorkerConfig`.
        swap_bytes: as in `WorkerConfig`.
        reports_load: otherwise reports are empty.
        reports_at_once: whether a report follows each command and step of an engine at once.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        num_prefills: int = 1,
        num_decodes: int = 1,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        token_budget: int = 512,
        decode_reserve_tokens: int = 512,
        watermark: float = 0.0,
        swap_bytes: int = 0,
        reports_load: bool = True,
        reports_at_once: bool = False,
    ) -> None:
        self.core = RouterCore(config, GatewayId("g0"))
        self.now = 0.0
        self._reports_load, self._reports_at_once = reports_load, reports_at_once
        self.ended: dict[str, str] = {}
        """Request -> `finished`, or the code of its error."""
        self.ended_at: dict[str, float] = {}
        self.first_token_at: dict[str, float] = {}
        self.arrived_at: dict[str, float] = {}
        self.num_refused_by: Counter[str] = Counter()
        """Attempts that an engine refused, by its reason."""
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self._prefills = {f"p{i}": _Prefill(f"p{i}") for i in range(num_prefills)}
        self.decodes: dict[str, Decode] = {}
        speed = samples(base_ms=STEP_MS, prefill_token_ms=TOKEN_MS, decode_ms=DECODE_MS)
        for name in self._prefills:
            info = worker_info(name, num_blocks=65536, max_num_seqs=256, token_budget=512, calibration=speed)
            self._handle(events.WorkerUp(info))
        for i in range(num_decodes):
            engine = WorkerConfig(
                worker_id=f"d{i}",
                roles=("decode",),
                model_path="fake",
                max_num_seqs=max_num_seqs,
                token_budget=token_budget,
                decode_reserve_tokens=decode_reserve_tokens,
                watermark=watermark,
                swap_bytes=swap_bytes,
            )
            core = EngineCore(QuickRunner(num_blocks, BLOCK, 1024, _VOCAB_SIZE), config=engine)
            decode = self.decodes[f"d{i}"] = Decode(f"d{i}", core)
            info = worker_info(
                decode.name,
                num_blocks=num_blocks,
                token_budget=token_budget,
                max_model_len=core.max_model_len,
                calibration=speed,
                max_num_seqs=engine.num_places,
                decode_reserve_tokens=engine.decode_reserve_tokens,
                watermark_blocks=engine.watermark_blocks(num_blocks),
            )
            self._handle(events.WorkerUp(info))
            self.report(decode)
            self.at(REPORT_S, partial(self._report_forever, decode))

    # ---------------------------------------------------------------- driving

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._num_planned += 1
        heapq.heappush(self._agenda, (when, self._num_planned, what))

    def submit(self, request: RoutedRequest) -> None:
        self.arrived_at[request.request_id] = self.now
        self._handle(events.Submit(request, self.now))

    def run_until(self, when: float) -> None:
        """Whatever happens until then."""
        while self._agenda[0][0] <= when:
            self.now, _, what = heapq.heappop(self._agenda)
            what()
        self.now = when

    def run(self, arrivals: Iterable[tuple[float, RoutedRequest]] = (), limit_s: float = 600.0) -> None:
        """All of them, until every request has ended."""
        num_expected = len(self.arrived_at)
        for when, request in arrivals:
            num_expected += 1
            self.at(when, partial(self.submit, request))
        while len(self.ended) < num_expected:
            self.now, _, what = heapq.heappop(self._agenda)
            assert self.now < limit_s, f"{num_expected - len(self.ended)} requests have not ended: {self.core.view(0)}"
            what()

    def assert_nothing_held(self) -> None:
        """In the router and in the engines."""
        assert not any(self.core.holdings().values())
        assert self.core.check_integrity() == []
        for decode in self.decodes.values():
            counts, problems = decode.core.audit()
            assert (problems, any(counts.values())) == ([], False), counts

    # ---------------------------------------------------------------- the router

    def _handle(self, event: events.Event) -> None:
        for command in self.core.handle(event, self.now):
            match command:
                case events.Dispatch(worker_id=worker_id, message=message):
                    self.at(self.now + HOP_S, partial(self._take, self._prefills[worker_id], message))
                case events.CancelOn(worker_id=worker_id, key=key) if worker_id in self.decodes:
                    self.decodes[worker_id].core.handle(Release(key), self.now)
                case events.Emit(request_id=request_id):
                    self.first_token_at.setdefault(request_id, self.now)
                case events.Finish(request_id=request_id):
                    self._note_end(request_id, "finished")
                case events.Fail(request_id=request_id, error=error):
                    self._note_end(request_id, str(error.code))
        if (wakeup := self.core.next_wakeup()) is not None:
            self.at(max(wakeup, self.now), self._tick)

    def _note_end(self, request_id: str, how: str) -> None:
        self.ended[request_id] = how
        self.ended_at[request_id] = self.now

    def _tick(self) -> None:
        wakeup = self.core.next_wakeup()
        if wakeup is not None and wakeup <= self.now:
            self._handle(events.Tick())

    def _say(self, name: str, *updates: StepUpdate) -> None:
        for update in updates:
            self._handle(events.FromWorker(WorkerId(name), Incarnation("1"), update))

    # ---------------------------------------------------------------- the workers

    def _take(self, prefill: _Prefill, message: Dispatch) -> None:
        spec, peer = message.spec, message.decode_peer
        assert peer is not None
        decode = self.decodes[peer.worker_id]
        (answer,) = decode.core.handle(Reserve(spec), self.now)
        self._changed(decode)
        if isinstance(answer, ReserveRefused):
            self.num_refused_by[answer.reason] += 1
            self._say(prefill.name, end_update(*spec.key, "refused", detail=answer.reason))
            return
        prefill.prompts.append((spec, decode))
        if len(prefill.prompts) == 1:
            self._begin(prefill)

    def _begin(self, prefill: _Prefill) -> None:
        spec, _ = prefill.prompts[0]
        seconds = (STEP_MS + spec.num_known_tokens * TOKEN_MS) / 1000
        self.at(self.now + seconds, partial(self._computed, prefill))

    def _computed(self, prefill: _Prefill) -> None:
        spec, decode = prefill.prompts.popleft()
        if prefill.prompts:
            self._begin(prefill)
        self._say(prefill.name, tokens_update(*spec.key, len(spec.emitted_token_ids), TOKEN))
        self._say(prefill.name, prefilled_update(*spec.key))
        self.at(self.now + HOP_S, partial(self._join, spec, decode))

    def _join(self, spec: SequenceSpec, decode: Decode) -> None:
        key = spec.key
        num_cached = self._num_cached(decode, key)
        if num_cached is None:
            return  # It was cancelled.
        if num_cached < spec.num_known_tokens:
            decode.core.handle(Scatter(key, 0, num_cached, spec.num_known_tokens, _NO_KV), self.now)
        happened = decode.core.handle(Join(key, TOKEN), self.now)
        self._say(decode.name, handed_over_update(*key))
        self._tell(decode, happened)
        self._kick(decode)

    def _changed(self, decode: Decode) -> None:
        if self._reports_at_once:
            self.report(decode)

    @staticmethod
    def _num_cached(decode: Decode, key: AttemptKey) -> int | None:
        sequence = decode.core._scheduler.sequences.get(key)
        return None if sequence is None else sequence.num_computed_tokens

    def _kick(self, decode: Decode) -> None:
        if not decode.is_stepping and decode.core.has_work:
            decode.is_stepping = True
            seconds = (STEP_MS + decode.core.load().num_running * DECODE_MS) / 1000
            self.at(self.now + seconds, partial(self._step, decode))

    def _step(self, decode: Decode) -> None:
        decode.is_stepping = False
        self._tell(decode, decode.core.step(self.now))
        self._kick(decode)

    def _tell(self, decode: Decode, happened: Sequence[Event]) -> None:
        for event in happened:
            if isinstance(event, TokenSampled):
                self._say(decode.name, tokens_update(*event.key, event.index, event.token_id))
            elif isinstance(event, Ended):
                self._say(decode.name, end_update(*event.key, event.reason, detail=event.detail))
        self._changed(decode)

    def occupy(self, name: str, request: RoutedRequest) -> None:
        """Another router's request has room there."""
        config = RouterConfig()
        tenant = Tenants(config, lambda: 1000, lambda: (1 << 20, 0)).get(request.tenant, request.limits, 0.0)
        record = new_record(request, new_trace(request, 0.0, 0.0, config), tenant, 0, config)
        spec = record.spec(AttemptKey(request.request_id, 0), GatewayId("g1"), 64.0, self.now)
        (answer,) = self.decodes[name].core.handle(Reserve(spec), self.now)
        assert isinstance(answer, Reserved)

    def leave(self, name: str, request_id: str) -> None:
        """It is gone."""
        self.decodes[name].core.handle(Release(AttemptKey(RequestId(request_id), 0)), self.now)

    def report(self, decode: Decode) -> None:
        """Send the router the latest report."""
        pending = decode.core.drain_kv_events()
        first = () if decode.num_reports else (decode.core.prefix_snapshot(),)
        load = decode.core.load() if self._reports_load else Load()
        report = worker_report(decode.name, decode.num_reports, *first, *pending, load=load)
        decode.num_reports += 1
        self._handle(events.WorkerReported(report))

    def _report_forever(self, decode: Decode) -> None:
        self.report(decode)
        self.at(self.now + REPORT_S, partial(self._report_forever, decode))
