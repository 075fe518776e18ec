"""The metrics under names of our own: requests and targets, the router's decisions and how good they were, workers,
KV transfers. The label `instance` is a worker's id. Base units; see docs/observability.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import Metric

from disagg.gateway.metrics.family_constructors import counter, gauge, histogram, histogram_of_counts
from disagg.proto.messages import MAX_DRAFT, STEP_SECONDS_BOUNDS, FetchOutcome, Load, WorkerInfo
from disagg.router.api import STAGES, ClusterView, WorkerView
from disagg.router.config import SPLIT, num_split
from disagg.router.statistics import MIGRATION_OUTCOMES, RouterStats
from disagg.router.telemetry.telemetry import ANSWERED, SLOS

ROLES = ("prefill", "decode", "colocated")
STATES = ("ready", "draining", "unreachable")
FETCH_OUTCOMES: tuple[FetchOutcome, ...] = get_args(FetchOutcome)
DECISIONS = (
    "pair",
    "local_prefill",
    "local_fallback",
    "colocated",
    "pooled",
    "probe",
    "no_room",
    "no_slot",
    "no_share",
)


def cluster_families(view: ClusterView, *, shows_workers: bool = True) -> Iterator[Metric]:
    """Metric families of the router's view. `shows_workers` adds those that are the same at every gateway of the
    cluster."""
    yield from _requests(view)
    yield from _tenants(view)
    yield from _latencies(view.stats)
    yield from _router(view)
    if shows_workers:
        yield from _instances(view)
        yield from _engines(view)
        yield from _experts(view)
        yield from _tiers(view)
        yield from _transfers(view)


def role_of(info: WorkerInfo) -> str:
    """`colocated` for a worker that has both roles."""
    return "colocated" if len(info.roles) > 1 else info.roles[0]


def _requests(view: ClusterView) -> Iterator[Metric]:
    stats = view.stats
    yield gauge(
        "disagg_requests_in_flight",
        "Requests by what they wait for: queued, prefill, transfer, decode.",
        ("stage",),
        [((stage,), view.stages.get(stage, 0)) for stage in STAGES],
    )
    outcomes = {**dict.fromkeys(ANSWERED, 0), **stats.outcomes}
    yield counter(
        "disagg_requests",
        "Requests that ended, by outcome: stop, length, or the code of an error. Each answer to a prompt is one.",
        ("outcome",),
        [((outcome,), count) for outcome, count in sorted(outcomes.items())],
    )
    yield counter(
        "disagg_slo_requests",
        "Requests that ended and had a target (ttft, tpot; both: all that it had), by whether they met it.",
        ("slo", "met"),
        [((slo, str(met).lower()), stats.slos[slo, met]) for slo in SLOS for met in (True, False)],
    )
    yield counter(
        "disagg_prompt_tokens", "Prompt tokens of answered requests.", (), [((), int(stats.prompt_tokens.total))]
    )
    yield counter(
        "disagg_cached_prompt_tokens",
        "Prompt tokens of answered requests that no worker had to compute.",
        (),
        [((), stats.cached_tokens)],
    )
    yield counter(
        "disagg_output_tokens",
        "Output tokens that reached the gateway, of all requests.",
        (),
        [((), stats.num_output_tokens)],
    )


def _tenants(view: ClusterView) -> Iterator[Metric]:
    """Metrics by tenant. Tenants' names come from the file of keys, which bounds their number."""
    usage = sorted(view.stats.tenants.items())
    in_flight = {**dict.fromkeys(view.stats.tenants, (0, 0)), **view.tenants}
    yield gauge(
        "disagg_tenant_requests_in_flight",
        "Requests of a tenant that wait for a worker (queued), and that have one (running).",
        ("tenant", "state"),
        [
            ((tenant, state), count)
            for tenant, counts in sorted(in_flight.items())
            for state, count in zip(("queued", "running"), counts, strict=True)
        ],
    )
    yield counter(
        "disagg_tenant_requests",
        "Requests of a tenant that ended, by outcome: stop, length, or the code of an error.",
        ("tenant", "outcome"),
        [((tenant, outcome), count) for tenant, each in usage for outcome, count in sorted(each.outcomes.items())],
    )
    yield counter(
        "disagg_tenant_prompt_tokens",
        "Prompt tokens of a tenant's requests that a worker was given, however they ended.",
        ("tenant",),
        [((tenant,), each.prompt_tokens) for tenant, each in usage],
    )
    yield counter(
        "disagg_tenant_output_tokens",
        "Output tokens that reached the gateway, of a tenant's requests that ended.",
        ("tenant",),
        [((tenant,), each.output_tokens) for tenant, each in usage],
    )
    yield counter(
        "disagg_tenant_refused",
        "Calls and requests that were refused because of a limit of their tenant, by the limit.",
        ("tenant", "limit"),
        [((tenant, limit), count) for tenant, each in usage for limit, count in sorted(each.refused.items())],
    )


