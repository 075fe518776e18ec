"""The shells around a `Sender` and a `Receiver` in a `WorkerPair`: they carry commands out, and check the order that
was promised.

Each keeps a table of who works on which staging slot (the engine or the transport); a second user at the same time is
an error. A slot that is reused between two uses for the same chunk shows in the checksum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from disagg.engine.commands import (
    Add,
    ChunkPlanned,
    End,
    Ended,
    Event,
    Export,
    Exported,
    Extend,
    Gather,
    Gathered,
    Held,
    Hold,
    Join,
    PrefillComputed,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    Scattered,
    TokenSampled,
    Unhold,
)
from disagg.engine.kv_transfer.commands import (
    Cause,
    ClosePair,
    EndSequence,
    ExtendSequence,
    GatherChunk,
    HoldSequence,
    JoinSequence,
    ReceiveKv,
    ReceiveOver,
    ReceiverCommand,
    ReleaseSequence,
    ReserveBlocks,
    ScatterChunk,
    SendControl,
    SenderCommand,
    SendKv,
    SendOver,
    StartPrefill,
    UnholdSequence,
)
from disagg.engine.kv_transfer.pair_half import TransitionError
from disagg.engine.kv_transfer.receiver import Receiver
from disagg.engine.kv_transfer.sender import Sender
from disagg.engine.kv_transfer.transports.transport import UNKEYED
from disagg.engine.plan import Buffer
from disagg.proto.handover import ChunkDone, ChunkHeader, Failure, ReceiverToSender, SenderToReceiver
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec

if TYPE_CHECKING:
    from tests.support.pair import WorkerPair

Chunk = tuple[AttemptKey, int]


class SenderShell:
    """P's shell."""

    def __init__(self, pair: WorkerPair, *, num_slots: int, max_chunk_bytes: int, **options: Any) -> None:
        self.machine = Sender(0.0, num_slots=num_slots, max_chunk_bytes=max_chunk_bytes, **options)
        self.slots_in_use: dict[int, Chunk] = {}
        self.close_cause: Cause | None = None
        self._pair = pair
        self._buffers: list[Buffer] = [pair.new_buffer(max_chunk_bytes) for _ in range(num_slots)]
        self._gathers: dict[Chunk, GatherChunk] = {}
        self._unfinished: set[tuple[Chunk, int]] = set()
        self._to_move: dict[AttemptKey, int] = {}

    @property
    def num_unfinished_chunks(self) -> int:
        """Chunks announced to D and not done, of attempts that P has not ended."""
        return len(self._unfinished)

    @property
    def close_detail(self) -> str:
        """Why the machine closed the pair, for people; empty if it did not."""
        return "" if self.close_cause is None else self.close_cause.detail

    def offer(self, spec: SequenceSpec) -> None:
        self._carry_out(self.machine.offer(spec, self._pair.now))

    def move(self, key: AttemptKey, number: int) -> None:
        """Offer a sequence that P decodes, once its engine has described it."""
        self._to_move[key] = number
        self._pair.p.commands.append(Export(key))

    def cancel(self, key: AttemptKey) -> None:
        self._to_move.pop(key, None)
        self._carry_out(self.machine.cancel(key))

    def tick(self) -> None:
        self._carry_out(self.machine.tick(self._pair.now))

    def close(self) -> None:
        self._to_move.clear()
        self._carry_out(self.machine.close(self._pair.now))

    def on_message(self, message: ReceiverToSender) -> None:
        if isinstance(message, ChunkDone):
            key = AttemptKey(message.request_id, message.attempt)
            self._unfinished.discard(((key, message.seq), message.generation))
        self._carry_out(self.machine.on_message(message, self._pair.now))

    def on_event(self, event: Event) -> None:
        machine, pair = self.machine, self._pair
        match event:
            case ChunkPlanned(key, end):
                self._carry_out(machine.on_chunk_planned(key, end))
            case PrefillComputed(key, _, token_id, _, logprobs):
                self._carry_out(machine.on_prefill_computed(key, token_id, logprobs))
            case TokenSampled(key, _, index, token_id):
                pair.note_token(key, index, token_id)
            case Exported(key, _, spec):
                number = self._to_move.pop(key, 0)
                if number and spec is not None:
                    try:
                        commands = machine.offer(spec, pair.now, number)
                    except TransitionError:
                        return  # something of an earlier move is here still
                    pair.moves[key] = spec
                    self._carry_out(commands)
            case Held(key, ok, token_ids, token_id, logprobs):
                self._carry_out(machine.on_held(key, ok, token_ids, token_id, logprobs))
            case Gathered(key, seq, ok, digest):
                gather = self._gathers.pop((key, seq))
                assert self.slots_in_use.pop(gather.slot) == (key, seq)
                assert digest == (UNKEYED(self._buffers[gather.slot][: gather.nbytes]) if ok else 0)
                self._carry_out(machine.on_gathered(key, seq, ok, gather.nbytes, digest))
            case Ended(key, _, reason):
                pair.ends[key].append(("p", reason))
                self._carry_out(machine.cancel(key, Cause(Failure.ENDED, f"ended on P: {reason}")))
            case _:
                raise AssertionError(event)

    def _carry_out(self, commands: Iterable[SenderCommand]) -> None:
        pair = self._pair
        for command in commands:
            match command:
                case SendControl(message):
                    self._send(message)  # type: ignore[arg-type]  # a sender sends only its own kinds
                case StartPrefill(spec):
                    pair.p.commands.append(Add(spec, hold_after_prefill=True))
                case GatherChunk(key, seq, start, end, slot, nbytes):
                    assert slot not in self.slots_in_use, self.slots_in_use
                    self.slots_in_use[slot] = (key, seq)
                    self._gathers[key, seq] = command
                    pair.p.commands.append(Gather(key, seq, start, end, self._buffers[slot][:nbytes]))
                case SendKv(key, seq, slot):
                    assert slot not in self.slots_in_use, self.slots_in_use
                    self.slots_in_use[slot] = (key, seq)
                    self._send_bytes(command)
                case HoldSequence(key, num_known):
                    pair.p.commands.append(Hold(key, num_known))
                case UnholdSequence(key):
                    pair.p.commands.append(Unhold(key))
                case EndSequence(key, moved, detail):
                    assert not any(gathering == key for gathering, _ in self._gathers)
                    pair.p.commands.append(End(key, "moved" if moved else "failed", detail))
                case ReleaseSequence(key):
                    assert not any(gathering == key for gathering, _ in self._gathers)
                    pair.p.commands.append(Release(key))
                case SendOver(key):
                    pair.p_overs[key].append(command)
                    self._unfinished = {entry for entry in self._unfinished if entry[0][0] != key}
                case ClosePair(cause):
                    self.close_cause = cause
                    pair.break_stream()

    def _send(self, message: SenderToReceiver) -> None:
        pair = self._pair
        if isinstance(message, ChunkHeader):
            key = AttemptKey(message.request_id, message.attempt)
            self._unfinished.add(((key, message.seq), message.generation))
            pair.chunk_tokens_sent += message.end_token - message.start_token
        pair.messages[type(message).__name__] += 1
        if not pair.broken:
            pair.to_d.append(message)

    def _send_bytes(self, effect: SendKv) -> None:
        def done(ok: bool) -> None:
            self._pair.answers["p"].append(lambda: self._on_sent(effect, ok))

        if self._pair.wire.closed:
            done(False)
        else:
            self._pair.wire.sends.append((self._buffers[effect.slot], effect.nbytes, done))

    def _on_sent(self, effect: SendKv, ok: bool) -> None:
        assert self.slots_in_use.pop(effect.slot) == (effect.key, effect.seq)
        self._carry_out(self.machine.on_sent(effect.key, effect.seq, ok))


