"""The engine core: commands in, events out, one step at a time. Pure: the shell gives it the time.

    colocated   Add ──> TokenSampled* ──> Ended
    prefill     Add(hold) ──> (ChunkPlanned, Gather ──> Gathered)*, TokenSampled, PrefillComputed ──> Release
    decode      Reserve ──> Reserved ──> (Scatter ──> Scattered)* ──> Join ──> Joined, TokenSampled* ──> Ended
    moving      Export ──> Exported, TokenSampled* ──> Hold ──> Held ──> End ──> Ended; see `migration.py`
    fetching    FetchPrefix, Add ──> FetchOrdered ──> (Reserve ──> (Scatter ──> Scattered)* ──> Release) ──> FetchOver
    its source  Pin ──> Pinned ──> (Gather ──> Gathered)* ──> Release; see `fetching.py`

Every live sequence ends in exactly one way: with `Ended`, or without an event by `Release`. After either nothing of it
is held here.

Steps may be computed while the next one is planned (`steps.py`); their tokens are events of later calls then. What a
command changes meanwhile, it changes behind those steps, and a copy of what they compute is made behind them.
`Scattered` may be an event of a later call, too: the buffer was read then (`blocks/landing.py`). A copy out of the
cache that a device or other ranks make is only begun here: `Gathering`.

A step that is short of blocks suspends sequences: before it runs, their KV is copied to host memory, and copied back
when there is room again. A copy that fails ends, at worst, its sequence.

An error of a peer never raises; one of the device after which it cannot be used (`is_fatal`) does. A malformed spec is
answered with `Ended` (`Reserve`: `ReserveRefused`). A command that would start a key that is in use means that it would
have two owners: the attempt is ended as failed, so that the answer (nothing is held) is true. A late `Gather` or
`Scatter` is answered with `ok=False`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import msgspec

from disagg.engine.blocks.block_manager import BlockManager
from disagg.engine.blocks.cached_blocks import CachedBlocks
from disagg.engine.blocks.swap import SwapIn, SwapOut, Swapper, swap_pool
from disagg.engine.blocks.window_group import WindowGroup
from disagg.engine.commands import (
    AdapterRead,
    Add,
    ChunkPlanned,
    Command,
    End,
    Ended,
    Event,
    Export,
    Extend,
    FetchOver,
    FetchPrefix,
    ForgetTenant,
    Gather,
    GatherFailed,
    Hold,
    Join,
    Pin,
    Pinned,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    TierFailed,
    TierForgotten,
    TierFull,
    TierRead,
    TierScanned,
    TierWritten,
    Unhold,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.core.adapters import Adapters
from disagg.engine.core.admission import new_sequence, refusal
from disagg.engine.core.fetching import Fetching
from disagg.engine.core.idle_steps import NUM_TOKENS, IdleSteps
from disagg.engine.core.kv_exchange import KvExchange
from disagg.engine.core.migration import Moves, extend
from disagg.engine.core.policy import LazyHeap
from disagg.engine.core.reports import EngineTotals
from disagg.engine.core.scheduler import Effect, Scheduler
from disagg.engine.core.scheduler_audit import scheduler_findings
from disagg.engine.core.slack import Slack
from disagg.engine.core.step_limit import StepLimit
from disagg.engine.core.steps import FinishedStep, Steps, failed, num_alike, num_prompt_steps
from disagg.engine.plan import LoadedAdapter, ModelRunner, StepPlan, is_fatal
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.speculation.lookup import Lookup
from disagg.engine.speculation.proposer import Proposer
from disagg.engine.speculation.speculation import Speculation
from disagg.engine.tiers.store import TierParts
from disagg.engine.tiers.tiers import Tiers
from disagg.proto.config import check_bounds
from disagg.proto.errors import ConfigError, InternalError
from disagg.proto.ids import AttemptKey, BlockHash
from disagg.proto.messages import Adapter, AdapterState, BlocksSnapshot, EndReason, KvEvent, Load, StepSample, TierName
from disagg.step_times.step_model import StepModel

_log = logging.getLogger(__name__)

RESERVE_WAIT_S = 10.0
"""How long an offer waits for its adapter: the prefill worker would take this worker for a stuck one much later."""


class EngineCore:
    """All sequences of one worker. Owner: the engine thread; every method is called from it.

    `calibration`: steps that were measured before, by which it is predicted how long others take. `tier_parts`: clock
    and files of the tiers, where `config` has some. `order_adapter`: has an adapter read for a slot, which is answered
    by `AdapterRead`, where `config` has some.

    Raises:
        ValueError: if the runner's cache or the configuration cannot work.
        ConfigError: if `config.tiers` or `config.fetch` cannot.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        config: WorkerConfig,
        calibration: Seq[StepSample] = (),
        tier_parts: TierParts | None = None,
        order_adapter: Callable[[Adapter, int], None] | None = None,
    ) -> None:
        check_bounds(config, "worker")
        self._runner = runner
        swap = swap_pool(runner, config.swap_bytes)
        self._swapper = Swapper(runner, swap.slot_bytes)
        self._groups = runner.layout.groups
        num_blocks = runner.num_blocks
        self._cached = CachedBlocks(num_blocks, config.cached_share, config.cached_keep_s)
        self._blocks = BlockManager(num_blocks, runner.block_size, config.watermark_blocks(num_blocks), self._cached)
        self._pools = [
            CachedBlocks(size, config.cached_share, config.cached_keep_s, copies_first=True)
            for size in runner.window_blocks
        ]
        self._slack: Slack[Sequence] | None = None
        if config.scheduling == "slack":
            self._slack = Slack(calibration, config.max_itl_ms, runner.block_size, runner.expert_share)
        model = StepModel(calibration, runner.expert_share) if self._slack is None else self._slack.model
        # A decode worker holds no prompt that ends with its first token, so it queues no step of prompts.
        num_steps = num_prompt_steps(runner) if "prefill" in config.roles else 1
        self._model = model
        self._limit = StepLimit(
            model,
            token_budget=config.token_budget,
            max_num_seqs=config.num_places,
            max_model_len=runner.max_model_len,
            num_kv_tokens=num_blocks * runner.block_size,
            block_size=runner.block_size,
            is_even=num_steps > 1,
        )
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=config.num_places,
            token_budget=config.token_budget,
            max_model_len=min(runner.max_model_len, config.max_model_len or runner.max_model_len),
            decode_reserve_tokens=config.decode_reserve_tokens,
            tail_tokens=config.tail_tokens,
            scheduling=config.scheduling,
            swap=swap,
            recomputes="prefill" in config.roles,
            slack=self._slack,
            limit=self._limit,
            speculation=_speculation_of(config, runner.proposer, calibration),
            windows=_windows_of(runner, config, self._pools, num_steps),
            whole_prompts=runner.whole_prompts,
        )
        self._token_budget = config.token_budget
        self._tiers: Tiers | None = None
        if config.tiers is not None:
            self._tiers = Tiers(
                config, runner, self._scheduler, self._compute_ms, self._loaded, tier_parts or TierParts()
            )
        if config.fetch and self._scheduler.kv_cache.windows:
            raise ConfigError(
                f"kv_cache.fetch: is for models without windows; this one has {len(self._groups)} cache groups"
            )
        self._fetching = Fetching(
            self._scheduler, self._begin, self._num_in_tiers, runner.layout.groups[0].bytes_per_token
        )
        self._adapters: Adapters | None = None
        if config.adapters is not None:
            self._adapters = Adapters(config.adapters.max_loaded, order_adapter or _order_none, runner.put_adapter)
        self._parked: dict[AttemptKey, tuple[Add | Reserve, Sequence]] = {}
        """What waits for its adapter, as it came."""
        self._deadlines: LazyHeap[AttemptKey] = LazyHeap()
        self._steps = Steps(runner, self._scheduler)
        self._exchange = KvExchange(runner, self._scheduler, self._fetching, self._steps, model)
        self._moves = Moves(self._scheduler)
        fits = min(config.token_budget, self._scheduler.max_model_len - 1) >= NUM_TOKENS
        windows = [window.blocks for window in self._scheduler.kv_cache.windows]
        self._idle_steps = IdleSteps(runner, [self._blocks, *windows], calibration, fits=fits)
        self.planned = StepPlan()
        """What `run_step` will compute or queue."""
        self._planned_at = 0.0
        self._last_now = 0.0
        self._stalled = False
        """The last step found that nothing can go on, and freed nothing; only a command or a deadline changes that."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output: the model's limit, the configured one, or what all blocks hold."""
        return self._scheduler.max_model_len

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute something, or finish what is under way."""
        if self._scheduler.running or self._steps.is_under_way or self._exchange.has_waiting:
            return True
        if self._tiers is not None and self._tiers.can_go_on:
            return True
        return len(self._scheduler.waiting) > 0 and not self._stalled

    @property
    def finished(self) -> Seq[FinishedStep]:
        """The steps that the last call of `run_step` finished, but for those that failed."""
        return self._steps.finished

    @property
    def last_plan(self) -> StepPlan:
        """The last one of these; empty without any."""
        return self._steps.finished[-1].plan if self._steps.finished else StepPlan()

    @property
    def last_began(self) -> float:
        """When that was planned: the `now` of `plan_step`; 0 without any."""
        return self._steps.finished[-1].began if self._steps.finished else 0.0

    def watch_steps(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on any thread, when a queued step is computed; to be called once."""
        self._steps.watch(wake)

    @property
    def num_steps_done(self) -> int:
        """Steps that have ended since the start, in whatever way."""
        return self._steps.num_done

    @property
    def num_steps_under_way(self) -> int:
        """Steps that are launched and whose results are not known."""
        return self._steps.num_under_way

    @property
    def is_waiting_for_step(self) -> bool:
        """Whether `run_step` would only wait for a queued step, of whose end `watch_steps` will tell."""
        return not self.planned.entries and self._steps.is_awaited

    @property
    def is_idle(self) -> bool:
        """Whether there is no sequence, in any state, and none to come for which a prefix is fetched."""
        return not (self._scheduler.sequences or self._fetching.num_open or self._parked)

    @property
    def next_deadline(self) -> float | None:
        """When `step` must be called at the latest, also without work."""
        head = self._deadlines.peek()
        due = self._fetching.due_at
        if self._tiers is not None:
            due = min(due, self._tiers.due_at)
        if head is not None:
            due = min(due, head[0][0])
        return None if due == math.inf else due

    # ------------------------------------------------------------ steps without sequences

    def idle_step_at(self, now: float) -> float:
        """When to measure a step, if nothing comes until then; infinite while there are sequences."""
        if not self.is_idle or self.has_work:
            self._idle_steps.worked()
            return math.inf
        return self._idle_steps.due_at(now)

    def begin_idle_step(self) -> StepPlan:
        """What that step computes; empty where there is no room for it. `end_idle_step` follows in any case."""
        return self._idle_steps.begin()

    def run_idle_step(self, plan: StepPlan) -> bool:
        """Compute it; whether that was possible."""
        try:
            if plan.entries:
                self._runner.run(plan)
        except Exception as error:
            if is_fatal(error):
                raise
            _log.warning("a step that measures the idle worker failed; none follows before its next request: %s", error)
            return False
        return bool(plan.entries)

    def end_idle_step(self, step: StepSample | None, now: float) -> None:
        """It was measured; None where it could not be computed."""
        self._idle_steps.end(None if step is None else step.ms, now)
        if step is not None:
            self.observe(step)

    # ------------------------------------------------------------ commands

    def handle(self, command: Command, now: float) -> list[Event]:
        """Carry out one command; `now` is on this process's monotonic clock."""
        self._stalled = False
        self._note_time(now)
        match command:
            case Add():
                events = self._add(command, now)
            case Reserve():
                events = self._reserve(command, now)
            case Scatter():
                events = self._exchange.scatter(command)
            case Join():
                events = self._exchange.join(command, now)
            case Gather():
                events = self._exchange.gather(command, self.planned)
            case GatherFailed():
                events = self._exchange.gather_failed(command)
            case Release():
                events = self._release(command)
            case Export(key):
                events = [self._moves.export(key, now)]
            case Hold(key, num_known):
                events = self._moves.hold(key, num_known, self.planned)
            case Unhold(key):
                self._moves.unhold(key)
                events = []
            case Extend():
                events = self._extend(command)
            case FetchPrefix():
                events = self._fetch(command, now)
            case FetchOver():
                self._fetching.over(command, now)
                events = []
            case Pin():
                events = self._pin(command, now)
            case TierWritten() | TierRead() | TierScanned() | TierFailed() | TierFull() | TierForgotten():
                if self._tiers is not None:
                    self._tiers.handle(command, now)
                events = []
            case AdapterRead():
                events = self._adapter_read(command, now)
            case ForgetTenant(tag):
                for blocks in (self._blocks, *[window.blocks for window in self._scheduler.kv_cache.windows]):
                    blocks.forget(tag)
                if self._tiers is not None:
                    self._tiers.forget_tenant(tag, now)
                events = []
            case End(key, reason, detail):
                sequence = self._scheduler.sequences.get(key)
                events = [] if sequence is None else [self._end_of(sequence, reason, detail)]
        self._forget_ended(events)
        return events + self._fetching.take_events()

    def _add(self, command: Add, now: float) -> list[Event]:
        spec = command.spec
        duplicate = self._end_duplicate(spec.key)
        if duplicate is not None:
            return [duplicate]
        sequence = new_sequence(spec, SequenceState.WAITING, now)
        sequence.hold_after_prefill = command.hold_after_prefill
        why_not = self._refusal(sequence)
        if why_not is not None:
            return [Ended(spec.key, spec.gateway_id, *why_not)]
        self._watch_deadline(sequence)
        if self._has_adapter(command, sequence, now):
            self._admit(sequence, now)
        return []

    def _admit(self, sequence: Sequence, now: float) -> None:
        if not self._fetching.waits(sequence) and (self._tiers is None or not self._tiers.loads(sequence, now)):
            self._scheduler.add(sequence)

    # ------------------------------------------------------------ adapters

    def _has_adapter(self, command: Add | Reserve, sequence: Sequence, now: float) -> bool:
        """Whether the adapter of a new sequence is loaded, or it has none. Else it waits, in state LOADING, and holds
        nothing."""
        adapter = sequence.spec.adapter
        if adapter is None:
            return True
        assert self._adapters is not None, "others were refused"
        if self._adapters.take(sequence.key, adapter, now):
            sequence.adapter_slot = self._adapters.slot(sequence.key)
            return True
        self._parked[sequence.key] = command, sequence
        self._scheduler.load(sequence)
        return False

    def _adapter_read(self, command: AdapterRead, now: float) -> list[Event]:
        """What waited for an adapter goes on, or ends."""
        assert self._adapters is not None
        events: list[Event] = []
        for key, reason, detail in self._adapters.answer(
            command.slot, command.loaded, command.reason, command.detail, now
        ):
            parked, sequence = self._parked.pop(key)
            if reason is None:
                self._scheduler.leave(sequence)
                sequence.adapter_slot = self._adapters.slot(key)
                if isinstance(parked, Add):
                    sequence.state = SequenceState.WAITING
                    self._admit(sequence, now)
                else:
                    self._deadlines.discard(key)
                    timeout_s, sequence.state = sequence.spec.timeout_s, SequenceState.RESERVED
                    sequence.deadline = None if timeout_s is None else sequence.arrival + timeout_s
                    events += self._reserve_now(parked, sequence)
                continue
            ended = self._scheduler.end(sequence, reason, detail)
            events.append(ended if isinstance(parked, Add) else ReserveRefused(key, detail))
            self._forget(key)
        return events

    def _end_of(self, sequence: Sequence, reason: EndReason, detail: str) -> Event:
        """End a sequence. An offer that waits for its adapter is refused."""
        parked, _ = self._parked.get(sequence.key, (None, None))
        ended = self._scheduler.end(sequence, reason, detail)
        if not isinstance(parked, Reserve):
            return ended
        self._forget(sequence.key)
        return ReserveRefused(sequence.key, f"waiting for its adapter: {detail}")

    def keep_adapter(self, loaded: LoadedAdapter, adapter: Adapter, load_ms: float) -> float:
        """An operator had an adapter read: load it if there is a slot. As of `Adapters.keep`."""
        assert self._adapters is not None
        return self._adapters.keep(loaded, adapter, load_ms)

    def unload_adapter(self, fingerprint: str) -> tuple[bool, int]:
        """Have an adapter leave once nobody uses it. As of `Adapters.unload`."""
        return (False, 0) if self._adapters is None else self._adapters.unload(fingerprint)

    def adapters(self) -> tuple[AdapterState, ...]:
        """The adapters that are loaded."""
        return () if self._adapters is None else self._adapters.states()

    def _reserve(self, command: Reserve, now: float) -> list[Event]:
        key = command.spec.key
        duplicate = self._end_duplicate(key)
        if duplicate is not None:
            return [duplicate, ReserveRefused(key, duplicate.detail)]
        sequence = new_sequence(command.spec, SequenceState.RESERVED, now)
        sequence.is_copy, sequence.is_prefix = not command.is_prefix, command.is_prefix
        why_not = self._refusal(sequence)
        if why_not is not None:
            return [ReserveRefused(key, why_not[1])]
        if command.is_prefix:  # Those that wait for it have time limits of their own.
            sequence.deadline = None
        elif not self._has_adapter(command, sequence, now):
            until = now + RESERVE_WAIT_S
            sequence.deadline = until if sequence.deadline is None else min(until, sequence.deadline)
            self._watch_deadline(sequence)
            return []
        return self._reserve_now(command, sequence)

    def _reserve_now(self, command: Reserve, sequence: Sequence) -> list[Event]:
        key = sequence.key
        reason = self._fetching.reserve(sequence) if command.is_prefix else self._scheduler.reserve(sequence)
        if reason is not None:
            if sequence.spec.adapter is not None:
                self._forget(key)
            return [ReserveRefused(key, reason)]
        self._exchange.reserved(key)
        self._watch_deadline(sequence)
        return [Reserved(key, sequence.cached_tokens)]

    def _fetch(self, command: FetchPrefix, now: float) -> list[Event]:
        """What cannot be run is refused when it is added."""
        sequence = new_sequence(command.spec, SequenceState.WAITING, now)
        if self._refusal(sequence) is None:
            self._fetching.order(sequence, command.fetch, now)
        return []

    def _pin(self, command: Pin, now: float) -> list[Event]:
        key = command.spec.key
        if key in self._scheduler.sequences:
            return [Pinned(key, 0, "this key is in use")]
        sequence = new_sequence(command.spec, SequenceState.HELD, now)
        sequence.is_prefix = True
        refused = self._refusal(sequence)
        why_not = self._fetching.why_no_pin if refused is None else refused[1]
        if why_not:
            return [Pinned(key, 0, why_not)]
        sequence.deadline = None  # A load has limits of its own, after which there is an answer.
        if self._tiers is None or not self._tiers.loads(sequence, now):
            self._pin_now(sequence)
        return []

    def _pin_now(self, prefix: Sequence) -> None:
        if self._fetching.pin(prefix):
            timeout_s = prefix.spec.timeout_s
            prefix.deadline = None if timeout_s is None else prefix.arrival + timeout_s
            self._watch_deadline(prefix)

    def _loaded(self, sequence: Sequence) -> None:
        """A sequence loads no more: it is queued, or, as the prefix that another worker fetches, pinned."""
        if not sequence.is_prefix:
            self._scheduler.begin(sequence)
            return
        self._scheduler.leave(sequence)
        self._pin_now(sequence)

    def _release(self, command: Release) -> list[Event]:
        sequence = self._scheduler.sequences.get(command.key)
        if sequence is not None:
            self._scheduler.drop(sequence)
            self._forget(command.key)
        return []

    def _extend(self, command: Extend) -> list[Event]:
        sequence = self._scheduler.sequences.get(command.key)
        if sequence is None or sequence.state is not SequenceState.RESERVED:
            return []
        why_not = extend(
            sequence,
            command.token_ids,
            self._scheduler.kv_cache,
            vocab_size=self._runner.vocab_size,
            max_model_len=self.max_model_len,
        )
        return [] if why_not is None else [self._scheduler.end(sequence, "failed", why_not)]

    # ------------------------------------------------------------ steps

    def step(self, now: float) -> list[Event]:
        """Plan one step and run it; returns the events of both."""
        return [*self.plan_step(now), *self.run_step()]

    def plan_step(self, now: float) -> list[Event]:
        """End what is out of time, and decide what the next step computes."""
        self._note_time(now)
        events: list[Event] = [*self._copied(wait=False), *self._expire(now)]
        if self._tiers is not None and self._tiers.turn(now):
            self._stalled = False
        if self._fetching.num_open and self._fetching.advance(now):
            self._stalled = False
        events += self._fetching.take_events()
        self._scheduler.advance(now)
        num_preemptions = self._scheduler.totals["preemptions"]
        plan = self._steps.plan()
        effects = self._scheduler.take_effects()
        events += [event for effect in effects for event in self._carry_out(effect)]
        events += self._exchange.serve(plan)
        has_freed = effects or self._scheduler.totals["preemptions"] > num_preemptions
        self._stalled = not (plan.entries or has_freed or self._steps.is_under_way)
        self.planned, self._planned_at = plan, now
        if plan.entries:
            self._idle_steps.worked()
            self._note_started(plan, now)
        events += [ChunkPlanned(e.sequence.key, e.end) for e in plan.entries if e.sequence.hold_after_prefill]
        self._forget_ended(events)
        return events

    def run_step(self) -> list[Event]:
        """Compute what was planned, or queue it and finish what was queued before."""
        events = self._steps.run(self.planned, self._planned_at)
        self.planned = StepPlan()
        events += self._copied(wait=not self._steps.is_under_way)
        events += self._moves.due()
        self._forget_ended(events)
        return events

    @property
    def expected_s(self) -> float:
        """How long the planned step is predicted to take, or the one that is waited for; 0 where no step takes long."""
        return max(self._limit.expected_s(self.planned), self._limit.expected_s(self._steps.oldest))

    @property
    def num_alike(self) -> int:
        """How many steps from the planned one on are like it, see `steps.num_alike`."""
        return 0 if self._exchange.has_waiting else num_alike(self._scheduler, self.planned)

    def run_alike(self, rows: Iterable[Seq[int]]) -> list[Event]:
        """Instead of `run_step`: take in the planned step and others like it, `num_alike` at most, that were computed
        together. `rows`: of each step the tokens of its decodes."""
        events: list[Event] = [*self._steps.run_alike(self.planned, rows)]
        self.planned = StepPlan()
        return events + self._moves.due()

    def observe(self, step: StepSample) -> None:
        """The step that `run_step` finished was measured. Without slack those with prompts count, which are few."""
        if self._slack is not None or step.prefill_tokens:
            self._model.observe(step)
        if self._scheduler.speculation is not None and not step.prefill_tokens:
            self._scheduler.speculation.observe(step.num_decodes, step.decode_context, step.ms)

    def _copied(self, *, wait: bool) -> list[Event]:
        """The answers of copies that are done, and what waited for them."""
        events = self._exchange.copied(wait=wait)
        self._forget_ended(events)  # a join may end its sequence, whose deadline must not be looked at any more
        return events

    def _carry_out(self, effect: Effect) -> list[Event]:
        """The copies are made here and now: the blocks of a suspended sequence have new owners already, which write to
        them in the next step."""
        totals = self._scheduler.totals
        match effect:
            case SwapOut(sequence=sequence):
                try:
                    totals["swapped_out_blocks"] += self._swapper.swap_out(effect)
                except Exception as error:
                    if is_fatal(error):
                        raise
                    _log.error(
                        "swapping out the KV of %s failed, it must be computed again", sequence.key, exc_info=error
                    )
                    return self._scheduler.swap_out_failed(sequence)
            case SwapIn(sequence=sequence):
                try:
                    totals["swapped_in_blocks"] += self._swapper.swap_in(effect)
                except Exception as error:
                    return [failed(self._scheduler, sequence, "swap", error)]
                self._scheduler.resumed(sequence)
            case Ended():
                return [effect]
        return []

    def _note_started(self, plan: StepPlan, now: float) -> None:
        """Sequences of which this is the first step waited until now."""
        for entry in plan.prefills:
            if entry.sequence.queue_s is None:
                entry.sequence.queue_s = now - entry.sequence.arrival
        for sequence, since in self._exchange.take_joined():
            sequence.queue_s = now - since

    def _expire(self, now: float) -> list[Event]:
        events: list[Event] = []
        while (head := self._deadlines.peek()) is not None and head[0][0] <= now:
            key = head[1]
            events.append(self._end_of(self._scheduler.sequences[key], "deadline", "the deadline passed"))
            self._forget(key)
        return events

    # ------------------------------------------------------------ reports

    def load(self) -> Load:
        """What this worker is doing. Reserved sequences count as waiting; their prompt is computed by another
        worker."""
        scheduler = self._scheduler
        num_suspended = scheduler.swap.num_kept
        return Load(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) - num_suspended + scheduler.num_reserved + self._num_loading,
            num_suspended=num_suspended,
            uncomputed_prompt_tokens=sum(it.num_uncomputed_prompt_tokens for it in scheduler.sequences.values()),
            blocks_total=self._blocks.num_blocks,
            blocks_active=self._blocks.num_active,
            blocks_cached=self._blocks.num_cached,
            blocks_reserved=scheduler.kv_cache.num_reserved,
            steps=self._steps.num_done,
            blocks_apart=self._blocks.num_fragmented,
            blocks_copied=self._blocks.prefix.num_copies,
            num_preempted=scheduler.num_preempted,
            tokens_per_step=self._steps.means.tokens_per_step,
            rows_per_step=self._steps.means.rows_per_step,
        )

    def totals(self) -> EngineTotals:
        """What was done since the start."""
        totals, speculation = self._scheduler.totals, self._scheduler.speculation
        drafts = () if speculation is None else speculation.totals.counts()
        found = EngineTotals(
            self._steps.num_sampled,
            totals["cached_tokens"],
            totals["preemptions"],
            totals["swapped_out_blocks"],
            totals["swapped_in_blocks"],
            *drafts,
        )
        if self._tiers is not None:
            found = found._replace(
                loaded_tokens=self._tiers.num_loaded_tokens,
                dropped_extents=self._tiers.num_dropped,
                tiers=self._tiers.counts(),
            )
        if (fetched := self._fetching.totals()).fetches:
            found = found._replace(fetched_tokens=fetched.fetched_tokens, fetches=fetched.fetches)
        return found._replace(expert_imbalance=self._runner.expert_imbalance)

    def drain_kv_events(self) -> tuple[KvEvent, ...]:
        """What was put into the prefix cache or evicted since the last call, in order; then the same of resume
        points, and of tiers."""
        events = self._blocks.prefix.drain_events() + self._scheduler.kv_cache.points.drain_events()
        return events if self._tiers is None else events + self._tiers.drain_events()

    @property
    def tiers(self) -> tuple[TierName, ...]:
        """The tiers of KV that there are beside the device cache."""
        return () if self._tiers is None else self._tiers.names

    def prefix_snapshot(self) -> BlocksSnapshot:
        """All prefix blocks that can be hit now, and resume points."""
        snapshot = self._blocks.prefix.snapshot()
        points = self._scheduler.kv_cache.points.snapshot()
        if self._tiers is not None:
            snapshot = msgspec.structs.replace(snapshot, tiers=self._tiers.snapshot())
        return msgspec.structs.replace(snapshot, resume=points) if points else snapshot

    def audit(self) -> tuple[dict[str, int], list[str]]:
        """What is held (all zero when idle), and the findings of the integrity checks (empty when sound)."""
        counts = {} if self._adapters is None else {"adapter_uses": self._adapters.num_uses}
        counts |= {
            "sequences": len(self._scheduler.sequences),
            "blocks_active": self._blocks.num_active,
            "blocks_reserved": self._blocks.num_reserved,
            "swap_bytes": self._scheduler.swap.num_bytes,
            "copies": len(self._exchange),
            "fetches": self._fetching.num_open,
        }
        return counts, self.check_integrity()

    def check_integrity(self) -> list[str]:
        """Findings; empty when sound. Costs O(blocks + sequences)."""
        sequences = self._scheduler.sequences
        loading = {key for key, sequence in sequences.items() if sequence.state is SequenceState.LOADING}
        with_deadline = sum(sequence.deadline is not None for sequence in sequences.values())
        problems = scheduler_findings(self._scheduler)
        problems += self._moves.check_integrity()
        problems += self._exchange.check_integrity()
        problems += self._fetching.check_integrity()
        loading -= self._fetching.loading | self._parked.keys()
        if self._adapters is not None:
            problems += self._adapters.check_integrity()
            if self._adapters.waiting != self._parked.keys():
                problems.append("adapters are waited for by other sequences than those that are parked")
        if self._tiers is not None:
            problems += self._tiers.check_integrity(loading)
        elif loading:
            problems.append(f"{len(loading)} sequences are loading and nothing loads them")
        if with_deadline != len(self._deadlines):
            problems.append(f"{len(self._deadlines)} deadlines are watched, {with_deadline} sequences have one")
        return problems

    # ------------------------------------------------------------ inside

    @property
    def _num_loading(self) -> int:
        return self._fetching.num_waiting + len(self._parked) + (0 if self._tiers is None else self._tiers.num_loading)

    def _num_in_tiers(self, hashes: Seq[BlockHash], num_tokens: int) -> int:
        return 0 if self._tiers is None else self._tiers.num_held(hashes, num_tokens)

    def _begin(self, sequence: Sequence, now: float) -> None:
        """A sequence waits no more for a fetch: it is loaded from a tier if that has more, or queued."""
        if self._tiers is None or not self._tiers.loads(sequence, now):
            self._scheduler.begin(sequence)

    def _compute_ms(self, start: int, end: int) -> float:
        """Predicted milliseconds to compute prompt tokens [start, end) in steps without others."""
        coefficients, num_tokens = self._model.coefficients, end - start
        return coefficients.prompt_ms(start, num_tokens) + coefficients.base_ms * num_tokens / self._token_budget

    def _note_time(self, now: float) -> None:
        self._last_now = max(self._last_now, now)
        for cached in (self._cached, *self._pools):
            cached.now = max(cached.now, now)

    def _refusal(self, sequence: Sequence) -> tuple[EndReason, str] | None:
        adapter = sequence.spec.adapter
        if adapter is not None and self._adapters is None:
            return "refused", f"adapter {adapter.name}: this worker takes no adapters"
        if adapter is not None and not adapter.fingerprint:
            return "failed", f"adapter {adapter.name}: there is no fingerprint"
        return refusal(sequence, vocab_size=self._runner.vocab_size, max_model_len=self.max_model_len)

    def _end_duplicate(self, key: AttemptKey) -> Ended | None:
        if (sequence := self._scheduler.sequences.get(key)) is None:
            return None
        ended = self._scheduler.end(sequence, "failed", f"started again while {sequence.state.value}")
        self._forget(key)
        return ended

    def _watch_deadline(self, sequence: Sequence) -> None:
        if sequence.deadline is not None:
            self._deadlines.push((sequence.deadline,), sequence.key)

    def _forget_ended(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Ended):
                self._forget(event.key)

    def _forget(self, key: AttemptKey) -> None:
        self._deadlines.discard(key)
        if self._tiers is not None:
            self._tiers.forget(key)
        self._fetching.forget(key)
        self._exchange.forget(key)
        self._moves.forget(key)
        if self._adapters is not None:
            self._parked.pop(key, None)
            self._adapters.forget(key, self._last_now)


def _order_none(adapter: Adapter, slot: int) -> None:
    raise InternalError(f"nothing reads adapter {adapter.name}")


def _windows_of(
    runner: ModelRunner, config: WorkerConfig, pools: Seq[CachedBlocks], num_steps: int
) -> list[WindowGroup]:
    """The cache groups beside the first one, of a worker that has at most `num_steps` steps under way together."""
    sizes, groups = runner.window_blocks, runner.layout.groups[1:]
    windows = []
    for number, (group, size, cached) in enumerate(zip(groups, sizes, pools, strict=True), start=1):
        blocks = BlockManager(size, runner.block_size, config.watermark_blocks(size), cached, announces=False)
        windows.append(WindowGroup(number, group, blocks, num_steps * config.token_budget))
    return windows


def _speculation_of(
    config: WorkerConfig, proposer: Proposer | None, calibration: Seq[StepSample]
) -> Speculation | None:
    """What proposes drafts on this worker, `proposer` where there is a draft model; None where nothing does."""
    if config.speculation.method == "off" or "decode" not in config.roles:
        return None
    if config.speculation.method == "lookup":
        proposer = Lookup()
    return None if proposer is None else Speculation(proposer, calibration, max_draft=config.speculation.max_draft)
