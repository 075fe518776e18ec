"""P's half of the hand-over: a pure state machine, one per pair and control stream.

An attempt is offered; when D has reserved, its prefill starts. What a prefill step computes is gathered into a
staging slot, announced to D with its checksum, and sent when D clears it. The end of a prompt, which a stream waits
for, is announced while it is computed, and its checksum follows. When all chunks are announced and token 0 is known,
`Commit` goes out; D's acknowledgement ends the hand-over, and the sequence is released here.

A prefix that D fetches is computed and held already: it is sent when D has reserved, and committed without a token.

A running sequence is handed over in the same way (`move`). It decodes on while D reserves and most of its KV is copied;
then it is held for what is left. Until `Commit` is sent it can go on here, and does so where the hand-over fails.

The blocks of a sequence are kept until then, or until the attempt is given up, and never released while a gather from
them is to come. A staging slot is held from `GatherChunk` until the bytes left, or until D can no longer clear them: it
acknowledged our abort, or aborted itself (its stream is ordered, so nothing of the attempt follows). A chunk that D
cleared is always sent in full. The states are in `send_window.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from disagg.engine.config import TRANSFER_DEFAULTS as DEFAULTS
from disagg.engine.kv_transfer.commands import (
    CANCELLED,
    DEADLINE,
    KV_GONE,
    PAIR_CLOSED,
    STUCK,
    Cause,
    EndSequence,
    HoldSequence,
    ReleaseSequence,
    SendControl,
    SenderCommand,
    SendOutcome,
    SendOver,
    StartPrefill,
    UnholdSequence,
)
from disagg.engine.kv_transfer.pair_half import PairHalf, PeerError, TransitionError, abort, abort_ack
from disagg.engine.kv_transfer.send_window import SEND_TABLE, SendAttempt, SendEvent, SendState, SendWindow
from disagg.engine.sharding.kv_routes import PairGroup
from disagg.proto.handover import (
    Abort,
    AbortAck,
    ChunkDone,
    ClearToSend,
    CommitAck,
    Extend,
    Failure,
    Offer,
    PairHeartbeat,
    ReceiverToSender,
    Refused,
    Reserved,
)
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec, TokenLogprobs

Commands = list[SenderCommand]


class Sender(PairHalf[SendAttempt, ReceiverToSender, SenderCommand]):
    """The sending half of one pair; see `PairHalf`. Owner: the asyncio thread of P.

    `counters` also counts what moved (`chunks_sent`, `kv_bytes_sent`).

    Args:
        now: this process's clock, seconds.
        groups: the cache groups of the pair.
        max_chunk_bytes: largest payload.
        credits: chunks that may be announced and not done.
        num_slots: staging slots of `max_chunk_bytes` each.
        announces_early: announce the last chunk of a prompt while it is computed.
        lease_timeout_s: silence of D after which attempts fail, and after twice as long what is left of the pair.
        heartbeat_s: how often to send a heartbeat.
        transfer_timeout_s: how long D may take for an answer (the attempt fails), or for an AbortAck or chunk (the
            pair closes).

    Raises:
        ValueError: if not even one token fits a chunk, or there is no slot or credit.
    """

    PEER = "decode worker"
    HOLDINGS = "sending"

    def __init__(
        self,
        now: float,
        *,
        groups: Sequence[PairGroup],
        max_chunk_bytes: int,
        credits: int,
        num_slots: int,
        announces_early: bool = True,
        lease_timeout_s: float = DEFAULTS.lease_timeout_s,
        heartbeat_s: float = DEFAULTS.heartbeat_s,
        transfer_timeout_s: float = DEFAULTS.timeout_s,
    ) -> None:
        super().__init__(now, lease_timeout_s, heartbeat_s, transfer_timeout_s)
        self._window: SendWindow = SendWindow(
            credits, num_slots, groups, max_chunk_bytes, announces_early=announces_early
        )
        self._moving: dict[AttemptKey, SendAttempt] = {}
        """Being computed or computed, until their commit."""

    # ------------------------------------------------------------ inputs of this worker

    def offer(self, spec: SequenceSpec, now: float, move: int = 0, *, is_prefix: bool = False) -> Commands:
        """Offer this attempt to D: a prompt; move number `move` of a sequence that decodes here, with the tokens whose
        KV is computed; or a prefix that D fetches and the engine holds. That is released when the hand-over is over.

        Raises:
            TransitionError: if the attempt was offered before and something of it is still here.
        """
        self._clock.advance(now)
        if self.closed:
            over: Commands = [ReleaseSequence(spec.key)] if is_prefix else []
            return [*over, SendOver(spec.key, "failed", PAIR_CLOSED, stays=move > 0)]
        if spec.key in self._attempts or self._window.has_any_of(spec.key):
            raise TransitionError(f"{spec.key} was offered before")
        deadline = None if spec.timeout_s is None else now + spec.timeout_s
        self._attempts[spec.key] = SendAttempt(
            spec, SendState.OFFERED, deadline, move=move, is_prefix=is_prefix, waiting_since=self._clock.now
        )
        return [SendControl(Offer(spec=spec, move=move, is_prefix=is_prefix))]

    def on_chunk_planned(self, key: AttemptKey, end: int) -> Commands:
        """P's engine computes tokens before `end` now; gathers of them are done when they are computed."""
        return self._move(attempt, end) if (attempt := self._attempts.get(key)) is not None else []

    def on_prefill_computed(self, key: AttemptKey, token_id: int, logprobs: TokenLogprobs | None = None) -> Commands:
        """The whole prompt is computed, and token 0 is sampled and was not the last."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        attempt.token_id, attempt.logprobs = token_id, logprobs
        return self._move(attempt, attempt.num_known_tokens)

    def on_held(
        self,
        key: AttemptKey,
        ok: bool,
        token_ids: tuple[int, ...] = (),
        token_id: int = -1,
        logprobs: TokenLogprobs | None = None,
    ) -> Commands:
        """A running sequence is out of the batch: it has `token_ids` more tokens than D has, and `token_id` behind
        them. Not `ok` if it does not decode any more."""
        attempt, out = self._attempts.get(key), Commands()
        if attempt is None or not attempt.live:
            return out
        if not ok:
            self._give_up(attempt, "failed", KV_GONE, out)
            return out
        attempt.is_growing = False
        attempt.token_id, attempt.logprobs = token_id, logprobs
        if token_ids:
            attempt.num_known_tokens += len(token_ids)
            request_id, number = key
            message = Extend(request_id=request_id, attempt=number, generation=attempt.generation, token_ids=token_ids)
            out.append(SendControl(message))
        self._window.begin(attempt)
        return out + self._move(attempt, attempt.num_known_tokens)

    def on_gathered(
        self, key: AttemptKey, seq: int, ok: bool, nbytes: int = 0, checksum: int = 0, most_tokens: int = 0
    ) -> Commands:
        """The copy into the slot is done; not `ok` if the sequence is gone. `most_tokens`: of the next copy of a
        prefix; 0 for a full chunk.

        Raises:
            TransitionError: if this chunk was not to be gathered.
        """
        out: Commands = []
        chunk = self._window.gathered(key, seq)
        attempt = chunk.attempt
        attempt.most_tokens = most_tokens
        if not attempt.live:
            self._release(attempt, out)
        elif not ok:
            self._give_up(attempt, "failed", KV_GONE, out)
        else:
            assert nbytes == chunk.nbytes, (nbytes, chunk.nbytes)
            chunk.checksum = checksum
            if chunk.is_announced:
                out.append(SendControl(chunk.late_checksum))
        out += [due.send for due in self._window.pop_due()]
        self._pump(out)
        return out

    def on_sent(self, key: AttemptKey, seq: int, ok: bool) -> Commands:
        """The transport is done with the slot; not `ok` if the connection broke, which ends the pair.

        Raises:
            TransitionError: if this chunk was not being sent.
        """
        out: Commands = []
        chunk = self._window.sent(key, seq)
        if self.closed:
            self._window.forget(chunk)
        if ok:
            self.counters["chunks_sent"] += 1
            self.counters["kv_bytes_sent"] += chunk.nbytes
        elif not self.closed:
            return self._close_pair(Cause(Failure.TRANSPORT, "the transport failed while sending"))
        self._pump(out)
        return out

    def cancel(self, key: AttemptKey, cause: Cause = CANCELLED) -> Commands:
        """Give the attempt up: the client went, the sequence ended on P, or its deadline passed. Idempotent."""
        out: Commands = []
        if (attempt := self._attempts.get(key)) is not None and attempt.live:
            self._give_up(attempt, "cancelled", cause, out)
            self._pump(out)
        return out

    # ------------------------------------------------------------ the peer's messages

    def _receive(self, message: ReceiverToSender, out: Commands) -> None:
        match message:
            case PairHeartbeat():
                pass
            case Reserved():
                self._on_reserved(message, out)
            case Refused():
                self._on_refused(message, out)
            case ClearToSend():
                self._on_clear_to_send(message, out)
            case ChunkDone():
                self._on_chunk_done(message, out)
            case CommitAck():
                self._on_commit_ack(message, out)
            case Abort():
                self._on_abort(message, out)
            case AbortAck():
                self._on_abort_ack(message)
            case _:
                raise PeerError(f"{type(message).__name__} in the middle of the stream")

    def _on_reserved(self, message: Reserved, out: Commands) -> None:
        attempt = self._attempts.get(message.key)
        if attempt is None:
            # D would keep this reservation for as long as the pair exists.
            self.counters["stale"] += 1
            out.append(abort(message.key, Cause(Failure.OTHER, "this attempt was not offered")))
            return
        attempt.state = SEND_TABLE.next_from_peer(attempt.state, SendEvent.RESERVED)
        if attempt.state is SendState.ABORTING:
            return
        if not 0 <= message.cached_tokens <= attempt.num_known_tokens:
            raise PeerError(f"Reserved with {message.cached_tokens} cached of {attempt.num_known_tokens} tokens")
        attempt.generation = message.generation
        attempt.cached_tokens = message.cached_tokens
        self._window.begin(attempt)
        attempt.started = True
        if attempt.move or attempt.is_prefix:
            attempt.num_planned = attempt.num_known_tokens
            self._moving[attempt.key] = attempt
        else:
            out.append(StartPrefill(attempt.spec))

    def _on_refused(self, message: Refused, out: Commands) -> None:
        attempt = self._attempts.get(message.key)
        if attempt is None:
            self.counters["stale"] += 1
            return
        attempt.state = SEND_TABLE.next_from_peer(attempt.state, SendEvent.REFUSED)
        if attempt.state is SendState.OVER:
            self._report(attempt, "refused", Cause(Failure.REFUSED, message.reason), out)
            self._forget(attempt)
            self._release(attempt, out)

    def _on_clear_to_send(self, message: ClearToSend, out: Commands) -> None:
        chunk = self._window.get(message.key, message.seq)
        if chunk is None or chunk.attempt.generation != message.generation:
            # D has posted a receive for which there are no bytes: it would swallow the next chunk.
            raise PeerError(f"ClearToSend for chunk {message.seq} of {message.key}, which was not announced")
        self._window.clear(chunk, message.turn)
        out += [due.send for due in self._window.pop_due()]

    def _on_chunk_done(self, message: ChunkDone, out: Commands) -> None:
        chunk = self._window.get(message.key, message.seq)
        if chunk is None or chunk.attempt.generation != message.generation:
            self.counters["stale"] += 1
            return
        self._window.done(chunk)
        if not message.ok and chunk.attempt.live:
            cause = Cause(Failure.CHUNK_REJECTED, f"the decode worker rejected chunk {message.seq}")
            self._give_up(chunk.attempt, "failed", cause, out)

    def _on_commit_ack(self, message: CommitAck, out: Commands) -> None:
        attempt = self._current(message)
        if attempt is None:
            return
        attempt.state = SEND_TABLE.next_from_peer(attempt.state, SendEvent.ACKED)
        if attempt.state is SendState.OVER:
            self._report(attempt, "handed_over", None, out)
            self._forget(attempt)
            if attempt.move:
                attempt.started = False
                out.append(EndSequence(attempt.key, moved=True))
            self._release(attempt, out)

    def _on_abort(self, message: Abort, out: Commands) -> None:
        out.append(abort_ack(message.key))
        attempt = self._attempts.get(message.key)
        if attempt is None:
            return
        was_live = attempt.live
        attempt.state = SEND_TABLE.next_from_peer(attempt.state, SendEvent.PEER_ABORT)
        if was_live:
            outcome: SendOutcome = "cancelled" if message.failure is Failure.CANCELLED else "failed"
            self._report(attempt, outcome, Cause(message.failure, message.detail), out)
        self._window.drop_unannounced(attempt)
        self._forget(attempt)
        self._release(attempt, out)

    def _on_abort_ack(self, message: AbortAck) -> None:
        attempt = self._attempts.get(message.key)
        if attempt is None:
            return
        attempt.state = SEND_TABLE.next_from_peer(attempt.state, SendEvent.ABORT_ACKED)
        self._forget(attempt)

    # ------------------------------------------------------------ moving on

    def _move(self, attempt: SendAttempt, end: int) -> Commands:
        out: Commands = []
        if attempt.live:
            assert end <= attempt.num_known_tokens, (attempt.key, end)
            attempt.num_planned = end
            self._moving[attempt.key] = attempt
            self._pump(out)
        return out

    def _pump(self, out: Commands) -> None:
        """Do all that slots, credits and computed tokens allow."""
        if self.closed:
            return
        self._moving = {key: each for key, each in self._moving.items() if each.state is SendState.PREFILLING}
        in_order = sorted(self._moving.values(), key=lambda each: each.urgency)
        for attempt in in_order:
            out += [chunk.gather for chunk in self._window.cut(attempt)]
        while (chunk := self._window.pop_announceable(self._clock.now)) is not None:
            out.append(SendControl(chunk.header))
        for attempt in in_order:
            if attempt.is_growing and not attempt.is_hold_ordered and not self._window.has_any_of(attempt.key):
                attempt.is_hold_ordered = True
                out.append(HoldSequence(attempt.key, attempt.num_known_tokens))
            if attempt.can_commit:
                attempt.state = SEND_TABLE.next(attempt.state, SendEvent.COMMIT)
                attempt.is_committed = True
                attempt.waiting_since = self._clock.now
                out.append(SendControl(attempt.commit))

    # ------------------------------------------------------------ giving up

    def _give_up(self, attempt: SendAttempt, outcome: SendOutcome, cause: Cause, out: Commands) -> None:
        """Abort a live attempt; announced chunks keep their slots until D can no longer clear them."""
        attempt.state = SEND_TABLE.next(attempt.state, SendEvent.GIVE_UP)
        attempt.waiting_since = self._clock.now
        self._window.drop_unannounced(attempt)
        out.append(abort(attempt.key, cause))
        self._report(attempt, outcome, cause, out)
        self._release(attempt, out)

    def _forget(self, attempt: SendAttempt) -> None:
        """D can clear nothing more of this attempt."""
        del self._attempts[attempt.key]
        self._window.drop_uncleared(attempt)

    def _release(self, attempt: SendAttempt, out: Commands) -> None:
        """Let the engine drop the sequence, once, when no gather from it is to come."""
        if attempt.started and attempt.num_gathering == 0:
            attempt.started = False
            if attempt.stays:
                out.append(UnholdSequence(attempt.key))
            elif attempt.move:
                out.append(EndSequence(attempt.key, moved=False, detail="the move to another worker failed at its end"))
            else:
                out.append(ReleaseSequence(attempt.key))

    def _report(self, attempt: SendAttempt, outcome: SendOutcome, cause: Cause | None, out: Commands) -> None:
        stays = attempt.stays and outcome != "handed_over"
        out.append(SendOver(attempt.key, outcome, cause, attempt.kv_bytes, attempt.cached_tokens, stays))

    def _end_all(self, cause: Cause, out: Commands) -> None:
        for attempt in self._attempts.values():
            if attempt.live:
                self._report(attempt, "failed", cause, out)
            attempt.state = SendState.OVER
            self._release(attempt, out)
        self._attempts.clear()
        self._window.close()

    # ------------------------------------------------------------ time

    def _expire(self, now: float, lease_lost: Cause | None, out: Commands) -> None:
        for attempt in [a for a in self._attempts.values() if a.live]:
            if lease_lost is not None:
                self._give_up(attempt, "failed", lease_lost, out)
            elif attempt.deadline is not None and now >= attempt.deadline:
                self._give_up(attempt, "cancelled", DEADLINE, out)
            elif attempt.awaits_answer and now - attempt.waiting_since >= self._transfer_timeout_s:
                self._give_up(attempt, "failed", STUCK, out)

    def _oldest_unanswered(self) -> float | None:
        aborts = [a.waiting_since for a in self._attempts.values() if a.state is SendState.ABORTING]
        return min(aborts + self._window.awaited_since, default=None)
