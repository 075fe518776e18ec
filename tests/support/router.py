"""Builders for the router's tests, and `Scenario`, which drives a `RouterCore` and writes its commands down as lines.

    dispatch p0 r0/0 -> d0      dispatch d0 r0/0 alone      cancel d0 r0/0
    emit r0 [7, 8]              emit r0 [7, 8] -0.5 -1.5    (the latter with logprobs)
    finish r0 stop 2 cached=0   fail r0 UnavailableError worker_lost             watch p0
    drained d0 1                move d0 r0/0 #1 -> d1       keep d0 r0/0

Every step checks the core's integrity.
"""

from __future__ import annotations

from collections.abc import Sequence

from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import BlockHash, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import (
    Adapter,
    AdapterState,
    BlocksSnapshot,
    End,
    EndReason,
    Fetched,
    FetchOutcome,
    HandedOver,
    KvEvent,
    KvLayout,
    Load,
    MigrationFailed,
    PrefillDone,
    RoleName,
    Sampling,
    StepSample,
    StepUpdate,
    TokenOut,
    WorkerInfo,
    WorkerReport,
)
from disagg.proto.token_ids import pack_token_ids
from disagg.router.api import RoutedRequest, TokenBatch
from disagg.router.config import RouterConfig
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
    WatchAgain,
    WorkerIsDrained,
    WorkerLost,
    WorkerRecovered,
    WorkerReported,
    WorkerSuspected,
    WorkerUp,
)
from disagg.router.requests.router_core import RouterCore
from disagg.router.workers.prefix_index import PrefixIndex

FINGERPRINT = "model-a"
ROOT = root_hash(FINGERPRINT)
LAYOUT = KvLayout.dense(num_layers=2, num_kv_heads=2, head_dim=4, dtype="fake", bytes_per_token=64)
PLAIN = RouterConfig(local_prefill="never", policy="least_loaded", migrations=0)
"""Transcripts of anything but placement use this, so that they do not depend on predicted times."""
MOVING = RouterConfig(local_prefill="never", policy="least_loaded", migrations=2)
"""The same where sequences move."""
EMPTY = {"requests": 0, "queued": 0, "admitted": 0, "tokens": 0, "sequences": 0, "blocks": 0}
"""`holdings()` when nothing is in flight."""


def in_turn(counter: int, count: int) -> int:
    """A `Draw` that is not random: counters go round the indices."""
    return counter % count


def reported_blocks(index: PrefixIndex, worker_id: WorkerId) -> frozenset[BlockHash]:
    """All blocks that a worker has reported and not removed."""
    holder = index._workers.get(worker_id)
    return frozenset(holder.hashes) if holder else frozenset()


def worker_info(
    worker_id: str,
    *,
    incarnation: str = "1",
    roles: Sequence[RoleName] | None = None,
    address: str = "",
    fingerprint: str = FINGERPRINT,
    kv_layout: KvLayout = LAYOUT,
    num_blocks: int = 64,
    block_size: int = 16,
    max_num_seqs: int = 8,
    token_budget: int = 128,
    max_model_len: int = 1024,
    calibration: tuple[StepSample, ...] = (),
    decode_reserve_tokens: int = 0,
    watermark_blocks: int = 0,
    arithmetic: str = "",
) -> WorkerInfo:
    """A worker; unless given its role follows from the first letter of its id: p, d, c for both, w for both and
    elastic."""
    both: tuple[RoleName, ...] = ("prefill", "decode")
    by_letter: dict[str, tuple[RoleName, ...]] = {"p": ("prefill",), "d": ("decode",), "c": both, "w": both}
    return WorkerInfo(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        roles=tuple(roles) if roles is not None else by_letter[worker_id[0]],
        is_elastic=roles is None and worker_id[0] == "w",
        address=address or f"{worker_id}:1",
        pid=1,
        fingerprint=fingerprint,
        kv_layout=kv_layout,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_model_len=max_model_len,
        calibration=calibration,
        decode_reserve_tokens=decode_reserve_tokens,
        watermark_blocks=watermark_blocks,
        arithmetic=arithmetic,
    )


def routed_request(
    request_id: str,
    prompt: Sequence[int] | int = 64,
    *,
    max_tokens: int = 4,
    stop: Sequence[int] = (),
    logprobs: int = -1,
    deadline: float | None = None,
    priority: int = 0,
    adapter: Adapter | None = None,
) -> RoutedRequest:
    """A request; a number as prompt means that many tokens, different for every request id."""
    if isinstance(prompt, int):
        start = 1000 * (1 + sum(request_id.encode()))
        prompt = range(start, start + prompt)
    packed = pack_token_ids(prompt)
    return RoutedRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=packed,
        block_hashes=tuple(chain_hashes(ROOT, packed)),
        root_hash=ROOT,
        sampling=Sampling(max_tokens=max_tokens, stop_token_ids=tuple(stop), logprobs=logprobs),
        deadline=deadline,
        priority=priority,
        adapter=adapter,
    )