def _latencies(stats: RouterStats) -> Iterator[Metric]:
    yield histogram(
        "disagg_time_to_first_token_seconds",
        "From arrival at the gateway to the first token; path: pd (a pair), local (a decode worker alone), colocated.",
        ("path",),
        [((path,), found) for path, found in stats.ttft.items()],
    )
    yield histogram(
        "disagg_inter_token_latency_seconds",
        "Between two tokens of an answer; 0 between tokens that came together.",
        (),
        [((), stats.itl)],
    )
    yield histogram("disagg_request_duration_seconds", "From arrival to the end of an answer.", (), [((), stats.e2e)])
    yield histogram(
        "disagg_request_stage_seconds",
        "Time of a request in each stage; kv_transfer overlaps prefill, kv_transfer_exposed is what follows it.",
        ("stage",),
        [((stage,), found) for stage, found in stats.stages.items()],
    )


def _router(view: ClusterView) -> Iterator[Metric]:
    decisions = {**dict.fromkeys(DECISIONS, 0), **view.stats.decisions}
    yield counter(
        "disagg_router_decisions",
        "Placements by decision (probe: of `disagg doctor`), and tries that found no room or no free slot.",
        ("reason",),
        [((reason,), count) for reason, count in sorted(decisions.items())],
    )
    yield counter(
        "disagg_router_events",
        "What failed or was dropped: refusals of workers, lost attempts, late or contradicting messages.",
        ("event",),
        [((event,), count) for event, count in sorted(view.events.items())],
    )
    yield counter(
        "disagg_exported_traces",
        "Requests that ended, by what became of their spans for the OpenTelemetry collector.",
        ("result",),
        [((result,), count) for result, count in sorted(view.exported_traces.items())],
    )
    decodes = view.placement.decodes
    if decodes is not None:
        yield gauge(
            "disagg_router_decodes",
            "Where answers decode: 1 for the present setting, spread or gather; of split the workers without prompts.",
            ("setting",),
            [
                (("spread",), int(decodes == "spread")),
                (("gather",), int(decodes == "gather")),
                ((SPLIT,), num_split(decodes)),
            ],
        )
        yield counter(
            "disagg_router_decodes_changes",
            "How often that setting was changed.",
            (),
            [((), view.stats.num_decodes_changes)],
        )
    yield counter(
        "disagg_migrations",
        "Moves of running sequences to another worker, by outcome: moved, refused, failed, ended (with its answer).",
        ("outcome",),
        [((outcome,), view.stats.migrations[outcome]) for outcome in MIGRATION_OUTCOMES],
    )
    yield histogram(
        "disagg_migration_pause_seconds",
        "Of sequences that moved: from the last token of one worker to the first of the other.",
        (),
        [((), view.stats.migration_pause)],
    )
    yield gauge(
        "disagg_router_quarantined",
        "Circuit breakers of a worker (instance) that are not closed.",
        ("instance",),
        [((worker.info.worker_id,), len(worker.open_breakers)) for worker in view.workers],
    )
    yield gauge(
        "disagg_router_view_age_seconds",
        "Age of the latest load report of a worker (instance), which placement relies on.",
        ("instance",),
        [((worker.info.worker_id,), worker.report_age_s) for worker in view.workers],
    )
    yield histogram(
        "disagg_router_prediction_error_ratio",
        "Measured over predicted, of answers that took one attempt: 1 is exact. what: ttft, tpot, transfer.",
        ("what",),
        [((what,), found) for what, found in view.stats.prediction_ratio.items()],
    )


