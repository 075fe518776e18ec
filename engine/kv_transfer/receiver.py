"""D's half of the hand-over: a pure state machine, one per pair and life of its control stream.

An offer becomes a reservation in D's engine. Each announced chunk is checked against it before it is cleared; then
its bytes arrive in a staging slot, are compared with the checksum that P tells, and D's own engine scatters them. When
`Commit` is here and all bytes are verified, the join is asked for behind the last scatter, so that the engine does both
between the same two steps; it joins nothing whose KV did not land. When all is in the cache, P may forget the sequence.

A staging slot is held from `ReceiveBytes` until the engine scattered it, or until the transport is done with it where
the attempt ended meanwhile: ending an attempt never proves that the writer stopped.
"""

from __future__ import annotations

from collections import Counter

from disagg.engine.kv_transfer.effects import (
    CANCELLED,
    LEASE_LOST,
    PAIR_CLOSED,
    STUCK,
    ClosePair,
    JoinSequence,
    ReceiveOutcome,
    ReceiveOver,
    ReceiverEffect,
    ReleaseSequence,
    ReserveBlocks,
    Send,
)
from disagg.engine.kv_transfer.pair_state import FadingSet, PairClock, PeerError
from disagg.engine.kv_transfer.receive_window import ReceiveWindow
from disagg.engine.kv_transfer.receiving import (
    RECEIVE_TABLE,
    ReceiveAttempt,
    ReceivedChunk,
    ReceivedChunkState,
    ReceiveEvent,
    ReceiveState,
    check_checksum,
    check_commit,
)
from disagg.proto.handover import (
    Abort,
    AbortAck,
    ChunkHeader,
    ChunkSum,
    Commit,
    Offer,
    PairHeartbeat,
    Refused,
    SenderToReceiver,
)
from disagg.proto.ids import AttemptKey

Effects = list[ReceiverEffect]

MAX_TOMBSTONES = 4096
ATTEMPT_IS_OVER = "this attempt is over here"