def tokens_update(request_id: str, attempt: int, first_index: int, *token_ids: int) -> StepUpdate:
    """Output tokens of an attempt."""
    return StepUpdate(tokens=(TokenOut(RequestId(request_id), attempt, first_index, token_ids),))


def prefilled_update(request_id: str, attempt: int, cached_tokens: int = 0) -> StepUpdate:
    """P is done with an attempt's prompt."""
    message = PrefillDone(request_id=RequestId(request_id), attempt=attempt, cached_tokens=cached_tokens)
    return StepUpdate(prefilled=(message,))


def handed_over_update(request_id: str, attempt: int, kv_bytes: int = 4096, cached_tokens: int = 0) -> StepUpdate:
    """D owns an attempt."""
    message = HandedOver(
        request_id=RequestId(request_id),
        attempt=attempt,
        kv_bytes=kv_bytes,
        cached_tokens=cached_tokens,
        transport="fake",
    )
    return StepUpdate(handed_over=(message,))


def end_update(
    request_id: str,
    attempt: int,
    reason: EndReason,
    *,
    detail: str = "",
    cached_tokens: int = 0,
    drafts: tuple[int, int] = (0, 0),
    in_transfer: bool = False,
) -> StepUpdate:
    """An attempt is over on a worker."""
    message = End(
        request_id=RequestId(request_id),
        attempt=attempt,
        reason=reason,
        detail=detail,
        cached_tokens=cached_tokens,
        drafted_tokens=drafts[0],
        accepted_tokens=drafts[1],
        in_transfer=in_transfer,
    )
    return StepUpdate(ends=(message,))


def fetched_update(
    request_id: str, source: str, outcome: FetchOutcome, *, tokens: int = 0, kv_bytes: int = 0, transfer_s: float = 0.0
) -> StepUpdate:
    """The fetch of a first attempt is over."""
    message = Fetched(
        request_id=RequestId(request_id),
        attempt=0,
        source=WorkerId(source),
        outcome=outcome,
        tokens=tokens,
        kv_bytes=kv_bytes,
        transfer_s=transfer_s,
    )
    return StepUpdate(fetched=(message,))


def stayed_update(request_id: str, attempt: int, *, refused: bool = False, detail: str = "") -> StepUpdate:
    """An attempt did not move."""
    message = MigrationFailed(request_id=RequestId(request_id), attempt=attempt, refused=refused, detail=detail)
    return StepUpdate(migrations_failed=(message,))


def worker_report(
    worker_id: str,
    sequence: int,
    *events: KvEvent,
    incarnation: str = "1",
    load: Load | None = None,
    steps: tuple[StepSample, ...] = (),
    adapters: tuple[AdapterState, ...] = (),
) -> WorkerReport:
    """A report; the first one of a stream needs a `BlocksSnapshot`."""
    return WorkerReport(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        sequence=sequence,
        load=load or Load(),
        kv_events=events,
        steps=steps,
        adapters=adapters,
    )


