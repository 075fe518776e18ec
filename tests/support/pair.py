"""Both halves of a hand-over with two real engine cores over a fake model, on a fake wire. No threads, no sockets, no
clock.

Everything that takes time in a cluster is a queue here: both control streams, the bytes, the engines' commands and
events, the transports' answers. `WorkerPair.deliver` moves one thing in one queue; a test or a random generator decides
which. Bytes are copied when they are delivered, not when they are sent, so a buffer that is reused too early shows.
"""

from __future__ import annotations

import functools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disagg.engine.commands import Add, Command, Event, FetchOrdered, FetchPrefix
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner, fake_generate
from disagg.engine.kv_transfer.commands import ReceiveOver, SendOver
from disagg.engine.plan import Buffer
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.handover import ReceiverToSender, SenderToReceiver
from disagg.proto.ids import AttemptKey, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import ONE_RANK, Fetched, FetchFrom, PeerRef, Sampling, SequenceSpec
from disagg.proto.token_ids import PackedTokenIds, pack_token_ids, unpack_token_ids
from tests.support.pair_ends import CheckedReceiver, CheckedSender

BYTES_PER_TOKEN = 8
"""Of the fake model, in each cache group."""
ONE_GROUP = plan_pair(FakeModelRunner(1, 16, 16).layout, ONE_RANK, ONE_RANK).groups
"""What its pairs move."""
ROOT = root_hash("fake")
Message = SenderToReceiver | ReceiverToSender
Deliver = Callable[[], None]
NO_TAMPERS: Mapping[str, Callable[[Message], list[Message]]] = {}


def _unchanged(message: Message) -> list[Message]:
    return [message]


def spec_of(
    name: str, prompt: Iterable[int], *, max_tokens: int = 4, stop: tuple[int, ...] = (), timeout_s: float | None = None
) -> SequenceSpec:
    """Attempt 0 of request `name`."""
    packed = pack_token_ids(prompt)
    return SequenceSpec(
        request_id=RequestId(name),
        attempt=0,
        gateway_id=GatewayId("gateway"),
        prompt_token_ids=packed,
        block_hashes=tuple(chain_hashes(ROOT, packed)),
        root_hash=ROOT,
        sampling=Sampling(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop),
        timeout_s=timeout_s,
    )


def prompt_of(num_tokens: int, first: int = 100) -> list[int]:
    """`num_tokens` different token ids."""
    return list(range(first, first + num_tokens))


@dataclass
class Side:
    """One worker: its engine core, and the queues to and from it."""

    name: str
    token_budget: int
    num_blocks: int = 64
    windows: tuple[tuple[int, int], ...] = ()
    commands: deque[Command] = field(default_factory=deque)
    events: deque[Event] = field(default_factory=deque)

    def __post_init__(self) -> None:
        config = WorkerConfig(
            worker_id=self.name,
            roles=("prefill", "decode"),
            model_path="fake",
            token_budget=self.token_budget,
            decode_reserve_tokens=16,
        )
        self.core = EngineCore(FakeModelRunner(self.num_blocks, 16, 1024, windows=self.windows), config=config)

    def run_alone(self, spec: SequenceSpec) -> None:
        """Compute a sequence here and nothing else, so that its prefix is cached."""
        self.core.handle(Add(spec), 0.0)
        while self.core.has_work:
            self.core.step(0.0)


