"""Which tokens of which sequences the next step computes. Pure, and one for all roles.

    plan = scheduler.schedule()              what the mode takes first, within the token budget
    effects = scheduler.take_effects()       copies to make before the step, and sequences that it ended, in order
    result = runner.run(plan)
    events = scheduler.apply(plan, result)   tokens appended, full blocks published, ended sequences dropped

A step that is planned before the last ones' tokens are known is made by `steps.plan_ahead`.

No step is planned that is predicted to take many seconds (`step_limit.py`).

Modes (`Scheduling`). The default is `decode_first` (chunked prefill): every decode gets its token, prompt chunks take
what is left of the budget.

    slack           the same, and no step takes longer than the targets of sequences that decode allow; see `slack.py`

The others are for comparison, on workers that have both roles:

    prefill_first   while a prompt is unfinished, or waits and can be admitted, a step computes prompts only
    static          a batch forms from all that waits when the engine is empty, as far as blocks suffice; no sequence
                    joins it until its last answer has ended; its prompts are computed before it decodes

Order: first come, first served within a priority, except that in the prefill role a prompt of several steps lets
prompts of one step pass for a while, also when it has begun (`policy.queue_order`). A preempted sequence goes before
those of its priority that never ran. While one waits, nothing new is reserved.

Preemption. A decode that outgrows its reservation takes what is available; when nothing is, running sequences are
preempted: lowest priority first, then fewest output tokens, then newest. So the sequence with most output is never
preempted for others and always finishes. Sequences of the prefill role (`hold_after_prefill`), held and reserved ones
are never preempted: a peer copies from them or into them. They end by themselves, by a command or by their deadline, so
waiting for their blocks is no deadlock.

The computed KV of a preempted sequence is kept in host memory, and copied back when it is admitted again (SUSPENDED).
Where host memory is full, or the copy fails, it must be computed again: here, if this worker computes prompts
(WAITING); else the sequence ends as `preempted`, and the router has its prompt and output computed by a prefill worker.
An attempt produces at least the token that was sampled with its prompt, so that is no livelock.

No deadlock at admission either: a sequence that is alone is admitted whenever its known tokens fit, see
`blocks/kv_cache_manager.py`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq

import msgspec

from disagg.engine.blocks.block_manager import BlockManager
from disagg.engine.blocks.kv_cache_manager import KVCacheManager
from disagg.engine.blocks.swap import SwapIn, SwapOut, SwapPool
from disagg.engine.blocks.window_group import WindowGroup
from disagg.engine.commands import Ended, Event, PrefillComputed, TokenSampled
from disagg.engine.config import Scheduling
from disagg.engine.core.forced import as_rows, num_to_decode
from disagg.engine.core.policy import (
    LazyHeap,
    SortKey,
    before_tail,
    chunk_length,
    faulty_end,
    finish_reason,
    is_at_tail,
    queue_order,
)
from disagg.engine.core.prompt_logprobs import chunk_budget, note_prompt, with_prompt
from disagg.engine.core.runs import runs
from disagg.engine.core.slack import UNLIMITED, Decode, Fitting, Slack, StepBudget, is_overdue, may_be_in_time
from disagg.engine.core.step_limit import StepLimit
from disagg.engine.plan import ScheduledSequence, StepPlan, StepResult
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.sampling_rules import ends_with_prompt
from disagg.engine.speculation.drafts import most_drafts, with_drafts
from disagg.engine.speculation.speculation import Speculation
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import EndReason, TokenLogprobs

Effect = SwapOut | SwapIn | Ended
"""What a plan needs to be done before it is run, and what it ended."""


class Scheduler:
    """All sequences of a worker and their blocks. Owner: the engine core.

    Args:
        max_num_seqs: sequences in the batch, reserved ones included. Never more than `token_budget`, so that every
            decode gets its token in each step and a prefill beside them at least one.
        max_model_len: prompt plus output of any sequence; at most what all blocks hold.
        decode_reserve_tokens: output tokens whose blocks are reserved at admission.
        tail_tokens: see `WorkerConfig`.
        swap: host memory for preempted sequences; none by default.
        recomputes: whether what is not kept may be computed again on this worker.
        slack: for scheduling `slack`, and only for that.
        limit: of how long a step takes; none by default.
        speculation: proposes drafts; none by default.
        windows: the cache groups beside `blocks`, for a model with windows.
        whole_prompts: see `ModelRunner`. A step has room for the longest then.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        decode_reserve_tokens: int,
        tail_tokens: int = 0,
        scheduling: Scheduling = "decode_first",
        swap: SwapPool | None = None,
        recomputes: bool = True,
        slack: Slack[Sequence] | None = None,
        limit: StepLimit | None = None,
        speculation: Speculation | None = None,
        windows: Seq[WindowGroup] = (),
        whole_prompts: bool = False,
    ) -> None:
        self.blocks = blocks
        self.scheduling = scheduling
        self._whole_prompts = whole_prompts
        self.max_num_seqs = min(max_num_seqs, token_budget)
        self.token_budget = token_budget
        self.max_model_len = min(max_model_len, blocks.num_blocks * blocks.block_size)
        self.swap = swap or SwapPool()
        self.recomputes = recomputes
        self.speculation = speculation
        self.sequences: dict[AttemptKey, Sequence] = {}
        self.running: dict[AttemptKey, Sequence] = {}
        self.waiting: LazyHeap[Sequence] = LazyHeap()
        """Sequences in state WAITING or SUSPENDED."""
        self.resuming: dict[AttemptKey, Sequence] = {}
        """SUSPENDED sequences that have blocks again, until the copy into them is made; empty between steps."""
        self.num_reserved = 0
        """Sequences in state RESERVED."""
        self.num_pooled = 0
        """Sequences of pooled requests."""
        self.num_leaving = 0
        """Sequences that were taken out of the batch to move (`migration.py`); they keep their places."""
        self.num_preempted = 0
        """Sequences that wait because they were preempted, suspended ones included."""
        self.totals: Counter[str] = Counter(preemptions=0, cached_tokens=0)
        """Counts since the start: preemptions, cached_tokens."""
        self.tail_tokens = tail_tokens
        self.kv_cache = KVCacheManager(
            blocks, max_model_len=self.max_model_len, decode_reserve_tokens=decode_reserve_tokens, windows=windows
        )
        self.on_drop: Callable[[Sequence, bool], None] | None = None
        """Called with each sequence before it gives back its blocks, and whether it ended with its whole answer."""
        self._effects: list[Effect] = []
        self._slack = slack
        self._limit = limit
        self._now = 0.0
        self._num_without = 0
        """Steps without prompts since the last one with some."""
        self._new_answers: list[Sequence] = []
        """Sequences whose first token came since the last plan."""

    # ------------------------------------------------------------ sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence in state WAITING."""
        self.num_pooled += sequence.spec.pooling is not None and sequence.key not in self.sequences
        self.sequences[sequence.key] = sequence
        self.waiting.push(self._order(sequence), sequence)
        if self._slack is not None:
            self._slack.waits(sequence)

    def load(self, sequence: Sequence) -> None:
        """Take in a sequence whose prefix is loaded from a tier, or fetched, before it is queued by `begin`."""
        sequence.state = SequenceState.LOADING
        self.num_pooled += sequence.spec.pooling is not None
        self.sequences[sequence.key] = sequence

    def begin(self, sequence: Sequence) -> None:
        """Queue a LOADING sequence. What was loaded or fetched is in the prefix cache, the last to be evicted."""
        assert sequence.state is SequenceState.LOADING
        self.kv_cache.free(sequence)
        sequence.state, sequence.loading_tokens = SequenceState.WAITING, 0
        self.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget a LOADING sequence that is not queued. What was loaded is in the prefix cache."""
        assert sequence.state is SequenceState.LOADING
        self.kv_cache.free(sequence)
        sequence.loading_tokens = 0
        self.num_pooled -= sequence.spec.pooling is not None
        del self.sequences[sequence.key]

    def reserve(self, sequence: Sequence) -> str | None:
        """Reserve a place and blocks for a sequence in state RESERVED and lock its cached prefix. Returns why not, or
        None."""
        if self.num_preempted:
            return "preempted sequences go first"
        if self.num_places() < 1:
            return "the batch is full"
        if not self._place(sequence):
            return "not enough free KV blocks" + self.kv_cache.lacking(sequence)
        self.sequences[sequence.key] = sequence
        self.num_reserved += 1
        return None

    def extend_reserved(self, sequence: Sequence, group: int, end: int) -> None:
        """Give a RESERVED sequence, or a prefix that is fetched, out of its reservation the blocks of a cache group for
        tokens [0, end)."""
        assert sequence.state is SequenceState.RESERVED or sequence.is_prefix
        self.kv_cache.extend_group(sequence, group, end)

    def join(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None = None) -> list[Event]:
        """A RESERVED sequence has the KV of all its tokens: publish it, append `token_id`, put it into the batch."""
        assert sequence.state is SequenceState.RESERVED
        self.num_reserved -= 1
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        start, sequence.num_computed_tokens = sequence.num_computed_tokens, sequence.num_tokens
        self.kv_cache.publish(sequence, start)
        return [self._append(sequence, token_id, logprobs), *self._end_if_finished(sequence)]

    def drop(self, sequence: Sequence, *, has_answered: bool = False) -> None:
        """Forget a live sequence in any state, and everything it holds. `has_answered`: it ended with its whole
        answer."""
        if sequence in self.waiting:
            self._take_from_queue(sequence)
        elif sequence.state is SequenceState.RUNNING:
            del self.running[sequence.key]
        elif sequence.state is SequenceState.RESERVED:
            self.num_reserved -= 1
        elif sequence.state is SequenceState.HELD:
            self.num_leaving -= sequence.is_leaving
        self.resuming.pop(sequence.key, None)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        self.swap.free_slots(sequence.key)
        if self.on_drop is not None:
            self.on_drop(sequence, has_answered)
        self.kv_cache.free(sequence)
        self.num_pooled -= sequence.spec.pooling is not None
        del self.sequences[sequence.key]
        sequence.state = SequenceState.ENDED

    def end(self, sequence: Sequence, reason: EndReason, detail: str = "", vector: bytes = b"") -> Ended:
        """Drop a live sequence; the event. `vector`: of a pooled request that is computed."""
        has_answered = reason in ("stop", "length") and not sequence.hold_after_prefill
        self.drop(sequence, has_answered=has_answered and sequence.spec.pooling is None)
        return Ended(
            sequence.key,
            sequence.spec.gateway_id,
            reason,
            detail,
            sequence.cached_tokens,
            sequence.queue_s or 0.0,
            sequence.num_drafted,
            sequence.num_accepted,
            vector,
        )

    # ------------------------------------------------------------ suspended sequences

    def take_effects(self) -> list[Effect]:
        """What the last plan needs, once; to be carried out before the plan is run, in this order."""
        effects, self._effects = self._effects, []
        return effects

    def resumed(self, sequence: Sequence) -> None:
        """The copy of a `SwapIn` is made: the sequence is in the batch again."""
        del self.resuming[sequence.key]
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = max(start, sequence.swapped_tokens)
        self._forget_copy(sequence)
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        self.kv_cache.publish(sequence, start)

    def swap_out_failed(self, sequence: Sequence) -> list[Event]:
        """The copy of a `SwapOut` failed: the sequence is computed again, here or elsewhere."""
        if not self.recomputes:
            return [self._end_preempted(sequence)]
        self._forget_copy(sequence)
        sequence.state = SequenceState.WAITING
        return []

    def _forget_copy(self, sequence: Sequence) -> None:
        self.swap.free_slots(sequence.key)
        sequence.swapped_tokens, sequence.swapped_windows = 0, ()

    def _end_preempted(self, sequence: Sequence) -> Ended:
        return self.end(sequence, "preempted", "its KV blocks were needed by a sequence with more output")

    # ------------------------------------------------------------ plan

    def advance(self, now: float) -> None:
        """The time of the plans that follow."""
        if self._slack is None:
            return
        self._now = now
        for sequence in self._new_answers:
            sequence.first_at = now
        self._new_answers.clear()
        for sequence in self._slack.changed(now):
            self.waiting.push(self._order(sequence), sequence)

    def schedule_prompts(self) -> StepPlan:
        """The step behind those under way, of prompts that end with their first token here; empty while a sequence
        runs that does not, since its next step depends on what they sample."""
        if not all(map(ends_with_prompt, self.running.values())):
            return StepPlan()
        return self.schedule(ahead=True)

    def schedule(self, *, ahead: bool = False) -> StepPlan:
        """The next step; empty when nothing can be computed now. `ahead`: as of `schedule_prompts`."""
        match self.scheduling:
            case "decode_first" | "slack":
                num_preempted = self.num_preempted
                decodes = self._plan_decodes()
                may_admit = self.num_preempted == num_preempted
                step_budget = UNLIMITED
                if self._slack is not None and (
                    len(self.waiting) or any(s.has_prompt_left for s in self.running.values())
                ):
                    counted = [Decode(e.sequence, e.sequence.num_output_tokens, e.start + 1) for e in decodes]
                    step_budget = self._slack.step_budget(counted, self._now)
                plan = StepPlan(decodes, self._plan_prefills(decodes, may_admit, step_budget, ahead=ahead))
                self._num_without = 0 if plan.prefills else self._num_without + 1
                plan = plan if ahead else self._with_drafts(plan)
            case "prefill_first":
                plan = self._plan_one_kind(may_admit=True, ahead=ahead)
            case "static":
                if not ahead:
                    self._form_batch()
                plan = self._plan_one_kind(may_admit=False, ahead=ahead)
        if self.num_pooled and any(entry.sequence.spec.pooling is not None for entry in plan.entries):
            plan = msgspec.structs.replace(plan, pools=True)
        return plan

    def _plan_one_kind(self, *, may_admit: bool, ahead: bool) -> StepPlan:
        """Prompts alone while there are any to compute, else decodes."""
        prefills = self._plan_prefills((), may_admit, ahead=ahead)
        if prefills:
            return StepPlan((), prefills)
        plan = StepPlan(self._plan_decodes(), ())
        return plan if ahead else self._with_drafts(plan)

    def _form_batch(self) -> None:
        if self.running:
            return
        while (head := self.waiting.peek()) is not None and self._admit(head[1]):
            pass

    def _plan_decodes(self) -> tuple[ScheduledSequence, ...]:
        planned: dict[Sequence, ScheduledSequence] = {}
        victims, block_size = self._victims(), self.blocks.block_size
        num_free = min(self.max_num_seqs, self.token_budget - 1) - len(self.running)
        for sequence in list(self.running.values()):
            start = sequence.next_token
            num_tokens = len(sequence.token_ids) - start
            if num_tokens != 1:
                if num_tokens == 0 or sequence.has_prompt_left:
                    continue
                num_tokens = num_to_decode(sequence, num_free, self.kv_cache, len(self.running) - 1)
                num_free -= num_tokens - 1
            end = start + num_tokens
            if end > len(sequence.block_table) * block_size:
                while sequence.state is SequenceState.RUNNING and not self.kv_cache.can_extend(sequence, end):
                    victim = next(victims)
                    self._preempt(victim)
                    planned.pop(victim, None)
                if sequence.state is SequenceState.RUNNING:
                    self.kv_cache.extend(sequence, end)
            if sequence.state is SequenceState.RUNNING:
                planned[sequence] = ScheduledSequence(sequence, start, num_tokens, end == len(sequence.token_ids))
        return as_rows(planned.values())

    def _with_drafts(self, plan: StepPlan) -> StepPlan:
        """A step of decodes alone, with drafts where rows of the batch and blocks are free for them."""
        if self.speculation is None or plan.prefills or not plan.decodes:
            return plan
        most_rows = min(self.max_num_seqs, self.token_budget)
        if len(plan.decodes) >= most_rows:
            return plan
        last = [entry for entry in plan.decodes if entry.samples]
        mosts = [(entry.sequence, most_drafts(entry.sequence, self.max_model_len)) for entry in last]
        context, most_ms = sum([entry.end for entry in plan.decodes]), self._longest_ms(plan)
        drafts = self.speculation.plan(
            mosts, num_rows=len(plan.decodes), context=context, most_rows=most_rows, most_ms=most_ms
        )
        if not any(drafts):
            return plan
        num_others = len(self.running)
        found: dict[Sequence, tuple[int, ...]] = {}
        for entry, token_ids in zip(last, drafts, strict=True):
            sequence = entry.sequence
            if token_ids and self.kv_cache.has_room(sequence, entry.end + len(token_ids), num_left=num_others):
                self.kv_cache.extend(sequence, entry.end + len(token_ids))
                found[sequence] = token_ids
        return StepPlan(with_drafts(plan.decodes, found))

    def would_draft(self, plan: StepPlan, most_rows: int) -> bool:
        """Whether a step that could be queued would have drafts once the tokens before it are known."""
        if self.speculation is None or not plan.decodes or len(plan.decodes) >= most_rows:
            return False
        mosts = [(e.sequence, most_drafts(e.sequence, self.max_model_len) - 1) for e in plan.decodes]
        context = sum([entry.end for entry in plan.decodes])
        return self.speculation.would_plan(mosts, num_rows=len(plan.decodes), context=context, most_rows=most_rows)

    def has_time(self) -> bool:
        """Whether the next step may take longer than its decodes need, by the targets of their sequences."""
        if self._slack is None:
            return True
        decoding = [s for s in self.running.values() if s.is_decoding]
        counted = [Decode(s, s.num_output_tokens, s.num_tokens) for s in decoding]
        return self._slack.step_budget(counted, self._now).ms > 0.0

    def _longest_ms(self, plan: StepPlan) -> float:
        """How long a step may take whose drafts may all be wrong, by the targets of its sequences."""
        if self._slack is None:
            return math.inf
        counted = [Decode(e.sequence, e.sequence.num_output_tokens, e.start + 1) for e in plan.decodes]
        step_budget = self._slack.step_budget(counted, self._now)
        return step_budget.step_ms + max(0.0, step_budget.ms)

    def _victims(self) -> Iterator[Sequence]:
        """Running sequences in the order in which they are preempted; sorted only when the first one is needed."""
        newest_first = [s for s in reversed(self.running.values()) if not s.hold_after_prefill]
        yield from sorted(newest_first, key=lambda s: (s.spec.priority, s.num_output_tokens, -s.arrival))

    def _preempt(self, sequence: Sequence) -> None:
        self.totals["preemptions"] += 1
        num_computed = sequence.num_computed_tokens
        assert not sequence.num_launched_tokens, f"{sequence.key} would be preempted while a step computes it"
        firsts = tuple([held.first_token for held in sequence.windows])
        pieces = self.swap.keep(sequence.key, num_computed, firsts)
        if num_computed and not pieces and not self.recomputes:
            self._effects.append(self._end_preempted(sequence))
            return
        sequence.state = SequenceState.WAITING
        if pieces:
            sequence.state = SequenceState.SUSPENDED
            sequence.swapped_tokens = num_computed
            sequence.swapped_windows = firsts
            tables = tuple([tuple(sequence.table_of(group)) for group in range(1 + len(sequence.windows))])
            self._effects.append(SwapOut(sequence, tables, pieces))
        del self.running[sequence.key]
        self.kv_cache.free(sequence)
        sequence.num_preemptions += 1
        self.num_preempted += 1
        self.waiting.push(self._order(sequence), sequence)

    def _plan_prefills(
        self,
        decodes: Seq[ScheduledSequence],
        may_admit: bool,
        step_budget: StepBudget = UNLIMITED,
        *,
        ahead: bool = False,
    ) -> tuple[ScheduledSequence, ...]:
        """Prompt chunks beside these decodes that take up `step_budget` at most. `ahead`: as of `schedule_prompts`."""
        budget = self.token_budget - len(decodes)
        if self._slack is not None:
            for sequence in self.running.values():  # those that wait are looked at by `advance`
                sequence.cannot_meet_ttft = sequence.cannot_meet_ttft and not is_overdue(sequence, self._now)
        started = deque(sorted((s for s in self.running.values() if s.has_prompt_left), key=self._order))
        planned: list[ScheduledSequence] = []
        num_ended, left_ms = 0, math.inf
        if self._limit is not None and (started or len(self.waiting)):
            left_ms = self._limit.left_ms(decodes)

        def fitting_of(sequence: Sequence) -> Fitting:
            fitting = self._num_fitting(sequence, budget, step_budget)
            if self._limit is None or left_ms == math.inf:
                return fitting
            most = self._limit.num_tokens(sequence.next_token, left_ms, first=not planned)
            return fitting if most >= fitting.num_tokens else Fitting(int(most), is_exact=not planned)

        def joins(sequence: Sequence) -> bool:
            if num_ended == 0 or self._slack is None:
                return True
            num_left, start = len(self.waiting) + len(started), sequence.next_token
            return self._slack.saves_time(start, sequence.num_unplanned_tokens, num_ended, num_left, step_budget)

        while budget > 0:
            head = self.waiting.peek() if may_admit else None
            if ahead and head is not None and not ends_with_prompt(head[1]):
                may_admit, head = False, None
            if head is not None and (not started or head[0] < self._order(started[0])):
                sequence = head[1]
                if not self._fits(sequence, fitting_of) or not joins(sequence):
                    break
                may_admit = self._admit(sequence)
                if sequence.state is not SequenceState.RUNNING:  # It finds no room, or its KV must come back first.
                    continue
            elif started and joins(started[0]):
                sequence = started.popleft()
            else:
                break
            fitting = fitting_of(sequence)
            num_tokens = chunk_budget(sequence, fitting.num_tokens, planned)
            if self._whole_prompts:
                num_tokens = budget if sequence.num_unplanned_tokens <= budget else 0
            entry = self._plan_chunk(sequence, num_tokens, first=not planned and fitting.is_exact)
            if entry is None:
                break
            planned.append(entry)
            budget -= entry.num_tokens
            if self._limit is not None and left_ms < math.inf:
                left_ms -= self._limit.prompt_ms(entry.start, entry.num_tokens)
            if self._slack is not None:
                step_budget = step_budget.less(self._slack.prompt_ms(entry.start, entry.num_tokens))
                num_ended += entry.samples and may_be_in_time(sequence, self._now)
            if is_at_tail(entry, self.tail_tokens, self.blocks.block_size):
                break
        return tuple(planned)

    def _num_fitting(self, sequence: Sequence, budget: int, step_budget: StepBudget) -> Fitting:
        if self._slack is None:
            return Fitting(budget, True)
        start = sequence.next_token
        return self._slack.num_fitting(sequence, start, budget, step_budget, self._num_without, self._now)

    def _fits(self, sequence: Sequence, fitting_of: Callable[[Sequence], Fitting]) -> bool:
        """Whether a prompt that waits may begin. A sequence whose KV is in host memory computes none of it again."""
        if sequence.state is SequenceState.SUSPENDED:
            return True
        return fitting_of(sequence).may_begin(sequence.num_unplanned_tokens, self.blocks.block_size)

    def _plan_chunk(self, sequence: Sequence, budget: int, *, first: bool) -> ScheduledSequence | None:
        start, num_unplanned = sequence.next_token, sequence.num_unplanned_tokens
        num_tokens = chunk_length(start, num_unplanned, budget, self.blocks.block_size, first=first)
        if sequence.hold_after_prefill and num_tokens == num_unplanned:
            num_tokens = before_tail(start, num_tokens, self.tail_tokens, self.blocks.block_size)
        if num_tokens == 0:
            return None
        self.kv_cache.extend(sequence, start + num_tokens)
        return ScheduledSequence(sequence, start, num_tokens, samples=num_tokens == num_unplanned)

    # ------------------------------------------------------------ apply

    def apply(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Take in the result of a step: one token per sampling entry of known tokens, one for each draft that is what
        was sampled before it, and those that the last of them forces. For each sequence its tokens come first.
        Sequences that ended while it was computed get nothing; one whose row gave no token ends, and nothing that the
        step wrote for it is published."""
        events: list[Event] = []
        place = -1
        for run in runs(plan):
            entry, sequence = run.last_known, run.last_known.sequence
            first_place = place + 1
            place += entry.samples + len(run.drafts)
            if sequence.state is SequenceState.ENDED:
                continue
            if result.faults and entry.samples and (fault := result.faults.get(first_place)) is not None:
                events.append(self.end(sequence, *faulty_end(sequence, fault)))
                continue
            start, sequence.num_computed_tokens = sequence.num_computed_tokens, entry.end
            if result.prompt_logprobs:
                note_prompt(entry, result)
            self.kv_cache.publish(sequence, start)
            if plan.pools and sequence.spec.pooling is not None:
                if entry.samples:
                    events.append(self._end_pooled(sequence, result))
                continue
            if entry.samples:
                token_id = result.token_ids[first_place]
                sampled = self._append(sequence, token_id, with_prompt(sequence, result.logprobs.get(first_place)))
                events += [sampled, *self._end_if_finished(sequence)]
                if run.drafts:
                    events += self._apply_drafts(sequence, run.drafts, first_place, result)
                else:
                    events += self._append_forced(sequence, result.forced.get(first_place, ()))
            if entry.samples and sequence.hold_after_prefill and sequence.state is SequenceState.RUNNING:
                events.append(self._hold(sequence, sampled))
        return events

    def _end_pooled(self, sequence: Sequence, result: StepResult) -> Ended:
        """A pooled request ends with its prompt."""
        vector = result.vectors.get(sequence.key)
        if vector is None:
            return self.end(sequence, "failed", "step: it gave no vector")
        return self.end(sequence, "stop", vector=vector)

    def _apply_drafts(
        self, sequence: Sequence, drafts: tuple[int, ...], first_place: int, result: StepResult
    ) -> Iterator[Event]:
        """Take in the rows of a sequence's drafts; the token of the row before them was just appended. A draft that
        equals the token sampled before it was computed like any known token, and its row gives the next one. KV that
        the rows of other drafts wrote is overwritten by the next step."""
        num_accepted = 0
        sequence.num_drafted += len(drafts)
        while num_accepted < len(drafts) and sequence.state is not SequenceState.ENDED:
            if drafts[num_accepted] != sequence.token_ids[-1]:
                break
            num_accepted += 1
            sequence.num_accepted += 1
            place = first_place + num_accepted
            if result.faults and (fault := result.faults.get(place)) is not None:
                yield self.end(sequence, *faulty_end(sequence, fault))
                break
            start, sequence.num_computed_tokens = sequence.num_computed_tokens, sequence.num_tokens
            self.kv_cache.publish(sequence, start)
            yield self._append(sequence, result.token_ids[place], result.logprobs.get(place))
            yield from self._end_if_finished(sequence)
        if self.speculation is not None:
            self.speculation.totals.walked(len(drafts), num_accepted)
        yield from self._append_forced(sequence, result.forced.get(first_place + num_accepted, ()))

    def _append_forced(self, sequence: Sequence, token_ids: Seq[int]) -> Iterator[Event]:
        """Those behind a sampled token, up to the one that ends the answer."""
        sequence.num_forced = 0
        for token_id in token_ids:
            if sequence.state is SequenceState.ENDED:
                return
            sequence.num_forced += 1
            yield self._append(sequence, token_id, None)
            yield from self._end_if_finished(sequence)

    def apply_alike(self, plan: StepPlan, rows: Iterable[Seq[int]]) -> list[TokenSampled]:
        """Take in several steps like `plan`, see `steps.num_alike`: of each one token for each decode."""
        events: list[TokenSampled] = []
        for number, token_ids in enumerate(rows):
            for entry in plan.decodes:
                self.kv_cache.extend(entry.sequence, entry.start + number + 1)
            for entry, token_id in zip(plan.decodes, token_ids, strict=True):
                sequence, start = entry.sequence, entry.start + number
                sequence.num_computed_tokens = start + 1
                self.kv_cache.publish(sequence, start)
                events.append(self._append(sequence, token_id, None))
        return events

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> TokenSampled:
        index = sequence.num_output_tokens
        sequence.token_ids.append(token_id)
        sequence.last_logprobs = logprobs
        if sequence.first_at is None and self._slack is not None:
            self._new_answers.append(sequence)
        return TokenSampled(sequence.key, sequence.spec.gateway_id, index, token_id, logprobs)

    def _end_if_finished(self, sequence: Sequence) -> list[Event]:
        reason = finish_reason(sequence, self.max_model_len)
        return [] if reason is None else [self.end(sequence, reason)]

    def _hold(self, sequence: Sequence, sampled: TokenSampled) -> PrefillComputed:
        del self.running[sequence.key]
        sequence.state = SequenceState.HELD
        key, gateway_id, queue_s = sampled.key, sampled.gateway_id, sequence.queue_s or 0.0
        return PrefillComputed(key, gateway_id, sampled.token_id, sequence.cached_tokens, sampled.logprobs, queue_s)

    # ------------------------------------------------------------ admission

    def num_places(self) -> int:
        """Free places of the batch."""
        return self.max_num_seqs - len(self.running) - len(self.resuming) - self.num_reserved - self.num_leaving

    def _admit(self, sequence: Sequence) -> bool:
        """Move a sequence from the queue into the batch if there are blocks and a place; a suspended one once its KV is
        back."""
        if self.num_places() < 1 or not self._place(sequence):
            return False
        self._take_from_queue(sequence)
        if sequence.state is SequenceState.SUSPENDED:
            self.resuming[sequence.key] = sequence
            pieces = self.swap.pieces(sequence.key, sequence.num_computed_tokens)
            self._effects.append(SwapIn(sequence, pieces))
        else:
            sequence.state = SequenceState.RUNNING
            self.running[sequence.key] = sequence
        return True

    def would_admit(self) -> bool:
        """Whether the next step could admit the head of the queue."""
        head = self.waiting.peek()
        if head is None or self.num_places() < 1:
            return False
        return self.kv_cache.can_admit(head[1], self.swap.slot_tokens, alone=self._is_alone())

    def _is_alone(self) -> bool:
        return len(self.sequences) <= len(self.waiting)

    def _place(self, sequence: Sequence) -> bool:
        if not self.kv_cache.admit(sequence, self.swap.slot_tokens, alone=self._is_alone()):
            return False
        if sequence.num_preemptions == 0:
            sequence.cached_tokens = sequence.num_computed_tokens
            self.totals["cached_tokens"] += sequence.cached_tokens
        return True

    def _take_from_queue(self, sequence: Sequence) -> None:
        self.waiting.discard(sequence)
        if self._slack is not None:
            self._slack.leaves(sequence)
        self.num_preempted -= sequence.num_preemptions > 0

    def _order(self, sequence: Sequence) -> SortKey:
        return queue_order(sequence, self.token_budget)
