"""KV that is exchanged with other workers: what arrives for reserved sequences, until they join, and what is copied out
for those that compute elsewhere. Pure.

    in     reserved() ──> scatter()* ──(copied(): of a device, later)──> join()
    out    gather() ──> copied at once, or begun; that of a prefix beside sequences that run: when `serve` has room

Copies are made behind the steps that are under way. Where such a copy is that of a device or of other ranks, it is only
begun here: `Gathering`, or an answer by `copied`.
"""

from __future__ import annotations

import math

from disagg.engine.blocks.landing import Landing
from disagg.engine.commands import (
    Ended,
    Event,
    Gather,
    Gathered,
    GatherFailed,
    Gathering,
    Join,
    Joined,
    Scatter,
    Scattered,
)
from disagg.engine.core.admission import covered_until
from disagg.engine.core.fetching import Fetching
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.core.serving import Serving
from disagg.engine.core.steps import Steps, failed, num_prompt_steps
from disagg.engine.plan import ModelRunner, StepPlan, is_fatal
from disagg.engine.request import Sequence, SequenceState
from disagg.proto.ids import AttemptKey, GatewayId
from disagg.step_times.step_model import StepModel

NO_GATEWAY = GatewayId("")
"""Gateway id in the `Ended` of a sequence that is not known any more."""


