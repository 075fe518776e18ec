"""The `PairIo`s of a `WorkerPair`: queues in place of sockets and engines, and checks of what was promised.

Each end keeps a table of who works on the memory of a staging slot (the engine or the transport); a second user at the
same time is an error. Memory that is reused between two uses for the same chunk shows in the checksum.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from disagg.engine.commands import (
    Command,
    End,
    Ended,
    Event,
    Export,
    Exported,
    Extend,
    FetchEnded,
    FetchGivenUp,
    FetchOrdered,
    FetchOver,
    Gather,
    Gathered,
    Join,
    Pin,
    Pinned,
    Release,
    Reserve,
    Reserved,
    Scatter,
    Scattered,
    TokenSampled,
)
from disagg.engine.kv_transfer.commands import Cause, ReceiveKv, ReceiveOver, SendKv, SendOver
from disagg.engine.kv_transfer.pair_shell import PairShell, ReceiverShell, SenderShell
from disagg.engine.kv_transfer.prefixes import held_part, outcome_of
from disagg.engine.kv_transfer.receiver import Receiver
from disagg.engine.kv_transfer.sender import Sender
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.engine.plan import Buffer
from disagg.proto.handover import ChunkDone, ChunkHeader, ReceiverToSender, SenderToReceiver
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import FetchOutcome, SequenceSpec

if TYPE_CHECKING:
    from tests.support.pair import WorkerPair

Chunk = tuple[AttemptKey, int]


class CheckedEnd:
    """What both ends of a pair have in common."""

    shell: PairShell[Any, Any]

    def __init__(self, pair: WorkerPair) -> None:
        self.slots_in_use: dict[int, Chunk] = {}
        """Identity of a slot's memory -> the chunk for which engine or transport use it."""
        self.close_cause: Cause | None = None
        self._pair = pair

    @property
    def close_detail(self) -> str:
        """Why the machine closed the pair, for people; empty if it did not."""
        return "" if self.close_cause is None else self.close_cause.detail

    def tick(self) -> None:
        self.shell.tick(self._pair.now)

    def close(self) -> None:
        self.shell.close(self._pair.now)

    def new_staging(self, nbytes: int) -> Buffer:
        return self._pair.new_buffer(nbytes)

    def on_close_pair(self, cause: Cause) -> None:
        self.close_cause = cause
        self._pair.break_stream()

    def _begin_use(self, memory: Buffer, chunk: Chunk) -> None:
        assert id(memory) not in self.slots_in_use, self.slots_in_use
        self.slots_in_use[id(memory)] = chunk

    def _end_use(self, memory: Buffer, chunk: Chunk) -> None:
        assert self.slots_in_use.pop(id(memory)) == chunk


