"""Failpoints: injected faults, named in one line of text that a worker is given at its start.

    seed=7; transport.receive=corrupt(p=0.01); control.send=drop(message=ClearToSend,p=0.02,worker=decode-*)

    point               actions
    transport.send      fail, corrupt, delay                             the bytes of a chunk, on P
    transport.receive   fail, corrupt, delay                             the same on D
    control.send        drop, duplicate, reorder, delay, stale, resize   the messages of a pair, either side
    control.receive     the same
    engine.step         raise, hang, exit, kill                          before a step of the engine
    pair.setup          fail, hang, exit, kill                           while a pair's byte channel is formed
    tokens.send         drop                                             the stream of tokens to a gateway ends
    tier.write          fail, delay                                      a file of the disk tier: the disk is full
    tier.read           fail, delay                                      a file of the disk tier: the disk is broken

Arguments: `p`, the probability at each opportunity (1); `after`, opportunities that pass first (0); `times`, how often
it happens at most; `ms` of a delay or hang (100); `message`, the kind of control message (any); `worker`, whose name
must match (any, as in file names).

This module is the text, and what is decided by it. Which opportunity a fault falls on is a function of seed, worker and
count, so a run can be repeated as far as its opportunities come in the same order. A restarted worker counts anew.
`faults/faulty.py` puts the faults where they belong.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, get_args

import msgspec

from disagg.engine.randomness import uniform
from disagg.proto.handover import PairHello, PairRefused, PairWelcome, ReceiverToSender, SenderToReceiver

_BYTES_ACTIONS = ("fail", "corrupt", "delay")
_CONTROL_ACTIONS = ("drop", "duplicate", "reorder", "delay", "stale", "resize")
ACTIONS: dict[str, tuple[str, ...]] = {
    "transport.send": _BYTES_ACTIONS,
    "transport.receive": _BYTES_ACTIONS,
    "control.send": _CONTROL_ACTIONS,
    "control.receive": _CONTROL_ACTIONS,
    "engine.step": ("raise", "hang", "exit", "kill"),
    "pair.setup": ("fail", "hang", "exit", "kill"),
    "tokens.send": ("drop",),
    "tier.write": ("fail", "delay"),
    "tier.read": ("fail", "delay"),
}
"""Point -> what can be done there."""
MESSAGES = tuple(
    sorted(
        {kind.__name__ for kind in get_args(SenderToReceiver | ReceiverToSender)}
        - {kind.__name__ for kind in (PairHello, PairWelcome, PairRefused)}
    )
)
"""Control messages that can be named."""

_ITEM = re.compile(r"([a-z.]+)=([a-z]+)(?:\(([^()]*)\))?")
_SEED = re.compile(r"seed=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failpoint:
    """One fault and when it happens; the module's docstring says what the fields mean."""

    point: str
    action: str
    p: float = 1.0
    after: int = 0
    times: int | None = None
    ms: float = 100.0
    message: str = ""
    worker: str = "*"

    def __post_init__(self) -> None:
        """Raises `ValueError` for what does not exist or cannot work."""
        if self.point not in ACTIONS:
            raise ValueError(f"there is no failpoint {self.point!r}; there are {', '.join(ACTIONS)}")
        if self.action not in ACTIONS[self.point]:
            raise ValueError(f"{self.point} cannot {self.action!r}; it can {', '.join(ACTIONS[self.point])}")
        if not 0.0 < self.p <= 1.0:
            raise ValueError(f"{self}: p must be above 0 and at most 1")
        if self.after < 0 or (self.times is not None and self.times < 1):
            raise ValueError(f"{self}: after must be at least 0, times at least 1")
        if not 0.0 <= self.ms <= 1e7:
            raise ValueError(f"{self}: ms must be from 0 to 10,000,000")
        if self.message and not self.point.startswith("control."):
            raise ValueError(f"{self}: only control messages have a kind")
        if self.message and self.message not in MESSAGES:
            raise ValueError(f"{self}: there is no such message; there are {', '.join(MESSAGES)}")

    def __str__(self) -> str:
        return f"{self.point}={self.action}" + (f"({self.message})" if self.message else "")


