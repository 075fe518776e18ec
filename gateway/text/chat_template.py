"""Chat templates: the model's own Jinja source, run in a sandbox with the helpers that published templates expect.

The environment behaves as that of `transformers` (`apply_chat_template`): block trimming, `break`/`continue`, the
`{% generation %}` tag, `tojson` without HTML escapes, `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from disagg.gateway.text.reasoning import ReasoningFormat, reasoning_format_of
from disagg.gateway.text.template_limits import BoundedEnvironment, render
from disagg.gateway.text.tool_calls import ToolFormat, format_of
from disagg.gateway.text.written_json import read_json, write_json
from disagg.proto.errors import ConfigError, InvalidRequestError

RESERVED: Final = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        *(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")),
    }
)
"""Variables that a request cannot set as one of `chat_template_kwargs`."""
_MAX_TIME_CHARS = 256
"""Maximum length of the format of a time."""
_TOOLS_TEXT = (
    "You may call these functions. To call one, write a JSON object with its name and arguments between tags:"
    ' <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
)


class ChatTurn(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str
    extra: str = ""
    """A JSON object of further fields for the template, such as `tool_calls`; empty without."""


class TemplateOptions(NamedTuple):
    """What a request may choose of the rendering."""

    variables: str = ""
    """A JSON object of variables for the template; empty without."""
    begins_answer: bool = True
    """The prompt ends with the beginning of the assistant's turn (`add_generation_prompt`)."""
    continues: bool = False
    """The last turn is not ended: the answer continues it (`continue_final_message`)."""


NO_OPTIONS: Final = TemplateOptions()
_CUT: Final = "\U000f0003"
"""Private-use character that marks where a continued turn ends."""


class ChatTemplate:
    """A compiled template. Stateless, so it may render on several threads at once."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile `source`. Raises `ConfigError` where it is not valid Jinja."""
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.add_filter("tojson", _tojson)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: _time(now(), form)
        self._special_tokens = dict(special_tokens)
        self.tool_format: ToolFormat = format_of(source)
        self.reasoning_format: ReasoningFormat = reasoning_format_of(source)
        try:
            self._template = environment.bounded_template(source)
            self._knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(self, turns: Sequence[ChatTurn], tools: str = "", options: TemplateOptions = NO_OPTIONS) -> str:
        """The text of the conversation up to the beginning of the assistant's turn, or as `options` say.

        Args:
            tools: JSON of a list; empty without. A template that has no place for tools gets them as text.
            options: the names of variables must not be those that `RESERVED` has.

        Raises:
            InvalidRequestError: if the template refuses these turns, for example their order, fails on them, or does
                more work than a conversation of this size may cost.
        """
        if not self._knows_tools:
            turns, tools = turns_without_tools(turns, tools), ""
        if options.continues:
            turns = [*turns[:-1], turns[-1]._replace(content=turns[-1].content + _CUT)]
        messages = [_message(turn) for turn in turns]
        try:
            text = render(
                self._template,
                len(turns),
                sum(len(turn.content) + len(turn.extra) for turn in turns) + len(tools) + len(options.variables),
                {
                    "messages": messages,
                    "tools": json.loads(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": options.begins_answer,
                    **self._special_tokens,
                    **(json.loads(options.variables) if options.variables else {}),
                },
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError("chat.messages", f"the model's chat template refuses them: {error}") from error
        except Exception as error:  # a template is a program, and fails like one: ZeroDivisionError, RecursionError
            why = f"{type(error).__name__}: {error}"
            raise InvalidRequestError("chat.messages", f"the model's chat template fails on them: {why}") from error
        return _cut(text) if options.continues else text


def _cut(text: str) -> str:
    """Rendered text up to the end of the turn that is continued."""
    end = text.rfind(_CUT)
    if end < 0:
        raise InvalidRequestError("chat.continue_final_message", "the model's chat template leaves the message out")
    return text[:end]


def turns_without_tools(turns: Sequence[ChatTurn], tools: str) -> list[ChatTurn]:
    """The same conversation for a template without tools: they are described in the system message, and calls and
    results are written as text, all as Hermes models do."""
    plain = [_plain(turn) for turn in turns]
    if not tools:
        return plain
    offered = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in json.loads(tools))
    text = f"{_TOOLS_TEXT}\n<tools>\n{offered}\n</tools>"
    if plain and plain[0].role == "system":
        return [ChatTurn("system", f"{plain[0].content}\n\n{text}"), *plain[1:]]
    return [ChatTurn("system", text), *plain]


def _plain(turn: ChatTurn) -> ChatTurn:
    if turn.role == "tool":
        return ChatTurn("user", f"<tool_response>\n{turn.content}\n</tool_response>")
    calls = read_json(turn.extra).get("tool_calls", []) if turn.extra else []
    texts = [f"<tool_call>\n{write_json(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    return ChatTurn(turn.role, "\n".join([turn.content, *texts] if turn.content else texts)) if texts else turn


def _message(turn: ChatTurn) -> dict[str, Any]:
    message = {"role": turn.role, "content": turn.content}
    return {**message, **read_json(turn.extra)} if turn.extra else message


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training; here it only has a body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _time(now: datetime, form: str) -> str:
    if len(form) > _MAX_TIME_CHARS:
        raise jinja2.TemplateError(f"a form of more than {_MAX_TIME_CHARS} characters for the time")
    return now.strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return write_json(value, ensure_ascii=ensure_ascii, indent=indent, **options)
