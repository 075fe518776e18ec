"""A worker as a few numbers: its messages, over the steps of `fast_engine.py`.

Tokens of an answer are sent to the router with its first token, at its end, and once a second between; the time of each
token is kept separately. The hand-over moves the same bytes at the same times, without messages for each chunk. Reports
are sent when sequences come, end or are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace
from typing_extensions import override

from disagg.engine.config import WorkerConfig
from disagg.engine.core.outbox import Outbox
from disagg.engine.core.reports import PendingPrompts
from disagg.engine.kv_transfer.pair_half import tokens_per_chunk
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import (
    BlocksSnapshot,
    Cancel,
    Connect,
    Dispatch,
    EndReason,
    GatewayToWorker,
    HandedOver,
    Load,
    PeerRef,
    SequenceSpec,
    StepUpdate,
    TokenOut,
    WorkerInfo,
)
from disagg.router.requests import events
from disagg.simulator.fast.fast_engine import FastEngine
from disagg.simulator.fast.fast_room import FastSequence
from disagg.simulator.world.reports import Reports
from disagg.simulator.world.surroundings import GATEWAY, Surroundings
from disagg.step_times.interface import StepTimes


class FastWorker(FastEngine):
    """A worker whose engine is a few numbers. Owner: the simulated cluster."""

    def __init__(self, world: Surroundings, config: WorkerConfig, info: WorkerInfo, times: StepTimes) -> None:
        super().__init__(world, config, info, times)
        self._full_token_bytes = sum(group.bytes_per_token for group in info.kv_layout.groups if not group.window)
        self._chunk_tokens = tokens_per_chunk(config.transfer.chunk_bytes, self._full_token_bytes)
        self._lanes: dict[FastWorker, deque[tuple[int, Callable[[], None]]]] = {}
        self._pending_prompts = PendingPrompts()
        self._tokens: list[TokenOut] = []
        self._outbox = Outbox()
        self._reports = Reports(
            self._loop,
            info.worker_id,
            info.incarnation,
            config.report_interval_s,
            None,
            self.load,
            self._room.drain_events,
            None,
            lambda report: world.to_gateway(events.WorkerReported(report)),
        )

    # ------------------------------------------------------------ start and end

    def start(self) -> None:
        """Send the first report, with an empty cache."""
        self._reports.start(BlocksSnapshot(hashes=()))

    def stop_reporting(self) -> None:
        """Stop the reports, because the run is over."""
        self._reports.stop()

    def die(self) -> None:
        """End without a message to anyone."""
        self.is_dead = True
        self._reports.stop()
        if self._machine is not None:
            self._machine.forget(self.info.worker_id)

    def forget_pair(self, peer: PeerRef) -> None:
        """Give up all transfers from and to a worker that died."""
        for sequence in list(self._sequences.values()):
            other = sequence.other
            if other is not None and other.is_dead and sequence.phase != "decode":
                self._end(sequence, "failed", f"pair lost: {peer.worker_id} is gone")
        self._lanes = {other: lane for other, lane in self._lanes.items() if not other.is_dead}
        self._flush()

    def load(self) -> Load:
        """The load as the worker reports it to gateways."""
        scheduler = self._scheduler
        blocks, per_block = self._blocks, self._blocks.per_block
        uncomputed = sum(max(0, s.num_known - max(s.computed, s.swapped)) for s in scheduler.uncomputed())
        uncomputed += self._pending_prompts.num_tokens(self._sequences.__contains__)
        num_suspended = sum(s.swapped > 0 for s in self._sequences.values()) if scheduler.num_preempted else 0
        return Load(
            num_running=len(self._decoding) + len(scheduler.started),
            num_waiting=scheduler.num_waiting - num_suspended + scheduler.num_reserved,
            num_suspended=num_suspended,
            uncomputed_prompt_tokens=uncomputed,
            blocks_total=blocks.num_blocks,
            blocks_active=(blocks.num_own + blocks.num_held) // per_block,
            blocks_cached=blocks.num_cached // per_block,
            blocks_reserved=self._room.num_reserved // per_block,
            steps=self._num_steps,
            num_preempted=scheduler.num_preempted,
            blocks_copied=blocks.num_copied // per_block,
        )

    def audit(self) -> tuple[dict[str, int], list[str]]:
        """Counts of what is held (all zero when idle), and inconsistencies."""
        blocks = self._blocks
        counts = {
            "sequences": len(self._sequences),
            "decoding": len(self._decoding),
            "units_own": blocks.num_own,
            "units_held": blocks.num_held,
            "units_reserved": blocks.num_reserved,
            "reserved": self._scheduler.num_reserved,
            "waiting": self._scheduler.num_waiting,
            "preempted": self._scheduler.num_preempted,
            "attended": self._scheduler.attends,
            "window_blocks": 0 if self._room.windows is None else self._room.windows.num_promised,
        }
        return counts, blocks.check_integrity()

    def catch_up(self) -> None:
        """Send the gateway what it would have received by now if each step were reported on its own."""
        self._take_in(self._loop.now - self._world.overheads.message_s)
        for sequence in self._decoding:
            self._tell_tokens(sequence)
        if not self._decoding:
            return
        self._reported_at = self._loop.now
        self._times.clear()
        self._first_time = self._scheduler.steps
        self._send_to(self._world.gateway_now)
        self._reports.force_report(lambda report: self._world.gateway_now(events.WorkerReported(report)))

    # ------------------------------------------------------------ messages of the gateway

    def receive(self, message: GatewayToWorker) -> None:
        """Handle a dispatch or a cancel."""
        if self.is_dead:
            return
        match message:
            case Dispatch():
                self._dispatch(message)
            case Cancel():
                if (sequence := self._sequences.get(AttemptKey(message.request_id, message.attempt))) is not None:
                    self._cancel(sequence)
            case Connect():
                """Pairs are formed at the first dispatch."""

    def _dispatch(self, dispatch: Dispatch) -> None:
        spec, peer = dispatch.spec, dispatch.decode_peer
        if ("decode" if peer is None else "prefill") not in self.config.roles:
            self._outbox.end(spec.gateway_id, spec.key, "refused", f"{self.config.worker_id} cannot run this dispatch")
            self._flush()
            return
        sequence = self._new_sequence(spec, holds=peer is not None)
        self._pending_prompts.dispatched(spec.key, spec.num_known_tokens)
        if peer is None:
            self._post(self._add, sequence)
            return
        decode = self._world.find_worker(peer)
        if not isinstance(decode, FastWorker):
            del self._sequences[spec.key]
            reason = f"pair lost: {peer.worker_id} is gone"
            self._outbox.end(spec.gateway_id, spec.key, "refused", reason, in_transfer=True)
            self._flush()
            return
        sequence.other = decode
        overheads = self._world.overheads
        delay_s = overheads.message_s
        if decode not in self._lanes:
            self._lanes[decode] = deque()
            delay_s += overheads.pair_s
        self._loop.after(delay_s, decode.on_offer, spec, self)

    def _new_sequence(self, spec: SequenceSpec, *, holds: bool) -> FastSequence:
        sequence = self._sequences[spec.key] = FastSequence(spec, self._loop.now, holds=holds)
        return sequence

    def _cancel(self, sequence: FastSequence) -> None:
        """Release an attempt that the gateway cancelled. The gateway gets no further message about it."""
        other = sequence.other
        if other is not None and sequence.holds:
            self._loop.after(self._world.overheads.message_s, other.on_abort, sequence.key)
        self._post(self._scheduler.release, sequence)

    # ------------------------------------------------------------ the hand-over

    def on_offer(self, spec: SequenceSpec, prefill: FastWorker) -> None:
        """D: reserve blocks for an attempt that a prefill worker is about to compute."""
        if self.is_dead or prefill.is_dead or spec.key in self._sequences:
            return
        sequence = self._new_sequence(spec, holds=False)
        sequence.phase = "offered"
        sequence.other = prefill
        self._post(self._reserve, sequence)

    def on_abort(self, key: AttemptKey) -> None:
        """The other worker gives up the attempt."""
        if not self.is_dead and (sequence := self._sequences.get(key)) is not None and sequence.phase != "decode":
            self._post(self._scheduler.release, sequence)

    def on_reserved(self, key: AttemptKey, cached_tokens: int) -> None:
        """P: the decode worker has reserved blocks."""
        sequence = None if self.is_dead else self._sequences.get(key)
        if sequence is None:
            return
        sequence.next_kv_token = sequence.peer_cached = cached_tokens
        sequence.alloc_wait_s = self._loop.now - sequence.arrival
        sequence.arrival = self._loop.now
        self._post(self._add, sequence)

    def on_refused(self, key: AttemptKey, reason: str) -> None:
        """P: the decode worker has no room for the attempt."""
        sequence = None if self.is_dead else self._sequences.get(key)
        if sequence is not None:
            self._end(sequence, "refused", reason)
            self._flush()

    def on_ack(self, key: AttemptKey) -> None:
        """P: the decode worker owns the sequence."""
        sequence = None if self.is_dead else self._sequences.get(key)
        if sequence is not None:
            self._scheduler.release(sequence)
            self._wake()

    @override
    def _send_kv(self, sequence: FastSequence, num_computed: int, *, is_complete: bool) -> None:
        """P: send the computed prompt's KV to D, as far as it fills payloads, see `kv_transfer/send_window.py`."""
        num_tokens = num_computed - sequence.next_kv_token
        if not is_complete and num_tokens > 0:
            rest = num_tokens % self._chunk_tokens
            num_tokens -= rest if 2 * rest < self._chunk_tokens else 0
        decode = sequence.other
        assert isinstance(decode, FastWorker)
        if num_tokens <= 0:
            return
        sequence.next_kv_token += num_tokens
        if sequence.transfer_began is None:
            sequence.transfer_began = self._loop.now
        nbytes = num_tokens * self._full_token_bytes
        if is_complete:  # windows are sent at the end
            cached = sequence.peer_cached
            nbytes += self._kv_layout.bytes_of(num_computed, cached)
            nbytes -= (num_computed - cached) * self._full_token_bytes
        sequence.kv_bytes += nbytes
        self._scheduler.copy_s += nbytes * self._world.overheads.copy_byte_s
        message_s = self._world.overheads.message_s
        if is_complete:
            computed_at = self._loop.now
            is_promised = self.config.transport != "nccl"
            self._loop.after(
                0.0 if is_promised else 2 * message_s,
                self._send,
                decode,
                nbytes,
                lambda: self._loop.at(computed_at + message_s, decode.on_kv, sequence),
            )
        else:
            self._loop.after(2 * message_s, self._send, decode, nbytes, _nothing)

    def _send(self, decode: FastWorker, nbytes: int, done: Callable[[], None]) -> None:
        """Send a payload to D, after the earlier ones of the pair."""
        lane = self._lanes.get(decode)
        if lane is None or self.is_dead:
            return
        lane.append((nbytes, done))
        if len(lane) == 1:
            self._send_next(decode)

    def _send_next(self, decode: FastWorker) -> None:
        nbytes = self._lanes[decode][0][0]
        self._world.network.send(self.info.worker_id, decode.info.worker_id, nbytes, lambda: self._on_sent(decode))

    def _on_sent(self, decode: FastWorker) -> None:
        lane = self._lanes.get(decode)
        if lane is None or self.is_dead or not lane:
            return
        _, done = lane.popleft()
        if lane:
            self._send_next(decode)
        done()

    def on_kv(self, sent: FastSequence) -> None:
        """D: all KV of a sequence of P has arrived."""
        sequence = None if self.is_dead else self._sequences.get(sent.key)
        if sequence is not None and sequence.phase == "reserved":
            sequence.kv_bytes, sequence.transfer_began = sent.kv_bytes, sent.transfer_began
            self._post(self._join, sequence)

    # ------------------------------------------------------------ commands, between two steps

    def _add(self, sequence: FastSequence) -> None:
        if sequence.phase != "waiting":
            return
        self._reports.note()
        self._pending_prompts.added((sequence.key,))
        if sequence.num_known >= self._max_model_len:
            self._end(sequence, "refused", f"{sequence.num_known} tokens and an answer do not fit")
            return
        self._scheduler.queue(sequence)

    def _reserve(self, sequence: FastSequence) -> None:
        if sequence.phase != "offered":
            return
        reason = None
        if self._scheduler.num_preempted:
            reason = "preempted sequences go first"
        elif self._scheduler.num_places() < 1:
            reason = "the batch is full"
        elif not self._room.place(sequence, self._scheduler.is_alone):
            reason = "not enough free KV blocks"
        prefill, key = sequence.other, sequence.key
        assert prefill is not None
        message_s = self._world.overheads.message_s
        if reason is not None:
            self._reports.note()
            sequence.phase = "over"
            del self._sequences[key]
            self._loop.after(message_s, prefill.on_refused, key, reason)
            return
        sequence.phase = "reserved"
        self._scheduler.num_reserved += 1
        self._loop.after(message_s, prefill.on_reserved, key, sequence.cached_tokens)

    def _join(self, sequence: FastSequence) -> None:
        if sequence.phase != "reserved":
            return
        now, prefill = self._loop.now, sequence.other
        assert prefill is not None
        self._scheduler.num_reserved -= 1
        self._scheduler.copy_s += sequence.kv_bytes * self._world.overheads.copy_byte_s
        self._room.extend(sequence, sequence.num_known)
        sequence.computed = sequence.num_known
        self._room.publish(sequence)
        sequence.sent += 1
        self._scheduler.decode(sequence)
        began = sequence.transfer_began
        message = HandedOver(
            request_id=sequence.key.request_id,
            attempt=sequence.key.attempt,
            kv_bytes=sequence.kv_bytes,
            cached_tokens=sequence.cached_tokens,
            transport=self.config.transport,
            transfer_s=0.0 if began is None else now - began,
        )
        self._outbox.handed_over(sequence.gateway_id, message)
        self._loop.after(self._world.overheads.message_s, prefill.on_ack, sequence.key)
        self._reports.note()

    # ------------------------------------------------------------ what goes out

    @override
    def _computed(self, sequence: FastSequence) -> None:
        """Handle a prompt that is computed, with its first token sampled."""
        now, key, index = self._loop.now, sequence.key, sequence.sent
        self._answers.note_times(key.request_id, index, [now + self._to_client_s])
        self._tokens.append(TokenOut(key.request_id, key.attempt, index, (self._answers.token(key.request_id, index),)))
        sequence.sent += 1
        if self._scheduler.num_left(sequence) == 0:
            sequence.phase = "held"
            other = sequence.other
            if other is not None:
                self._loop.after(self._world.overheads.message_s, other.on_abort, key)
            self._end(sequence, self._scheduler.finish_reason(sequence))
            return
        if sequence.holds:
            sequence.phase = "held"
            self._outbox.prefill_done(
                sequence.gateway_id,
                key,
                sequence.cached_tokens,
                alloc_wait_s=sequence.alloc_wait_s,
                queue_s=sequence.queue_s or 0.0,
            )
            return
        self._scheduler.decode(sequence)

    @override
    def _tell_tokens(self, sequence: FastSequence) -> None:
        """Send the tokens that the sequence made since the last call."""
        steps = self._scheduler.steps
        num_new = steps - sequence.reported_at
        if num_new <= 0:
            return
        first, last = sequence.sent, steps - self._first_time
        request_id, attempt = sequence.key
        self._answers.note_times(request_id, first, self._times[last - num_new : last])
        self._tokens.append(TokenOut(request_id, attempt, first, self._answers.tokens(request_id, first, num_new)))
        sequence.sent += num_new
        sequence.reported_at = steps

    @override
    def _end(self, sequence: FastSequence, reason: EndReason, detail: str = "") -> None:
        """Release the sequence and tell the gateway that it ended."""
        in_transfer = detail.startswith("pair lost")
        self._scheduler.release(sequence)
        if sequence.other is not None and not sequence.holds and reason == "failed":
            return  # P, or the loss of P, says so.
        self._outbox.end(
            sequence.gateway_id,
            sequence.key,
            reason,
            detail,
            sequence.cached_tokens,
            sequence.queue_s or 0.0,
            in_transfer=in_transfer,
        )

    @override
    def _flush(self) -> None:
        """Send all queued messages to the gateway."""
        self._send_to(self._world.to_gateway)

    def _send_to(self, send: Callable[[events.Event], None]) -> None:
        update = self._outbox.flush().get(GATEWAY)
        if self._tokens:
            tokens, self._tokens = tuple(self._tokens), []
            update = StepUpdate(tokens=tokens) if update is None else replace(update, tokens=tokens)
        if update is not None:
            send(events.FromWorker(self.info.worker_id, self.info.incarnation, update))


def _nothing() -> None:
    """Do nothing when a payload has arrived that is not the last one of its prompt."""
