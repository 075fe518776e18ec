"""Which tokens of which sequences the next step computes. Pure, and one for all roles.

    plan = scheduler.schedule()              what the mode takes first, within the token budget
    result = runner.run(plan)
    events = scheduler.apply(plan, result)   tokens appended, full blocks published, ended sequences dropped

Modes (`Scheduling`). What is served is `decode_first`: every decode gets its token, prompt chunks take what is left of
the budget. The others are there to be compared with, on workers that have both roles:

    prefill_first   while a prompt is unfinished, or waits and finds room, a step computes prompts only
    static          a batch forms from all that waits when the engine is empty, and as far as there is room; nobody
                    joins it until its last answer has ended; its prompts are computed before it decodes

Order is first come, first served within a priority; a preempted sequence goes before those of its priority that never
ran.

Room. A sequence is admitted with blocks promised for all its known tokens and for some output
(`decode_reserve_tokens`), and the watermark stays free. A decode that outgrows its promise takes what is available;
when nothing is, running sequences are preempted: lowest priority first, then fewest output tokens, then newest. So the
one that got furthest is never the victim of its peers and always finishes. Sequences of the prefill role
(`hold_after_prefill`), held and reserved ones are never preempted: a peer copies from them or into them. They end by
themselves, by a command or by their deadline, so waiting for their blocks is no deadlock.

No deadlock at admission either: a sequence that is alone gets in whenever its known tokens fit, with whatever reserve
is left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from disagg.engine.batching import chunk_length, finish_reason, queue_order
from disagg.engine.block_manager import BlockManager
from disagg.engine.commands import ChunkComputed, Ended, Event, PrefillComputed, TokenSampled
from disagg.engine.config import Scheduling
from disagg.engine.lazy_heap import LazyHeap
from disagg.engine.plan import ScheduledSequence, StepPlan, StepResult
from disagg.engine.request import Sequence, SequenceState
from disagg.proto.block_hash import HASH_BLOCK_TOKENS, child_hash, max_cached_tokens
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import EndReason, TokenLogprobs


class Scheduler:
    """All sequences of a worker and their blocks. Owner: the engine core.

    Args:
        max_num_seqs: sequences in the batch, promised places included. Never more than `token_budget`, so that every
        decode
            gets its token in each step and a prefill beside them at least one.
        max_model_len: prompt plus output of any sequence; at most what all blocks hold.
        decode_reserve_tokens: output tokens whose blocks are promised at admission.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        decode_reserve_tokens: int,
        scheduling: Scheduling = "decode_first",
    ) -> None:
        self.blocks = blocks
        self.scheduling = scheduling
        self.max_num_seqs = min(max_num_seqs, token_budget)
        self.token_budget = token_budget
        self.max_model_len = min(max_model_len, blocks.num_blocks * blocks.block_size)
        self.decode_reserve_tokens = decode_reserve_tokens
        self.sequences: dict[AttemptKey, Sequence] = {}
        self.running: dict[AttemptKey, Sequence] = {}
        self.waiting: LazyHeap[Sequence] = LazyHeap()
        self.num_reserved = 0
        """Sequences in state RESERVED."""
        self.num_preempted = 0
        """Sequences that wait because they were preempted."""
        self.totals: Counter[str] = Counter()
        """Since the start: preemptions, cached_tokens."""

    # ------------------------------------------------------------ life of a sequence

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence in state WAITING."""
        self.sequences[sequence.key] = sequence
        self.waiting.push(queue_order(sequence), sequence)

    def reserve(self, sequence: Sequence) -> str | None:
        """Promise room to a sequence in state RESERVED and lock its cached prefix. Returns why not, or None."""
        if self.num_preempted:
            return "preempted sequences go first"
        if self._num_places() < 1:
            return "the batch is full"
        if not self._place(sequence):
            return "not enough free KV blocks"
        self.sequences[sequence.key] = sequence
        self.num_reserved += 1
        return None

    def extend_reserved(self, sequence: Sequence, end: int) -> None:
        """Give a RESERVED sequence, out of its promise, the blocks for tokens [0, end)."""
        assert sequence.state is SequenceState.RESERVED
        self._extend(sequence, end)

    def join(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None = None) -> list[Event]:
        """A RESERVED sequence has the KV of all its tokens: publish it, append `token_id`, put it into the batch."""
        assert sequence.state is SequenceState.RESERVED
        self.num_reserved -= 1
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        start, sequence.num_computed_tokens = sequence.num_computed_tokens, sequence.num_tokens
        self._publish(sequence, start)
        return [self._append(sequence, token_id, logprobs), *self._end_if_finished(sequence)]

    def drop(self, sequence: Sequence) -> None:
        """Forget a live sequence in any state, and everything it holds."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.discard(sequence)
            self.num_preempted -= sequence.num_preemptions > 0
        elif sequence.state is SequenceState.RUNNING:
            del self.running[sequence.key]
        elif sequence.state is SequenceState.RESERVED:
            self.num_reserved -= 1
        self._let_go(sequence)
        del self.sequences[sequence.key]
        sequence.state = SequenceState.ENDED

    def end(self, sequence: Sequence, reason: EndReason, detail: str = "") -> Ended:
        """Drop a live sequence and say so."""
        self.drop(sequence)
        gateway_id, queue_s = sequence.spec.gateway_id, sequence.queue_s or 0.0
        return Ended(sequence.key, gateway_id, reason, detail, sequence.cached_tokens, queue_s)

    # ------------------------------------------------------------ plan

    def schedule(self) -> StepPlan:
        """The next step; empty when nothing can be computed now."""
        match self.scheduling:
            case "decode_first":
                num_preempted = self.num_preempted
                decodes = self._plan_decodes()
                may_admit = self.num_preempted == num_preempted
                plan = StepPlan(decodes, self._plan_prefills(self.token_budget - len(decodes), may_admit))
            case "prefill_first":
                plan = self._plan_one_kind(may_admit=True)
            case "static":
                self._form_batch()
                plan = self._plan_one_kind(may_admit=False)
        self._check_plan(plan)
        return plan

    def _plan_one_kind(self, *, may_admit: bool) -> StepPlan:
        """Prompts alone while there are any to compute, else decodes."""
        prefills = self._plan_prefills(self.token_budget, may_admit)
        return StepPlan((), prefills) if prefills else StepPlan(self._plan_decodes(), ())

    def _form_batch(self) -> None:
        if self.running:
            return
        while (head := self.waiting.peek()) is not None and self._admit(head[1]):
            pass

    def _plan_decodes(self) -> tuple[ScheduledSequence, ...]:
        planned: dict[AttemptKey, ScheduledSequence] = {}
        victims = self._victims()
        for sequence in list(self.running.values()):
            if sequence.num_uncomputed_tokens != 1:
                continue
            while sequence.state is SequenceState.RUNNING and not self._can_extend(sequence):
                victim = next(victims)
                self._preempt(victim)
                planned.pop(victim.key, None)
            if sequence.state is SequenceState.RUNNING:
                self._extend(sequence, sequence.num_tokens)
                planned[sequence.key] = ScheduledSequence(sequence, sequence.num_computed_tokens, 1, samples=True)
        return tuple(planned.values())

    def _victims(self) -> Iterator[Sequence]:
        """Running sequences in the order in which they are preempted; sorted only when the first one is needed."""
        newest_first = [s for s in reversed(self.running.values()) if not s.hold_after_prefill]
        yield from sorted(newest_first, key=lambda s: (s.spec.priority, s.num_output_tokens, -s.arrival))

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.key]
        self._let_go(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        self.num_preempted += 1
        self.totals["preemptions"] += 1
        self.waiting.push(queue_order(sequence), sequence)

    def _plan_prefills(self, budget: int, may_admit: bool) -> tuple[ScheduledSequence, ...]:
        started = deque(sorted((s for s in self.running.values() if s.num_uncomputed_tokens > 1), key=queue_order))
        planned: list[ScheduledSequence] = []
        while budget > 0:
            head = self.waiting.peek() if may_admit else None
            if head is not None and (not started or head[0] < queue_order(started[0])):
                sequence = head[1]
                may_admit = self._admit(sequence)
                if not may_admit:
                    continue
            elif started:
                sequence = started.popleft()
            else:
                break
            entry = self._plan_chunk(sequence, budget, first=not planned)
            if entry is None:
                break
            planned.append(entry)
            budget -= entry.num_tokens
        return tuple(planned)

    def _plan_chunk(self, sequence: Sequence, budget: int, *, first: bool) -> ScheduledSequence | None:
        start, num_uncomputed = sequence.num_computed_tokens, sequence.num_uncomputed_tokens
        num_tokens = chunk_length(start, num_uncomputed, budget, self.blocks.block_size, first=first)
        if num_tokens == 0:
            return None
        self._extend(sequence, start + num_tokens)
        return ScheduledSequence(sequence, start, num_tokens, samples=num_tokens == num_uncomputed)

    def _check_plan(self, plan: StepPlan) -> None:
        """Our own invariants: nobody computes into a block that somebody else can read."""
        entries, block_size = plan.entries, self.blocks.block_size
        assert plan.num_tokens <= self.token_budget, "the plan is over its token budget"
        assert len({entry.sequence.key for entry in entries}) == len(entries), "a sequence is planned twice"
        for entry in entries:
            key, table, end = entry.sequence.key, entry.sequence.block_table, entry.start + entry.num_tokens
            assert entry.sequence.state is SequenceState.RUNNING, f"{key} is planned and not running"
            assert entry.start == entry.sequence.num_computed_tokens, f"{key} would leave a gap"
            assert entry.samples == (end == entry.sequence.num_tokens), f"{key} samples at the wrong token"
            assert len(table) * block_size >= end, f"the block table of {key} does not cover its chunk"
            written = table[entry.start // block_size : self.blocks.blocks_for(end)]
            assert all(self.blocks.is_writable(block) for block in written), f"{key} would write a shared block"

    # ------------------------------------------------------------ apply

    def apply(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Take in the result of a step: one token per sampling entry. For each sequence its token comes first."""
        events: list[Event] = []
        tokens = enumerate(result.token_ids)
        for entry in plan.entries:
            sequence = entry.sequence
            sequence.num_computed_tokens = entry.start + entry.num_tokens
            self._publish(sequence, entry.start)
            if entry.samples:
                place, token_id = next(tokens)
                sampled = self._append(sequence, token_id, result.logprobs.get(place))
                events.append(sampled)
                events += self._end_if_finished(sequence)
            if sequence.hold_after_prefill and sequence.state is SequenceState.RUNNING:
                events.append(ChunkComputed(sequence.key, sequence.num_computed_tokens))
                if entry.samples:
                    events.append(self._hold(sequence, sampled))
        return events

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> TokenSampled:
        index = sequence.num_output_tokens
        sequence.token_ids.append(token_id)
        return TokenSampled(sequence.key, sequence.spec.gateway_id, index, token_id, logprobs)

    def _end_if_finished(self, sequence: Sequence) -> list[Event]:
        reason = finish_reason(sequence, self.max_model_len)
        return [] if reason is None else [self.end(sequence, reason)]

    def _hold(self, sequence: Sequence, sampled: TokenSampled) -> PrefillComputed:
        del self.running[sequence.key]
        sequence.state = SequenceState.HELD
        cached_tokens, queue_s = sequence.cached_tokens, sequence.queue_s or 0.0
        key, gateway_id = sampled.key, sampled.gateway_id
        return PrefillComputed(key, gateway_id, sampled.token_id, cached_tokens, sampled.logprobs, queue_s)

    def _publish(self, sequence: Sequence, start: int) -> None:
        """Make the blocks findable that tokens [start, num_computed_tokens) have filled. A block whose content is
        published already makes way for that one, so that the table leads to each published block by published ones."""
        if not sequence.spec.root_hash:
            return
        hashes, table, block_size = sequence.block_hashes, sequence.block_table, self.blocks.block_size
        while len(hashes) < sequence.num_computed_tokens // HASH_BLOCK_TOKENS:
            first = len(hashes) * HASH_BLOCK_TOKENS
            parent = hashes[-1] if hashes else sequence.spec.root_hash
            hashes.append(child_hash(parent, sequence.token_ids[first : first + HASH_BLOCK_TOKENS]))
        hashes_per_block = block_size // HASH_BLOCK_TOKENS
        for index in range(start // block_size, sequence.num_computed_tokens // block_size):
            block_hashes = hashes[index * hashes_per_block : (index + 1) * hashes_per_block]
            table[index] = self.blocks.publish(table[index], block_hashes)

    # ------------------------------------------------------------ room

    def _num_places(self) -> int:
        return self.max_num_seqs - len(self.running) - self.num_reserved

    def _admit(self, sequence: Sequence) -> bool:
        """Move a WAITING sequence into the batch if there is room."""
        if self._num_places() < 1 or not self._place(sequence):
            return False
        self.waiting.discard(sequence)
        self.num_preempted -= sequence.num_preemptions > 0
        sequence.state = SequenceState.RUNNING
        self.running[sequence.key] = sequence
        return True

    def _place(self, sequence: Sequence) -> bool:
        """Lock the cached prefix of a sequence without blocks and promise it the rest, if that fits."""
        blocks = self.blocks
        cap = max_cached_tokens(sequence.num_tokens) if sequence.spec.root_hash else 0
        matched = blocks.match_prefix(sequence.block_hashes, cap)
        room = blocks.available_after_lock(matched)
        num_needed = blocks.blocks_for(sequence.num_tokens) - len(matched)
        num_wanted = blocks.blocks_for(self._num_tokens_to_reserve(sequence)) - len(matched)
        if num_wanted > room - blocks.num_watermark_blocks:
            if num_needed > room or len(self.sequences) > len(self.waiting):
                return False
            num_wanted = min(num_wanted, room)
        blocks.lock(matched)
        blocks.reserve(num_wanted)
        sequence.block_table = matched
        sequence.reserved_blocks = num_wanted
        sequence.num_computed_tokens = len(matched) * blocks.block_size
        if sequence.num_preemptions == 0:
            sequence.cached_tokens = sequence.num_computed_tokens
            self.totals["cached_tokens"] += sequence.cached_tokens
        return True

    def _num_tokens_to_reserve(self, sequence: Sequence) -> int:
        """Known tokens and output to come whose KV is written here; that of the very last token never is."""
        if sequence.hold_after_prefill:
            return sequence.num_tokens
        num_remaining = sequence.spec.sampling.max_tokens - sequence.num_output_tokens
        num_tokens = sequence.num_tokens + min(num_remaining - 1, self.decode_reserve_tokens)
        return min(num_tokens, max(self.max_model_len - 1, sequence.num_tokens))

    def _can_extend(self, sequence: Sequence) -> bool:
        """Whether the next token of a decoding sequence has a block, or can get one."""
        if len(sequence.block_table) * self.blocks.block_size >= sequence.num_tokens:
            return True
        return sequence.reserved_blocks > 0 or self.blocks.num_available > 0

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the blocks for tokens [0, num_tokens): out of the promise, and beyond it out of what is
        available."""
        num_missing = self.blocks.blocks_for(num_tokens) - len(sequence.block_table)
        if num_missing <= 0:
            return
        num_promised = min(num_missing, sequence.reserved_blocks)
        sequence.reserved_blocks -= num_promised
        sequence.block_table += self.blocks.allocate(num_promised, reserved=True)
        sequence.block_table += self.blocks.allocate(num_missing - num_promised, reserved=False)

    def _let_go(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        self.blocks.unreserve(sequence.reserved_blocks)
        sequence.block_table = []
        sequence.reserved_blocks = 0

    # ------------------------------------------------------------ audit

    def check_integrity(self) -> list[str]:
        """Findings; empty when sound. Costs O(blocks + sequences): for idle moments and tests."""
        sequences = self.sequences.values()
        problems = self.blocks.check_integrity(
            [s.block_table for s in sequences], sum(s.reserved_blocks for s in sequences)
        )
        by_state = {state: [s for s in sequences if s.state is state] for state in SequenceState}
        counted = {
            SequenceState.WAITING: len(self.waiting),
            SequenceState.RUNNING: len(self.running),
            SequenceState.RESERVED: self.num_reserved,
            SequenceState.ENDED: 0,
        }
        problems += [
            f"{len(by_state[state])} sequences are {state.value}, {number} are counted"
            for state, number in counted.items()
            if len(by_state[state]) != number
        ]
        if sum(s.num_preemptions > 0 for s in by_state[SequenceState.WAITING]) != self.num_preempted:
            problems.append(f"{self.num_preempted} preempted sequences are counted and other ones wait")
        if self._num_places() < 0:
            problems.append(f"{-self._num_places()} sequences more than the batch has places")
        for sequence in sequences:
            problems += self._check_sequence(sequence)
        return problems

    def _check_sequence(self, sequence: Sequence) -> list[str]:
        key, table, state = sequence.key, sequence.block_table, sequence.state
        problems = []
        if len(set(table)) != len(table):
            problems.append(f"{key} lists a block twice")
        if len(table) * self.blocks.block_size < sequence.num_computed_tokens:
            problems.append(f"the block table of {key} does not cover its computed tokens")
        if state is SequenceState.WAITING and (table or sequence.reserved_blocks):
            problems.append(f"{key} waits and holds blocks")
        if sequence.spec.root_hash and state in (SequenceState.RUNNING, SequenceState.HELD):
            full = table[: sequence.num_computed_tokens // self.blocks.block_size]
            if not all(map(self.blocks.prefix.is_published, full)):
                problems.append(f"{key} has computed a full block that is not published")
        if state is SequenceState.HELD and sequence.reserved_blocks:
            problems.append(f"{key} is computed and still has blocks promised")
        return problems
