"""Sequences that move to another worker while they decode, with their KV: which, where to, and how each move ends.
Pure.

    a worker drains ──> Migrate on it (S), at most `migrations` at a time; an assignment is opened on the target (D)
    a worker lacks KV blocks for what runs there ──> the same, one at a time, where another one has much room
      S: MigrationFailed        nothing was stopped, or it goes on: the assignment on D is closed, S keeps the attempt
      D: HandedOver             D decodes from now on
      S: End `moved`            behind all tokens of S; its assignment is closed
      D is lost before that     CancelMigration; S keeps the attempt, or ends it as failed where D may have had it
      S is lost                 the attempt is lost: an ordinary retry

An attempt keeps its key when it moves: both workers send tokens of it, as P and D do, and the output buffer releases
each once and in order. S stays a part of the attempt until it has said that it is done, because its tokens come on
another stream than those of D.

Owner: the router core.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from disagg.proto import messages
from disagg.proto.ids import RequestId, WorkerId
from disagg.proto.messages import End, HandedOver, MigrationFailed
from disagg.router.config import RouterConfig
from disagg.router.placement.placement import Candidate, Demand, Policy
from disagg.router.requests.attempts import Attempts
from disagg.router.requests.core_state import CoreState
from disagg.router.requests.events import CancelMigration, Command, Migrate
from disagg.router.requests.record import Attempt, Move, RequestRecord
from disagg.router.states import AttemptState
from disagg.router.workers.worker import Worker

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Seconds between two looks for room for sequences that could not move."""
FEWEST_LEFT = 8
"""Most tokens left of an answer that is not moved: it ends as fast as it would move."""
MOST_USED = 0.8
"""Share of a worker's blocks up to which it takes sequences of a worker that lacks blocks."""
PAUSE_S = 0.1
"""Seconds of pause after a move that failed; doubles with each move of the attempt, up to `MAX_PAUSE_S`."""
MAX_PAUSE_S = 2.0


@dataclass(slots=True)
class _Drain:
    """The draining of one worker."""

    began: float
    num_sequences: int
    """Number of sequences on the worker at the beginning."""
    num_moved: int = 0


