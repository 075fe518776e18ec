"""An answer's text as it comes, divided into its segments: first reasoning from content, then calls from the content.

text ──> ReasoningSplitter ──> content ──> ToolParser ──> content, calls
               └──> reasoning, tags
"""

from __future__ import annotations

from disagg.gateway.text.reasoning import Phase, ReasoningSplitter
from disagg.gateway.text.segments import Segment
from disagg.gateway.text.tool_calls import ToolParser


class AnswerSplitter:
    """Divides one answer.

    Args:
        phase: where it begins; `None` where reasoning is not separated.
        parser: finds the calls; `None` where there are none.
    """

    def __init__(self, phase: Phase | None, parser: ToolParser | None) -> None:
        self._reasoning = ReasoningSplitter(Phase.AFTER if phase is None else phase)
        self._parser = parser
        self.num_reasoning_tokens = 0
        """Tokens up to the one that completed the close tag, or so far."""

    def feed(self, text: str, num_tokens: int) -> list[Segment]:
        """What is certain after the next piece of text, which ends with the token of this number, from 1."""
        was_after = self._reasoning.phase is Phase.AFTER
        found = self._called(self._reasoning.feed(text))
        if self._reasoning.has_reasoned and not was_after:
            self.num_reasoning_tokens = num_tokens
        return found

    def finish(self) -> list[Segment]:
        """The rest, at the end of the answer."""
        found = self._called(self._reasoning.finish())
        return found if self._parser is None else found + self._parser.finish()

    def _called(self, segments: list[Segment]) -> list[Segment]:
        """With the calls of their content."""
        if self._parser is None:
            return segments
        found: list[Segment] = []
        for one in segments:
            found += self._parser.feed(one.text) if one.channel == "content" else [one]
        return found


def answer_splitter(phase: Phase | None, parser: ToolParser | None) -> AnswerSplitter | None:
    """`None` for an answer that is content only."""
    return None if phase is None and parser is None else AnswerSplitter(phase, parser)
