"""Limits for chat templates, which are programs that run on users' text: steps of loops, size of the output, size of
what an operator or a method builds in one go. Pure: no clock, so that a conversation is refused always or never.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

STEP = "__step__"
"""The name under which a rendering finds its counter."""
MAX_VALUE_CHARS = 1 << 20
"""Length of what `*` or a method that fills up makes."""
_MAX_EXPONENT = 64
_FILLING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_WIDE = re.compile(r"%[^%a-zA-Z]*(\d{5}|\*)")
_BASE_STEPS, _STEPS_PER_TURN, _STEPS_PER_CHAR = 1000, 100, 4
_BASE_CHARS, _CHARS_PER_TURN, _OUTPUT_PER_CHAR = 64 << 10, 1 << 10, 8


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2, with limits."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See `SandboxedEnvironment`. Refuses what makes something very large."""
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= _MAX_EXPONENT):
            raise SecurityError(f"an exponent above {_MAX_EXPONENT}")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _check_size(len(value) * times)
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise SecurityError("formatting with % to a width of more than four digits, or a given one")
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See `SandboxedEnvironment`. Refuses to fill a text up to a great length."""
        if getattr(__obj, "__name__", "") in _FILLING:
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    _check_size(value)
        return super().call(__context, __obj, *args, **kwargs)

    def bounded_template(self, source: str) -> jinja2.Template:
        """Compile `source` so that each round of a loop is a step. Raises `jinja2.TemplateSyntaxError`."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            step = nodes.Call(nodes.Name(STEP, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(step).set_lineno(loop.lineno).set_environment(self))
        code = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.make_globals(None))


def render(template: jinja2.Template, num_turns: int, num_chars: int, **variables: Any) -> str:
    """The text, for a conversation of this size. Raises `SecurityError` above its limits, and what the template
    raises."""
    max_chars = _BASE_CHARS + num_turns * _CHARS_PER_TURN + num_chars * _OUTPUT_PER_CHAR
    step = _counter(_BASE_STEPS + num_turns * _STEPS_PER_TURN + num_chars * _STEPS_PER_CHAR)
    pieces: list[str] = []
    for piece in template.generate(**variables, **{STEP: step}):
        pieces.append(piece)
        max_chars -= len(piece)
        if max_chars < 0:
            raise SecurityError("the rendered text is too long for this conversation")
    return "".join(pieces)


def _counter(max_steps: int) -> Callable[[], None]:
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > max_steps:
            raise SecurityError(f"more than {max_steps} rounds of loops")

    return step


def _check_size(size: int) -> None:
    if size > MAX_VALUE_CHARS:
        raise SecurityError(f"a value of {size} parts, at most {MAX_VALUE_CHARS}")
