"""One present incarnation of a worker, as placement needs it: its capacity, its assignments, its reports, its step
times.

Assignments show a dispatch at once and its progress late; the worker's reports show progress within 20 ms and
dispatches late. `outstanding_tokens` combines both.

A placement reads many workers, and few of them changed since the last one. So what it reads is kept as plain numbers,
which `refresh` updates after every change of the assignments and every report.

Owner: the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.ids import WorkerId
from disagg.proto.messages import (
    KvLayout,
    Load,
    PeerRef,
    StepCoefficients,
    TierCounts,
    TierName,
    WorkerInfo,
    WorkerReport,
    experts_read,
)
from disagg.router.workers.adapter_loads import Loaded
from disagg.router.workers.assignments import AssignedLoad, Assignment, num_left
from disagg.router.workers.prefix_index import WorkerSet
from disagg.step_times.pace import slack_ms, tokens_left
from disagg.step_times.step_model import StepModel

LATE_MS = 100.0
"""Milliseconds of outstanding prompts from which on an elastic worker gets no other prompt, so that a worker that
becomes free can take it instead."""

OTHERS_SHARE = 0.03
"""Weight of the latest report in a mean over reports; there are some fifty reports a second while much changes."""


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation of a worker. Changed by the fleet only."""

    info: WorkerInfo
    assigned: AssignedLoad
    position: int
    """Number of the worker in the order in which the workers came; breaks ties of ranks."""
    slot_tokens: int
    """Number of outstanding tokens below which it takes another prompt."""
    bit: WorkerSet = 0
    """The worker as a set of the prefix index."""
    host_bit: WorkerSet = field(init=False)
    """Its host memory as a set of the index of tiers; the next bit is its disk."""
    tier_bits: WorkerSet = field(init=False)
    """All its tiers as such a set."""
    num_routers: int = 1
    """Number of routers that place on it. With several, sequences of the others count among those that decode, by
    `_others`."""
    load: Load = field(default_factory=Load)
    model: StepModel = field(init=False)
    is_measured: bool = False
    """Whether the model has observed a step of this worker, so that its predictions are usable."""
    is_draining: bool = False
    is_split_off: bool = False
    """Whether it is an elastic worker that takes no prompts, see `Fleet.split`."""
    is_suspected: bool = False
    """Whether it seems to hang. Nothing is placed on it then."""
    last_turn: int = -1
    """Number of the latest placement on it."""
    reported_at: float = 0.0
    """Time of its latest report, or of its coming up."""

    adapters: Loaded = field(default_factory=Loaded)
    """The adapters that it has loaded."""

    # From `info`.
    worker_id: WorkerId = field(init=False)
    peer: PeerRef = field(init=False)
    """The reference by which another worker reaches this one."""
    decodes: bool = field(init=False)
    """Whether its sequences decode there (D, or both roles)."""
    is_for_prompts: bool = field(init=False)
    """Whether it computes prompts from the queue (P, or both roles and not split off)."""
    num_blocks: int = field(init=False)
    kv_layout: KvLayout = field(init=False)
    fetches: bool = field(init=False)
    """Whether it gets KV from other workers, and gives them its own."""

    # What `refresh` keeps up to date.
    outstanding_tokens: int = 0
    """Number of prompt tokens that it was given and has not computed."""
    used_blocks: int = 0
    """Number of assigned blocks, plus those that the latest report showed beyond them: of sequences of other routers,
    and of answers longer than their reserve."""
    free_tokens: int = 0
    """Number of tokens in blocks without reusable content, or with a copy of another worker's content. Writing beyond
    them evicts other cached blocks."""
    num_decodes: int = 0
    """Number of sequences that decode, or are about to."""
    prompt_room: int = 1
    """Number of prompt tokens in one step, beside these sequences."""
    num_sequences: int = 0
    """Number of assigned sequences."""
    around_ms: float = 0.0
    """Predicted milliseconds that a step with prompt tokens takes without these: those of its decodes, each with one
    row, or the fixed cost alone."""
    token_ms: float = 0.0
    """Predicted milliseconds from one token of its decodes to the next, in steps without prompt tokens: such a step
    with all its rows, divided by the tokens that it gives to each."""
    backlog_ms: float = 0.0
    """Milliseconds until the outstanding prompt tokens are computed."""
    has_slot: bool = True
    """Whether it has a free prefill slot."""
    is_full: bool = False
    """Whether it has no free decode place."""
    _saved: tuple[float, float] | None = None
    """Time until which its sequences can spare time, and the least TPOT target in milliseconds. None after a change,
    until they are needed."""
    is_empty: bool = True
    """Whether no sequence is assigned or reported."""
    refused_blocks: float = math.inf
    """Number of blocks of the smallest request that it refused since the latest report; smaller ones may fit."""

    # The coefficients of its step times, as of the latest report.
    base_ms: float = 0.0
    prefill_token_ms: float = 0.0
    attended_ms: float = 0.0
    decode_ms: float = 0.0
    context_ms: float = 0.0

    experts_ms: float = 0.0
    expert_share: float = 0.0

    # The same for one token of each sequence, see `token_ms`.
    token_base_ms: float = 0.0
    joining_ms: float = 0.0
    """Milliseconds that a further sequence adds, without its context: with experts, to the sequences that are there."""
    attending_ms: float = 0.0
    """Milliseconds that each token of its context adds."""

    extent_ms: Mapping[TierName, float] = field(default_factory=dict)
    """Milliseconds that it expects to take to load an extent from each of its tiers that are on."""
    tiers: tuple[TierCounts, ...] = ()
    """The tiers of KV that it has, as it reported last."""
    tier_queue_ms: Mapping[TierName, float] = field(default_factory=dict)
    """Milliseconds until a load from each of these tiers that begins now gets its first extent."""
    heard_at: float = -math.inf
    """When its latest message came."""
    blocks_beyond: int = 0
    """Number of blocks that were reported as held, and not assigned at that time."""
    _others: float = 0.0
    """Mean of `num_others`, of which a report changes a small share: each router spreads its own requests evenly, and
    does not follow the latest placements of the others. If all routers followed them, all would fill up the worker that
    the same late reports show as the emptiest. An imbalance that lasts longer counts."""
    _others_context: float = 0.0
    """Mean number of tokens that these sequences attend to."""
    _num_blocks_unseen: int = 0
    """Number of blocks assigned since the last report, which that report may not include."""
    num_others: int = 0
    """Number of sequences that were reported, and not assigned at that time."""
    _has_preempted: bool = False
    """Whether preempted sequences wait on it. A decode worker refuses everything until they run again."""
    _num_computed: int = 0
    """Number of assigned tokens that it has computed by its load, and not yet reported as computed by request."""
    _num_unseen: int = 0
    """Number of tokens assigned since the last report, which that report may not include."""

    def __post_init__(self) -> None:
        self.model = StepModel(self.info.calibration, self.info.expert_share)
        self.is_measured = bool(self.info.calibration)
        self.host_bit = self.bit * self.bit
        self.tier_bits = 3 * self.host_bit
        self.update_info(self.info)

    def update_info(self, info: WorkerInfo) -> None:
        """Take the info of the same incarnation after a new session."""
        self.info = info
        self.worker_id = info.worker_id
        self.peer = PeerRef(worker_id=info.worker_id, incarnation=info.incarnation, address=info.address)
        self.decodes = "decode" in info.roles
        self.is_for_prompts = not (decodes_only(info) or self.is_split_off)
        self.num_blocks = info.num_blocks
        self.kv_layout = info.kv_layout
        self.fetches = info.fetches
        self._take_load()
        self.refresh()

    def split_off(self, is_split_off: bool) -> None:
        """Set whether it takes no prompts from now on."""
        self.is_split_off = is_split_off
        self.update_info(self.info)

    def has_adapter(self, fingerprint: str, now: float) -> bool:
        """Whether it has an adapter, or loads it now."""
        return fingerprint in self.adapters.there or self.adapters.is_coming(fingerprint, now)

    def note_assigned(self, num_tokens: int, num_blocks: int) -> None:
        """Note that prompt tokens and KV blocks were assigned."""
        self._num_unseen += num_tokens
        self._num_blocks_unseen += num_blocks

    def note_closed(self, assignment: Assignment) -> None:
        """Note that an assignment was closed. The blocks that it shares with others stay in use until the next
        report."""
        num_left_blocks = num_left(assignment, self.assigned.held) * HASH_BLOCK_TOKENS // self.info.block_size
        self.blocks_beyond += max(0, num_left_blocks - assignment.shared_blocks)

    def note_returned(self, num_tokens: int) -> None:
        """Note that assigned prompt tokens were released: computed, or given up. Progress on them no longer counts."""
        self._num_computed = max(0, min(self._num_computed - num_tokens, self.assigned.tokens))
        self._num_unseen = min(self._num_unseen, self.assigned.tokens)

    @property
    def has_others(self) -> bool:
        """Whether it reported sequences that are not assigned here, or preempted ones."""
        return self.num_others > 0 or self._has_preempted

    @property
    def coefficients(self) -> StepCoefficients:
        """The coefficients of prompts and of one token of each sequence that decodes, as of the latest report. Without
        drafts and forced tokens they are those of a step."""
        times = StepCoefficients(
            self.token_base_ms, self.prefill_token_ms, self.attended_ms, self.joining_ms, self.attending_ms
        )
        if not self.experts_ms:
            return times
        rows, tokens = self.load.rows_per_step, self.load.tokens_per_step
        return times._replace(
            decode_ms=self.decode_ms * rows / tokens,
            experts_ms=self.experts_ms / tokens,
            expert_share=experts_read(self.expert_share, rows),
        )

    def note_refused(self, num_blocks: int) -> None:
        """Note that it refused a sequence of `num_blocks` blocks: larger ones are not placed on it until its next
        report."""
        self.refused_blocks = min(self.refused_blocks, num_blocks)

    @property
    def lacks_blocks(self) -> bool:
        """Whether its latest report shows that it preempted sequences, or is about to: not every running sequence can
        get one more block."""
        load = self.load
        if not self.decodes:
            return False
        num_left = load.blocks_total - load.blocks_active
        return load.num_preempted > 0 or (load.num_running > 1 and num_left < load.num_running)

    def take_report(self, report: WorkerReport) -> None:
        """Take the load and the measured steps of a report. Call `refresh` next."""
        self.load = load = report.load
        num_computed = self.assigned.tokens - self._num_unseen - load.uncomputed_prompt_tokens
        # If the report includes the tokens assigned since the last one, this is too low by as many.
        self._num_computed = max(num_computed, self._num_computed if self._num_unseen else 0)
        self._num_unseen = 0
        num_seen = max(0, self.assigned.blocks - self._num_blocks_unseen)
        self.blocks_beyond = max(0, load.blocks_active + load.blocks_reserved - num_seen)
        self._num_blocks_unseen = 0
        self.num_others = max(0, load.num_running + load.num_waiting - len(self.assigned.assignments))
        others_context = self.blocks_beyond * self.info.block_size if self.num_others else 0
        self._others += OTHERS_SHARE * (self.num_others - self._others)
        self._others_context += OTHERS_SHARE * (others_context - self._others_context)
        self._has_preempted = load.num_preempted > 0
        self.refused_blocks = math.inf
        if report.metrics is not None and report.metrics.tiers:
            self.tiers = report.metrics.tiers
            self.extent_ms = {tier.name: tier.extent_ms for tier in report.metrics.tiers if tier.extent_ms}
            self.tier_queue_ms = {tier.name: tier.queue_ms for tier in report.metrics.tiers}
        for sample in report.steps:
            self.model.observe(sample)
            self.is_measured = True
        self._take_load()

    def refresh(self) -> None:
        """Update what follows from the assignments and the latest report."""
        assigned, info = self.assigned, self.info
        self.num_sequences = num_sequences = len(assigned.assignments)
        num_there = num_sequences + self.num_others
        self.is_full, self.is_empty = num_there >= info.max_num_seqs, not num_there
        if self._has_preempted:
            self.is_full, self.is_empty = self.is_full or not self.is_for_prompts, False
        self.used_blocks = assigned.blocks + self.blocks_beyond
        self.outstanding_tokens = tokens = assigned.tokens - self._num_computed
        if self.decodes:
            num_decodes, context = num_sequences - assigned.num_prefills, assigned.context
            if self.num_routers > 1:
                num_decodes += round(self._others)
                context += round(self._others_context)
            self.num_decodes = num_decodes
            self.around_ms = self.base_ms + num_decodes * self.decode_ms + context * self.context_ms
            self.token_ms = self.token_base_ms + num_decodes * self.joining_ms + context * self.attending_ms
            if self.experts_ms:
                self._add_experts(num_decodes, context)
            room = info.token_budget - num_decodes
            self.prompt_room = room if room > 1 else 1
        else:
            self.around_ms = self.token_ms = self.base_ms + self.experts_ms
            self.prompt_room = info.token_budget
        if tokens:
            pairs = assigned.pairs * tokens / assigned.tokens
            compute = tokens * self.prefill_token_ms + pairs * self.attended_ms
            self.backlog_ms = compute + tokens / self.prompt_room * self.around_ms
        elif self.backlog_ms:
            self.backlog_ms = 0.0
        self.has_slot = tokens < self.slot_tokens
        if info.is_elastic:
            self._saved = None
            if self.backlog_ms >= LATE_MS:
                self.has_slot = False

    def saved(self, now: float, output_tokens: float) -> tuple[float, float]:
        """(how many milliseconds all sequences that decode there can spare for prompts by their TPOT targets, and the
        least of these targets); infinite where none has one. `output_tokens`: the mean length of answers.

        A sequence that would be late even alone on the worker counts as one without a target."""
        if self._saved is None:
            self._saved = self._find_saved(now, output_tokens)
        until, pace_ms = self._saved
        return max(0.0, (until - now) * 1e3), pace_ms

    def _find_saved(self, now: float, output_tokens: float) -> tuple[float, float]:
        least_ms, pace_ms, step_ms = math.inf, math.inf, self.token_ms
        base_ms = self.token_base_ms + self.joining_ms
        if self.experts_ms:
            times = self.coefficients
            base_ms = times.base_ms + times.decode_ms + times.experts_of(1)
        for assignment in self.assigned.assignments.values():
            tpot_ms = assignment.tpot_ms
            if tpot_ms == math.inf or assignment.tokens:
                continue
            num_before = assignment.num_before
            num_done = num_before + assignment.context - assignment.known_tokens
            rest = tokens_left(num_done, num_before + assignment.most_output_tokens, output_tokens)
            paced_ms = left_ms = tpot_ms * (max(0, num_done - 1) + rest)
            if assignment.first_at < now:
                left_ms -= (now - assignment.first_at) * 1e3
            ms = slack_ms(left_ms, rest, step_ms, base_ms + assignment.context * self.attending_ms, paced_ms)
            if ms is None:
                continue
            if ms < least_ms:
                least_ms = ms
            if tpot_ms < pace_ms:
                pace_ms = tpot_ms
        return now + least_ms / 1e3, pace_ms

    def _add_experts(self, num_decodes: int, context: float) -> None:
        """Add the experts that steps read: those of a prompt's rows are all, those of decodes bend with their number,
        so that a further sequence adds less the more there are."""
        times = self.coefficients
        read_ms = times.experts_of(num_decodes)
        self.around_ms += self.experts_ms
        self.token_ms = times.base_ms + num_decodes * times.decode_ms + context * times.context_ms + read_ms
        self.joining_ms = times.decode_ms + times.experts_of(num_decodes + 1) - read_ms

    def _take_load(self) -> None:
        """Update what follows from the latest report alone."""
        load, info = self.load, self.info
        num_free = (load.blocks_total or info.num_blocks) - load.blocks_active - load.blocks_cached
        self.free_tokens = (max(0, num_free - load.blocks_apart) + load.blocks_copied) * info.block_size
        coefficients = self.model.coefficients
        self.base_ms, self.prefill_token_ms, self.attended_ms, self.decode_ms, self.context_ms = coefficients[:5]
        self.experts_ms, self.expert_share = coefficients[5:]
        rows, tokens = load.rows_per_step, load.tokens_per_step
        self.token_base_ms = self.base_ms / tokens
        self.joining_ms, self.attending_ms = self.decode_ms * rows / tokens, self.context_ms * rows / tokens


def longest_sequence(info: WorkerInfo) -> int:
    """The most tokens, prompt and answer, that one sequence can ever have on this worker."""
    return min(info.max_model_len, info.num_blocks * info.block_size)


def prefills_only(info: WorkerInfo) -> bool:
    """Whether this worker is a P."""
    return set(info.roles) == {"prefill"}


def decodes_only(info: WorkerInfo) -> bool:
    """Whether this worker is a D."""
    return set(info.roles) == {"decode"}


def can_prefill_for_others(info: WorkerInfo) -> bool:
    """Whether this worker can be the P of a pair."""
    return info.is_elastic or prefills_only(info)


def can_decode_for_others(info: WorkerInfo) -> bool:
    """Whether this worker can be the D of a pair."""
    return info.is_elastic or decodes_only(info)


def has_both_roles(info: WorkerInfo) -> bool:
    """Whether this worker has both roles."""
    return {"prefill", "decode"} <= set(info.roles)