@dataclass(frozen=True, slots=True)
class Plan:
    """All failpoints of a text, and the seed of their dice."""

    failpoints: tuple[Failpoint, ...] = ()
    seed: int = 0

    def of(self, worker_id: str) -> list[Trigger]:
        """The triggers of one incarnation of a worker."""
        return [
            Trigger(each, self.seed ^ zlib.crc32(f"{worker_id} {number} {each}".encode()))
            for number, each in enumerate(self.failpoints)
            if fnmatchcase(worker_id, each.worker)
        ]


def parse(text: str) -> Plan:
    """Read the text of failpoints; see the module's docstring.

    Raises:
        ValueError: if it cannot be read, or names what does not exist.
    """
    failpoints: list[Failpoint] = []
    seed = 0
    for item in (part.strip() for part in text.split(";")):
        if not item:
            continue
        if match := _SEED.fullmatch(item):
            seed = int(match[1])
        elif match := _ITEM.fullmatch(item):
            failpoints.append(Failpoint(point=match[1], action=match[2], **_arguments(item, match[3] or "")))
        else:
            raise ValueError(f"{item!r} is not of the form point=action(name=value,...)")
    return Plan(tuple(failpoints), seed)


_KINDS: dict[str, type] = {"p": float, "after": int, "times": int, "ms": float, "message": str, "worker": str}


def _arguments(item: str, text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, _, value = (each.strip() for each in part.partition("="))
        if name not in _KINDS or name in values:
            raise ValueError(f"{item!r}: {name!r} is not, or not once, one of {', '.join(_KINDS)}")
        try:
            values[name] = _KINDS[name](value)
        except ValueError:
            raise ValueError(f"{item!r}: {name} must be a number, not {value!r}") from None
    return values


class Trigger:
    """One failpoint of one worker, and how often it came by."""

    def __init__(self, failpoint: Failpoint, seed: int) -> None:
        self.failpoint = failpoint
        self.num_fired = 0
        self._seed = seed
        self._num_seen = 0

    def fires(self) -> bool:
        """Whether the fault falls on this opportunity."""
        number, self._num_seen = self._num_seen, self._num_seen + 1
        failpoint = self.failpoint
        if number < failpoint.after or (failpoint.times is not None and self.num_fired >= failpoint.times):
            return False
        if uniform(self._seed, number) >= failpoint.p:
            return False
        self.num_fired += 1
        return True


class Altered(NamedTuple):
    """What becomes of a control message."""

    messages: list[Any]
    """Messages to send, in this order, instead of it."""
    delay_s: float = 0.0
    """Seconds for which these, and all that follow, are held up."""
    fault: Failpoint | None = None
    """What was done, if anything."""


class Tamper:
    """What happens to the control messages of one pair in one direction; the first trigger that fires decides."""

    def __init__(self, triggers: Sequence[Trigger]) -> None:
        self._triggers = triggers
        self._held: list[Any] = []
        """A message that is to come after the next one."""

    def __call__(self, message: Any) -> Altered:
        """What is to be passed on."""
        for trigger in self._triggers:
            if _concerns(trigger.failpoint, message) and trigger.fires():
                return self._apply(trigger.failpoint, message)
        return self.spare(message)

    def spare(self, message: Any) -> Altered:
        """What is to be passed on where no fault may fall."""
        return Altered(self._with_held(message))

    def _apply(self, failpoint: Failpoint, message: Any) -> Altered:
        if failpoint.action == "reorder" and not self._held:
            self._held.append(message)
            return Altered([], fault=failpoint)
        delay_s = failpoint.ms / 1000 if failpoint.action == "delay" else 0.0
        messages = [each for result in altered(failpoint.action, message) for each in self._with_held(result)]
        return Altered(messages, delay_s, failpoint)

    def _with_held(self, message: Any) -> list[Any]:
        held, self._held = self._held, []
        return [message, *held]


def altered(action: str, message: Any) -> list[Any]:
    """What arrives of one message under an action that needs no other message."""
    match action:
        case "drop":
            return []
        case "duplicate":
            return [message, message]
        case "stale":
            return [msgspec.structs.replace(message, generation=message.generation - 1), message]
        case "resize":
            return [msgspec.structs.replace(message, nbytes=message.nbytes + 8)]
    return [message]


def _concerns(failpoint: Failpoint, message: Any) -> bool:
    if failpoint.message and failpoint.message != type(message).__name__:
        return False
    needs = {"stale": "generation", "resize": "nbytes"}.get(failpoint.action)
    return needs is None or hasattr(message, needs)