class Receiver:
    """The receiving half of one pair. Owner: the asyncio thread of D.

    Every input returns the effects to carry out, in order. `counters` counts what a healthy pair never sees (`stale`,
    `violations`, `corrupt_chunks`) and what moved (`chunks_received`, `kv_bytes_received`).

    Args:
        now: this process's clock, seconds.
        bytes_per_token: bytes of one token's KV, all layers.
        max_chunk_bytes: largest payload.
        credits: chunks that P may have announced and not seen done.
        num_slots: staging slots of `max_chunk_bytes` each.
        lease_timeout_s: silence of P after which attempts fail; after twice as long the pair is closed, if bytes of it
            are still to come.
        heartbeat_s: how often to beat.
        transfer_timeout_s: how long cleared bytes may take before the pair is closed.
        tombstone_ttl_s: how long a cancel waits for its offer, and an ended attempt is remembered.

    Raises:
        ValueError: if not even one token fits a chunk, or there is no slot or credit.
    """

    def __init__(
        self,
        now: float,
        *,
        bytes_per_token: int,
        max_chunk_bytes: int,
        credits: int,
        num_slots: int,
        lease_timeout_s: float = 5.0,
        heartbeat_s: float = 0.5,
        transfer_timeout_s: float = 30.0,
        tombstone_ttl_s: float = 10.0,
    ) -> None:
        self._window = ReceiveWindow(credits, num_slots, bytes_per_token, max_chunk_bytes)
        self._transfer_timeout_s = transfer_timeout_s
        self._clock = PairClock(now, lease_timeout_s, heartbeat_s)
        self._attempts: dict[AttemptKey, ReceiveAttempt] = {}
        self._cancelled_early = FadingSet(tombstone_ttl_s, MAX_TOMBSTONES)
        self._ended = FadingSet(tombstone_ttl_s, MAX_TOMBSTONES)
        self._last_generation = 0
        self.closed = False
        self.counters: Counter[str] = Counter()

    # ------------------------------------------------------------ our own inputs

    def on_reserved(self, key: AttemptKey, cached_tokens: int) -> Effects:
        """The engine counted the blocks; the KV of the first `cached_tokens` tokens is here."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        num_known = attempt.spec.num_known_tokens
        assert 0 <= cached_tokens <= num_known, (key, cached_tokens)
        attempt.state = RECEIVE_TABLE.next(attempt.state, ReceiveEvent.RESERVED)
        attempt.cached_tokens = attempt.next_token = cached_tokens
        attempt.num_unverified_tokens = attempt.num_missing_tokens = num_known - cached_tokens
        return [Send(attempt.reservation)]

    def on_reserve_refused(self, key: AttemptKey, reason: str) -> Effects:
        """The engine has no room; it holds nothing."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        attempt.state = RECEIVE_TABLE.next(attempt.state, ReceiveEvent.REFUSED)
        del self._attempts[key]
        refused = Refused(request_id=key.request_id, attempt=key.attempt, reason=reason)
        return [Send(refused), ReceiveOver(key, "aborted", reason)]

    def on_received(self, key: AttemptKey, seq: int, ok: bool, checksum: int = 0) -> Effects:
        """The transport is done with the slot; not `ok` if the connection broke, which ends the pair.

        Raises:
            TransitionError: if this chunk was not being received.
        """
        out: Effects = []
        chunk = self._window.under_way(key, seq, ReceivedChunkState.RECEIVING)
        if not ok:
            self._window.judge(chunk, keep=False)
            return out if self.closed else self._close_pair("the transport failed while receiving")
        self.counters["chunks_received"] += 1
        self.counters["kv_bytes_received"] += chunk.header.nbytes
        chunk.arrived = checksum
        if chunk.announced is None and chunk.attempt.live:
            self._window.hold(chunk)
        else:
            self._judge(chunk, out)
        self._pump(out)
        return out

    def on_scattered(self, key: AttemptKey, seq: int, ok: bool) -> Effects:
        """The engine is done with the slot; not `ok` if the sequence was gone.

        Raises:
            TransitionError: if this chunk was not being scattered.
        """
        out: Effects = []
        chunk = self._window.scattered(key, seq)
        attempt = chunk.attempt
        if not self.closed:
            out.append(Send(chunk.done(ok=ok)))
        if attempt.live and ok:
            attempt.num_missing_tokens -= chunk.num_tokens
            attempt.kv_bytes += chunk.header.nbytes
            self._acknowledge_if_whole(attempt, out)
        elif attempt.live:
            self._give_up(attempt, "its blocks are gone on the decode worker", out)
        self._pump(out)
        return out

    def on_ended(self, key: AttemptKey, reason: str) -> Effects:
        """The engine ended the reserved sequence by itself (its deadline passed) and holds nothing of it."""
        return self._end_own(key, reason, release=False)

    def cancel(self, key: AttemptKey) -> Effects:
        """The gateway wants this attempt to stop. Idempotent; one that was not offered yet will be turned away.

        After the hand-over the sequence is the engine's, and cancelling it too.
        """
        if key not in self._attempts and key not in self._ended and not self.closed:
            self._cancelled_early.add(key, self._clock.now)
        return self._end_own(key, CANCELLED, release=True)

    def tick(self, now: float) -> Effects:
        """Let time pass: beat, and end what waited too long. To be called at least every `heartbeat_s`."""
        out: Effects = []
        if self.closed:
            return out
        if self._clock.tick(now):
            out.append(Send(PairHeartbeat()))
        self._cancelled_early.fade(now)
        self._ended.fade(now)
        if self._clock.silence_s >= self._clock.lease_timeout_s:
            for attempt in list(self._attempts.values()):
                self._give_up(attempt, LEASE_LOST, out)
        if self._clock.silence_s >= 2 * self._clock.lease_timeout_s and len(self._window):
            return out + self._close_pair(LEASE_LOST)
        if self._is_stuck():
            return out + self._close_pair(STUCK)
        self._pump(out)
        return out

    def close(self, now: float, reason: str = PAIR_CLOSED) -> Effects:
        """The control stream ended, or P is gone: every attempt is aborted. Idempotent.

        Slots that the transport or the engine still works on are freed by `on_received` and `on_scattered`; closing
        the transport makes it answer.
        """
        self._clock.see(now)
        out: Effects = []
        if self.closed:
            return out
        self.closed = True
        for attempt in list(self._attempts.values()):
            self._end(attempt, reason, out, release=True)
        self._cancelled_early.clear()
        self._ended.clear()
        return out

    def holdings(self) -> dict[str, int]:
        """What this half holds; all zero when idle, a while after the last cancel."""
        return {
            "receiving": len(self._attempts),
            "receiving_chunks": len(self._window),
            "receiving_slots": self._window.num_busy_slots,
            "tombstones": len(self._cancelled_early),
        }

    # ------------------------------------------------------------ the peer's messages

    def on_message(self, message: SenderToReceiver, now: float) -> Effects:
        """A control message of P. One that P must not send closes the pair."""
        if self.closed:
            return []
        self._clock.heard(now)
        out: Effects = []
        try:
            self._receive(message, out)
            self._pump(out)
        except PeerError as error:
            self.counters["violations"] += 1
            out += self._close_pair(f"protocol violation by the prefill worker: {error}")
        return out

    def _receive(self, message: SenderToReceiver, out: Effects) -> None:
        match message:
            case PairHeartbeat() | AbortAck():
                pass
            case Offer():
                self._on_offer(message, out)
            case ChunkHeader():
                self._on_header(message)
            case ChunkSum():
                self._on_checksum(message, out)
            case Commit():
                self._on_commit(message, out)
            case Abort():
                self._on_abort(message, out)
            case _:
                raise PeerError(f"{type(message).__name__} in the middle of the stream")

    def _on_offer(self, message: Offer, out: Effects) -> None:
        key = message.spec.key
        if message.spec.num_known_tokens < 1:
            raise PeerError(f"Offer of {key} without tokens")
        if key in self._attempts:
            self.counters["stale"] += 1
        elif key in self._cancelled_early:
            self._cancelled_early.discard(key)
            self._ended.add(key, self._clock.now)
            out.append(Send(Abort(request_id=key.request_id, attempt=key.attempt, reason=CANCELLED)))
        elif key in self._ended or self._window.has_any_of(key):
            self.counters["stale"] += 1
            out.append(Send(Refused(request_id=key.request_id, attempt=key.attempt, reason=ATTEMPT_IS_OVER)))
        else:
            self._last_generation += 1
            self._attempts[key] = ReceiveAttempt(message.spec, self._last_generation)
            out.append(ReserveBlocks(message.spec))

    def _on_header(self, header: ChunkHeader) -> None:
        attempt = self._current(header)
        if attempt is None:
            return
        attempt.state = RECEIVE_TABLE.next_from_peer(attempt.state, ReceiveEvent.HEADER)
        self._window.announce(attempt, header)
        attempt.began_at = self._clock.now if attempt.began_at is None else attempt.began_at

    def _on_checksum(self, message: ChunkSum, out: Effects) -> None:
        attempt = self._current(message)
        if attempt is None:
            return
        chunk = check_checksum(self._window.get(attempt.key, message.seq), message)
        chunk.announced = message.checksum
        if chunk.arrived is not None:
            self._judge(chunk, out)

    def _on_commit(self, commit: Commit, out: Effects) -> None:
        attempt = self._current(commit)
        if attempt is None:
            return
        attempt.state = RECEIVE_TABLE.next_from_peer(attempt.state, ReceiveEvent.COMMIT)
        check_commit(attempt, commit)
        attempt.commit = commit
        self._join_if_verified(attempt, out)

    def _on_abort(self, message: Abort, out: Effects) -> None:
        key = AttemptKey(message.request_id, message.attempt)
        attempt = self._attempts.get(key)
        held = [] if attempt is None else self._end(attempt, message.reason, out, release=True)
        out += [Send(AbortAck(request_id=key.request_id, attempt=key.attempt)), *held]

    def _current(self, message: ChunkHeader | ChunkSum | Commit) -> ReceiveAttempt | None:
        """The attempt that a message means; where it is over, or the reservation an earlier one, that is counted."""
        attempt = self._attempts.get(AttemptKey(message.request_id, message.attempt))
        if attempt is None or attempt.generation != message.generation:
            self.counters["stale"] += 1
            return None
        return attempt

    # ------------------------------------------------------------ moving on

    def _pump(self, out: Effects) -> None:
        """Clear announced chunks while there are slots. P sends in this order, so the receives are posted in it."""
        while not self.closed and (chunk := self._window.clear_next(self._clock.now)) is not None:
            out += [chunk.receive, Send(chunk.clear())]

    def _judge(self, chunk: ReceivedChunk, out: Effects) -> None:
        """The bytes are here, and their checksum is known, or nobody wants them any more."""
        attempt = chunk.attempt
        intact = chunk.announced in (None, chunk.arrived)
        self._window.judge(chunk, keep=intact and attempt.live)
        if intact and attempt.live:
            out.append(chunk.scatter)
            attempt.num_unverified_tokens -= chunk.num_tokens
            self._join_if_verified(attempt, out)
        elif not self.closed:
            out.append(Send(chunk.done(ok=False)))
        if not intact:
            self.counters["corrupt_chunks"] += 1
            if attempt.live:
                self._give_up(attempt, f"chunk {chunk.header.seq} has another checksum than announced", out)

    def _join_if_verified(self, attempt: ReceiveAttempt, out: Effects) -> None:
        """Ask for the join; it does not wait for the answers of the scatters before it."""
        if attempt.commit is None or attempt.num_unverified_tokens:
            return
        attempt.state = RECEIVE_TABLE.next(attempt.state, ReceiveEvent.JOIN)
        out.append(JoinSequence(attempt.key, attempt.commit.token_id, attempt.commit.logprobs))
        self._acknowledge_if_whole(attempt, out)

    def _acknowledge_if_whole(self, attempt: ReceiveAttempt, out: Effects) -> None:
        """All is in the cache and joined: P may let go."""
        if attempt.state is not ReceiveState.JOINING or attempt.num_missing_tokens:
            return
        attempt.state = RECEIVE_TABLE.next(attempt.state, ReceiveEvent.JOINED)
        self._forget(attempt)
        out.append(Send(attempt.acknowledgement))
        self._report(attempt, "committed", "", out)

    # ------------------------------------------------------------ giving up

    def _end_own(self, key: AttemptKey, reason: str, *, release: bool) -> Effects:
        out: Effects = []
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._give_up(attempt, reason, out, release=release)
            self._pump(out)
        return out

    def _give_up(self, attempt: ReceiveAttempt, reason: str, out: Effects, *, release: bool = True) -> None:
        """End an attempt from this side and tell P, which answers only to be polite: nothing here waits for it."""
        held = self._end(attempt, reason, out, release=release)
        request_id, number = attempt.key
        out += [Send(Abort(request_id=request_id, attempt=number, reason=reason)), *held]

    def _end(self, attempt: ReceiveAttempt, reason: str, out: Effects, *, release: bool) -> list[Send]:
        """The credits that P is owed, to be told after the end: before it, they would say that chunks were bad."""
        attempt.state = RECEIVE_TABLE.next(attempt.state, ReceiveEvent.GIVE_UP)
        self._forget(attempt)
        if release:
            out.append(ReleaseSequence(attempt.key))
        self._report(attempt, "aborted", reason, out)
        return [Send(chunk.done(ok=False)) for chunk in self._window.drop_idle(attempt)]

    def _forget(self, attempt: ReceiveAttempt) -> None:
        del self._attempts[attempt.key]
        self._ended.add(attempt.key, self._clock.now)

    def _report(self, attempt: ReceiveAttempt, outcome: ReceiveOutcome, reason: str, out: Effects) -> None:
        kv_bytes, cached = attempt.kv_bytes, attempt.cached_tokens
        out.append(ReceiveOver(attempt.key, outcome, reason, kv_bytes, cached, attempt.began_at))

    def _close_pair(self, reason: str) -> Effects:
        return [*self.close(self._clock.now, reason), ClosePair(reason)]

    def _is_stuck(self) -> bool:
        oldest = self._window.oldest_clear
        return oldest is not None and self._clock.now - oldest >= self._transfer_timeout_s
