"""The checks that a text passes, piece by piece. Pure: what comes out does not depend on how the text was cut.

    runs of text ──> check ──> runs that are final ──> next check ...
                       └─ may ask a question, whose verdict it waits for

A check keeps what it cannot decide yet: the end of the text that can still become a match, or a piece that is not
complete. `ended` says that nothing more comes, and then it keeps nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from typing_extensions import override

from disagg.gateway.guardrails.scanner import Scanner
from disagg.gateway.requests.verdicts import Allow, Decision, Question, Replace, Stop, Subject, Verdict
from disagg.gateway.text.segments import Channel, ToolCall

MAX_REPLACED: Final = 1000
"""Matches in one text; a further one stops it."""


class Run(NamedTuple):
    """A piece of text, and how much of the original text it stands for."""

    text: str
    num_chars: int
    """Number of characters of the original text."""
    is_original: bool
    """Whether the text is the original one."""
    channel: Channel = "content"
    call: ToolCall | None = None
    """The tool call that takes the place of the text, in the channel `call`."""


Work = Generator[Question, Verdict, list[Run]]
"""Questions to be answered on the way to the runs that are final."""


class Check(Protocol):
    """One guardrail, or a part of its rules, on one text."""

    stopped: Stop | None
    """Set when it ended the text: what it gave out until then is all."""

    def feed(self, runs: Sequence[Run], ended: bool) -> Work:
        """Take the next text. Not to be called after `stopped` is set, nor after `ended`."""
        ...


class PlainCheck(Check):
    """One that asks nothing."""

    @abstractmethod
    def scan(self, runs: Sequence[Run], ended: bool) -> list[Run]:
        """The runs that are final, after `runs` came; `feed` without questions."""

    @override
    def feed(self, runs: Sequence[Run], ended: bool) -> Work:
        yield from ()
        return self.scan(runs, ended)


class _Kept:
    """Text that waits for a decision, with what it stands for."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque()
        self._offset = 0
        """Characters of the first run that were taken."""

    @property
    def num_runs(self) -> int:
        """Number of runs that wait."""
        return len(self._runs)

    @property
    def num_chars(self) -> int:
        """Characters that wait, of all runs together."""
        return sum(len(run.text) for run in self._runs) - self._offset

    def add(self, runs: Sequence[Run]) -> None:
        """Append the next runs."""
        self._runs.extend(runs)

    def take(self, num_chars: int, into: list[Run]) -> None:
        """The next characters as they are."""
        while num_chars > 0:
            run = self._runs[0]
            left = len(run.text) - self._offset
            taken = min(left, num_chars)
            num_chars -= taken
            if taken == len(run.text):
                into.append(run)
            elif run.is_original:
                into.append(Run(run.text[self._offset : self._offset + taken], taken, True))
            else:  # what it stands for goes with its last character
                stands_for = run.num_chars if taken == left else 0
                into.append(Run(run.text[self._offset : self._offset + taken], stands_for, False))
            self._drop(taken, left)
        while self._runs and not self._runs[0].text:  # replaced by nothing
            into.append(self._runs.popleft())

    def replace(self, num_chars: int, text: str, into: list[Run]) -> None:
        """`text` in place of the next characters."""
        replaced: list[Run] = []
        self.take(num_chars, replaced)
        into.append(Run(text, sum(run.num_chars for run in replaced), False))

    def _drop(self, taken: int, left: int) -> None:
        if taken == left:
            self._runs.popleft()
            self._offset = 0
        else:
            self._offset += taken


@dataclass(frozen=True, slots=True)
class Rule:
    """What a pattern does."""

    name: str
    reason: str
    replacement: str | None
    """Text that replaces a match; None stops the text."""


Note = Callable[[Decision], None]


class PatternCheck(PlainCheck):
    """Patterns of one guardrail.

    Args:
        guardrail: its name.
        scanner: of the patterns.
        rules: one for each pattern.
        subject: of what text.
        may_replace: whether a replacement is possible; else it stops.
        note: takes the decisions.
    """

    def __init__(
        self,
        guardrail: str,
        scanner: Scanner,
        rules: Sequence[Rule],
        subject: Subject,
        may_replace: bool,
        note: Note,
    ) -> None:
        self.stopped: Stop | None = None
        self._guardrail = guardrail
        self._scanner = scanner
        self._rules = rules
        self._subject = subject
        self._may_replace = may_replace
        self._note = note
        self._kept = _Kept()
        self._text = b""
        """Text that is kept, after the character before it."""
        self._num_found = 0
        self._start = 0
        """Where that text begins."""

    @override
    def scan(self, runs: Sequence[Run], ended: bool) -> list[Run]:
        new = "".join([run.text for run in runs])
        if not ended and new and self._start == len(self._text) and not self._kept.num_runs:
            text = self._text + new.encode()
            if self._scanner.find(text, self._start, False) is None:  # as nearly always
                self._keep(text, len(text))
                return list(runs)
        self._kept.add(runs)
        if not new and not ended:
            return [] if self._start < len(self._text) else self._rest()
        text, pos = self._text + new.encode(), self._start
        out: list[Run] = []
        while (found := self._scanner.find(text, pos, ended)) is not None:
            self._kept.take(_num_chars(text, pos, found.start), out)
            pos = found.start
            if found.pattern is None:
                break
            rule = self._rules[found.pattern]
            self._num_found += 1
            if rule.replacement is None or not self._may_replace or self._num_found > MAX_REPLACED:
                self._note(Decision(self._guardrail, rule.name, self._subject, "stop", rule.reason))
                self.stopped = Stop(rule.reason)
                return out
            self._note(Decision(self._guardrail, rule.name, self._subject, "replace", rule.reason))
            self._kept.replace(_num_chars(text, found.start, found.end), rule.replacement, out)
            pos = found.end
        if found is None:
            self._keep(text, len(text))
            return out + self._rest()
        self._keep(text, pos)
        return out

    def _rest(self) -> list[Run]:
        """All that is kept."""
        out: list[Run] = []
        self._kept.take(self._kept.num_chars, out)
        return out

    def _keep(self, text: bytes, start: int) -> None:
        """Keep text[start:], and the character before it for assertions."""
        before = max(0, start - 1)
        while before > 0 and text[before] & 0xC0 == 0x80:  # inside a character
            before -= 1
        self._text, self._start = text[before:], start - before


