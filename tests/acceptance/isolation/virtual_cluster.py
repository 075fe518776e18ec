"""A router core with workers that only take time, in virtual time: what clients see of a policy, without a cluster.

    request ──> RouterCore ──> P: prompts one after the other ──> D: a token each step ──> first token, end

A prefill worker computes prompts in the order in which it got them, at a fixed rate. A decode worker gives a sequence
all its tokens at a fixed pace, and reports the KV blocks that its sequences have. Nothing is random here.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.proto.ids import BlockHash, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import (
    End,
    HandedOver,
    KvLayout,
    Load,
    PrefillDone,
    RoleName,
    Sampling,
    SequenceSpec,
    StepSample,
    StepUpdate,
    TokenOut,
    WorkerInfo,
    WorkerReport,
)
from disagg.proto.token_ids import pack_token_ids
from disagg.router.api import CallDemand, RoutedRequest, TenantLimits
from disagg.router.config import RouterConfig
from disagg.router.requests import events
from disagg.router.requests.router_core import RouterCore

PREFILL_MS = 0.05
"""A prompt token."""
STEP_MS = 20.0
BLOCK_TOKENS = 16
TOKEN_BUDGET = 2048
REPORT_S = 0.05
_INCARNATION = Incarnation("1")
_LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="fake", bytes_per_token=1024)
_ROOT = BlockHash(b"root")
_CALIBRATION = tuple(
    StepSample(1.0 + PREFILL_MS * prefill + 0.02 * decodes, prefill, prefill * prefill // 2, decodes, decodes * 300)
    for prefill, decodes in ((64, 0), (512, 0), (2048, 0), (0, 1), (0, 16), (0, 64), (256, 16))
)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """One answer that a client wants."""

    label: str
    tenant: str
    limits: TenantLimits
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    ttft_slo_s: float | None = None


@dataclass
class Seen:
    """What its client saw, seconds."""

    wish: Wish
    arrival: float
    ttft_s: float | None = None
    error: str = ""
    ended: float | None = None


@dataclass
class _Worker:
    free_at: float = 0.0
    """P: when it begins the next prompt."""
    sequences: dict[RequestId, int] = field(default_factory=dict)
    """What runs there, and its KV blocks."""
    sequence: int = 0
    """Of its reports."""


class VirtualCluster:
    """A `RouterCore` and simulated workers on one virtual clock, `now`, seconds."""

    def __init__(
        self, num_prefills: int, num_decodes: int, places: int, num_blocks: int, config: RouterConfig | None = None
    ) -> None:
        self.now = 0.0
        self.core = RouterCore(
            config or RouterConfig(local_prefill="never"), GatewayId("g0"), draw=lambda counter, count: counter % count
        )
        self.seen: dict[RequestId, Seen] = {}
        self._num_blocks = num_blocks
        self._workers: dict[WorkerId, _Worker] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for number in range(num_prefills):
            self._start(f"p{number}", "prefill", 512)
        for number in range(num_decodes):
            self._start(f"d{number}", "decode", places)

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do this then."""
        heapq.heappush(self._due, (when, next(self._order), what))

    def run(self, until: float) -> None:
        """Let time pass."""
        while True:
            wakeup = self.core.next_wakeup()
            due = self._due[0][0] if self._due else None
            when = min((each for each in (wakeup, due) if each is not None), default=until)
            if when > until:
                break
            if due is not None and due <= when:
                self.now = max(self.now, due)
                heapq.heappop(self._due)[2]()
            elif wakeup is None:
                break
            else:
                self.now = max(self.now, wakeup)
                self._handle(events.Tick())
        self.now = until

    def ask(self, wish: Wish, num_answers: int = 1) -> None:
        """A call arrives."""
        least = wish.prompt_tokens + wish.max_tokens
        call = CallDemand(
            tenant=wish.tenant, limits=wish.limits, num_answers=num_answers, num_tokens=num_answers * least
        )
        error = self.core.admit(call, self.now)
        for _ in range(num_answers):
            name = RequestId(f"r{len(self.seen)}")
            self.seen[name] = Seen(wish, self.now)
            if error is not None:
                self.seen[name].error = error.code
                continue
            request = RoutedRequest(
                request_id=name,
                prompt_token_ids=pack_token_ids(range(wish.prompt_tokens)),
                block_hashes=(),
                root_hash=_ROOT,
                sampling=Sampling(max_tokens=wish.max_tokens),
                ttft_slo_s=wish.ttft_slo_s,
                tenant=wish.tenant,
                limits=wish.limits,
                prepaid_tokens=least,
            )
            self._handle(events.Submit(request, self.now))
            if self.seen[name].error:
                self.core.refund(wish.tenant, least, 1, self.now)

    # ---------------------------------------------------------------- inside

    def _start(self, name: str, role: RoleName, places: int) -> None:
        worker_id = WorkerId(name)
        self._workers[worker_id] = _Worker()
        info = WorkerInfo(
            worker_id=worker_id,
            incarnation=_INCARNATION,
            roles=(role,),
            address=f"{name}:1",
            pid=1,
            fingerprint="model",
            kv_layout=_LAYOUT,
            num_blocks=1 << 20 if role == "prefill" else self._num_blocks,
            block_size=BLOCK_TOKENS,
            max_num_seqs=places,
            token_budget=TOKEN_BUDGET,
            max_model_len=16384,
            calibration=_CALIBRATION,
        )
        self._handle(events.WorkerUp(info))
        self.at(REPORT_S, lambda: self._report(worker_id))

    def _report(self, worker_id: WorkerId) -> None:
        worker = self._workers[worker_id]
        uncomputed = int(max(0.0, worker.free_at - self.now) * 1000 / PREFILL_MS)
        load = Load(
            num_running=len(worker.sequences),
            uncomputed_prompt_tokens=uncomputed,
            blocks_total=self._num_blocks,
            blocks_active=sum(worker.sequences.values()),
        )
        report = WorkerReport(
            worker_id=worker_id, incarnation=_INCARNATION, sequence=worker.sequence, load=load, kv_events=()
        )
        worker.sequence += 1
        self._handle(events.WorkerReported(report))
        self.at(self.now + REPORT_S, lambda: self._report(worker_id))

    def _handle(self, event: events.Event) -> None:
        for command in self.core.handle(event, self.now):
            match command:
                case events.Dispatch(worker_id=worker_id, message=message):
                    assert message.decode_peer is not None
                    self._prefill(worker_id, message.decode_peer.worker_id, message.spec)
                case events.Emit(request_id=request_id):
                    seen = self.seen[request_id]
                    if seen.ttft_s is None:
                        seen.ttft_s = self.now - seen.arrival
                case events.Finish(request_id=request_id):
                    self.seen[request_id].ended = self.now
                case events.Fail(request_id=request_id, error=error):
                    self.seen[request_id].error, self.seen[request_id].ended = error.code, self.now
                case _:
                    pass

    def _prefill(self, prefill: WorkerId, decode: WorkerId, spec: SequenceSpec) -> None:
        worker = self._workers[prefill]
        worker.free_at = max(self.now, worker.free_at) + spec.num_known_tokens * PREFILL_MS / 1000
        self._workers[decode].sequences[spec.request_id] = -(-(spec.num_known_tokens + 1) // BLOCK_TOKENS)
        self.at(worker.free_at, lambda: self._prefilled(prefill, decode, spec))

    def _prefilled(self, prefill: WorkerId, decode: WorkerId, spec: SequenceSpec) -> None:
        key = spec.key
        token = (TokenOut(key.request_id, key.attempt, 0, (7,)),)
        done = PrefillDone(request_id=key.request_id, attempt=key.attempt, cached_tokens=0)
        self._update(prefill, StepUpdate(tokens=token, prefilled=(done,)))
        moved = HandedOver(
            request_id=key.request_id, attempt=key.attempt, kv_bytes=1, cached_tokens=0, transport="fake"
        )
        self._update(decode, StepUpdate(tokens=token, handed_over=(moved,)))
        num_tokens = self.seen[key.request_id].wish.output_tokens
        self.at(self.now + (num_tokens - 1) * STEP_MS / 1000, lambda: self._end(decode, spec, num_tokens))

    def _end(self, decode: WorkerId, spec: SequenceSpec, num_tokens: int) -> None:
        key = spec.key
        del self._workers[decode].sequences[key.request_id]
        rest = (TokenOut(key.request_id, key.attempt, 1, (7,) * (num_tokens - 1)),) if num_tokens > 1 else ()
        end = End(request_id=key.request_id, attempt=key.attempt, reason="stop")
        self._update(decode, StepUpdate(tokens=rest, ends=(end,)))

    def _update(self, worker_id: WorkerId, update: StepUpdate) -> None:
        self._handle(events.FromWorker(worker_id, _INCARNATION, update))