def _state_of(worker: WorkerView) -> str:
    if worker.is_suspected:
        return "unreachable"
    return "draining" if worker.is_draining else "ready"


def _instances(view: ClusterView) -> Iterator[Metric]:
    states = Counter((role_of(info), "unreachable") for info in view.unreachable)
    states.update((role_of(w.info), _state_of(w)) for w in view.workers)
    yield gauge(
        "disagg_instances",
        "Workers by role, and by whether the router can use them.",
        ("role", "state"),
        [((role, state), states[role, state]) for role in ROLES for state in STATES],
    )
    yield counter(
        "disagg_instance_restarts",
        "Processes of a worker that took the place of an earlier one: after a failure, or a drain by hand.",
        ("instance",),
        [((worker_id,), count) for worker_id, count in view.restarts.items()],
    )
    yield gauge(
        "disagg_worker_start_seconds",
        "How long a phase of the start of a worker (instance) took: from its template to its open port.",
        ("instance", "phase"),
        [((w.info.worker_id, phase.name), phase.seconds) for w in view.workers for phase in w.info.start_phases],
    )
    yield gauge(
        "disagg_kv_blocks",
        "KV blocks by state: active (held by sequences), reserved (promised to sequences), cached (reusable), free.",
        ("instance", "state"),
        [((w.info.worker_id, state), count) for w in view.workers for state, count in kv_blocks(w.load).items()],
    )
    yield gauge(
        "disagg_worker_buffer_bytes",
        "Large buffers of a worker's ranks, as on the rank where each is largest, fixed at the start: kv and "
        "kv_window_<tokens> (caches), experts (beside their weights), swap (host memory for preempted sequences).",
        ("instance", "buffer"),
        [((w.info.worker_id, buffer.name), buffer.num_bytes) for w in view.workers for buffer in w.info.buffers],
    )
    yield gauge(
        "disagg_instance_sequences",
        "Sequences on a worker: in its batch (running), waiting for a place or for their KV (waiting), or preempted "
        "with their KV in host memory (suspended).",
        ("instance", "state"),
        [
            ((w.info.worker_id, state), count)
            for w in view.workers
            for state, count in (
                ("running", w.load.num_running),
                ("waiting", w.load.num_waiting),
                ("suspended", w.load.num_suspended),
            )
        ],
    )


def kv_blocks(load: Load) -> dict[str, int]:
    """Blocks by state. Their sum is the number of all blocks, unless more are reserved than are free, so that cached
    ones must be evicted."""
    free = load.blocks_total - load.blocks_active - load.blocks_cached - load.blocks_reserved
    return {
        "active": load.blocks_active,
        "reserved": load.blocks_reserved,
        "cached": load.blocks_cached,
        "free": max(0, free),
    }


def _engines(view: ClusterView) -> Iterator[Metric]:
    counters = view.counters.items()
    yield histogram_of_counts(
        "disagg_engine_step_seconds",
        "Duration of the engine's steps.",
        ("instance",),
        [((id_,), STEP_SECONDS_BOUNDS, m.step_seconds, m.step_seconds_sum) for id_, m in counters if m.step_seconds],
    )
    for name, text, field in (
        ("disagg_engine_prompt_tokens", "Prompt tokens that a worker computed.", "prompt_tokens"),
        (
            "disagg_engine_cached_tokens",
            "Tokens of new sequences that a worker found in its prefix cache.",
            "cached_tokens",
        ),
        (
            "disagg_engine_loaded_tokens",
            "Tokens of new sequences whose KV a worker loaded from a tier; they are among the cached ones.",
            "loaded_tokens",
        ),
        (
            "disagg_engine_fetched_tokens",
            "Tokens of new sequences whose KV a worker got from another one; they are among the cached ones.",
            "fetched_tokens",
        ),
        ("disagg_kv_served_fetches", "Fetches for which a worker gave KV to another one.", "served_fetches"),
        (
            "disagg_kv_tier_dropped_extents",
            "Extents that were to be written to a tier and were not: their blocks were needed, or there was no place.",
            "dropped_extents",
        ),
        ("disagg_engine_output_tokens", "Tokens that a worker sampled.", "output_tokens"),
        ("disagg_engine_preemptions", "Sequences that a worker preempted for lack of KV blocks.", "preemptions"),
        (
            "disagg_engine_swapped_out_blocks",
            "KV blocks of preempted sequences that a worker copied to host memory.",
            "swapped_out_blocks",
        ),
        (
            "disagg_engine_swapped_in_blocks",
            "KV blocks of preempted sequences that a worker copied back from host memory.",
            "swapped_in_blocks",
        ),
        ("disagg_engine_draft_steps", "Steps of a worker that computed drafts.", "draft_steps"),
        ("disagg_engine_drafted_tokens", "Drafts that a worker computed.", "drafted_tokens"),
        ("disagg_engine_accepted_tokens", "Drafts of a worker that became output tokens.", "accepted_tokens"),
    ):
        yield counter(name, text, ("instance",), [((id_,), getattr(m, field)) for id_, m in counters])
    yield counter(
        "disagg_kv_fetches",
        "Fetches of KV that a worker asked another one for.",
        ("instance", "outcome"),
        [((id_, outcome), m.fetches.get(outcome, 0)) for id_, m in counters for outcome in FETCH_OUTCOMES],
    )
    yield histogram_of_counts(
        "disagg_engine_accepted_length",
        "Accepted drafts of a run, which is the drafts of one sequence in one step.",
        ("instance",),
        [((id_,), range(MAX_DRAFT), m.draft_runs, m.accepted_tokens) for id_, m in counters if m.draft_runs],
    )


