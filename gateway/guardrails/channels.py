"""One answer through its guardrails, each channel in the form in which a client gets it. Pure.

    text ──> max_chars ──> AnswerSplitter ──┬─ reasoning ──> a chain ──┐
                                            ├─ content ────> a chain ──┼──> runs, in the order of the model's text
                                            ├─ a call ─────> a chain for each of its texts
                                            └─ tags ───────────────────┘

What a client reads as one text is looked at as one, so the content before a call with that after it. A call is looked
at whole: as the model wrote it (its tokens tell that), its name and its arguments as they are sent, and what these say
to a reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

from disagg.gateway.guardrails.stream import Chain, Run, Work
from disagg.gateway.requests.verdicts import Question, Stop, Verdict
from disagg.gateway.text.answer_splitter import AnswerSplitter
from disagg.gateway.text.segments import Channel, Segment, ToolCall
from disagg.gateway.text.written_json import unescaped

MakeChain = Callable[[bool], Chain]
"""A chain for a text of its own; the argument is whether the text is a call's, which is stopped where it would be
replaced."""
_TEXTS: Final[tuple[Channel, ...]] = ("reasoning", "content")


@dataclass(slots=True)
class _Expected:
    """A piece of the model's text that has not come out."""

    channel: Channel
    num_chars: int
    call: ToolCall | None = None


class GuardedChannels:
    """Owner of what is held back of one answer.

    Args:
        make: makes the chains.
        limit: what cuts the model's text before it is divided; `None` without.
        splitter: divides it; `None` where all of it is content.
    """

    def __init__(self, make: MakeChain, limit: Chain | None, splitter: AnswerSplitter | None) -> None:
        self._make = make
        self._limit = limit
        self._splitter = splitter
        self._content = make(False)
        self._chains: dict[Channel, Chain] = {"content": self._content}
        if splitter is not None:
            self._chains["reasoning"] = make(False)
        self._ready: dict[Channel, deque[Run]] = {channel: deque() for channel in _TEXTS}
        """Final, but something before it may not be."""
        self._order: deque[_Expected] = deque()
        self._has_content = False
        """Then the reasoning has ended."""
        self._ended: set[Channel] = set()
        self.asks = self._content.asks
        """Whether there may be questions."""
        self.stopped: Stop | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the one that completed the close tag, or so far."""
        return 0 if self._splitter is None else self._splitter.num_reasoning_tokens

    def scan(self, text: str, num_tokens: int, ended: bool = False) -> list[Run]:
        """As `feed`, where nothing is asked."""
        if self._limit is None and self._splitter is None:  # as nearly always
            runs = self._content.scan(text, ended)
            self.stopped = self._content.stopped
            return runs
        try:
            next(self.feed(text, num_tokens, ended))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what `feed` returns
        raise AssertionError("nothing is asked here")

    def feed(self, text: str, num_tokens: int, ended: bool = False) -> Work:
        """The runs that are final, in the order of the model's text. Not to be called after `stopped` is set, nor after
        `ended`.

        Args:
            text: the next one.
            num_tokens: of the answer up to its end.
            ended: whether nothing more comes.
        """
        if self._limit is not None:
            text = "".join(run.text for run in self._limit.scan(text, ended))
            self.stopped = self._limit.stopped
            ended = ended or self.stopped is not None
        if self._splitter is None:
            runs = yield from self._content.feed(text, ended)
            self.stopped = self._content.stopped or self.stopped
            return runs
        segments = self._splitter.feed(text, num_tokens)
        if ended:
            segments += self._splitter.finish()
        for segment in segments:
            if (yield from self._refuses(segment)):
                ended = True
                break
        if ended:
            for channel in _TEXTS:
                yield from self._pass(channel, "", ended=True)
        return self._merged()

    def _refuses(self, segment: Segment) -> Generator[Question, Verdict, bool]:
        """Take a piece; whether the answer ends because of it."""
        channel, text, call = segment
        if channel in ("content", "call") and not self._has_content:
            self._has_content = True
            if (yield from self._pass("reasoning", "", ended=True)):
                return True
        if call is not None and (yield from self._refuses_call(text, call)):
            return True
        last = self._order[-1] if self._order else None
        if last is not None and last.channel == channel and call is None:
            last.num_chars += len(text)
        else:
            self._order.append(_Expected(channel, len(text), call))
        return channel in _TEXTS and (yield from self._pass(channel, text))

    def _pass(self, channel: Channel, text: str, ended: bool = False) -> Generator[Question, Verdict, bool]:
        """Whether its chain stops here. Does nothing where it did before."""
        chain = self._chains[channel]
        if chain.stopped is not None or channel in self._ended:
            return False
        if ended:
            self._ended.add(channel)
        self._ready[channel].extend((yield from chain.feed(text, ended)))
        self.stopped = chain.stopped or self.stopped
        return chain.stopped is not None

    def _refuses_call(self, text: str, call: ToolCall) -> Generator[Question, Verdict, bool]:
        for each in dict.fromkeys((text, call.name, call.arguments, unescaped(call.arguments))):
            if not each:
                continue
            chain = self._make(True)
            yield from chain.feed(each, ended=True)
            if chain.stopped is not None:
                self.stopped = chain.stopped
                return True
        return False

    def _merged(self) -> list[Run]:
        """What is final of all that was expected."""
        runs: list[Run] = []
        while self._order:
            first = self._order[0]
            if first.channel in _TEXTS:
                self._pull(first, runs)
                if first.num_chars:
                    break
            else:
                runs.append(Run("", first.num_chars, True, first.channel, first.call))
            self._order.popleft()
        return runs

    def _pull(self, wanted: _Expected, into: list[Run]) -> None:
        """Take as much of a text as is final."""
        ready = self._ready[wanted.channel]
        while ready and wanted.num_chars:
            run = ready.popleft()._replace(channel=wanted.channel)
            if run.num_chars > wanted.num_chars:
                assert run.is_original, "nothing is replaced beyond a text of its own"
                ready.appendleft(Run(run.text[wanted.num_chars :], run.num_chars - wanted.num_chars, True))
                run = run._replace(text=run.text[: wanted.num_chars], num_chars=wanted.num_chars)
            wanted.num_chars -= run.num_chars
            into.append(run)