class Scenario:
    """A router core with workers that are up, at time 0."""

    def __init__(self, *workers: WorkerInfo | str, config: RouterConfig | None = None) -> None:
        self.core = RouterCore(config or PLAIN, GatewayId("g0"), draw=in_turn)
        self.now = 0.0
        self.dispatched: dict[str, Dispatch] = {}
        """By `request/attempt`."""
        self.errors: dict[str, Exception] = {}
        self.incarnations: dict[str, str] = {}
        self.pairs: list[str] = []
        """Pairs whose forming was ordered while workers came up."""
        for worker in workers:
            assert self.up(worker) == []

    def handle(self, event: Event) -> list[str]:
        """Give the core one event; the commands as lines."""
        commands = self.core.handle(event, self.now)
        assert self.core.check_integrity() == []
        return [self._line(command) for command in commands]

    def up(self, worker: WorkerInfo | str) -> list[str]:
        info = worker_info(worker) if isinstance(worker, str) else worker
        self.incarnations[info.worker_id] = info.incarnation
        lines = self.handle(WorkerUp(info))
        self.pairs += [line for line in lines if line.startswith("pair ")]
        return [line for line in lines if not line.startswith("pair ")]

    def lost(self, worker_id: str, incarnation: str | None = None) -> list[str]:
        current = self.incarnations[worker_id] if incarnation is None else incarnation
        return self.handle(WorkerLost(WorkerId(worker_id), Incarnation(current)))

    def suspected(
        self,
        worker_id: str,
        why: str = "was unresponsive for 2.5 s",
        incarnation: str | None = None,
        *,
        is_stuck: bool = False,
    ) -> list[str]:
        current = self.incarnations[worker_id] if incarnation is None else incarnation
        return self.handle(WorkerSuspected(WorkerId(worker_id), Incarnation(current), why, is_stuck))

    def heard(self, worker_id: str, incarnation: str | None = None) -> list[str]:
        current = self.incarnations[worker_id] if incarnation is None else incarnation
        return self.handle(WorkerRecovered(WorkerId(worker_id), Incarnation(current)))

    def drain(self, worker_id: str, incarnation: str | None = None) -> list[str]:
        current = self.incarnations[worker_id] if incarnation is None else incarnation
        return self.handle(DrainWorker(WorkerId(worker_id), Incarnation(current)))

    def resume(self, worker_id: str, incarnation: str | None = None) -> list[str]:
        current = self.incarnations[worker_id] if incarnation is None else incarnation
        return self.handle(ResumeWorker(WorkerId(worker_id), Incarnation(current)))

    def submit(self, request: RoutedRequest | str, arrival: float | None = None) -> list[str]:
        routed = routed_request(request) if isinstance(request, str) else request
        return self.handle(Submit(routed, self.now if arrival is None else arrival))

    def cancel(self, request_id: str) -> list[str]:
        return self.handle(CancelRequest(RequestId(request_id)))

    def at(self, now: float) -> list[str]:
        """Move the clock and tick."""
        self.now = now
        return self.handle(Tick())

    def report(self, report: WorkerReport) -> list[str]:
        return self.handle(WorkerReported(report))

    def holds(self, worker_id: str, request: RoutedRequest, num_blocks: int) -> None:
        """Report to the core that the worker has the first blocks of the request's prompt."""
        snapshot = BlocksSnapshot(hashes=request.block_hashes[:num_blocks])
        assert self.report(worker_report(worker_id, 0, snapshot)) == []

    def update(self, worker_id: str, *updates: StepUpdate, incarnation: str | None = None) -> list[str]:
        """All of these as one step of the worker."""
        current = self.incarnations[worker_id] if incarnation is None else incarnation
        merged = StepUpdate(
            tokens=tuple(item for update in updates for item in update.tokens),
            prefilled=tuple(item for update in updates for item in update.prefilled),
            handed_over=tuple(item for update in updates for item in update.handed_over),
            ends=tuple(item for update in updates for item in update.ends),
            migrations_failed=tuple(item for update in updates for item in update.migrations_failed),
            fetched=tuple(item for update in updates for item in update.fetched),
        )
        return self.handle(FromWorker(WorkerId(worker_id), Incarnation(current), merged))

    def start(self, request: RoutedRequest | str, prefill: str, decode: str) -> None:
        """Submit a request, which must go to this pair at once."""
        routed = routed_request(request) if isinstance(request, str) else request
        assert self.submit(routed) == [f"dispatch {prefill} {routed.request_id}/0 -> {decode}"]

    def hand_over(
        self, request_id: str, prefill: str, decode: str, token: int, attempt: int = 0, index: int = 0
    ) -> None:
        """P samples the attempt's first token; D takes over and repeats it."""
        prefilled = prefilled_update(request_id, attempt)
        first = tokens_update(request_id, attempt, index, token)
        assert self.update(prefill, first, prefilled) == [f"emit {request_id} [{token}]"]
        assert self.update(decode, handed_over_update(request_id, attempt), first) == []

    def _line(self, command: Command) -> str:
        match command:
            case Dispatch(worker_id=worker_id, message=message):
                self.dispatched[str(message.spec.key)] = command
                peer = message.decode_peer
                return f"dispatch {worker_id} {message.spec.key} " + (f"-> {peer.worker_id}" if peer else "alone")
            case Migrate(worker_id=worker_id, message=migrate):
                name = f"{migrate.request_id}/{migrate.attempt} #{migrate.number}"
                return f"move {worker_id} {name} -> {migrate.decode_peer.worker_id}"
            case CancelMigration(worker_id=worker_id, key=key):
                return f"keep {worker_id} {key}"
            case CancelOn(worker_id=worker_id, key=key):
                return f"cancel {worker_id} {key}"
            case ConnectPair(prefill_id=prefill_id, decode_peer=peer):
                return f"pair {prefill_id} -> {peer.worker_id} {peer.incarnation}"
            case Emit(request_id=request_id, batch=TokenBatch(token_ids, logprobs)):
                return " ".join(["emit", request_id, f"{token_ids}", *(f"{each.logprob}" for each in logprobs)])
            case Finish(request_id=request_id, completion=done):
                return f"finish {request_id} {done.reason} {done.num_output_tokens} cached={done.cached_tokens}"
            case Fail(request_id=request_id, error=error):
                self.errors[request_id] = error
                code = f" {error.code}" if "code" in vars(error) else ""
                return f"fail {request_id} {type(error).__name__}{code}"
            case WatchAgain(worker_id=worker_id):
                return f"watch {worker_id}"
            case WorkerIsDrained(worker_id=worker_id, incarnation=incarnation):
                return f"drained {worker_id} {incarnation}"
