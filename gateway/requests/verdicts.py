"""The questions to guardrails, and their verdicts. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

Subject = Literal["prompt", "answer"]
UNJUDGED: Final = "guardrail_unavailable"
"""Code of the error where a guardrail gave no verdict and nothing may pass without one."""
MAX_REASON_CHARS: Final = 200
MAX_NOTED: Final = 32
"""Maximum number of different decisions on one request that are kept for `explain`."""


@dataclass(frozen=True, slots=True)
class Allow:
    """The texts may pass unchanged."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Other texts replace those of the question; their number is the same."""

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
    """The texts of one request that a guardrail judges."""

    subject: Subject
    texts: tuple[str, ...]
    """Contents of a chat's turns, or one text; for an answer its next piece."""
    roles: tuple[str, ...] = ()
    """Role of the turn of each text; empty if the texts are no turns."""
    before: str = ""
    """End of the answer's text before this piece, which is not judged again."""
    ended: bool = True
    """Whether this is the last piece."""
    guardrail: str = ""
    """Name of the guardrail that is asked."""
    request_id: str = ""
    model: str = ""
    tenant: str = ""
    """Tenant of the caller; empty if there are no keys."""


class Decision(NamedTuple):
    """Something that a guardrail did to a request."""

    guardrail: str
    rule: str
    """Name of the rule, for a guardrail with rules; else empty."""
    subject: Subject
    action: Literal["replace", "stop", "failed"]
    """`failed`: the guardrail gave no verdict, and its configured reaction was applied."""
    reason: str


@dataclass(slots=True)
class Decisions:
    """The decisions on one request with the number of times each was made. At most `MAX_NOTED` different ones are
    kept."""

    counts: Counter[tuple[str, str, str, str, str]] = field(default_factory=Counter)

    def add(self, decision: Decision) -> None:
        """Count a decision, unless it is new and the limit is reached."""
        if decision in self.counts or len(self.counts) < MAX_NOTED:
            self.counts[decision] += 1
