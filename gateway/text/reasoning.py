"""Reasoning before an answer: the text between think tags, separated from what follows as it comes. A pure state
machine whose parts do not depend on how the text was cut.

    UNDECIDED ── the open tag ──> INSIDE ── the close tag ──> AFTER
        └──────── any other text ─────────────────────────────┘

Held back are white space that may turn out to be around a tag, and as much of a text as a tag begins with.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, Literal

from disagg.gateway.text.segments import Segment, overlap

ReasoningFormat = Literal["none", "think"]
"""`think`: `<think>` ... `</think>` at the beginning of an answer; a prompt may end with the open tag."""

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
TAGS: Final = (OPEN, CLOSE)
_SPACE: Final = " \t\r\n"


class Phase(Enum):
    """Phase in which an answer is."""

    UNDECIDED = auto()
    INSIDE = auto()
    AFTER = auto()


def reasoning_format_of(template_source: str) -> ReasoningFormat:
    """Whether a chat template is of a model that reasons between tags."""
    return "think" if CLOSE in template_source else "none"


def first_phase(prompt_end: str, continued: str | None = None) -> Phase:
    """Where an answer begins.

    Args:
        prompt_end: the last characters of the prompt's text.
        continued: what a client wrote of the answer, which goes on; `None` for a new one.
    """
    if continued is not None and continued.strip(_SPACE):
        return Phase.INSIDE if continued.rfind(OPEN) > continued.rfind(CLOSE) else Phase.AFTER
    return Phase.INSIDE if prompt_end.rstrip(_SPACE).endswith(OPEN) else Phase.UNDECIDED


class ReasoningSplitter:
    """Separates one answer. White space next to a tag belongs to neither part."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self.has_reasoned = phase is Phase.INSIDE
        """There was an open tag."""
        self._space: list[str] = []
        """White space that is text only if other text follows."""
        self._tail = ""
        """After it: shorter than a tag, and may begin one."""
        self._begun = phase is Phase.AFTER
        """The present part has text: white space may be a part of it."""

    @property
    def phase(self) -> Phase:
        """The phase in which the answer is."""
        return self._phase

    def feed(self, text: str) -> list[Segment]:
        """What is certain after the next piece of text."""
        found: list[Segment] = []
        text, self._tail = self._tail + text, ""
        if self._phase is Phase.UNDECIDED:
            text = self._decide(text, found)
        if self._phase is Phase.INSIDE:
            text = self._inside(text, found)
        if self._phase is Phase.AFTER:
            self._content(text, found)
        return found

    def finish(self) -> list[Segment]:
        """The rest, at the end of the answer."""
        rest, self._tail = self._spaced(self._tail), ""
        if not rest:
            return []
        return [Segment("reasoning" if self._phase is Phase.INSIDE else "content", rest)]

    def _decide(self, text: str, found: list[Segment]) -> str:
        """Decide whether the answer begins with the think tag. Returns the text after the tag, or all of it if it is
        content; empty while that is undecided."""
        start = text.lstrip(_SPACE)
        self._space.append(text[: len(text) - len(start)])
        if start.startswith(OPEN):
            self._phase, self.has_reasoned = Phase.INSIDE, True
            found.append(Segment("none", self._spaced(OPEN)))
            return start[len(OPEN) :]
        if OPEN.startswith(start):
            self._tail = start
            return ""
        self._phase, self._begun = Phase.AFTER, True
        return self._spaced(start)

    def _inside(self, text: str, found: list[Segment]) -> str:
        """Append the reasoning that is certain to `found`. Returns the text after the closing tag, or nothing."""
        if not self._begun:
            text = self._without_space(text, found)
        closed = text.find(CLOSE)
        end = closed if closed >= 0 else len(text) - overlap(text, CLOSE)
        sure = text[:end].rstrip(_SPACE)
        if sure:
            found.append(Segment("reasoning", self._spaced(sure)))
            self._begun = True
        if closed < 0:
            self._space.append(text[len(sure) : end])
            self._tail = text[end:]
            return ""
        self._phase, self._begun = Phase.AFTER, False
        found.append(Segment("none", self._spaced(text[len(sure) : end] + CLOSE)))
        return text[closed + len(CLOSE) :]

    def _content(self, text: str, found: list[Segment]) -> None:
        if not self._begun:
            text = self._without_space(text, found)
            self._begun = bool(text)
        if text:
            found.append(Segment("content", text))

    def _without_space(self, text: str, found: list[Segment]) -> str:
        """What is behind the white space at its beginning."""
        rest = text.lstrip(_SPACE)
        if len(rest) < len(text):
            found.append(Segment("none", text[: len(text) - len(rest)]))
        return rest

    def _spaced(self, text: str) -> str:
        """`text` behind the white space before it."""
        text = "".join((*self._space, text))
        self._space.clear()
        return text
