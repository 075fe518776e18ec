"""Output ids to output text, piece by piece: incremental detokenizing, then stop strings.

    ids ──> IncrementalDecoder ──> text of complete characters ──> StopMatcher ──> text that is final
                                                                     (AnswerSplitter ──> reasoning, text, calls)

Each stage holds back what the next token may still change: a character that is cut between tokens, the beginning of a
stop string or of a tag. The held parts are bounded, but for white space next to tags, and `finish` lets them go. What
comes out is the same however the ids were cut into batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers.decoders import DecodeStream

from disagg.gateway.text.answer_splitter import AnswerSplitter
from disagg.gateway.text.segments import Segment, ToolCall, parts_of
from disagg.gateway.text.tokenizer import Tokenizer

MAX_PENDING_TOKENS = 16
"""A character has at most 4 bytes: ids without a complete one after this many are no text, and read as U+FFFD."""


class IncrementalDecoder:
    """Decodes one output. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._context: list[int] = []
        """The ids behind the last text: how an id reads may depend on its neighbour."""
        self._pending: list[int] = []
        """The ids since then."""

    def step(self, token_id: int) -> str:
        """The text that became complete with this id."""
        if token_id in self._tokenizer.special_token_ids:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the library raises bare `Exception` where broken bytes change text that it has given out
            return self._restart()
        if text is None:
            return self._restart() if len(self._pending) >= MAX_PENDING_TOKENS else ""
        self._context, self._pending = self._pending, []
        return str(text)

    def finish(self) -> str:
        """The text of what is still held; a character that was cut reads as U+FFFD."""
        before = self._tokenizer.decode(self._context)
        whole = self._tokenizer.decode(self._context + self._pending)
        self._pending = []
        return whole[len(before) :]

    def _restart(self) -> str:
        """Let the pending ids go and continue as if they had not been there."""
        text = self.finish()
        if not self._context:  # a word that comes now is not the first, whose leading space some decoders strip
            self._context = _any_word(self._tokenizer)
        self._stream = DecodeStream(skip_special_tokens=True)
        for token_id in self._context:
            self._stream.step(self._tokenizer.backend, token_id)
        return text


def _any_word(tokenizer: Tokenizer) -> list[int]:
    """An id with a text of its own, whatever comes after it; none where there is no such id. Byte tokens such as
    `<0x41>` are not: a run of them is decoded as one."""
    for token_id in range(tokenizer.backend.get_vocab_size()):
        piece = tokenizer.backend.id_to_token(token_id)
        if piece and not piece.startswith("<") and tokenizer.decode([token_id]).isalpha():
            return [token_id]
    return []


class StopMatcher:
    """Finds the first place where a stop string ends, in text that comes in pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self.matched = ""
        """The stop string that ended the text; empty until then."""
        self._held = ""
        """The longest end of the text so far that a stop string begins with; shorter than the longest stop string."""

    def push(self, text: str, may_stop: bool) -> tuple[str, bool]:
        """Text that is final now, and whether a stop string ended it; without `may_stop`, none does."""
        if not self._stop:
            return text, False
        text = self._held + text
        if may_stop and (cut := self._find(text)) is not None:
            self._held = ""
            return text[:cut], True
        keep = self._num_held_chars(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text that is still held."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        """Index where the stop string begins that ends first; of several that end there, the longest."""
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, self.matched = min(found)
        return start

    def _num_held_chars(self, text: str) -> int:
        longest = max(map(len, self._stop)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            rest = text[start:]
            if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stop):
                return len(rest)
        return 0


class Piece(NamedTuple):
    """What a batch of ids came to."""

    token_ids: tuple[int, ...]
    """The ids up to where the text ended; surplus ones are dropped."""
    text: str
    """The text that is final now."""
    stopped: bool
    """A stop string ended the text."""
    reasoning: str = ""
    """Text between think tags; it comes before `text`."""
    calls: tuple[tuple[int, ToolCall], ...] = ()
    """Calls, each with the number of characters of `text` before it."""


class TextStream:
    """The text of one output.

    Args:
        tokenizer: of the model.
        stop: strings that end the text and are not part of it.
        stop_token_ids: ids that end the output; they have no text.
        min_tokens: no stop string ends the text before this many ids.
        splitter: divides a text that is not content only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        splitter: AnswerSplitter | None = None,
    ) -> None:
        self._splitter = splitter
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Ids that were taken."""
        self.stopped = False
        """Whether a stop string ended it."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Ids up to the one that completed the close tag, or so far."""
        return 0 if self._splitter is None else self._splitter.num_reasoning_tokens

    @property
    def stop_string(self) -> str:
        """What ended it, where that was a stop string; else empty."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take the next ids, at most up to the one that completes a stop string."""
        if self._splitter is not None:
            return self._push_divided(token_ids, self._splitter)
        texts: list[str] = []
        for i, token_id in enumerate(token_ids):
            text, stopped = self._push_one(token_id)
            texts.append(text)
            if stopped:
                self.stopped = True
                return Piece(tuple(token_ids[: i + 1]), "".join(texts), True)
        return Piece(tuple(token_ids), "".join(texts), False)

    def _push_divided(self, token_ids: Sequence[int], splitter: AnswerSplitter) -> Piece:
        segments: list[Segment] = []
        taken = tuple(token_ids)
        for i, token_id in enumerate(taken):
            text, stopped = self._push_one(token_id)
            segments += self._split(splitter, text, stopped)
            if stopped:
                self.stopped = True
                taken = taken[: i + 1]
                break
        reasoning, content, calls = parts_of(segments)
        return Piece(taken, content, self.stopped, reasoning, calls)

    def finish(self) -> Piece:
        """No more ids come: the text that was held back, which may still end at a stop string."""
        text, stopped = self._matcher.push(self._decoder.finish(), self._may_stop)
        text = text if stopped else text + self._matcher.finish()
        if self._splitter is None:
            return Piece((), text, stopped)
        reasoning, text, calls = parts_of(self._split(self._splitter, text, ended=True))
        return Piece((), text, stopped, reasoning, calls)

    def _split(self, splitter: AnswerSplitter, text: str, ended: bool) -> list[Segment]:
        found = splitter.feed(text, self.num_tokens)
        return found + splitter.finish() if ended else found

    @property
    def _may_stop(self) -> bool:
        return self.num_tokens >= self._min_tokens

    def _push_one(self, token_id: int) -> tuple[str, bool]:
        self.num_tokens += 1
        if token_id in self._stop_token_ids:
            return "", False
        return self._matcher.push(self._decoder.step(token_id), self._may_stop)