def _experts(view: ClusterView) -> Iterator[Metric]:
    yield gauge(
        "disagg_expert_imbalance",
        "Tokens of the busiest expert over those of an average one, in 256 steps, by layer with experts of the first "
        "stage.",
        ("instance", "layer"),
        [
            ((id_, str(layer)), found)
            for id_, metrics in view.counters.items()
            for layer, found in enumerate(metrics.expert_imbalance)
        ],
    )


def _tiers(view: ClusterView) -> Iterator[Metric]:
    tiers = [((id_, tier.name), tier) for id_, metrics in view.counters.items() for tier in metrics.tiers]
    ids = {worker.info.worker_id for worker in view.workers}
    present = [(values, tier) for values, tier in tiers if values[0] in ids]
    labels = ("instance", "tier")
    for name, text, field in (
        ("disagg_kv_tier_bytes", "KV that a worker keeps in a tier, in bytes.", "held_bytes"),
        ("disagg_kv_tier_capacity_bytes", "Most KV that a worker keeps in a tier, in bytes.", "capacity_bytes"),
    ):
        yield gauge(name, text, labels, [(values, getattr(tier, field)) for values, tier in present])
    yield gauge(
        "disagg_kv_tier_on",
        "Whether a worker uses a tier (1), or does not because it failed, is full or was not read yet (0).",
        labels,
        [(values, int(not tier.off_reason)) for values, tier in present],
    )
    for name, text, field in (
        ("disagg_kv_tier_written_extents", "Extents of 128 tokens that were written to a tier.", "written_extents"),
        ("disagg_kv_tier_loaded_extents", "Extents that were loaded from a tier.", "loaded_extents"),
        ("disagg_kv_tier_evicted_extents", "Extents that gave way to others in a tier.", "evicted_extents"),
        ("disagg_kv_tier_failed_extents", "Extents that could not be written to a tier or read.", "failed_extents"),
    ):
        yield counter(name, text, labels, [(values, getattr(tier, field)) for values, tier in tiers])


def _transfers(view: ClusterView) -> Iterator[Metric]:
    moved = [(src, count) for src, metrics in view.counters.items() for count in metrics.transfers]
    for name, text, field in (
        ("disagg_kv_transfers", "Hand-overs that ended well.", "num_transfers"),
        ("disagg_kv_transfer_bytes", "KV bytes of hand-overs that ended well.", "num_bytes"),
    ):
        yield counter(
            name,
            text,
            ("src", "dst", "transport"),
            [((src, count.decode_worker, count.transport), getattr(count, field)) for src, count in moved],
        )
    yield counter(
        "disagg_kv_transfer_failures",
        "Hand-overs that failed.",
        ("src", "dst", "reason"),
        [
            ((src, count.decode_worker, reason), times)
            for src, count in moved
            for reason, times in sorted(count.failures.items())
        ],
    )
