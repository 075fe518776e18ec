"""The conversation of `disagg chat`: a line that was typed in, what is to be done about it out. Pure.

    read(line) ──> Ask      the shell streams the answer, then calls `ended`
               ──> Say      a text for the user
               ──> Explain  where an answer ran
               ──> Leave
               ──> None     nothing yet: an empty line, or a part of a message of several lines

A message of several lines is between two lines of three quotes, or begins with them; `/multi-line` begins one, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from disagg.client.types import Message, Options
from disagg.client.wire import make_request

PROMPT: Final = ">>> "
PROMPT_INSIDE: Final = "... "
"""Prompt within a message of several lines."""
QUOTES: Final = '"""'
DEFAULT: Final = "default"
"""Value that sets a parameter to the server's default."""
HELP: Final = (
    ("/set PARAMETER VALUE", "change a parameter of the answers; VALUE `default` takes the server's"),
    ("/system TEXT", "set the system prompt, also as `/set system TEXT`; without TEXT there is none"),
    ("/show", "show the model, the system prompt, the parameters and the length of the conversation"),
    ("/clear", "begin anew; system prompt and parameters stay"),
    ("/explain", "show where the last answer ran, and why there"),
    ("/multi-line", f"begin a message of several lines, which ends with {QUOTES}; so does {QUOTES}"),
    ("/help", "show this"),
    ("/bye, /quit", "leave, as Ctrl-D does; Ctrl-C stops an answer"),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """Send these messages, and stream the answer."""

    messages: list[Message]
    options: Options


@dataclass(frozen=True, slots=True)
class Say:
    """Show a text."""

    text: str


@dataclass(frozen=True, slots=True)
class Explain:
    """Explain the request of the last answer."""

    request_id: str
    """Its id; empty if there is no answer that came whole."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End the program."""


Command = Ask | Say | Explain | Leave


def _truth(text: str) -> bool:
    known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(f"expected true or false; got {text!r}")
    return known[text.lower()]


PARAMETERS: Final[dict[str, Callable[[str], Any]]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "max_tokens": int,
    "min_tokens": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "stop": str,
    "split_reasoning": _truth,
    "json_object": _truth,
}
"""Parameters that `/set` takes, with the function that reads their values."""
_KINDS: Final = {float: "a number", int: "a whole number"}


class Conversation:
    """One conversation: its messages, its system prompt, its parameters.

    Args:
        model: name of the model, to be shown.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._system = ""
        self._options: dict[str, Any] = {}
        self._turns: list[Message] = []
        self._request_id = ""
        """Id of the request of the last answer; empty if that did not come whole."""
        self._lines: list[str] | None = None
        """The lines so far of a text of several lines, or None outside of one."""
        self._then: Callable[[str], Command | None] = self.ask
        """What is done with that text."""

    @property
    def prompt(self) -> str:
        """Text before the next line."""
        return PROMPT if self._lines is None else PROMPT_INSIDE

    def read(self, line: str) -> Command | None:
        """Handle a line, without its end."""
        if self._lines is not None:
            return self._continue(line)
        text = line.strip()
        if text.startswith("/"):
            return self._obey(text)
        return self._text(text, self.ask)

    def drop(self) -> None:
        """Forget the lines of a message that is not complete."""
        self._lines = None

    def ask(self, text: str) -> Ask | None:
        """Add a message of the user; None if it is empty."""
        if not text.strip():
            return None
        self._request_id = ""
        if self._turns and self._turns[-1]["role"] == "user":
            self._turns.pop()  # its answer was cut off before it was noted
        self._turns.append({"role": "user", "content": text})
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return Ask([*system, *self._turns], cast(Options, dict(self._options)))

    def ended(self, text: str, request_id: str = "") -> None:
        """Add the answer to the last message, also one that was stopped or broke off. If nothing of it came, the
        message is taken back.

        Args:
            text: the answer.
            request_id: id of its request, if it came whole.
        """
        self._request_id = request_id
        if text or request_id:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    # ------------------------------------------------------------ texts of several lines

    def _text(self, text: str, then: Callable[[str], Command | None]) -> Command | None:
        """Give a text to `then`, at once or, if it begins with quotes, when its last line was read."""
        if not text.startswith(QUOTES):
            return then(text)
        return self._begin(text.removeprefix(QUOTES), then)

    def _begin(self, first: str, then: Callable[[str], Command | None]) -> Command | None:
        self._lines, self._then = [], then
        return self._continue(first)

    def _continue(self, line: str) -> Command | None:
        assert self._lines is not None
        if not line.rstrip().endswith(QUOTES):
            self._lines.append(line)
            return None
        text = "\n".join([*self._lines, line.rstrip().removesuffix(QUOTES)]).strip("\n")
        self._lines = None
        return self._then(text)

    # ------------------------------------------------------------ commands

    def _obey(self, text: str) -> Command | None:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        match name:
            case "/set":
                return self._set(rest)
            case "/system":
                return self._text(rest, self._set_system)
            case "/show":
                return self._show()
            case "/clear":
                self._turns, self._request_id = [], ""
                return Say("the conversation begins anew")
            case "/explain":
                return Explain(self._request_id)
            case "/multi-line" | "/multiline":
                return self._begin("", self.ask)
            case "/help" | "/?":
                width = max(len(usage) for usage, _ in HELP)
                return Say("\n".join(f"{usage:<{width}}  {meaning}" for usage, meaning in HELP))
            case "/bye" | "/quit" | "/exit":
                return Leave()
        return Say(f"there is no command {name}; /help lists them")

    def _set(self, rest: str) -> Command | None:
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        value = value.strip()
        if name == "system":
            return self._text(value, self._set_system)
        if name not in PARAMETERS:
            return Say(f"/set PARAMETER VALUE, with one of {', '.join(PARAMETERS)}")
        if value == DEFAULT:
            self._options.pop(name, None)
            return Say(f"{name} is the server's default")
        try:
            found = self._value(name, value)
        except ValueError as error:
            return Say(f"{name}: {str(error).removeprefix(f'{name}: ')}")
        self._options[name] = found
        return Say(f"{name} is {found}")

    @staticmethod
    def _value(name: str, text: str) -> Any:
        """The value of a parameter; raises `ValueError` if a request cannot have it."""
        kind = PARAMETERS[name]
        if not text:
            raise ValueError("needs a value")
        try:
            value = kind(text)
        except ValueError as error:
            if kind in _KINDS:
                raise ValueError(f"expected {_KINDS[kind]}; got {text!r}") from None
            raise error from None
        make_request("", cast(Options, {name: value}))
        return value

    def _set_system(self, text: str) -> Say:
        self._system = text
        return Say("the system prompt is set" if text else "there is no system prompt")

    def _show(self) -> Say:
        parameters = ", ".join(f"{name} {value}" for name, value in self._options.items())
        facts = {
            "model": self._model,
            "system": self._system or "none",
            "parameters": parameters or "the server's defaults",
            "messages": str(len(self._turns)),
        }
        return Say("\n".join(f"{name:<10}  {value}" for name, value in facts.items()))