class ReceiverShell:
    """D's shell."""

    def __init__(self, pair: WorkerPair, *, num_slots: int, max_chunk_bytes: int, **options: Any) -> None:
        self.machine = Receiver(0.0, num_slots=num_slots, max_chunk_bytes=max_chunk_bytes, **options)
        self.slots_in_use: dict[int, Chunk] = {}
        self.close_cause: Cause | None = None
        self._pair = pair
        self._buffers: list[Buffer] = [pair.new_buffer(max_chunk_bytes) for _ in range(num_slots)]
        self._scatters: dict[Chunk, int] = {}
        self._verified: Counter[AttemptKey] = Counter()
        """Tokens whose scatter was ordered, or that were cached."""
        self._grown: Counter[AttemptKey] = Counter()
        """Tokens by which running sequences grew."""
        self._owned: set[AttemptKey] = set()
        """Committed attempts that the engine runs."""

    @property
    def close_detail(self) -> str:
        """Why the machine closed the pair, for people; empty if it did not."""
        return "" if self.close_cause is None else self.close_cause.detail

    def cancel(self, key: AttemptKey) -> None:
        self._carry_out(self.machine.cancel(key))
        if key in self._owned:
            self._owned.discard(key)
            self._pair.d.commands.append(Release(key))

    def tick(self) -> None:
        self._carry_out(self.machine.tick(self._pair.now))

    def close(self) -> None:
        self._carry_out(self.machine.close(self._pair.now))

    def on_message(self, message: SenderToReceiver) -> None:
        self._carry_out(self.machine.on_message(message, self._pair.now))

    def on_event(self, event: Event) -> None:
        machine, pair = self.machine, self._pair
        match event:
            case Reserved(key, cached_tokens):
                self._verified[key] = cached_tokens
                self._carry_out(machine.on_reserved(key, cached_tokens))
            case ReserveRefused(key, reason):
                self._carry_out(machine.on_reserve_refused(key, reason))
            case Scattered(key, seq, ok):
                del self.slots_in_use[self._scatters.pop((key, seq))]
                self._carry_out(machine.on_scattered(key, seq, ok))
            case TokenSampled(key, _, index, token_id):
                pair.note_token(key, index, token_id)
            case Ended(key, _, reason):
                pair.ends[key].append(("d", reason))
                self._owned.discard(key)
                self._carry_out(machine.on_ended(key, reason))

    def _carry_out(self, commands: Iterable[ReceiverCommand]) -> None:
        pair = self._pair
        for command in commands:
            match command:
                case SendControl(message):
                    pair.messages[type(message).__name__] += 1
                    if not pair.broken:
                        pair.to_p.append(message)  # type: ignore[arg-type]  # a receiver sends only its own kinds
                case ReserveBlocks(spec):
                    self._grown[spec.key] = 0
                    pair.asked_for_blocks[spec.key] += 1
                    pair.d.commands.append(Reserve(spec))
                case ReceiveKv(key, seq, slot):
                    assert slot not in self.slots_in_use, self.slots_in_use
                    self.slots_in_use[slot] = (key, seq)
                    self._receive(command)
                case ScatterChunk(key, seq, start, end, slot, nbytes):
                    assert slot not in self.slots_in_use
                    self.slots_in_use[slot] = (key, seq)
                    self._scatters[key, seq] = slot
                    self._verified[key] += end - start
                    pair.d.commands.append(Scatter(key, seq, start, end, self._buffers[slot][:nbytes]))
                case ExtendSequence(key, token_ids):
                    self._grown[key] += len(token_ids)
                    pair.d.commands.append(Extend(key, token_ids))
                case JoinSequence(key, token_id, logprobs):
                    offered = pair.moves.get(key, pair.specs[key])
                    assert self._verified[key] == offered.num_known_tokens + self._grown[key]
                    self._owned.add(key)
                    pair.d.commands.append(Join(key, token_id, logprobs))
                case ReleaseSequence(key):
                    pair.d.commands.append(Release(key))
                case ReceiveOver(key):
                    pair.d_overs[key].append(command)
                case ClosePair(cause):
                    self.close_cause = cause
                    pair.break_stream()

    def _receive(self, effect: ReceiveKv) -> None:
        def done(ok: bool) -> None:
            self._pair.answers["d"].append(lambda: self._on_received(effect, ok))

        if self._pair.wire.closed:
            done(False)
        else:
            self._pair.wire.recvs.append((self._buffers[effect.slot], effect.nbytes, done))

    def _on_received(self, effect: ReceiveKv, ok: bool) -> None:
        assert self.slots_in_use.pop(effect.slot) == (effect.key, effect.seq)
        digest = UNKEYED(self._buffers[effect.slot][: effect.nbytes])
        self._carry_out(self.machine.on_received(effect.key, effect.seq, ok, digest))