@dataclass
class Wire:
    """Bytes from P to D, first in, first out; the copy is made when the wire delivers."""

    sends: deque[tuple[Buffer, int, Callable[[bool], None]]] = field(default_factory=deque)
    recvs: deque[tuple[Buffer, int, Callable[[bool], None]]] = field(default_factory=deque)
    closed: bool = False
    corrupt_next: bool = False
    num_corrupted: int = 0
    fail_next: bool = False

    def deliver(self) -> None:
        source, sent, sent_done = self.sends.popleft()
        target, expected, received_done = self.recvs.popleft()
        assert sent == expected, "a size mismatch ends the process with gloo"
        if self.fail_next:
            sent_done(False)
            received_done(False)
            self.close()
            return
        target[:expected] = source[:sent]
        if self.corrupt_next:
            target[expected // 2] ^= 0x10
            self.corrupt_next = False
            self.num_corrupted += 1
        sent_done(True)
        received_done(True)

    def close(self) -> None:
        self.closed = True
        pending = [*self.sends, *self.recvs]
        self.sends.clear()
        self.recvs.clear()
        for _, _, done in pending:
            done(False)


class WorkerPair:
    """P, D and what is between them.

    Args:
        chunk_tokens: tokens of a full payload.
        windows: of each cache group beside the first, its window and its number of blocks on either side.
        tamper: gets every control message as it is delivered, and returns what arrives instead.
        tampers: the same, for one way only: `to_d` or `to_p`.
    """

    def __init__(
        self,
        *,
        chunk_tokens: int = 8,
        credits: int = 3,
        send_slots: int = 2,
        receive_slots: int = 2,
        token_budget: int = 20,
        d_blocks: int = 64,
        p_blocks: int = 64,
        windows: tuple[tuple[int, int], ...] = (),
        tamper: Callable[[Message], list[Message]] | None = None,
        tampers: Mapping[str, Callable[[Message], list[Message]]] = NO_TAMPERS,
        **timeouts: float,
    ) -> None:
        self.now = 0.0
        self.credits = credits
        self.tampers = {way: tampers.get(way, tamper or _unchanged) for way in ("to_d", "to_p")}
        self.windows = tuple(window for window, _ in windows)
        self.groups = plan_pair(FakeModelRunner(1, 16, 16, windows=windows).layout, ONE_RANK, ONE_RANK).groups
        self.p = Side("p", token_budget, num_blocks=p_blocks, windows=windows)
        self.d = Side("d", token_budget, num_blocks=d_blocks, windows=windows)
        self.wire = Wire()
        self.to_d: deque[SenderToReceiver] = deque()
        self.to_p: deque[ReceiverToSender] = deque()
        self.answers: dict[str, deque[Deliver]] = {"p": deque(), "d": deque()}
        """Completions of the transports that P and D have not handled."""
        self.broken = False
        self.num_delivered = 0
        common: dict[str, Any] = {
            "groups": self.groups,
            "max_chunk_bytes": chunk_tokens * BYTES_PER_TOKEN + 3,
            "credits": credits,
            **timeouts,
        }
        self._new_ends: Callable[[], tuple[CheckedSender, CheckedReceiver]] = lambda: (
            CheckedSender(self, num_slots=send_slots, **common),
            CheckedReceiver(self, num_slots=receive_slots, **common),
        )
        self.sender, self.receiver = self._new_ends()
        self.specs: dict[AttemptKey, SequenceSpec] = {}
        self.moves: dict[AttemptKey, SequenceSpec] = {}
        """With what running sequences were offered."""
        self.fetches: dict[AttemptKey, FetchOrdered] = {}
        """Prefixes that D fetches from P, by their own keys."""
        self.fetched: dict[AttemptKey, Fetched] = {}
        """What became of them for each sequence."""
        self.decoding: set[AttemptKey] = set()
        """Sequences that ran on P alone at first."""
        self.p_overs: defaultdict[AttemptKey, list[SendOver]] = defaultdict(list)
        self.d_overs: defaultdict[AttemptKey, list[ReceiveOver]] = defaultdict(list)
        self.asked_for_blocks: Counter[AttemptKey] = Counter()
        """Attempts for which D's machine ordered a reservation of its engine."""
        self.tokens: defaultdict[AttemptKey, dict[int, int]] = defaultdict(dict)
        self.ends: defaultdict[AttemptKey, list[tuple[str, str]]] = defaultdict(list)
        """(side, reason) of every end that an engine reported."""
        self.messages: Counter[str] = Counter()
        self.chunk_tokens_sent = 0

    # ------------------------------------------------------------ the gateway's part

    def offer(self, spec: SequenceSpec) -> AttemptKey:
        self.specs[spec.key] = spec
        self.sender.offer(spec)
        return spec.key

    def fetch(self, spec: SequenceSpec, *, end_token: int, timeout_s: float = 60.0) -> AttemptKey:
        """Run a sequence on D alone, for which D fetches a prefix from P."""
        self.specs[spec.key] = spec
        self.decoding.add(spec.key)
        peer = PeerRef(worker_id=WorkerId("p"), incarnation=Incarnation("p.1"), address="p:1")
        fetch = FetchFrom(peer=peer, end_token=end_token, timeout_ms=timeout_s * 1e3)
        self.d.commands += [FetchPrefix(spec, fetch), Add(spec)]
        return spec.key

    def decode_on_p(self, spec: SequenceSpec, num_tokens: int) -> AttemptKey:
        """Run a sequence on P alone until it has so many output tokens."""
        self.specs[spec.key] = spec
        self.decoding.add(spec.key)
        self.p.commands.append(Add(spec))
        while len(self.tokens[spec.key]) < num_tokens:
            self.deliver(next(name for name in ("p_event", "p_command", "p_step") if name in self.ready()))
        return spec.key

    def cancel(self, key: AttemptKey, side: str) -> None:
        if side in ("p", "both"):
            self.sender.cancel(key)
        if side in ("d", "both"):
            self.receiver.cancel(key)

    def break_stream(self) -> None:
        """The control stream ends on both sides, and with it the transport."""
        if self.broken:
            return
        self.broken = True
        self.to_d.clear()
        self.to_p.clear()
        self.sender.close()
        self.receiver.close()
        self.wire.close()

    def die(self, side: str) -> None:
        """One worker is gone with all that it held and its unsent messages; the other sees its stream end. The dead
        one's place is taken by a new incarnation with no state."""
        self.broken = True
        self.to_d.clear()
        self.to_p.clear()
        self.wire.close()
        self.answers[side].clear()
        sender, receiver = self._new_ends()
        if side == "p":
            self.sender, self.p = sender, Side("p", self.p.token_budget, self.p.num_blocks, self.p.windows)
            self.receiver.close()
        else:
            self.receiver, self.d = receiver, Side("d", self.d.token_budget, self.d.num_blocks, self.d.windows)
            self.sender.close()

    def reconnect(self) -> None:
        """A new stream and transport between the workers that live now; the old pair is at rest."""
        self.broken, self.wire = False, Wire()
        self.sender, self.receiver = self._new_ends()

    # ------------------------------------------------------------ time

    def ready(self) -> list[str]:
        """Names of the queues in which something can be delivered, in a fixed order."""
        queues = {
            "to_d": bool(self.to_d),
            "to_p": bool(self.to_p),
            "bytes": bool(self.wire.sends and self.wire.recvs),
            "p_answer": bool(self.answers["p"]),
            "d_answer": bool(self.answers["d"]),
            "p_command": bool(self.p.commands),
            "d_command": bool(self.d.commands),
            "p_event": bool(self.p.events),
            "d_event": bool(self.d.events),
            "p_step": self.p.core.has_work,
            "d_step": self.d.core.has_work,
        }
        return [name for name, full in queues.items() if full]

    def deliver(self, name: str) -> None:
        """Move one thing in the named queue, and check what must hold at any time."""
        self.num_delivered += 1
        match name:
            case "to_d":
                for message in self.tampers["to_d"](self.to_d.popleft()):
                    self.receiver.on_message(message)  # type: ignore[arg-type]  # A test may send what P must not.
            case "to_p":
                for message in self.tampers["to_p"](self.to_p.popleft()):
                    self.sender.on_message(message)  # type: ignore[arg-type]  # A test may send what D must not.
            case "bytes":
                self.wire.deliver()
            case "p_answer" | "d_answer":
                self.answers[name[0]].popleft()()
            case _:
                self._deliver_to_engine(name)
        self._check_always()

    def _deliver_to_engine(self, name: str) -> None:
        side = self.p if name[0] == "p" else self.d
        end: CheckedSender | CheckedReceiver = self.sender if name[0] == "p" else self.receiver
        match name[2:]:
            case "command":
                side.events += side.core.handle(side.commands.popleft(), self.now)
            case "step":
                side.events += side.core.step(self.now)
            case "event":
                end.on_event(side.events.popleft())

    def run(self, pick: Callable[[list[str]], str] | None = None, limit: int = 20_000) -> None:
        """Deliver until nothing is left. Without `pick` the queues take turns."""
        for turn in range(limit):
            ready = self.ready()
            if not ready:
                return
            self.deliver(pick(ready) if pick else ready[turn % len(ready)])
        raise AssertionError(f"no rest after {limit} deliveries: {self.ready()}")

    def run_some(self, num_deliveries: int) -> None:
        """At most so many deliveries, in turns."""
        for turn in range(num_deliveries):
            ready = self.ready()
            if ready:
                self.deliver(ready[turn % len(ready)])

    def run_randomly(self, seed: int) -> None:
        """Deliver in random order until nothing is left."""
        self.run(random.Random(seed).choice)

    def tick(self, seconds: float, *, p: bool = True, d: bool = True) -> None:
        """Let time pass on one side or both, engines included; nothing is delivered."""
        self.now += seconds
        if p:
            self.p.events += self.p.core.step(self.now)
            self.sender.tick()
        if d:
            self.d.events += self.d.core.step(self.now)
            self.receiver.tick()

    def settle(self, seconds: float = 12.0) -> None:
        """Let time pass for both in small steps with everything delivered, long enough for memories to fade."""
        for _ in range(int(seconds / 0.5)):
            self.run()
            self.tick(0.5)
        self.run()

    # ------------------------------------------------------------ what must hold

    def _check_always(self) -> None:
        assert self.sender.num_unfinished_chunks <= self.credits

    def assert_at_rest(self) -> None:
        """Nothing is held anywhere, and every attempt that was offered was reported exactly once."""
        self.assert_nothing_is_held()
        offered = [key for key in self.specs if key in self.moves or key not in self.decoding]
        assert {key: len(overs) for key, overs in self.p_overs.items()} == dict.fromkeys(offered, 1)
        assert Counter(over.key for overs in self.d_overs.values() for over in overs) == self.asked_for_blocks

    def assert_nothing_is_held(self) -> None:
        """By either side."""
        held = {**self.sender.machine.holdings(), **self.receiver.machine.holdings()}
        assert not any(held.values()), held
        for side in (self.p, self.d):
            counts, problems = side.core.audit()
            assert problems == []
            assert not any(counts.values()), (side.name, counts)
        num_found, num_corrupted = self.receiver.machine.counters["corrupt_chunks"], self.wire.num_corrupted
        was_given_up = any(over.outcome == "cancelled" for overs in self.p_overs.values() for over in overs)
        # The bytes of an attempt that was given up are discarded without a look at their checksum.
        assert num_found == num_corrupted or (was_given_up and num_found < num_corrupted)
        assert not self.sender.slots_in_use
        assert not self.receiver.slots_in_use

    def outcome(self, key: AttemptKey) -> str:
        """The final outcome that P received."""
        (over,) = self.p_overs[key]
        return over.outcome

    def committed(self, key: AttemptKey) -> bool:
        """Whether D took the attempt over."""
        return any(over.outcome == "committed" for over in self.d_overs[key])

    def expected(self, key: AttemptKey) -> list[int]:
        """What the fake model answers, from the first token of this attempt on."""
        spec = self.specs[key]
        answer = _answer_of(spec.prompt_token_ids, spec.sampling.max_tokens, self.windows)
        return list(answer[len(spec.emitted_token_ids) :])

    def answer(self, key: AttemptKey) -> list[int]:
        """Output tokens of this attempt so far, without a gap."""
        tokens, first = self.tokens[key], len(self.specs[key].emitted_token_ids)
        assert sorted(tokens) == list(range(first, first + len(tokens)))
        return [tokens[index] for index in sorted(tokens)]

    def assert_answers_are_right(self) -> None:
        """No attempt, finished or not, gave a token that the model does not give; committed ones that ended gave
        all."""
        for key in self.specs:
            answer, expected = self.answer(key), self.expected(key)
            assert answer == expected[: len(answer)]
            if ("d", "length") in self.ends[key]:
                assert answer == expected

    def note_token(self, key: AttemptKey, index: int, token_id: int) -> None:
        """A token reached the gateway; any repetition must be the same."""
        assert self.tokens[key].setdefault(index, token_id) == token_id

    def new_buffer(self, nbytes: int) -> Buffer:
        """Staging memory that starts as garbage."""
        return np.full(nbytes, 0xA5, dtype=np.uint8)


@functools.cache
def _answer_of(prompt_token_ids: PackedTokenIds, num_tokens: int, windows: tuple[int, ...]) -> tuple[int, ...]:
    """The same few prompts are played thousands of times."""
    return tuple(fake_generate(unpack_token_ids(prompt_token_ids), num_tokens, windows=windows))