class CheckedSender(CheckedEnd):
    """P's end."""

    shell: SenderShell

    def __init__(self, pair: WorkerPair, **options: Any) -> None:
        super().__init__(pair)
        self.machine = Sender(0.0, **options)
        self.shell = SenderShell(self.machine, self)
        self._gathers: dict[Chunk, Gather] = {}
        self._unfinished: set[tuple[Chunk, int]] = set()
        self._to_move: dict[AttemptKey, int] = {}

    @property
    def num_unfinished_chunks(self) -> int:
        """Chunks announced to D and not done, of attempts that P has not ended."""
        return len(self._unfinished)

    def offer(self, spec: SequenceSpec) -> None:
        self.shell.offer(spec, self._pair.now)

    def move(self, key: AttemptKey, number: int) -> None:
        """Offer a sequence that P decodes, once its engine has described it."""
        self._to_move[key] = number
        self._pair.p.commands.append(Export(key))

    def cancel(self, key: AttemptKey) -> None:
        self._to_move.pop(key, None)
        self.shell.cancel(key)

    @override
    def close(self) -> None:
        self._to_move.clear()
        super().close()

    def on_message(self, message: ReceiverToSender) -> None:
        if isinstance(message, ChunkDone):
            key = AttemptKey(message.request_id, message.attempt)
            self._unfinished.discard(((key, message.seq), message.generation))
        self.shell.on_message(message, self._pair.now)

    def on_event(self, event: Event) -> None:
        pair = self._pair
        match event:
            case TokenSampled(key, _, index, token_id):
                pair.note_token(key, index, token_id)
                return
            case Exported(key, _, spec):
                number = self._to_move.pop(key, 0)
                if number and spec is not None:
                    pair.moves[key] = spec
                    self.shell.offer(spec, pair.now, number)
                return
            case Pinned(key, num_tokens):
                self._on_pinned(key, num_tokens)
                return
            case Gathered(key, seq, ok, digest):
                out = self._gathers.pop((key, seq)).out
                self._end_use(out.base, (key, seq))
                assert digest == (UNKEYED(out) if ok else 0)
            case Ended(key, _, reason):
                pair.ends[key].append(("p", reason))
        assert self.shell.on_event(event), event

    def _on_pinned(self, key: AttemptKey, num_tokens: int) -> None:
        order = self._pair.fetches[key]
        if num_tokens > order.from_token:
            self.shell.offer(held_part(order.spec, num_tokens), self._pair.now, is_prefix=True)
        else:
            self.post(Release(key))
            self._pair.receiver.fetch_over(key, "refused")

    # ------------------------------------------------------------ SenderIo

    def send(self, message: SenderToReceiver) -> None:
        pair = self._pair
        if isinstance(message, ChunkHeader):
            key = AttemptKey(message.request_id, message.attempt)
            self._unfinished.add(((key, message.seq), message.generation))
            pair.chunk_tokens_sent += message.end_token - message.start_token
        pair.messages[type(message).__name__] += 1
        if not pair.broken:
            pair.to_d.append(message)

    def post(self, command: Command) -> None:
        match command:
            case Gather(key, seq):
                self._begin_use(command.out.base, (key, seq))
                self._gathers[key, seq] = command
                if key in self._pair.fetches:
                    assert sum(each == key for each, _ in self._gathers) == 1
            case End(key) | Release(key):
                assert not any(gathering == key for gathering, _ in self._gathers)
        self._pair.p.commands.append(command)

    def send_kv(self, chunk: SendKv) -> None:
        memory, number = self.shell.buffer(chunk.slot), (chunk.key, chunk.seq)
        self._begin_use(memory, number)

        def on_sent(ok: bool) -> None:
            self._end_use(memory, number)
            self.shell.on_sent(*number, ok)

        def done(ok: bool) -> None:
            self._pair.answers["p"].append(lambda: on_sent(ok))

        if self._pair.wire.closed:
            done(False)
        else:
            self._pair.wire.sends.append((memory, chunk.nbytes, done))

    def on_reserved(self, key: AttemptKey) -> None:
        """The tests look at the engine."""

    def on_over(self, over: SendOver) -> None:
        self._pair.p_overs[over.key].append(over)
        self._unfinished = {entry for entry in self._unfinished if entry[0][0] != over.key}


