"""The simulator as a judge of candidates: the real router over workers in virtual time, until the queues have
settled and enough requests have ended.

    steady_requests(load) -> requests of a plan, and from when on they count: not while the queues fill
    SimulatedJudge(planner, outline)(candidate) -> Judgement
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from disagg.autoscaler.queueing import Lengths
from disagg.engine.config import TRANSFER_DEFAULTS, TransferLimits, WorkerConfig
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import meets, meets_tpot, meets_ttft
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import Outline, OutlinedRequest, RandomWorkload, outline
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.messages import RoleName
from disagg.router.config import RouterConfig
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.plan.candidates import Candidate, Judgement, Pool
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.pools import Planner
from disagg.simulator.world.settings import ClusterSpec, EngineKind, PoolSpec
from disagg.simulator.world.users import UserRequest

PLAN_ENGINE: EngineKind = "fast"
"""The engine that judges plans. For the reason why it is not the exact one see
docs/adr/0081-the-fast-engine-judges-plans.md."""
COUNTED = 300
"""Least number of requests that count."""
MAX_REQUESTS = 20_000
_LIVES = 1.0
"""Time before requests count, as a multiple of the time of an answer at its limits."""
_UNLIMITED_TTFT_S, _UNLIMITED_TPOT_S = 600.0, 1.0
"""Limits in seconds that determine the length of a run where none are given."""
_MAX_TURNS = 8
_USUAL_TPOT_S = 0.05
_BLOCK_SIZE = 16
_MAX_QUEUED = 1 << 20


class SimulatedJudge:
    """Judges candidates of one planner under the same requests at the same times."""

    def __init__(
        self, planner: Planner, requests: Outline, engine: EngineKind = PLAN_ENGINE, counted_from_s: float = 0.0
    ) -> None:
        self._planner = planner
        self._requests = [UserRequest(each) for each in requests.requests]
        self._engine: EngineKind = engine
        self._counted_from_s = counted_from_s
        self._last_s = _last_s(requests.requests, planner.load)

    def __call__(self, candidate: Candidate) -> Judgement:
        """Simulate the candidate until every request has ended or missed its limits."""
        cluster = SimulatedCluster(self.spec(candidate), self._requests)
        cluster.advance(self._last_s)
        ended = {record.index: record for record in cluster.users.records}
        due = [request.outlined for request in self._requests]
        return judgement_of(due, ended, self._planner.load, self._counted_from_s)

    def spec(self, candidate: Candidate) -> ClusterSpec:
        """The simulated cluster of a candidate."""
        site = self._planner.site
        model, precision = site.model, site.precision
        prefill, decode = candidate.prefill, candidate.decode
        pools = [self._pool("colocated", decode, ("prefill", "decode"))]
        if prefill is not None:
            pools = [self._pool("prefill", prefill, ("prefill",)), self._pool("decode", decode, ("decode",))]
        return ClusterSpec(
            pools=pools,
            kv_layout=model.kv_layout(precision.kv_dtype),
            max_model_len=model.max_positions,
            router=RouterConfig(max_queued=_MAX_QUEUED, admission=False),
            link=site.link,
            engine=self._engine,
            sample_s=60.0,
        )

    def _pool(self, name: str, pool: Pool, roles: tuple[RoleName, ...]) -> PoolSpec:
        worker = self._planner.worker(pool.parallelism, pool.token_budget)
        config = WorkerConfig(
            worker_id=name,
            roles=roles,
            model_path="fake",
            block_size=_BLOCK_SIZE,
            transfer=_transfer_limits(
                self._planner.site.model.kv_bytes_per_token(self._planner.site.precision.kv_dtype)
            ),
            max_num_seqs=worker.max_num_seqs,
            token_budget=pool.token_budget,
            pp=pool.pp,
        )
        return PoolSpec(
            name=name,
            size=pool.num_workers,
            worker=config,
            num_blocks=max(1, worker.kv_tokens // _BLOCK_SIZE),
            times=worker.times,
            expert_share=self._planner.site.model.expert_share,
        )


def _transfer_limits(bytes_per_token: int) -> TransferLimits:
    """The default ones, or payloads of one token where its KV is larger."""
    chunk_bytes = max(TRANSFER_DEFAULTS.chunk_bytes, bytes_per_token)
    return TransferLimits(chunk_bytes=chunk_bytes, staging_bytes=max(TRANSFER_DEFAULTS.staging_bytes, chunk_bytes))


def judgement_of(
    requests: Sequence[OutlinedRequest], ended: Mapping[int, RequestRecord], load: Load, counted_from_s: float
) -> Judgement:
    """The judgement by the requests that are due from `counted_from_s` on. One that has not ended has missed its
    limits; means are those of the others."""
    counted = [request.index for request in requests if request.due_s >= counted_from_s]
    records = [ended[index] for index in counted if index in ended]
    slo, number = load.slo, len(counted)
    return Judgement(
        attainment=sum(meets(record, slo) for record in records) / number,
        ttft_attainment=sum(meets_ttft(record, slo) for record in records) / number,
        tpot_attainment=sum(meets_tpot(record, slo) for record in records) / number,
        mean_ttft_s=_mean([record.ttft_s for record in records]),
        mean_tpot_s=_mean([record.tpot_s for record in records]),
    )


def _last_s(requests: Sequence[OutlinedRequest], load: Load) -> float:
    """When the last request has ended or missed its limits at the latest. Turns of a conversation may be due later than
    planned."""
    slo = load.slo
    longest = max(request.max_tokens for request in requests)
    life_s = (slo.ttft_s or _UNLIMITED_TTFT_S) + longest * (slo.tpot_s or _UNLIMITED_TPOT_S)
    num_turns = 1 + sum(request.after is not None for request in requests)
    return requests[-1].due_s + life_s * min(_MAX_TURNS, num_turns)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


# ---------------------------------------------------------------- requests


def steady_requests(load: Load, seed: int = 0) -> tuple[Outline, float]:
    """Poisson arrivals of the load's one kind of request, and the time in seconds from which on they count. There are
    enough requests to fill the pools, and half as many again or `COUNTED`."""
    kind = load.kinds[0]
    assert len(load.kinds) == 1, "requests of several kinds come from a scenario"
    life_s = kind.output * (load.slo.tpot_s or _USUAL_TPOT_S) + (load.slo.ttft_s or 0.0)
    settle_s = _LIVES * life_s
    number = math.ceil(load.rate_per_s * settle_s + max(COUNTED, load.rate_per_s * settle_s / 2.0))
    if number > MAX_REQUESTS:
        number, settle_s = MAX_REQUESTS, MAX_REQUESTS / load.rate_per_s / 2.0
    arrivals = ArrivalConfig(kind="poisson", rate_per_s=load.rate_per_s, num_requests=number, seed=seed)
    workload = RandomWorkload(isl=kind.prompt, osl=kind.output, seed=seed)
    longest = kind.prompt + kind.output
    return outline(workload, arrivals, max_model_len=longest), settle_s


def lengths_of(requests: Sequence[OutlinedRequest]) -> list[Lengths]:
    """The lengths of a scenario's requests: of the whole prompt with the earlier turns, and of the part that an
    unlimited cache would hold, in whole blocks."""
    found: list[Lengths] = []
    said: dict[int, int] = {}
    seen: set[tuple[object, ...]] = set()
    for number, request in enumerate(requests):
        before = said.get(request.after, 0) if request.after is not None else 0
        prompt, cached = before, before
        keys: tuple[object, ...] = (request.after,)
        for part in request.parts:
            keys = (hash(keys), part)
            if cached == prompt and keys in seen:
                cached += part.num_tokens
            seen.add(keys)
            prompt += part.num_tokens
        cached = min(cached, prompt - 1) // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
        found.append(Lengths(prompt, request.max_tokens, cached))
        said[number] = prompt + request.max_tokens
    return found
