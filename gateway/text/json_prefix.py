"""Whether a text that comes in pieces can still become a JSON object, and whether its end is inside a string. Pure.

That tells a delimiter behind JSON from the same characters inside of it. Each character is looked at once, and nothing
is kept of it. Stricter than needed to find strings, so that most text that is no JSON shows it at once; less strict
than JSON: numbers and names are any letters and digits, and an object may have what a list has.
"""

from __future__ import annotations

import re
from typing import Final

_IN_STRING: Final = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE: Final = " \t\r\n"
_WORD: Final = "0"
"""Stands for any number or name."""
_BEFORE_VALUE: Final = "[,:"


class JsonPrefix:
    """Reader of one JSON text that comes in pieces."""

    def __init__(self) -> None:
        self.in_string = False
        """Whether the next character is a string's."""
        self._is_escaped = False
        self._last = ""
        """The last character that is no white space; empty before the first one."""
        self._depth = 0

    @property
    def is_complete(self) -> bool:
        """Whether an object was read to its end."""
        return self._last == "}" and not self._depth

    def read(self, text: str, start: int) -> int:
        """Take text[start:]; the index of the first character that cannot come there, or the length."""
        place = start
        while place < len(text):
            if not self.in_string:
                if not self._takes(text[place]):
                    break
                place += 1
            elif self._is_escaped:
                self._is_escaped = False
                place += 1
            else:
                place = self._end_of_run(text, place)
                if place < len(text):
                    if text[place] not in '"\\':
                        break
                    self._is_escaped = text[place] == "\\"
                    self.in_string = self._is_escaped
                    place += 1
        return place

    def _end_of_run(self, text: str, place: int) -> int:
        match = _IN_STRING.match(text, place)
        assert match is not None
        return match.end()

    def _takes(self, char: str) -> bool:
        """Take a character outside of strings, if it may come there."""
        if char in _SPACE:
            return True
        last = self._last
        if not self._depth:
            fits = char == "{" and not last
        elif char == '"':
            fits = last in _BEFORE_VALUE or last == "{"
            self.in_string = fits
        elif char in "{[":
            fits = last in _BEFORE_VALUE
        elif char in "}]":
            fits = last not in ",:"
        elif char == ":":
            fits = last == '"'
        elif char == ",":
            fits = last not in "{[,:"
        else:
            fits = (char.isalnum() or char in "+-.") and (last in _BEFORE_VALUE or last == _WORD)
            char = _WORD
        if fits:
            self._last = char
            self._depth += (char in "{[") - (char in "}]")
        return fits
