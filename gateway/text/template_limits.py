"""Limits for chat templates, which are programs that run on users' text: steps of loops, size of the output, size of
what is built in one go, and work in all. Pure: no clock, so that a conversation is refused always or never.

Work is counted in characters that are copied; a call and an item of a list count as several. What an operator, a method
or a filter builds is counted before it is built.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from disagg.gateway.text.written_json import WrittenNumber

MAX_VALUE_CHARS = 1 << 20
"""Maximum length of the result of `*` or of a method that pads."""
_MAX_EXPONENT = 64
_MAX_BITS = 4096
"""Maximum number of bits of an integer."""
_MAX_DEPTH = 64
"""Maximum depth of lists within lists."""
_MAX_INDENT = 16
"""Maximum indent of JSON, and maximum length of its separators."""
_FILLING = frozenset({"center", "ljust", "rjust", "zfill"})
_WIDE = re.compile(r"%(?:\([^)]*\))?[^%a-zA-Z]*(\d{5}|\*)")
_WIDE_SPEC = re.compile(r"\d{5}|\{")
_BASE_STEPS, _STEPS_PER_TURN, _STEPS_PER_CHAR = 1000, 100, 4
_BASE_CHARS, _CHARS_PER_TURN, _OUTPUT_PER_CHAR = 64 << 10, 1 << 10, 8
_BASE_WORK, _WORK_PER_OUTPUT = 16 << 20, 64
_CALL_WORK, _ITEM_WORK = 256, 64
_UNUSED_GLOBALS = ("lipsum",)
_UNUSED_FILTERS = ("batch", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
"""What no chat template needs, and makes much of little."""
_CHEAP_FILTERS = frozenset({"attr", "count", "d", "default", "first", "last", "length"})
"""What they cost does not depend on the size of the value."""
_REFUSED_METHODS = frozenset({"encode", "maketrans", "to_bytes", "translate"})
_ADDED = frozenset({"_loop_vars", "_block_vars"})
"""Arguments by name that compiled templates add to a call, for functions that look at the context."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2, with limits."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_output, **options)
        for name in _UNUSED_GLOBALS:
            del self.globals[name]
        for name in _UNUSED_FILTERS:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """A filter whose work is counted."""
        self.filters[name] = _counted(name, function)

    @override
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses what makes something very large."""
        work = _WORK.get()
        if operator == "**":
            if not (isinstance(right, int | float) and abs(right) <= _MAX_EXPONENT):
                raise SecurityError(f"an exponent above {_MAX_EXPONENT}")
            if isinstance(left, int):
                _check_bits(left.bit_length() * abs(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _check_size(len(value) * times)
                    work.read(value, times)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "%" and isinstance(left, str):
            work.percent(left, right)
        elif operator == "+":
            work.read(left)
            work.read(right)
        return super().call_binop(context, operator, left, right)

    @override
    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts the call, and what a method builds, before it does."""
        if getattr(__obj, "__self__", None) is self:
            return __obj(*args)
        work = _WORK.get()
        work.take(_CALL_WORK)
        name = getattr(__obj, "__name__", "")
        if name in _REFUSED_METHODS:
            raise SecurityError(f"the method {name!r}")
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            args = work.method(owner, name, args, [kwargs[key] for key in kwargs.keys() - _ADDED])
        else:
            work.read(owner)
        return work.result(super().call(__context, __obj, *args, **kwargs))

    def step(self, num_chars: int) -> None:
        """Count a round of a loop, by the size of the text of its body."""
        _WORK.get().step(num_chars)

    def read(self, value: Any) -> Any:
        """A value that is searched, or of which a part is copied."""
        _WORK.get().read(value)
        return value

    def text(self, value: Any) -> Any:
        """A value that becomes part of a text."""
        _WORK.get().take(_text_size(value))
        return value

    def bounded_template(self, source: str) -> jinja2.Template:
        """Compile `source` so that work is counted. Raises `jinja2.TemplateSyntaxError`."""
        tree = self.parse(source)
        for concat in tree.find_all(nodes.Concat):
            concat.nodes = [self._through("text", node) for node in concat.nodes]
        for operand in tree.find_all(nodes.Operand):
            if operand.op in ("in", "notin"):
                operand.expr = self._through("read", operand.expr)
        for item in tree.find_all(nodes.Getitem):
            if isinstance(item.arg, nodes.Slice):
                item.node = self._through("read", item.node)
        for loop in tree.find_all(nodes.For):
            num_chars = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            step = self._through("step", nodes.Const(num_chars, lineno=loop.lineno))
            loop.body.insert(0, nodes.ExprStmt(step).set_lineno(loop.lineno).set_environment(self))
        code = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def _through(self, method: str, node: nodes.Expr) -> nodes.Expr:
        """A call of a method of this environment, which no variable of a template can hide."""
        call = nodes.Call(nodes.EnvironmentAttribute(method), [node], [], None, None)
        call.set_lineno(node.lineno).set_environment(self)
        return call


