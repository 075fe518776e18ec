"""The terminal of `disagg chat`: reads lines, does what the conversation says, streams answers.

input ──line──> Conversation.read ──Ask──> Client.stream ──deltas──> output
                       ^                        │ end, error or Ctrl-C
                       └─────── ended ──────────┘
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console

from disagg.cli.address import check_address, reaching
from disagg.cli.chat.conversation import Ask, Command, Conversation, Explain, Leave, Say
from disagg.cli.explain import report
from disagg.cli.generate import only_model
from disagg.cli.next_steps import with_next_step
from disagg.client import Client
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.program import command as command_line
from disagg.proto.errors import ConfigError, ContextLengthError, DisaggError

HOW_TO_LEAVE = "Ctrl-D or /bye leaves"


def run_chat(address: str, model: str | None, console: Console) -> None:
    """Talk with a model until the user leaves; where standard input is no terminal, answer it once.

    Raises:
        ConfigError: if the address is invalid, the model is not clear, or there is no text on standard input.
        LaunchError: if there is no gateway at the address.
        DisaggError: the error that the gateway answered, before the conversation or to standard input.
    """
    check_address(address)
    with Client(address) as client:
        with reaching(address):
            served = model or only_model([each.name for each in client.models()])
        chat = Chat(client, address, served, console, sys.stdout)
        if sys.stdin.isatty():
            with suppress(ImportError):
                importlib.import_module("readline")  # gives `input` a history and keys to edit a line
            chat.say(f"{served} at {address}; /help lists the commands, {HOW_TO_LEAVE}")
            with chat.interrupts:
                chat.run(input)
        else:
            chat.answer_once(sys.stdin.buffer.read())


class Interrupts:
    """Ctrl-C of a conversation: a `KeyboardInterrupt` where there is something to stop, and nothing anywhere else, or
    one that comes as an answer ends would end the program."""

    def __init__(self) -> None:
        self._can_stop = False
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._on_signal)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Where Ctrl-C raises `KeyboardInterrupt`, once."""
        self._can_stop = True
        try:
            yield
        finally:
            self._can_stop = False

    def _on_signal(self, *_: object) -> None:
        if self._can_stop:
            self._can_stop = False
            raise KeyboardInterrupt


class Chat:
    """A conversation with its terminal. `interrupts` is for the time of `run`.

    Args:
        client: client of the gateway.
        address: its address, for errors.
        model: name of the model.
        console: where explanations go.
        out: where the rest goes.
    """

    def __init__(self, client: Client, address: str, model: str, console: Console, out: TextIO) -> None:
        self._client = client
        self._address = address
        self._model = model
        self._console = console
        self._out = out
        self._conversation = Conversation(model)
        self.interrupts = Interrupts()

    def run(self, read_line: Callable[[str], str]) -> None:
        """Handle lines until the user leaves. Ctrl-C ends an answer or drops a message, and not the conversation.

        Args:
            read_line: shows a prompt and returns a line, as `input` does.
        """
        while True:
            try:
                with self.interrupts.stoppable():
                    line = read_line(self._conversation.prompt)
            except EOFError:
                self._write("\n")
                return
            except KeyboardInterrupt:
                self._conversation.drop()
                self.say(f"\n{HOW_TO_LEAVE}")
                continue
            if not self._do(self._conversation.read(line)):
                return

    def answer_once(self, message: bytes) -> None:
        """Answer one message. Raises as `run_chat` does."""
        try:
            ask = self._conversation.ask(message.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input: not UTF-8 at byte {error.start}") from None
        if ask is None:
            raise ConfigError("standard input: there is no text in it")
        self._stream(ask, [])
        self._write("\n")

    def say(self, text: str) -> None:
        """Show a text on lines of its own."""
        self._write(f"{text}\n")

    def _do(self, command: Command | None) -> bool:
        """Carry out a command; False for one that ends the conversation."""
        match command:
            case Ask():
                self._answer(command)
            case Say(text=text):
                self.say(text)
            case Explain(request_id=request_id):
                self._explain(request_id)
            case Leave():
                return False
        return True

    def _answer(self, ask: Ask) -> None:
        """Stream an answer to the screen and into the conversation."""
        parts: list[str] = []
        request_id = problem = ""
        try:
            with self.interrupts.stoppable():
                request_id = self._stream(ask, parts)
        except KeyboardInterrupt:
            pass  # what came so far is the answer
        except (DisaggError, LaunchError, TypeError, ValueError) as error:
            problem = _one_line(error)
        self._conversation.ended("".join(parts), request_id)
        self._write("\n" if parts or not problem else "")
        if problem:
            self.say(problem)

    def _stream(self, ask: Ask, parts: list[str]) -> str:
        """Write an answer as it comes, and its parts to `parts`; returns the id of its request."""
        request_id, is_reasoning = "", False
        stream = self._client.stream(ask.messages, model=self._model, **ask.options)
        with reaching(self._address), closing(stream) as deltas:
            for delta in deltas:
                self._write(delta.reasoning)
                if is_reasoning and delta.text:
                    self._write("\n\n")
                is_reasoning = bool(delta.reasoning) or (is_reasoning and not delta.text)
                if delta.text:
                    parts.append(delta.text)
                self._write(delta.text)
                if delta.finished is not None:
                    request_id = delta.finished.request_id
        return request_id

    def _explain(self, request_id: str) -> None:
        if not request_id:
            listing = command_line(f"explain --list --address {self._address}")
            self.say(f"there is no whole answer to explain; latest requests: {listing}")
            return
        try:
            with self.interrupts.stoppable(), reaching(self._address):
                found = self._client.explain(request_id)
        except KeyboardInterrupt:
            self._write("\n")
            return
        except (DisaggError, LaunchError) as error:
            self.say(_one_line(error))
            return
        self._console.print(report(found, ascii_only=self._console.options.ascii_only))

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _one_line(error: Exception) -> str:
    text = with_next_step(error) if isinstance(error, DisaggError) else str(error)
    if isinstance(error, ContextLengthError):
        text += "; next: /clear, which begins anew"
    return f"error: {' '.join(text.split())}"
