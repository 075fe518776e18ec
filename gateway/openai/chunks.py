"""Events of the generator as JSON: server-sent events of a stream, or one complete answer.

Of a stream everything is constant but an index, a text and, where requested, logprobs and usage: the rest is formatted
once. What is written for a token is bytes put together, in the form that each of both APIs has for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import msgspec
from typing_extensions import override

from disagg.gateway.openai.logprobs import (
    LEAST_LOGPROB,
    CompletionLogprobs,
    chat_logprobs,
    joined,
    prompt_logprobs,
)
from disagg.gateway.openai.resume import Position
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.text.segments import ToolCall
from disagg.gateway.text.tokenizer import Tokenizer
from disagg.proto.messages import TokenLogprobs
from disagg.proto.token_ids import PackedTokenIds, unpack_token_ids

LAST_DATA: Final = "[DONE]"
DONE: Final = b"data: %b\n\n" % LAST_DATA.encode()
_JSON: Final = msgspec.json.Encoder()
_LINE_ENDS: Final = (("\u0085", b"\\u0085"), ("\u2028", b"\\u2028"), ("\u2029", b"\\u2029"))
"""JSON lets these stand, but clients that split lines of text, not of bytes, would take them for ends of lines."""


def encode_text(text: str) -> bytes:
    """`text` as a JSON string that is one line for every reader."""
    encoded = _JSON.encode(text)
    if not text.isascii():
        for char, escaped in _LINE_ENDS:
            if char in text:
                encoded = encoded.replace(char.encode(), escaped)
    return encoded


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def reasoning_field(reasoning: str) -> bytes:
    """A further field of a message; nothing where there is no reasoning."""
    return b',"reasoning_content":' + encode_text(reasoning) if reasoning else b""


@dataclass(slots=True)
class UsageCount:
    """Tokens of a call, as its answers bring them.

    Args:
        answers_each: how many answers a prompt has; they share its tokens.
    """

    answers_each: int
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    """Number of tokens of each prompt, by the index of the prompt."""
    cached_tokens: dict[int, int] = field(default_factory=dict)
    output_tokens: dict[int, int] = field(default_factory=dict)
    """Number of tokens of each answer, by the index of the answer."""
    reasoning_tokens: dict[int, int] | None = None
    """Number of output tokens that are reasoning, by the index of the answer; `None` where the model's reasoning is not
    told from its answers."""

    def add(self, delta: Delta) -> None:
        """Count what a delta brings."""
        self.prompt_tokens[delta.answer_index // self.answers_each] = delta.num_prompt_tokens
        self.output_tokens[delta.answer_index] = delta.first_index + len(delta.token_ids)
        if self.reasoning_tokens is not None:
            self.reasoning_tokens[delta.answer_index] = delta.num_reasoning_tokens

    def end(self, finish: Finish) -> None:
        """Count an answer that ended."""
        prompt_index = finish.answer_index // self.answers_each
        self.prompt_tokens[prompt_index] = finish.num_prompt_tokens
        cached = self.cached_tokens.get(prompt_index, finish.num_cached_tokens)
        self.cached_tokens[prompt_index] = min(cached, finish.num_cached_tokens)
        self.output_tokens[finish.answer_index] = finish.num_output_tokens
        if self.reasoning_tokens is not None:
            self.reasoning_tokens[finish.answer_index] = finish.num_reasoning_tokens

    def encode(self) -> bytes:
        """The JSON of `usage`. Of the answers to one prompt, the one that found the least cached counts: the others
        find what it computed."""
        prompt, output = sum(self.prompt_tokens.values()), sum(self.output_tokens.values())
        details = b""
        if self.reasoning_tokens is not None:
            details = b',"completion_tokens_details":{"reasoning_tokens":%d}' % sum(self.reasoning_tokens.values())
        return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":%b%b}' % (
            prompt,
            output,
            prompt + output,
            b'{"cached_tokens":%d}' % sum(self.cached_tokens.values()),
            details,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What does not change in a call."""

    call_id: str
    """The request id with the prefix of its kind."""
    created: int
    """Seconds since 1970."""
    model: str
    tokenizer: Tokenizer
    with_logprobs: bool
    include_usage: bool = False
    continuous_usage: bool = False
    shows_reasoning: bool = True
    shows_prompt_logprobs: bool = False
    tier: str = ""
    """In which the call is served; empty where that was not asked for."""

    def head(self, kind: str) -> bytes:
        """The first fields of an answer or chunk, up to `choices`."""
        fields = {"id": self.call_id, "object": kind, "created": self.created, "model": self.model}
        if self.tier:
            fields["service_tier"] = self.tier
        return _JSON.encode(fields)[:-1] + b',"choices":['