class _Work:
    """What one rendering may still do."""

    def __init__(self, max_steps: int, max_work: int) -> None:
        self._max_steps = max_steps
        self._num_steps = 0
        self._left = max_work

    def step(self, num_chars: int) -> None:
        self._num_steps += 1
        if self._num_steps > self._max_steps:
            raise SecurityError(f"more than {self._max_steps} rounds of loops")
        self.take(num_chars)

    def take(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise SecurityError("more work than a conversation of this size may cost")

    def read(self, value: Any, times: int = 1) -> None:
        """All of a value is looked at or copied."""
        if isinstance(value, str):
            self.take(len(value) * max(0, times))
        elif isinstance(value, list | tuple | dict | range):
            self.take(_ITEM_WORK * len(value) * max(0, times))

    def result(self, value: Any) -> Any:
        """What a function returned. Items that are still to be made are counted as they are."""
        if isinstance(value, int):
            _check_bits(value.bit_length())
        elif isinstance(value, Iterator):
            return self._items(value)
        else:
            self.read(value)
        return value

    def percent(self, form: str, values: Any) -> None:
        """A text is formatted with `%`."""
        if _WIDE.search(form):
            raise SecurityError("formatting with % to a width of more than four digits, or a given one")
        self.take(len(form) + form.count("%") * _text_size(values))

    def method(self, text: str, name: str, args: tuple[Any, ...], more: list[Any]) -> tuple[Any, ...]:
        """A method of a text is called, `more` being what is given by name. Returns the other arguments to call it
        with."""
        given = (*args, *more)
        self.take(len(text))
        if name in _FILLING:
            _check_sizes(given)
        elif name == "expandtabs":
            size = max((value for value in given if isinstance(value, int)), default=8)
            _check_size(size)
            self.take(text.count("\t") * max(0, size))
        elif name == "replace":
            self.replace(text, args)
        elif name == "join" and args:
            return (self.join(text, args[0]), *args[1:])
        elif name in ("format", "format_map"):
            self._format(text, given)
        return args

    def replace(self, text: str, args: tuple[Any, ...]) -> None:
        """Parts of a text are replaced: `args` are what by what, as strings."""
        if len(args) >= 2:
            self.take(len(text) + (text.count(str(args[0])) + 1) * _text_size(args[1]))

    def join(self, separator: str, values: Any) -> list[Any]:
        """Values are joined. Returns them."""
        items = values if isinstance(values, list) else list(self._items(iter(values)))
        self.take(len(items) * len(separator) + _text_size(items))
        return items

    def filter(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        """A filter is called on `args[0]`, which it may change to what it stands for."""
        value, more = args[0], (*args[1:], *kwargs.values())
        self.take(_CALL_WORK)
        if name not in _CHEAP_FILTERS:
            self.read(value)
        match name:
            case "center":
                _check_sizes(more)
            case "indent":
                _check_sizes(more)
                width = max((len(w) if isinstance(w, str) else w for w in more if isinstance(w, str | int)), default=4)
                self.take((_text_of(value).count("\n") + 1) * max(4, width))
            case "replace":
                changed = kwargs.get("old"), kwargs.get("new")
                self.replace(_text_of(value), (*args[1:], *(each for each in changed if each is not None)))
            case "join":
                separator = args[1] if len(args) > 1 else kwargs.get("d", "")
                if not isinstance(value, Undefined):
                    args[0] = self.join(_text_of(separator), value)
            case "format":
                self.percent(_text_of(value), list(more))
            case "tojson":
                _check_json(kwargs, args[1:])
                self.take(6 * _text_size(value) * (_MAX_INDENT if more else 1))
            case "round":
                if any(isinstance(digits, int) and abs(digits) > _MAX_EXPONENT for digits in more):
                    raise SecurityError(f"rounding to more than {_MAX_EXPONENT} digits")
            case "sum":
                if not all(isinstance(start, int | float | str | None) for start in more):
                    raise SecurityError("only sums of numbers")
            case "string" | "escape" | "e" | "forceescape" | "safe" | "trim" | "upper" | "lower" | "title":
                self.take(6 * _text_size(value))
            case _:
                pass

    def _format(self, text: str, given: tuple[Any, ...]) -> None:
        num_fields = 0
        for _, field, spec, _ in string.Formatter().parse(text):
            num_fields += field is not None
            if spec and _WIDE_SPEC.search(spec):
                raise SecurityError("formatting to a width of more than four digits, or a given one")
        self.take(num_fields * _text_size(list(given)))

    def _items(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.take(_ITEM_WORK)
            yield item


_WORK: ContextVar[_Work] = ContextVar("template_work")
"""Work of the present rendering. There is none while a template is compiled, so that nothing is computed then."""


def render(template: jinja2.Template, num_turns: int, num_chars: int, variables: Mapping[str, Any]) -> str:
    """The text, for a conversation of this size. Raises `SecurityError` above its limits, and what the template
    raises."""
    max_chars = _BASE_CHARS + num_turns * _CHARS_PER_TURN + num_chars * _OUTPUT_PER_CHAR
    max_steps = _BASE_STEPS + num_turns * _STEPS_PER_TURN + num_chars * _STEPS_PER_CHAR
    token = _WORK.set(_Work(max_steps, _BASE_WORK + max_chars * _WORK_PER_OUTPUT))
    try:
        pieces: list[str] = []
        for piece in template.generate(variables):
            pieces.append(piece)
            max_chars -= len(piece)
            if max_chars < 0:
                raise SecurityError("the rendered text is too long for this conversation")
        return "".join(pieces)
    finally:
        _WORK.reset(token)


@jinja2.pass_context
def _output(context: Context, value: Any) -> Any:
    """What `{{ }}` writes."""
    _WORK.get().take(_text_size(value))
    return value


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts its work. Its first argument may be one that jinja2 adds."""
    num_added = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        work, own = _WORK.get(), list(args[num_added:])
        work.filter(name, own, kwargs)
        return work.result(function(*args[:num_added], *own, **kwargs))

    return counted


def _text_size(value: Any, depth: int = 0) -> int:
    """Characters of a value as text, or a few more. Counts the items that it looks at."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, WrittenNumber):
        return len(value.text)
    if depth > _MAX_DEPTH:
        raise SecurityError(f"lists nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        items: Any = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        return 1 if value is None or isinstance(value, bool | int | float) else _ITEM_WORK
    work = _WORK.get()
    size = 2
    for item in items:
        work.take(_ITEM_WORK)
        size += 4 + _text_size(item, depth + 1)
    return size


def _text_of(value: Any) -> str:
    """A value as text."""
    _WORK.get().take(_text_size(value))
    return str(value)


def _check_sizes(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, int):
            _check_size(value)


def _check_size(size: int) -> None:
    if size > MAX_VALUE_CHARS:
        raise SecurityError(f"a value of {size} parts, at most {MAX_VALUE_CHARS}")


def _check_bits(num_bits: float) -> None:
    if num_bits > _MAX_BITS:
        raise SecurityError(f"an integer of more than {_MAX_BITS} bits")


def _check_json(options: dict[str, Any], more: list[Any]) -> None:
    given = [*more, options.get("indent"), *(options.get("separators") or ())]
    sizes = (len(each) if isinstance(each, str) else each for each in given)
    if any(isinstance(size, int) and size > _MAX_INDENT for size in sizes):
        raise SecurityError(f"an indent or a separator of more than {_MAX_INDENT} characters")