class LengthCheck(PlainCheck):
    """Ends a text at a number of characters."""

    def __init__(self, guardrail: str, rule: Rule, max_chars: int, subject: Subject, note: Note) -> None:
        self.stopped: Stop | None = None
        self._guardrail = guardrail
        self._rule = rule
        self._left = max_chars
        self._subject = subject
        self._note = note

    @override
    def scan(self, runs: Sequence[Run], ended: bool) -> list[Run]:
        num_chars = sum(len(run.text) for run in runs)
        if num_chars <= self._left:
            self._left -= num_chars
            return list(runs)
        kept, out = _Kept(), list[Run]()
        kept.add(runs)
        kept.take(self._left, out)
        self._note(Decision(self._guardrail, self._rule.name, self._subject, "stop", self._rule.reason))
        self.stopped = Stop(self._rule.reason)
        return out


class PieceCheck(Check):
    """Asks about a text piece by piece.

    Args:
        guardrail: its name.
        question: what every question has.
        piece_chars: of a piece; None asks about the whole text at its end.
        context_chars: of the text before it that goes with a piece.
        may_replace: whether a replacement is possible; else it stops.
        note: takes the decisions.
    """

    def __init__(
        self,
        guardrail: str,
        question: Callable[[str, str, bool], Question],
        piece_chars: int | None,
        context_chars: int,
        may_replace: bool,
        note: Note,
    ) -> None:
        self.stopped: Stop | None = None
        self._guardrail = guardrail
        self._question = question
        self._piece_chars = piece_chars
        self._context_chars = context_chars
        self._may_replace = may_replace
        self._note = note
        self._kept = _Kept()
        self._texts: list[str] = []
        self._num_chars = 0
        self._before = ""

    @override
    def feed(self, runs: Sequence[Run], ended: bool) -> Work:
        self._kept.add(runs)
        self._texts.extend(run.text for run in runs)
        self._num_chars += sum(len(run.text) for run in runs)
        out: list[Run] = []
        piece_chars = self._piece_chars
        if not ended and (piece_chars is None or self._num_chars <= piece_chars):
            return out
        text = "".join(self._texts)
        start = 0
        # A piece is complete when more comes: so the last one is known to be that.
        while piece_chars is not None and len(text) - start > piece_chars:
            piece = text[start : start + piece_chars]
            yield from self._ask(piece, False, out)
            if self.stopped is not None:
                return out
            start += piece_chars
        if ended and start < len(text):
            yield from self._ask(text[start:], True, out)
            start = len(text)
        self._texts, self._num_chars = [text[start:]], len(text) - start
        return out

    def _ask(self, piece: str, ended: bool, out: list[Run]) -> Generator[Question, Verdict, None]:
        verdict = yield self._question(piece, self._before, ended)
        if self._context_chars:
            self._before = (self._before + piece)[-self._context_chars :]
        if isinstance(verdict, Allow):
            self._kept.take(len(piece), out)
        elif isinstance(verdict, Replace) and self._may_replace:
            self._note(Decision(self._guardrail, "", "answer", "replace", verdict.reason))
            self._kept.replace(len(piece), verdict.texts[0], out)
        else:
            self._note(Decision(self._guardrail, "", "answer", "stop", verdict.reason))
            self.stopped = Stop(verdict.reason)


class Chain:
    """All checks, one behind the other: the first one that stops ends the text, and replacements compose.

    What a check gave out before it stopped still passes the later ones, which may stop it sooner.
    """

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = checks
        self._plain = [check for check in checks if isinstance(check, PlainCheck)]
        self.asks = len(self._plain) < len(checks)
        """Whether there may be questions."""
        self.stopped: Stop | None = None

    def scan(self, text: str, ended: bool = False) -> list[Run]:
        """As `feed`, where nothing is asked."""
        runs: list[Run] = [Run(text, len(text), True)] if text else []
        for check in self._plain:
            runs = check.scan(runs, ended)
            if check.stopped is not None:
                self.stopped, ended = check.stopped, True
            elif not runs and not ended:
                break
        return runs

    def feed(self, text: str, ended: bool = False) -> Work:
        """The runs that are final. Not to be called after `stopped` is set, nor after `ended`."""
        runs: list[Run] = [Run(text, len(text), True)] if text else []
        for check in self._checks:
            runs = yield from check.feed(runs, ended)
            if check.stopped is not None:
                self.stopped, ended = check.stopped, True
            elif not runs and not ended:
                break
        return runs


def _num_chars(text: bytes, start: int, end: int) -> int:
    piece = text[start:end]
    return len(piece) if piece.isascii() else len(piece.decode())