class Migrations:
    """The moves between the workers of one router."""

    def __init__(self, config: RouterConfig, state: CoreState, policy: Policy, attempts: Attempts) -> None:
        self._most = config.migrations
        self._pair_timeout_s = config.pair_timeout_s
        self._requests: Mapping[RequestId, RequestRecord] = state.requests
        self._fleet = state.fleet
        self._policy = policy
        self._attempts = attempts
        self._telemetry = state.telemetry
        self._num_moving: Counter[WorkerId] = Counter()
        """Number of moves from each worker."""
        self._drains: dict[WorkerId, _Drain] = {}
        self._look_at = math.inf

    def configure(self, config: RouterConfig, policy: Policy) -> None:
        """Follow another number of simultaneous moves, and another policy."""
        self._most, self._policy = config.migrations, policy
        self.changed()

    def next_wakeup(self) -> float:
        """When `look` is due; infinite if no sequence has to move."""
        return self._look_at if self._fleet.to_drain or self._fleet.lacking else math.inf

    def changed(self) -> None:
        """Make `look` due, because workers changed or a move is over."""
        if self._fleet.to_drain or self._fleet.lacking:
            self._look_at = -math.inf

    def reported(self, worker_id: WorkerId) -> None:
        """Make `look` due after a report of a worker that lacks blocks, if nothing moves away from it."""
        if worker_id in self._fleet.lacking and self._look_at == math.inf:
            self._look_at = -math.inf

    # ---------------------------------------------------------------- drains

    def drain_begins(self, worker: Worker, now: float) -> None:
        """Note that a worker drains from now on."""
        self._drains.setdefault(worker.worker_id, _Drain(now, worker.num_sequences))

    def drain_ends(self, worker_id: WorkerId, now: float, how: str) -> None:
        """Note that a worker is empty, or no longer drains; `how` continues a sentence that begins with its id."""
        drain = self._drains.pop(worker_id, None)
        if drain is not None:
            taken_s = now - drain.began
            logger.info(
                "worker %s %s after %.2f s: %d sequences moved, of %d that it had",
                *(worker_id, how, taken_s, drain.num_moved, drain.num_sequences),
            )

    # ---------------------------------------------------------------- which, and where to

    def look(self, now: float) -> list[Command]:
        """Begin the moves that are due, to workers with room: from draining workers, and one from each worker that
        lacks blocks, instead of a preemption there."""
        commands: list[Command] = []
        self._look_at = math.inf
        if not self._most:
            return commands
        draining = self._fleet.to_drain
        lacking = [worker for worker in self._fleet.lacking.values() if not worker.is_draining]
        for source in [*draining, *lacking]:
            if source.is_suspected or not source.decodes:
                continue
            self._look_at = now + LOOK_S
            most = self._most if source.is_draining else 1
            for record in self._movable(source, now):
                if self._num_moving[source.worker_id] >= most:
                    break
                demand = self._attempts.demand(record, now)
                target = self._target(source, demand)
                if target is not None:
                    commands.append(self._start(record, source, target, demand, now))
        return commands

    def _movable(self, source: Worker, now: float) -> Iterator[RequestRecord]:
        """The sequences that decode on `source` and will for a while, the longest first."""
        records = [self._requests[key.request_id] for key in source.assigned.assignments]
        found = [(_num_left(record), record) for record in records if _may_move(record, source.worker_id, now)]
        found.sort(key=lambda each: (-each[0], each[1].arrival_order))
        return (record for num_left, record in found if num_left > FEWEST_LEFT)

    def _target(self, source: Worker, demand: Demand) -> Candidate | None:
        """The worker with room on which decoding costs least; one of the same arithmetic, if there is any."""
        found = self._fleet.targets(demand, source)
        found = [each for each in found if each.worker.info.arithmetic == source.info.arithmetic] or found
        if not source.is_draining:
            found = [each for each in found if _has_much_room(each)]
        weights = [self._policy.weigh_decode(demand, candidate) for candidate in found]
        least = min(zip(weights, found, strict=True), key=lambda each: (each[0].num_misses, each[0].cost), default=None)
        return None if least is None else least[1]

    def _start(self, record: RequestRecord, source: Worker, target: Candidate, demand: Demand, now: float) -> Migrate:
        attempt, worker = record.running, target.worker
        self._attempts.open_target(record, target, demand, now)
        attempt.num_moves += 1
        attempt.move = Move(source=source.worker_id, target=worker.worker_id)
        self._num_moving[source.worker_id] += 1
        attempt.marks.note_move(source.worker_id, worker.worker_id, now)
        message = messages.Migrate(
            request_id=attempt.key.request_id,
            attempt=attempt.key.attempt,
            number=attempt.num_moves,
            decode_peer=worker.peer,
            pair_timeout_s=self._pair_timeout_s,
        )
        return Migrate(source.worker_id, message)

    # ---------------------------------------------------------------- how they end

    def arrived(self, record: RequestRecord, move: Move, message: HandedOver, now: float) -> None:
        """Note that the target owns the sequence."""
        attempt, trace = record.running, record.trace
        move.has_arrived = True
        attempt.decode = attempt.awaited = move.target
        if attempt.prefill is None:
            attempt.prefill = move.source  # it computed the prompt, and another worker decodes now
        trace.prefill_worker = trace.prefill_worker or move.source
        trace.decode_worker, trace.transport = move.target, message.transport
        trace.kv_bytes += message.kv_bytes
        marks = attempt.marks.moves[-1]
        marks.ended, marks.has_arrived = now, True
        if move.has_left:
            self._over(attempt, move, "moved")

    def left(self, attempt: Attempt, move: Move) -> None:
        """Note that the source has sent all its tokens of the sequence; its assignment is closed."""
        move.has_left = True
        if move.has_arrived:
            self._over(attempt, move, "moved")

    def stayed(self, record: RequestRecord, message: MigrationFailed, now: float) -> None:
        """Note that the move failed and the sequence continues on the source."""
        attempt = record.running
        move = attempt.move
        assert move is not None
        if move.target in attempt.live:
            if message.refused:
                self._attempts.refused_by(attempt, move.target)
            self._attempts.leave(attempt, move.target)
        attempt.move_after = now + min(MAX_PAUSE_S, PAUSE_S * 2 ** min(attempt.num_moves - 1, 10))
        attempt.marks.moves[-1].ended = now
        self._over(attempt, move, "refused" if message.refused else "failed")

    def lost_target(self, attempt: Attempt, worker_id: WorkerId) -> CancelMigration | None:
        """The message to the source if an attempt may stay on it, because the lost worker is the target of a move that
        has not arrived; else None."""
        move = attempt.move
        if move is None or worker_id != move.target or move.has_arrived or move.has_left:
            return None
        return CancelMigration(move.source, attempt.key)

    def attempt_ends(self, attempt: Attempt, now: float) -> None:
        """End the move of an attempt that has ended."""
        move = attempt.move
        if move is not None:
            if attempt.marks.moves[-1].ended is None:
                attempt.marks.moves[-1].ended = now
            self._over(attempt, move, "moved" if move.has_arrived else "ended")

    def awaits_tokens(self, attempt: Attempt, end: End, worker_id: WorkerId, *, has_gap: bool) -> bool:
        """Whether the end of an answer on the target came before the last tokens of the source; then the move keeps
        it."""
        move = attempt.move
        if move is None or move.has_left or worker_id != move.target or not has_gap:
            return False
        if end.reason not in ("stop", "length"):
            return False
        move.last_end = end
        return True

    def _over(self, attempt: Attempt, move: Move, outcome: str) -> None:
        attempt.move = None
        self._num_moving[move.source] -= 1
        if not self._num_moving[move.source]:
            del self._num_moving[move.source]
        self._telemetry.stats.migrations[outcome] += 1
        if outcome == "moved" and (drain := self._drains.get(move.source)) is not None:
            drain.num_moved += 1
        self.changed()


def _may_move(record: RequestRecord, worker_id: WorkerId, now: float) -> bool:
    attempt = record.attempt
    return (
        attempt is not None
        and attempt.state is AttemptState.DECODING
        and attempt.decode == worker_id
        and attempt.move is None
        and now >= attempt.move_after
        and not record.is_probe
        and bool(record.output.released)
    )


def _has_much_room(target: Candidate) -> bool:
    """Whether a sequence that moves for lack of blocks can stay on the target for long."""
    worker = target.worker
    num_used = worker.used_blocks + target.assigned_blocks
    return not worker.lacks_blocks and num_used <= MOST_USED * worker.num_blocks


def _num_left(record: RequestRecord) -> int:
    return record.request.sampling.max_tokens - len(record.output.released)