class CheckedReceiver(CheckedEnd):
    """D's end."""

    shell: ReceiverShell

    def __init__(self, pair: WorkerPair, **options: Any) -> None:
        super().__init__(pair)
        self.machine = Receiver(0.0, **options)
        self.shell = ReceiverShell(self.machine, self)
        self._scatters: dict[Chunk, Buffer] = {}
        self._cached: dict[AttemptKey, int] = {}
        self._verified: Counter[tuple[AttemptKey, int]] = Counter()
        """Tokens whose scatter was ordered, by cache group."""
        self._grown: Counter[AttemptKey] = Counter()
        """Tokens by which running sequences grew."""
        self._open_fetches: set[AttemptKey] = set()
        self._owned: set[AttemptKey] = set()
        """Committed attempts that the engine runs."""

    def cancel(self, key: AttemptKey) -> None:
        self.shell.cancel(key)
        if key in self._owned:
            self._owned.discard(key)
            self._pair.d.commands.append(Release(key))

    def on_message(self, message: SenderToReceiver) -> None:
        self.shell.on_message(message, self._pair.now)

    def on_event(self, event: Event) -> None:
        pair = self._pair
        match event:
            case Reserved(key, cached_tokens):
                self._cached[key] = cached_tokens
                for number in range(len(pair.groups)):
                    self._verified[key, number] = 0
            case Scattered(key, seq):
                self._end_use(self._scatters.pop((key, seq)), (key, seq))
            case TokenSampled(key, _, index, token_id):
                pair.note_token(key, index, token_id)
            case Ended(key, _, reason):
                pair.ends[key].append(("d", reason))
                self._owned.discard(key)
            case FetchOrdered(key, spec):
                pair.fetches[key] = event
                self._open_fetches.add(key)
                pair.p.commands.append(Pin(spec))
            case FetchGivenUp(key):
                self.shell.cancel(key)
                self.fetch_over(key, "late")
            case FetchEnded(key, _, message):
                pair.fetched[key] = message
        self.shell.on_event(event)

    def fetch_over(self, key: AttemptKey, outcome: FetchOutcome) -> None:
        """Tell D's engine, once."""
        if key in self._open_fetches:
            self._open_fetches.discard(key)
            self._pair.d.commands.append(FetchOver(key, outcome))

    # ------------------------------------------------------------ ReceiverIo

    def send(self, message: ReceiverToSender) -> None:
        pair = self._pair
        pair.messages[type(message).__name__] += 1
        if not pair.broken:
            pair.to_p.append(message)

    def post(self, command: Command) -> None:
        match command:
            case Reserve(spec):
                self._grown[spec.key] = 0
                self._pair.asked_for_blocks[spec.key] += 1
            case Scatter(key, seq, start, end, data):
                self._begin_use(data.base, (key, seq))
                self._scatters[key, seq] = data.base
                self._verified[key, command.group] += end - start
            case Extend(key, token_ids):
                self._grown[key] += len(token_ids)
            case Join(key):
                offered = self._pair.moves.get(key, self._pair.specs[key])
                num_tokens = offered.num_known_tokens + self._grown[key]
                for number, group in enumerate(self._pair.groups):
                    num_due = num_tokens - group.first_token(num_tokens, self._cached[key])
                    assert self._verified[key, number] == num_due
                self._owned.add(key)
        self._pair.d.commands.append(command)

    def receive_kv(self, chunk: ReceiveKv) -> None:
        memory, number = self.shell.buffer(chunk.slot), (chunk.key, chunk.seq)
        self._begin_use(memory, number)

        def on_received(ok: bool) -> None:
            self._end_use(memory, number)
            self.shell.on_received(*number, ok, UNKEYED(memory[: chunk.nbytes]))

        def done(ok: bool) -> None:
            self._pair.answers["d"].append(lambda: on_received(ok))

        if self._pair.wire.closed:
            done(False)
        else:
            self._pair.wire.recvs.append((memory, chunk.nbytes, done))

    def on_offered(self, spec: SequenceSpec, *, is_prefix: bool) -> bool:
        return not is_prefix or spec.key in self._open_fetches

    def on_over(self, over: ReceiveOver) -> None:
        self._pair.d_overs[over.key].append(over)
        self.fetch_over(over.key, outcome_of(over))


class RecordedIo:
    """The `PairIo` of either half, which notes what it is asked for.

    Args:
        takes_offers: the answer to `on_offered`.
    """

    def __init__(self, *, takes_offers: bool = True) -> None:
        self._takes_offers = takes_offers
        self._calls: list[Any] = []
        self.staging: list[Buffer] = []
        """All memory that was allocated."""

    def calls(self) -> list[Any]:
        """What was asked for since the last call: messages, commands and notices as they are, else a name and its
        argument."""
        calls, self._calls = self._calls, []
        return calls

    def new_staging(self, nbytes: int) -> Buffer:
        self.staging.append(bytes(nbytes))
        return self.staging[-1]

    def send(self, message: Any) -> None:
        self._calls.append(message)

    def post(self, command: Command) -> None:
        self._calls.append(command)

    def send_kv(self, chunk: SendKv) -> None:
        self._calls.append(chunk)

    def receive_kv(self, chunk: ReceiveKv) -> None:
        self._calls.append(chunk)

    def on_reserved(self, key: AttemptKey) -> None:
        self._calls.append(("reserved", key))

    def on_offered(self, spec: SequenceSpec, *, is_prefix: bool) -> bool:
        self._calls.append(("offered", spec.key))
        return self._takes_offers

    def on_over(self, over: SendOver | ReceiveOver) -> None:
        self._calls.append(over)

    def on_close_pair(self, cause: Cause) -> None:
        self._calls.append(("close", cause))
