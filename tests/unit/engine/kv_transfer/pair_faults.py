"""Runs of a `WorkerPair` in which every kind of control message occurs, and what must hold when something happens to
one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from disagg.engine.failpoints import Failpoint, Tamper, Trigger
from disagg.proto.ids import AttemptKey
from tests.support.pair import NO_TAMPERS, Message, WorkerPair, prompt_of, spec_of

Tampering = Callable[[Message], list[Message]]
TRANSFER_TIMEOUT_S = 2.0
SETTLE_S = 12.0
"""Leases, the timeout above twice, and tombstones are over by then."""


@dataclass
class OneFault:
    """Tampers with a `WorkerPair`: one action on one occurrence of one kind of message, on one way."""

    way: str
    """`to_d` or `to_p`."""
    kind: str
    action: str
    number: int = 0
    """Counts messages of the kind on that way from 0."""
    num_done: int = 0
    _tamper: Tamper = field(init=False)

    def __post_init__(self) -> None:
        failpoint = Failpoint(
            point="control.send", action=self.action, message=self.kind, after=self.number, times=1
        )  # fmt: skip
        self._tamper = Tamper([Trigger(failpoint, seed=0)])

    @property
    def tampers(self) -> dict[str, Tampering]:
        """For a `WorkerPair`."""
        return {self.way: self._apply}

    def _apply(self, message: Message) -> list[Message]:
        altered = self._tamper(message)
        self.num_done += altered.fault is not None
        messages: list[Message] = altered.messages
        return messages


Act = Callable[[WorkerPair], None]


@dataclass(frozen=True)
class Scenario:
    """Offers, and what happens after some deliveries."""

    name: str
    acts: tuple[tuple[int, Act], ...] = ()
    options: tuple[tuple[str, int], ...] = ()
    moves: bool = False
    """Whether a sequence that decodes on P moves to D, instead of the second offer."""

    def play(
        self, tampers: Mapping[str, Tampering] = NO_TAMPERS, pick: Callable[[list[str]], str] | None = None
    ) -> WorkerPair:
        """A pair that has lived it, and `SETTLE_S` seconds more."""
        options: dict[str, Any] = {"transfer_timeout_s": TRANSFER_TIMEOUT_S, **dict(self.options)}
        pair = WorkerPair(tampers=tampers, **options)
        pair.d.run_alone(spec_of("warm", prompt_of(35, 500)))
        pair.offer(spec_of("a", prompt_of(30)))
        if self.moves:
            key = pair.decode_on_p(spec_of("m", prompt_of(20, 700), max_tokens=70), 3)
            pair.sender.move(key, 1)
        else:
            pair.offer(spec_of("b", prompt_of(9, 300), max_tokens=2))
        pair.offer(spec_of("c", prompt_of(50, 500)))
        for num_deliveries, act in self.acts:
            pair.run_some(num_deliveries)
            act(pair)
        pair.run(pick)
        pair.settle(SETTLE_S)
        return pair

    def cancelled(self, pair: WorkerPair) -> set[AttemptKey]:
        """Attempts that were cancelled, or may have been."""
        return {key for key in pair.specs if self.acts and key.request_id == "a"}


def cancel_a(side: str) -> Act:
    """A cancel of request a by the gateway, at one side or both."""
    return lambda pair: pair.cancel(AttemptKey(*next(iter(pair.specs))), side)


SCENARIOS = (
    Scenario("plain"),
    Scenario("one-credit", options=(("credits", 1), ("send_slots", 1), ("receive_slots", 1))),
    Scenario("cancel-on-p", acts=((25, cancel_a("p")),)),
    Scenario("cancel-on-d", acts=((25, cancel_a("d")),)),
    Scenario("cancel-on-both", acts=((40, cancel_a("both")),)),
    Scenario("no-room", options=(("d_blocks", 6),)),
    Scenario("move", moves=True),
)


def faults(action: str) -> Iterator[tuple[Scenario, OneFault]]:
    """`action` on every message of every scenario, one at a time; beats stand for all of their kind."""
    for scenario in SCENARIOS:
        seen: Counter[tuple[str, str]] = Counter()

        def counting(way: str, seen: Counter[tuple[str, str]] = seen) -> Tampering:
            def count(message: Message) -> list[Message]:
                seen[way, type(message).__name__] += 1
                return [message]

            return count

        scenario.play({way: counting(way) for way in ("to_d", "to_p")})
        for (way, kind), number in seen.items():
            for occurrence in range(number if kind != "PairHeartbeat" else 2):
                yield scenario, OneFault(way, kind, action, occurrence)


def assert_exact_or_failed(scenario: Scenario, pair: WorkerPair) -> None:
    """Each attempt was answered in full by D, or failed on both sides; no wrong token was sent, nothing is held."""
    pair.assert_answers_are_right()
    pair.assert_at_rest()
    for key in pair.specs.keys() - scenario.cancelled(pair):
        if key not in pair.p_overs or pair.p_overs[key][0].stays:  # it is here, so it must not be there
            assert not pair.committed(key)
            assert pair.ends[key] == [("p", "length")]
            assert pair.answer(key) == pair.expected(key)
            continue
        if pair.outcome(key) == "handed_over":
            assert pair.committed(key)
        if pair.committed(key):
            assert pair.answer(key) == pair.expected(key)
        else:
            assert pair.outcome(key) in ("failed", "refused")
