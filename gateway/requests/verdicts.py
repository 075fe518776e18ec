"""What is asked of a guardrail, and what it says. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

Subject = Literal["prompt", "answer"]
UNJUDGED: Final = "guardrail_unavailable"
"""Code of the error where a guardrail gave no verdict and nothing may pass without one."""
MAX_REASON_CHARS: Final = 200
MAX_NOTED: Final = 32
"""Different decisions on one request that are kept for `explain`."""


@dataclass(frozen=True, slots=True)
class Allow:
    """Nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Other texts take its place: as many as the question has."""

    texts: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """The prompt is refused, or the answer ends before this text."""

    reason: str = ""


Verdict = Allow | Replace | Stop
ALLOW: Final = Allow()


class CannotJudgeError(Exception):
    """A function raises it for a text that it cannot judge, such as one that is too long for it. The text is stopped,
    and the function does not count as failed. The message is for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Texts of one request."""

    subject: Subject
    texts: tuple[str, ...]
    """The contents of a chat's turns, or one text; of an answer the next piece of it."""
    roles: tuple[str, ...] = ()
    """Of the turns, one for each text; empty where they are no turns."""
    before: str = ""
    """The end of the answer's text before this piece, which is not asked about again."""
    ended: bool = True
    """Whether this is the last piece."""
    guardrail: str = ""
    """Whose question it is."""
    request_id: str = ""
    model: str = ""
    tenant: str = ""
    """Empty where there are no keys."""


class Decision(NamedTuple):
    """Something that a guardrail did to a request."""

    guardrail: str
    rule: str
    """Of a guardrail with rules; else empty."""
    subject: Subject
    action: Literal["replace", "stop", "failed"]
    """`failed`: it gave no verdict, and what its configuration says was done."""
    reason: str


@dataclass(slots=True)
class Decisions:
    """The decisions on one request, each with how often it was made. Bounded: what is beyond that is not kept."""

    counts: Counter[tuple[str, str, str, str, str]] = field(default_factory=Counter)

    def add(self, decision: Decision) -> None:
        """Note one."""
        if decision in self.counts or len(self.counts) < MAX_NOTED:
            self.counts[decision] += 1
