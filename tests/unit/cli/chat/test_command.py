"""The terminal of `disagg chat`, with a client that follows a script."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
from rich.console import Console

from disagg.cli.chat.command import HOW_TO_LEAVE, Chat, Interrupts
from disagg.client import Client, Delta, Finished, Usage
from disagg.proto.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    RequestNotFoundError,
)
from disagg.v1 import inference_pb2 as pb

END = Delta("", (), Finished("stop", Usage(1, 0, 1), "r1"))
Step = Delta | BaseException


class Played:
    """A client whose streams follow scripts."""

    def __init__(self, *answers: Sequence[Step]) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[list[dict[str, str]], dict[str, Any]]] = []
        self.num_closed = 0

    def stream(self, messages: list[dict[str, str]], **options: Any) -> Iterator[Delta]:
        self.asked.append((messages, options))
        return self._play(self._answers.pop(0))

    def _play(self, steps: Sequence[Step]) -> Iterator[Delta]:
        try:
            for step in steps:
                if isinstance(step, BaseException):
                    raise step
                yield step
        finally:
            self.num_closed += 1

    def explain(self, request_id: str) -> pb.ExplainRequestResponse:
        if request_id != "r1":
            raise RequestNotFoundError("no such request")
        return pb.ExplainRequestResponse(request_id=request_id, decode_worker="decode-0", outcome="stop")


def lines(*typed: str | BaseException) -> Callable[[str], str]:
    """A user who types these lines, presses Ctrl-C where an exception stands, and then Ctrl-D."""
    left = iter(typed)

    def read_line(prompt: str) -> str:
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read_line


def talk(client: Played, *typed: str | BaseException) -> str:
    out = io.StringIO()
    Chat(cast(Client, client), "x:1", "m", Console(file=out, width=100), out).run(lines(*typed))
    return out.getvalue()


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 9, texts, strict=False)]


def test_an_answer_is_streamed_and_kept() -> None:
    client = Played([Delta("an"), Delta("swer"), END], [Delta("B"), END])
    assert talk(client, "one", "/set seed 1", "two") == "answer\nseed is 1\nB\n\n"
    assert client.asked == [
        (messages("one"), {"model": "m"}),
        (messages("one", "answer", "two"), {"model": "m", "seed": 1}),
    ]


def test_ctrl_c_ends_the_answer_and_not_the_conversation() -> None:
    client = Played([Delta("half"), KeyboardInterrupt()], [Delta("B"), END])
    assert talk(client, "one", "two") == "half\nB\n\n"
    assert client.num_closed == 2
    assert client.asked[1][0] == messages("one", "half", "two")


def test_ctrl_c_before_anything_came_takes_the_message_back() -> None:
    client = Played([KeyboardInterrupt()], [Delta("B"), END])
    assert talk(client, "one", "two") == "\nB\n\n"
    assert client.asked[1][0] == messages("two")


def test_ctrl_c_at_the_prompt_drops_what_was_typed_and_says_how_to_leave() -> None:
    client = Played([Delta("B"), END])
    assert talk(client, '"""one', KeyboardInterrupt(), "two") == f"\n{HOW_TO_LEAVE}\nB\n\n"
    assert client.asked[0][0] == messages("two")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InvalidRequestError("prompt.chat", "is\nlong"), "error: prompt.chat: is long"),
        (OverloadedError("full", 1.5), "error: full; next: try again in 1.5 s, or add workers: disagg scale decode=2"),
        (ValueError("stop: surrogates"), "error: stop: surrogates"),
    ],
)
def test_an_error_is_one_line_and_the_conversation_goes_on(error: Exception, line: str) -> None:
    client = Played([error], [Delta("B"), END])
    assert talk(client, "one", "two") == f"{line}\nB\n\n"
    assert client.asked[1][0] == messages("two")


def test_a_conversation_that_is_too_long_can_begin_anew() -> None:
    text = talk(Played([ContextLengthError("prompt.chat", "is long")], [Delta("B"), END]), "one", "/clear", "two")
    error, *rest = text.splitlines()
    assert error.startswith("error: ")
    assert error.endswith("; next: /clear, which begins anew")
    assert rest == ["the conversation begins anew", "B", ""]


def test_an_error_within_an_answer_begins_a_line() -> None:
    client = Played([Delta("half"), OverloadedError("full", None)], [Delta("B"), END])
    assert talk(client, "one", "two") == "half\nerror: full\nB\n\n"
    assert client.asked[1][0] == messages("one", "half", "two")


def test_reasoning_is_shown_before_the_answer_and_is_no_part_of_it() -> None:
    client = Played([Delta("", reasoning="hm"), Delta("", reasoning="m"), Delta("A"), Delta("B"), END], [END])
    assert talk(client, "one", "two").startswith("hmm\n\nAB\n")
    assert client.asked[1][0] == messages("one", "AB", "two")


def test_explain_shows_where_the_last_answer_ran() -> None:
    text = talk(Played([Delta("A"), END]), "one", "/explain")
    assert "request   r1 " in text
    assert "ran on    decode-0, prompt and answer" in text
    assert talk(Played(), "/explain") == (
        "there is no whole answer to explain; latest requests: disagg explain --list --address x:1\n\n"
    )
    forgotten = Delta("", (), Finished("stop", Usage(1, 0, 1), "r2"))
    assert "\nerror: no such request; next: disagg explain --list\n" in talk(
        Played([Delta("A"), forgotten]), "one", "/explain"
    )


@pytest.mark.parametrize("typed", ["/bye", "/quit"])
def test_leaving_reads_no_further_line(typed: str) -> None:
    assert talk(Played(), typed, "never read") == ""


def once(client: Played, message: bytes) -> str:
    out = io.StringIO()
    Chat(cast(Client, client), "x:1", "m", Console(file=out), out).answer_once(message)
    return out.getvalue()


def test_a_pipe_is_one_message() -> None:
    client = Played([Delta("A"), END])
    assert once(client, "/bye\nzwölf\n".encode()) == "A\n"
    assert client.asked == [(messages("/bye\nzwölf\n"), {"model": "m"})]


@pytest.mark.parametrize(
    ("message", "error"),
    [(b" \n", "standard input: there is no text in it"), (b"ab\xff", "standard input: not UTF-8 at byte 2")],
)
def test_a_pipe_without_a_message(message: bytes, error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{error}$"):
        once(Played(), message)


def test_an_error_of_a_pipe_is_raised() -> None:
    with pytest.raises(OverloadedError):
        once(Played([OverloadedError("full", None)]), b"x")


def test_ctrl_c_is_an_interrupt_only_where_it_stops_something() -> None:
    before, interrupts = signal.getsignal(signal.SIGINT), Interrupts()
    with interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.stoppable():
            signal.raise_signal(signal.SIGINT)
        with interrupts.stoppable():
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)  # the second one, while the first is handled
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