class Choices(Protocol):
    """Writes the choices of one kind of answer; one object for each call."""

    chunk_kind: str
    answer_kind: str

    def chunk(
        self,
        index: int,
        text: str,
        logprobs: bytes,
        reason: bytes,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
    ) -> bytes:
        """A choice of a chunk. `logprobs` and `reason` are JSON; `reasoning` comes before `text`. `calls` are only in
        answers to requests that offer functions."""
        ...

    def last_chunk(self, index: int, reason: bytes) -> bytes:
        """A choice that brings nothing but the end."""
        ...

    def answer(
        self,
        index: int,
        text: str,
        logprobs: bytes,
        reason: bytes,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
    ) -> bytes:
        """A choice of a complete answer."""
        ...

    def logprobs(self, delta: Delta, prompt: Sequence[TokenLogprobs] = (), echo: str = "") -> bytes:
        """JSON of a delta's logprobs, behind those of its prompt, where the text begins with that: with `echo`."""
        ...


class ChatChoices(Choices):
    """`chat.completion` and its chunks. The role comes with an answer's first chunk."""

    chunk_kind = "chat.completion.chunk"
    answer_kind = "chat.completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    @override
    def chunk(
        self,
        index: int,
        text: str,
        logprobs: bytes,
        reason: bytes,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
    ) -> bytes:
        role = b""
        if index not in self._begun:
            self._begun.add(index)
            role = b'"role":"assistant",'
        if reasoning:
            content = b'"reasoning_content":' + encode_text(reasoning)
            if text:
                content += b',"content":' + encode_text(text)
        else:
            content = b'"content":' + encode_text(text)
        return b'{"index":%d,"delta":{%b%b},"logprobs":%b,"finish_reason":%b}' % (
            index,
            role,
            content,
            logprobs,
            reason,
        )

    @override
    def last_chunk(self, index: int, reason: bytes) -> bytes:
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (index, reason)

    @override
    def answer(
        self,
        index: int,
        text: str,
        logprobs: bytes,
        reason: bytes,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
    ) -> bytes:
        content = encode_text(text) if text or not reasoning else _NULL
        return (
            b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null%b},"logprobs":%b,"finish_reason":%b}'
            % (index, content, reasoning_field(reasoning), logprobs, reason)
        )

    @override
    def logprobs(self, delta: Delta, prompt: Sequence[TokenLogprobs] = (), echo: str = "") -> bytes:
        return _JSON.encode(chat_logprobs(delta.token_ids, delta.logprobs, self._tokenizer))


class TextChoices(Choices):
    """`text_completion`, complete and in chunks."""

    chunk_kind = "text_completion"
    answer_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._logprobs: dict[int, CompletionLogprobs] = {}

    @override
    def chunk(
        self,
        index: int,
        text: str,
        logprobs: bytes,
        reason: bytes,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
    ) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, encode_text(text), logprobs, reason)

    @override
    def last_chunk(self, index: int, reason: bytes) -> bytes:
        return self.chunk(index, "", _NULL, reason)

    @override
    def answer(
        self,
        index: int,
        text: str,
        logprobs: bytes,
        reason: bytes,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
    ) -> bytes:
        return self.chunk(index, text, logprobs, reason)

    @override
    def logprobs(self, delta: Delta, prompt: Sequence[TokenLogprobs] = (), echo: str = "") -> bytes:
        writer = self._logprobs.get(delta.answer_index)
        if writer is None:
            writer = self._logprobs[delta.answer_index] = CompletionLogprobs(self._tokenizer)
        ids = unpack_token_ids(delta.prompt_token_ids)
        before = writer.prompt(ids, prompt, echo) if ids else {}
        piece = writer.piece(delta.token_ids, delta.logprobs, dict(delta.skipped))
        return _JSON.encode(joined(before, piece) if before else piece)


