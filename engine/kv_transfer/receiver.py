"""D's half of the hand-over: a pure state machine, one per pair and control stream.

An offer becomes a reservation in D's engine. Each announced chunk is checked against it before it is cleared; then
its bytes arrive in a staging slot, are compared with the checksum that P sent, and D's own engine scatters them. When
`Commit` is here and all bytes are verified, the join is ordered behind the last scatter, so that the engine does both
between the same two steps; it joins nothing whose KV did not land. When all is in the cache, P may forget the sequence.

A prefix that D fetched joins nothing: when all of it is in the cache it is released, and its blocks stay cached.

With `digests` nothing is compared before the scatter: D's device computes the digest of what arrives there, and the
engine joins only what has the announced one.

A staging slot is held from `ReceiveKv` until the engine scattered it, or until the transport is done with it where
the attempt ended meanwhile: ending an attempt never proves that the writer stopped. The states are in
`receive_window.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from disagg.engine.config import TRANSFER_DEFAULTS as DEFAULTS
from disagg.engine.kv_transfer.commands import (
    BLOCKS_GONE,
    CANCELLED,
    DEADLINE,
    Cause,
    ExtendSequence,
    JoinSequence,
    ReceiveOutcome,
    ReceiveOver,
    ReceiverCommand,
    ReleaseSequence,
    ReserveBlocks,
    SendControl,
)
from disagg.engine.kv_transfer.pair_half import ExpiringSet, PairHalf, PeerError, abort, abort_ack
from disagg.engine.kv_transfer.receive_window import (
    RECEIVE_TABLE,
    ReceiveAttempt,
    ReceivedChunk,
    ReceivedChunkState,
    ReceiveEvent,
    ReceiveState,
    ReceiveWindow,
    check_checksum,
    check_commit,
    check_extension,
)
from disagg.engine.sharding.kv_routes import PairGroup
from disagg.proto.handover import (
    Abort,
    AbortAck,
    ChunkHeader,
    ChunkSum,
    Commit,
    Extend,
    Failure,
    Offer,
    PairHeartbeat,
    Refused,
    SenderToReceiver,
)
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import EndReason

Commands = list[ReceiverCommand]

MAX_TOMBSTONES = 4096
ATTEMPT_IS_OVER = "this attempt is over here"


class Receiver(PairHalf[ReceiveAttempt, SenderToReceiver, ReceiverCommand]):
    """The receiving half of one pair; see `PairHalf`. Owner: the asyncio thread of D.

    `counters` also counts `corrupt_chunks`, and what moved (`chunks_received`, `kv_bytes_received`).

    Args:
        now: this process's clock, seconds.
        groups: the cache groups of the pair.
        max_chunk_bytes: largest payload.
        credits: chunks that P may have announced and not seen done.
        num_slots: staging slots of `max_chunk_bytes` each.
        lease_timeout_s: silence of P after which attempts fail; after twice as long the pair is closed, if bytes of it
            are still to come.
        heartbeat_s: how often to send a heartbeat.
        transfer_timeout_s: how long cleared bytes may take before the pair is closed.
        digests: whether P's checksums are digests, which the engine compares.
        tombstone_ttl_s: how long a cancel waits for its offer, and an ended attempt is remembered.

    Raises:
        ValueError: if not even one token fits a chunk, or there is no slot or credit.
    """

    PEER = "prefill worker"
    HOLDINGS = "receiving"

    def __init__(
        self,
        now: float,
        *,
        groups: Sequence[PairGroup],
        max_chunk_bytes: int,
        credits: int,
        num_slots: int,
        digests: bool = False,
        lease_timeout_s: float = DEFAULTS.lease_timeout_s,
        heartbeat_s: float = DEFAULTS.heartbeat_s,
        transfer_timeout_s: float = DEFAULTS.timeout_s,
        tombstone_ttl_s: float = 10.0,
    ) -> None:
        super().__init__(now, lease_timeout_s, heartbeat_s, transfer_timeout_s)
        self._window: ReceiveWindow = ReceiveWindow(credits, num_slots, groups, max_chunk_bytes)
        self._digests = digests
        self._cancelled_early = ExpiringSet(tombstone_ttl_s, MAX_TOMBSTONES)
        self._ended = ExpiringSet(tombstone_ttl_s, MAX_TOMBSTONES)
        self._last_moves: dict[AttemptKey, int] = {}
        """Number of the last move of each key in `_ended`, and of some keys that have left it."""
        self._last_generation = 0

    # ------------------------------------------------------------ inputs of this worker

    def on_reserved(self, key: AttemptKey, cached_tokens: int) -> Commands:
        """The engine counted the blocks; the KV of the first `cached_tokens` tokens is here."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        num_known = attempt.spec.num_known_tokens
        assert 0 <= cached_tokens <= num_known, (key, cached_tokens)
        attempt.state = RECEIVE_TABLE.next(attempt.state, ReceiveEvent.RESERVED)
        attempt.cached_tokens = cached_tokens
        self._window.begin(attempt)
        return [SendControl(attempt.reservation)]

    def on_reserve_refused(self, key: AttemptKey, reason: str) -> Commands:
        """The engine has no room; it holds nothing."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        attempt.state = RECEIVE_TABLE.next(attempt.state, ReceiveEvent.REFUSED)
        del self._attempts[key]
        refused = Refused(request_id=key.request_id, attempt=key.attempt, reason=reason)
        return [SendControl(refused), ReceiveOver(key, "aborted", Cause(Failure.REFUSED, reason))]

    def on_received(self, key: AttemptKey, seq: int, ok: bool, checksum: int = 0) -> Commands:
        """The transport is done with the slot; not `ok` if the connection broke, which ends the pair.

        Raises:
            TransitionError: if this chunk was not being received.
        """
        out: Commands = []
        chunk = self._window.under_way(key, seq, ReceivedChunkState.RECEIVING)
        if not ok:
            self._window.settle(chunk, keep=False)
            cause = Cause(Failure.TRANSPORT, "the transport failed while receiving")
            return out if self.closed else self._close_pair(cause)
        self.counters["chunks_received"] += 1
        self.counters["kv_bytes_received"] += chunk.header.nbytes
        chunk.arrived = checksum
        if chunk.announced is None and chunk.attempt.live:
            self._window.hold(chunk)
        else:
            self._verify(chunk, out)
        self._pump(out)
        return out

    def on_scattered(self, key: AttemptKey, seq: int, ok: bool, intact: bool = True) -> Commands:
        """The engine is done with the slot; not `ok` if the sequence was gone, or what arrived was not `intact`.

        Raises:
            TransitionError: if this chunk was not being scattered.
        """
        out: Commands = []
        chunk = self._window.scattered(key, seq)
        attempt = chunk.attempt
        if not self.closed:
            out.append(SendControl(chunk.done(ok=ok)))
        if attempt.live and ok:
            attempt.num_missing_tokens -= chunk.num_tokens
            attempt.kv_bytes += chunk.header.nbytes
            self._acknowledge_if_whole(attempt, out)
        elif attempt.live and intact:
            self._give_up(attempt, BLOCKS_GONE, out)
        if not intact:
            self._reject(chunk, out)
        self._pump(out)
        return out

    def on_ended(self, key: AttemptKey, reason: EndReason) -> Commands:
        """The engine ended the reserved sequence by itself (its deadline passed) and holds nothing of it."""
        match reason:
            case "cancelled":
                cause = CANCELLED
            case "deadline":
                cause = DEADLINE
            case _:
                cause = Cause(Failure.ENDED, f"ended on the decode worker: {reason}")
        return self._end_own(key, cause, release=False)

    def cancel(self, key: AttemptKey) -> Commands:
        """A gateway cancels this attempt. Idempotent; one that was not offered yet is refused when it is.

        After the hand-over the engine owns the sequence: cancel it there.
        """
        if key not in self._attempts and key not in self._ended and not self.closed:
            self._cancelled_early.add(key, self._clock.now)
        return self._end_own(key, CANCELLED, release=True)

    @override
    def holdings(self) -> dict[str, int]:
        """Zero a while after the last cancel."""
        return {**super().holdings(), "tombstones": len(self._cancelled_early)}

    # ------------------------------------------------------------ the peer's messages

    def _receive(self, message: SenderToReceiver, out: Commands) -> None:
        match message:
            case PairHeartbeat() | AbortAck():
                pass
            case Offer():
                self._on_offer(message, out)
            case ChunkHeader():
                self._on_header(message)
            case ChunkSum():
                self._on_checksum(message, out)
            case Extend():
                self._on_extend(message, out)
            case Commit():
                self._on_commit(message, out)
            case Abort():
                self._on_abort(message, out)
            case _:
                raise PeerError(f"{type(message).__name__} in the middle of the stream")

    def _on_offer(self, message: Offer, out: Commands) -> None:
        key = message.spec.key
        if message.spec.num_known_tokens < 1:
            raise PeerError(f"Offer of {key} without tokens")
        if key in self._attempts:
            self.counters["stale"] += 1
        elif key in self._cancelled_early:
            self._cancelled_early.discard(key)
            self._remember(key, message.move)
            out.append(abort(key, CANCELLED))
        elif self._is_over(key, message.move) or self._window.has_any_of(key):
            self.counters["stale"] += 1
            out.append(SendControl(Refused(request_id=key.request_id, attempt=key.attempt, reason=ATTEMPT_IS_OVER)))
        else:
            self._last_generation += 1
            self._attempts[key] = ReceiveAttempt(
                message.spec, self._last_generation, message.move, is_prefix=message.is_prefix
            )
            out.append(ReserveBlocks(message.spec, message.is_prefix))

    def _on_header(self, header: ChunkHeader) -> None:
        attempt = self._current(header)
        if attempt is None:
            return
        attempt.state = RECEIVE_TABLE.next_from_peer(attempt.state, ReceiveEvent.HEADER)
        self._window.announce(attempt, header)
        attempt.began_at = self._clock.now if attempt.began_at is None else attempt.began_at

    def _on_checksum(self, message: ChunkSum, out: Commands) -> None:
        attempt = self._current(message)
        if attempt is None:
            return
        chunk = check_checksum(self._window.get(attempt.key, message.seq), message)
        chunk.announced = message.checksum
        if chunk.arrived is not None:
            self._verify(chunk, out)

    def _on_extend(self, message: Extend, out: Commands) -> None:
        attempt = self._current(message)
        if attempt is None:
            return
        attempt.state = RECEIVE_TABLE.next_from_peer(attempt.state, ReceiveEvent.EXTEND)
        check_extension(attempt, message)
        attempt.num_known_tokens += len(message.token_ids)
        self._window.begin(attempt)
        out.append(ExtendSequence(attempt.key, message.token_ids))

    def _on_commit(self, commit: Commit, out: Commands) -> None:
        attempt = self._current(commit)
        if attempt is None:
            return
        attempt.state = RECEIVE_TABLE.next_from_peer(attempt.state, ReceiveEvent.COMMIT)
        check_commit(attempt, commit)
        attempt.commit = commit
        self._join_if_verified(attempt, out)

    def _on_abort(self, message: Abort, out: Commands) -> None:
        attempt = self._attempts.get(message.key)
        cause = Cause(message.failure, message.detail)
        held = [] if attempt is None else self._end(attempt, cause, out, release=True)
        out += [abort_ack(message.key), *held]

    # ------------------------------------------------------------ moving on

    def _pump(self, out: Commands) -> None:
        """Clear announced chunks while there are slots. P sends in this order, so the receives are posted in it."""
        while not self.closed and (chunk := self._window.clear_next(self._clock.now)) is not None:
            out += [chunk.receive, SendControl(chunk.clear())]

    def _verify(self, chunk: ReceivedChunk, out: Commands) -> None:
        """The bytes are here, and P's checksum is, too, or the attempt is over."""
        attempt = chunk.attempt
        intact = self._digests or chunk.announced in (None, chunk.arrived)
        self._window.settle(chunk, keep=intact and attempt.live)
        if intact and attempt.live:
            out.append(chunk.scatter(digests=self._digests))
            attempt.num_unverified_tokens -= chunk.num_tokens
            self._join_if_verified(attempt, out)
        elif not self.closed:
            out.append(SendControl(chunk.done(ok=False)))
        if not intact:
            self._reject(chunk, out)

    def _reject(self, chunk: ReceivedChunk, out: Commands) -> None:
        self.counters["corrupt_chunks"] += 1
        if chunk.attempt.live:
            detail = f"chunk {chunk.header.seq} has another checksum than announced"
            self._give_up(chunk.attempt, Cause(Failure.CHUNK_REJECTED, detail), out)

    def _join_if_verified(self, attempt: ReceiveAttempt, out: Commands) -> None:
        """Order the join; it does not wait for the answers of the scatters before it. A prefix has none."""
        if attempt.commit is None or attempt.num_unverified_tokens:
            return
        attempt.state = RECEIVE_TABLE.next(attempt.state, ReceiveEvent.JOIN)
        if attempt.commit.token_id is not None:
            out.append(JoinSequence(attempt.key, attempt.commit.token_id, attempt.commit.logprobs))
        self._acknowledge_if_whole(attempt, out)

    def _acknowledge_if_whole(self, attempt: ReceiveAttempt, out: Commands) -> None:
        """All is in the cache and joined: P may let go."""
        if attempt.state is not ReceiveState.JOINING or attempt.num_missing_tokens:
            return
        attempt.state = RECEIVE_TABLE.next(attempt.state, ReceiveEvent.JOINED)
        self._forget(attempt)
        if attempt.is_prefix:
            out.append(ReleaseSequence(attempt.key))
        out.append(SendControl(attempt.acknowledgement))
        self._report(attempt, "committed", None, out)

    # ------------------------------------------------------------ giving up

    def _end_own(self, key: AttemptKey, cause: Cause, *, release: bool) -> Commands:
        out: Commands = []
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._give_up(attempt, cause, out, release=release)
            self._pump(out)
        return out

    def _give_up(self, attempt: ReceiveAttempt, cause: Cause, out: Commands, *, release: bool = True) -> None:
        """End an attempt from this side. Nothing here waits for P's AbortAck."""
        held = self._end(attempt, cause, out, release=release)
        out += [abort(attempt.key, cause), *held]

    def _end(self, attempt: ReceiveAttempt, cause: Cause, out: Commands, *, release: bool) -> list[SendControl]:
        """Returns the messages that return P's credits, to be sent after the end: before it, they would mean rejected
        chunks."""
        attempt.state = RECEIVE_TABLE.next(attempt.state, ReceiveEvent.GIVE_UP)
        self._forget(attempt)
        if release:
            out.append(ReleaseSequence(attempt.key))
        self._report(attempt, "aborted", cause, out)
        return [SendControl(chunk.done(ok=False)) for chunk in self._window.drop_idle(attempt)]

    def _forget(self, attempt: ReceiveAttempt) -> None:
        del self._attempts[attempt.key]
        self._remember(attempt.key, attempt.move)

    def _remember(self, key: AttemptKey, move: int) -> None:
        self._ended.add(key, self._clock.now)
        self._last_moves[key] = move

    def _is_over(self, key: AttemptKey, move: int) -> bool:
        """Whether this offer, or a later move of the sequence, ended here and is still remembered."""
        if len(self._last_moves) > 2 * len(self._ended) + 64:
            self._last_moves = {known: last for known, last in self._last_moves.items() if known in self._ended}
        return key in self._ended and move <= self._last_moves[key]

    def _report(self, attempt: ReceiveAttempt, outcome: ReceiveOutcome, cause: Cause | None, out: Commands) -> None:
        kv_bytes, cached = attempt.kv_bytes, attempt.cached_tokens
        out.append(ReceiveOver(attempt.key, outcome, cause, kv_bytes, cached, attempt.began_at))

    def _end_all(self, cause: Cause, out: Commands) -> None:
        for attempt in list(self._attempts.values()):
            self._end(attempt, cause, out, release=True)
        self._cancelled_early.clear()
        self._ended.clear()

    # ------------------------------------------------------------ time

    def _expire(self, now: float, lease_lost: Cause | None, out: Commands) -> None:
        self._cancelled_early.expire(now)
        self._ended.expire(now)
        if lease_lost is not None:
            for attempt in list(self._attempts.values()):
                self._give_up(attempt, lease_lost, out)

    def _oldest_unanswered(self) -> float | None:
        return self._window.oldest_clear
