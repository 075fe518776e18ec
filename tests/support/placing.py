"""A fleet in a given state, to test where a policy places a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.proto.ids import AttemptKey, RequestId, WorkerId
from disagg.proto.messages import BlocksSnapshot, Load, StepSample, WorkerInfo
from disagg.router.config import PolicyName, RouterConfig
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.placement import Choice, Demand, choose
from disagg.router.placement.policies import create
from disagg.router.workers.assignments import Assignment, marks_of
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.pairs import Pairs
from tests.support.router import in_turn, routed_request, worker_info, worker_report

LOAD = Load()


@dataclass(frozen=True, kw_only=True)
class Busy:
    """A worker with something on it."""

    info: WorkerInfo
    cached: int = 0
    """Leading tokens of the request that it has; whole blocks."""
    held: int = 0
    """Of these, those that a sequence there holds."""
    tokens: int = 0
    """Outstanding prompt tokens."""
    seqs: int = 0
    used: int = 0
    """KV blocks."""
    context: int = 0
    """Of all its sequences."""
    load: Load = LOAD


def busy(worker: WorkerInfo | str, load: Load = LOAD, /, **state: int) -> Busy:
    return Busy(info=worker_info(worker) if isinstance(worker, str) else worker, load=load, **state)


class Placing:
    """Runs one policy; the request has `num_tokens` tokens, of which each worker has `cached`."""

    def __init__(
        self, policy: PolicyName, *workers: Busy | str, num_tokens: int = 64, config: RouterConfig | None = None
    ) -> None:
        self.config = config or RouterConfig(local_prefill="never", watermark=0.0)
        self.links, self.pairs = LinkModel(), Pairs(self.config)
        self.policy = create(policy, self.config, self.links, self.pairs, in_turn)
        self.fleet = Fleet(self.config, self.policy, self.links, self.pairs)
        self.request = routed_request("asked", num_tokens)
        self.num_tokens = num_tokens
        for worker in workers:
            self.add(busy(worker) if isinstance(worker, str) else worker)

    def add(self, state: Busy) -> None:
        info = state.info
        self.fleet.up(info, 0.0)
        self.fleet.pairs_to_form(info.worker_id)
        hashes = self.request.block_hashes[: state.cached // 16]
        assert self.fleet.report(worker_report(info.worker_id, 0, BlocksSnapshot(hashes=hashes), load=state.load), 0.0)
        worker = self.fleet.worker(info.worker_id)
        for number in range(state.seqs):
            assignment = Assignment()
            if number == 0:
                marks = marks_of(hashes[: state.held // 16], state.held // 16)
                assignment = Assignment(tokens=state.tokens, blocks=state.used, context=state.context, marks=marks)
            self.fleet.open(worker, AttemptKey(RequestId(f"{info.worker_id}-{number}"), 0), assignment, -1)

    def choose(self, *, without: Sequence[str] = (), **demand: object) -> Choice | None:
        settings: dict[str, object] = {
            "num_tokens": self.num_tokens,
            "reserve_tokens": 16,
            "output_tokens": 10.0,
            **demand,
        }
        wanted = Demand(**settings)  # type: ignore[arg-type]
        avoided = {WorkerId(name) for name in without}
        shortlists = self.fleet.shortlists(wanted, self.request.block_hashes, avoided, 0.0)
        return choose(self.policy, wanted, shortlists, in_turn)

    def where(self, *, without: Sequence[str] = (), **demand: object) -> str:
        """`p0 d0`, `- d0` for one worker alone, `none`; with ` later` behind it where it has no slot."""
        choice = self.choose(without=without, **demand)
        if choice is None:
            return "none"
        prefill = choice.prefill.worker.worker_id if choice.prefill else "-"
        return f"{prefill} {choice.decode.worker.worker_id}" + ("" if choice.has_slot else " later")


def samples(
    *, base_ms: float, prefill_token_ms: float, decode_ms: float, context_ms: float = 0.0, attended_ms: float = 0.0
) -> tuple[StepSample, ...]:
    """A calibration of a worker whose step times are exactly these."""
    shapes = [(16, 136, 0, 0), (128, 8256, 0, 0), (512, 131328, 0, 0), (128, 73792, 0, 0)]
    shapes += [(0, 0, n, n * context) for n in (1, 8, 32) for context in (64, 1024)]
    return tuple(
        StepSample(
            base_ms + tokens * prefill_token_ms + pairs * attended_ms + num * decode_ms + context * context_ms,
            tokens,
            pairs,
            num,
            context,
        )
        for tokens, pairs, num, context in shapes
    )