class KvExchange:
    """Owner: the engine core, whose parts these are. What ends a sequence is an event; the core forgets it then."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, fetching: Fetching, steps: Steps, model: StepModel
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._fetching = fetching
        self._steps = steps
        self._model = model
        self._groups = runner.layout.groups
        self._serving = Serving(runner.layout.groups[0].bytes_per_token // runner.shape.num_ranks, runner.block_size)
        self._landing = Landing()
        self._joined: list[tuple[Sequence, float]] = []

    def __len__(self) -> int:
        """Number of copies into the cache that are under way."""
        return len(self._landing)

    @property
    def has_waiting(self) -> bool:
        """Whether copies for other workers wait for their turn."""
        return bool(self._serving)

    def reserved(self, key: AttemptKey) -> None:
        """A sequence was reserved, for which KV arrives."""
        self._landing.reserved(key)

    def forget(self, key: AttemptKey) -> None:
        """A sequence is gone."""
        self._landing.forget(key)

    def takes_kv(self, sequence: Sequence) -> bool:
        """Whether KV of another worker is written to its blocks."""
        return sequence.state is SequenceState.RESERVED or self._fetching.receives(sequence)

    def check_integrity(self) -> list[str]:
        """Findings; empty when sound."""
        sequences = self._scheduler.sequences
        return self._landing.check_integrity({key for key, sequence in sequences.items() if self.takes_kv(sequence)})

    # ------------------------------------------------------------ in

    def scatter(self, command: Scatter) -> list[Event]:
        """Begin or make a copy. One that cannot be right is answered as not ok."""
        key, start, end = command.key, command.start, command.end
        sequence = self._scheduler.sequences.get(key)
        if sequence is None or not self.takes_kv(sequence):
            return [Scattered(key, command.seq, ok=False)]
        group = command.group
        if (
            not 0 <= group < len(self._groups)
            or not self._due_from(sequence, group) <= start < end <= sequence.num_tokens
        ):
            return [Scattered(key, command.seq, ok=False)]
        self._scheduler.extend_reserved(sequence, group, end)
        try:
            copying = self._runner.start_scatter(
                sequence.table_of(group),
                start,
                end,
                command.data,
                command.peer,
                digests=command.digest is not None,
                group=group,
            )
            answers = self._landing.begun(command, copying, waits=not self._steps.is_under_way)
            self._landed(sequence)
            return [*answers]
        except Exception as error:
            return [Scattered(key, command.seq, ok=False), failed(self._scheduler, sequence, "scatter", error)]

    def _landed(self, sequence: Sequence) -> None:
        """More KV of a sequence is in its blocks. That of a prefix is used at once."""
        if self._fetching.receives(sequence):
            ranges = self._landing.landed[sequence.key].get(0, [])
            self._fetching.landed(sequence, covered_until(sequence.cached_tokens, ranges))

    def copied(self, *, wait: bool) -> list[Event]:
        """The answers of copies that are done, and what waited for them."""
        events: list[Event] = []
        for scattered in self._landing.answers(wait=wait):
            events.append(scattered)
            if (sequence := self._scheduler.sequences.get(scattered.key)) is not None:
                self._landed(sequence)
            if (kept := self._landing.take_join(scattered.key)) is not None:
                events += self.join(*kept)
        return events

    def join(self, command: Join, now: float) -> list[Event]:
        """`Joined`, then the joined token as `TokenSampled`, so that P may be lost; then `Ended` where that token is
        the last."""
        key = command.key
        sequence = self._scheduler.sequences.get(key)
        if sequence is None:
            return [Ended(key, NO_GATEWAY, "failed", "the sequence is gone")]
        if sequence.state is not SequenceState.RESERVED:
            return [self._scheduler.end(sequence, "failed", f"joined while {sequence.state.value}")]
        if not 0 <= command.token_id < self._runner.vocab_size:
            return [self._scheduler.end(sequence, "failed", f"token id {command.token_id} is not in the vocabulary")]
        if (command.logprobs is not None) != (sequence.spec.sampling.logprobs >= 0):
            return [self._scheduler.end(sequence, "failed", "the token's logprobs are not what was requested")]
        if self._landing.keeps_join(command, now):
            return []
        landed = self._landing.landed[key]
        num_landed = min(
            covered_until(self._due_from(sequence, group), landed.get(group, [])) for group in range(len(self._groups))
        )
        if num_landed < sequence.num_tokens:
            detail = f"joined with the KV of {num_landed} of {sequence.num_tokens} tokens"
            return [self._scheduler.end(sequence, "failed", detail)]
        self._landing.forget(key)
        self._joined.append((sequence, now))
        return [Joined(key), *self._scheduler.join(sequence, command.token_id, command.logprobs)]

    def take_joined(self) -> list[tuple[Sequence, float]]:
        """The sequences that joined since the last call, and when."""
        joined, self._joined = self._joined, []
        return joined

    # ------------------------------------------------------------ out

    def gather(self, command: Gather, planned: StepPlan) -> list[Event]:
        """Begin or make a copy, beside the step that is `planned`, if any. That of a prefix that another worker fetches
        waits for its turn beside steps."""
        sequence = self._scheduler.sequences.get(command.key)
        if sequence is not None and sequence.is_prefix and (self._serving or self._scheduler.running):
            self._serving.add(command)
            return []
        return self._copy(command, planned)

    def _copy(self, command: Gather, plan: StepPlan) -> list[Event]:
        key, start, end = command.key, command.start, command.end
        sequence = self._scheduler.sequences.get(key)
        if sequence is None or not self._has(sequence, command.group, start, end):
            return [Gathered(key, command.seq, ok=False)]
        group = command.group
        try:
            begun = self._runner.start_gather(
                sequence.table_of(group), start, end, command.out, command.peer, digests=command.digests, group=group
            )
        except Exception as error:
            return [Gathered(key, command.seq, ok=False), failed(self._scheduler, sequence, "gather", error)]
        # Stages copy between steps, as one rank does; a device copies beside them.
        holds_up = isinstance(begun, int) or num_prompt_steps(self._runner) > 1
        most_tokens = self._most_to_copy(plan) if sequence.is_prefix and holds_up else 0
        if isinstance(begun, int):
            return [Gathered(key, command.seq, ok=True, checksum=begun, most_tokens=most_tokens)]
        return [Gathering(key, command.seq, begun, most_tokens)]

    def _most_to_copy(self, plan: StepPlan) -> int:
        """Tokens that the next copy of a prefix may have beside the sequences that run, of which some decode, or the
        next step is this one; 0 where none run."""
        running = self._scheduler.running
        if not running:
            return 0
        decoding = [sequence.num_tokens for sequence in running.values() if sequence.is_decoding]
        if decoding:
            step_ms = self._model.coefficients.ms_of(0, 0, len(decoding), sum(decoding))
        else:
            step = plan if plan.entries else self._steps.oldest
            step_ms = self._model.coefficients.step_ms(step.measured(0.0))
        return self._serving.most_tokens(step_ms)

    def serve(self, plan: StepPlan) -> list[Event]:
        """Copy what other workers fetch, as much as this step may be held up."""
        if not self._serving:
            return []
        step_ms = self._model.coefficients.step_ms(plan.measured(0.0)) if self._scheduler.running else math.inf
        return [event for gather in self._serving.take(step_ms) for event in self._copy(gather, plan)]

    def _due_from(self, sequence: Sequence, group: int) -> int:
        """The first token whose KV of a cache group arrives for a reserved sequence."""
        return max(sequence.cached_tokens, self._groups[group].kept_from(sequence.num_tokens))

    def _has(self, sequence: Sequence, group: int, start: int, end: int) -> bool:
        """Whether the KV of tokens [start, end) of a cache group is in the cache, or will be behind steps under way,
        behind which a copy of it is ordered."""
        if not 0 <= group < len(self._groups) or not 0 <= start < end <= sequence.next_token:
            return False
        return not group or sequence.windows[group - 1].first_token <= start

    def gather_failed(self, command: GatherFailed) -> list[Event]:
        """The sequence may have ended meanwhile; a device that is lost ends the worker in any case."""
        if is_fatal(command.error):
            raise command.error
        gathered = Gathered(command.key, command.seq, ok=False)
        sequence = self._scheduler.sequences.get(command.key)
        return (
            [gathered] if sequence is None else [gathered, failed(self._scheduler, sequence, "gather", command.error)]
        )