_NULL: Final = b"null"
_REASONS: Final = {"stop": b'"stop"', "length": b'"length"', "content_filter": b'"content_filter"'}


class StreamWriter:
    """The events of one stream, in the order of what is put in.

    A delta that its answer's end must follow waits for it, so that the last token and `finish_reason` are one chunk:
    clients that take each chunk for a token then count as many as there are.

    Args:
        style: of the call.
        choices: of its kind.
        usage: of the call, to which the writer adds.
        max_tokens: at which an answer ends; `None` where it is not known.
        echoes: text before the answers of each prompt; empty without.
        position: of a stream that can be resumed: its events have ids; `None` for others.
    """

    def __init__(
        self,
        style: Style,
        choices: Choices,
        usage: UsageCount,
        max_tokens: int | None,
        echoes: tuple[str, ...] = (),
        position: Position | None = None,
    ) -> None:
        self._position = position
        self._style = style
        self._choices = choices
        self._usage = usage
        self._max_tokens = max_tokens
        self._echoes = echoes
        self._head = b"data: " + style.head(choices.chunk_kind)
        self._tail = b'],"usage":null}\n\n' if style.include_usage else b"]}\n\n"
        self._held: dict[int, Delta] = {}
        self._count_always = style.continuous_usage

    def delta(self, delta: Delta) -> bytes:
        """The event of a delta; empty where it waits for the end."""
        before = self._release(delta.answer_index)
        num_tokens = delta.first_index + len(delta.token_ids)
        if not delta.token_ids or num_tokens == self._max_tokens:
            self._held[delta.answer_index] = delta
            return before
        return before + self._chunk(delta, _NULL)

    def finish(self, finish: Finish) -> bytes:
        """The event of an answer's end."""
        self._usage.end(finish)
        reason = _REASONS[finish.reason]
        held = self._held.pop(finish.answer_index, None)
        if held is not None:
            return self._chunk(held, reason)
        return self._head + self._choices.last_chunk(finish.answer_index, reason) + self._end()

    def flush(self) -> bytes:
        """What still waits; before an error."""
        return b"".join(self._release(index) for index in list(self._held))

    def last(self) -> bytes:
        """The end of a stream that ended well."""
        if not self._style.include_usage:
            return DONE
        return self._head + b'],"usage":' + self._usage.encode() + b"}\n\n" + DONE

    def _release(self, index: int) -> bytes:
        held = self._held.pop(index, None)
        return b"" if held is None else self._chunk(held, _NULL)

    def _chunk(self, delta: Delta, reason: bytes) -> bytes:
        logprobs = self._choices.logprobs(delta) if delta.logprobs else _NULL
        text = self._echo(delta) + delta.text if self._echoes else delta.text
        if self._count_always:
            self._usage.add(delta)
        reasoning = delta.reasoning if self._style.shows_reasoning else ""
        calls = [call for _, call in delta.calls]
        choice = self._choices.chunk(delta.answer_index, text, logprobs, reason, reasoning, calls)
        chunk = self._head + choice + self._end()
        return chunk if self._position is None else self._position.add(delta) + chunk

    def _echo(self, delta: Delta) -> str:
        return self._echoes[delta.answer_index // self._usage.answers_each] if delta.first_index == 0 else ""

    def _end(self) -> bytes:
        return b'],"usage":' + self._usage.encode() + b"}\n\n" if self._count_always else self._tail


@dataclass(slots=True)
class _Whole:
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    prompt_token_ids: bytes = b""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    skipped: list[tuple[int, int]] = field(default_factory=list)
    reason: bytes = _NULL


class AnswerWriter:
    """One complete answer, gathered from the events of a call."""

    def __init__(
        self,
        style: Style,
        choices: Choices,
        usage: UsageCount,
        echoes: tuple[str, ...] = (),
        num_shown: int | None = None,
    ) -> None:
        self._num_shown = usage.answers_each if num_shown is None else num_shown
        self._style = style
        self._choices = choices
        self._usage = usage
        self._echoes = echoes
        self._answers: dict[int, _Whole] = {}

    def add(self, event: Delta | Finish) -> None:
        """Take the next event."""
        answer = self._answers.setdefault(event.answer_index, _Whole())
        if isinstance(event, Finish):
            self._usage.end(event)
            answer.reason = _REASONS[event.reason]
            return
        answer.texts.append(event.text)
        answer.reasoning.append(event.reasoning)
        answer.calls.extend(call for _, call in event.calls)
        answer.prompt_token_ids = answer.prompt_token_ids or event.prompt_token_ids
        answer.skipped.extend((len(answer.token_ids) + index, num_chars) for index, num_chars in event.skipped)
        answer.token_ids.extend(event.token_ids)
        answer.logprobs.extend(event.logprobs)

    @property
    def num_prompt_bytes(self) -> int:
        """Of the prompts whose log-probabilities are a part of the body."""
        return sum(len(answer.prompt_token_ids) for answer in self._answers.values())

    def encode(self) -> bytes:
        """The body, when all answers have ended."""
        choices = b",".join(self._choice(index, answer) for index, answer in enumerate(self._shown()))
        end = b'],"usage":' + self._usage.encode()
        if self._style.shows_prompt_logprobs and isinstance(self._choices, ChatChoices):
            end += b',"prompt_logprobs":' + self._prompt_logprobs(self._answers[0])
        return self._style.head(self._choices.answer_kind) + choices + end + b"}"

    def _choice(self, index: int, answer: _Whole) -> bytes:
        first = self._answers[index // self._num_shown * self._usage.answers_each]
        choice = self._choice_of(index, answer, first)
        if self._style.shows_prompt_logprobs and isinstance(self._choices, TextChoices):
            return choice[:-1] + b',"prompt_logprobs":' + self._prompt_logprobs(first) + b"}"
        return choice

    def _prompt_logprobs(self, first: _Whole) -> bytes:
        """`first` is the answer that came with those of the prompt; null where guardrails let no token of it pass."""
        if not first.logprobs:
            return _NULL
        ids = unpack_token_ids(PackedTokenIds(first.prompt_token_ids))
        return _JSON.encode(prompt_logprobs(ids, first.logprobs[0].prompt, self._style.tokenizer))

    def _choice_of(self, index: int, answer: _Whole, first: _Whole) -> bytes:
        echo = self._echoes[index // self._num_shown] if self._echoes else ""
        text = echo + "".join(answer.texts)
        logprobs = _NULL
        if self._style.with_logprobs:
            whole = Delta(0, tuple(answer.token_ids), "", tuple(answer.logprobs), index, skipped=tuple(answer.skipped))
            if self._echoes and first.prompt_token_ids:
                whole = replace(whole, prompt_token_ids=PackedTokenIds(first.prompt_token_ids))
                logprobs = self._choices.logprobs(whole, first.logprobs[0].prompt, echo)
            else:
                logprobs = self._choices.logprobs(whole)
        reasoning = "".join(answer.reasoning) if self._style.shows_reasoning else ""
        return self._choices.answer(index, text, logprobs, answer.reason, reasoning, answer.calls)

    def _shown(self) -> list[_Whole]:
        """Of the answers to each prompt those of the largest mean logprob, where not all are shown."""
        made, each = [answer for _, answer in sorted(self._answers.items())], self._usage.answers_each
        if self._num_shown == each:
            return made
        groups = (made[begin : begin + each] for begin in range(0, len(made), each))
        return [answer for group in groups for answer in sorted(group, key=_unlikelihood)[: self._num_shown]]


def _unlikelihood(answer: _Whole) -> float:
    """The negated mean logprob of the tokens; infinite where guardrails let none pass."""
    if not answer.logprobs:
        return math.inf
    return -math.fsum(max(one.logprob, LEAST_LOGPROB) for one in answer.logprobs) / len(answer.logprobs)
