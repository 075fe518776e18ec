"""Several patterns as one scanner for RE2, whose time is linear in the text whatever the patterns are.

Texts are bytes of UTF-8 here, so that no position has to be converted unless something is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from disagg.gateway.guardrails.pattern_syntax import PatternError, read_pattern

if TYPE_CHECKING:
    from re2 import _Regexp as Regexp
else:
    Regexp = Any

_MAX_BYTES_A_CHAR: Final = 4
_BLOCK_BYTES: Final = 16 << 10
"""Bytes of a long text that are searched for any match at once."""
_MAX_MEMORY: Final = 16 << 20
"""Bytes of memory for one compiled pattern and its states."""


class Found(NamedTuple):
    """Place where something matches, or may begin to."""

    start: int
    end: int
    """End in bytes. With `pattern` None the end of the text."""
    pattern: int | None
    """Index of the one that matches; of several that match so much, the first one. None where more text could make a
    match, or a longer one."""


class Scanner:
    """Where patterns match: leftmost, and of what begins there the longest.

    Args:
        patterns: see `syntax`; each with whether upper and lower case are the same.

    Raises:
        PatternError: if a pattern cannot be used.
    """

    def __init__(self, patterns: Sequence[tuple[str, bool]]) -> None:
        forms = [(read_pattern(text), "(?i:" if ignores_case else "(?:") for text, ignores_case in patterns]
        self._each = [_compiled(f"{flags}{form.match})") for form, flags in forms]
        self._any = _compiled("|".join(f"{flags}{form.match})" for form, flags in forms))
        self._first = _compiled("|".join(f"{flags}{form.first})" for form, flags in forms))
        pending = [f"{flags}{form.pending})" for form, flags in forms if form.pending]
        self._pending = _compiled("|".join(pending)) if pending else None
        self._set = _set_of([f"{flags}{form.match})" for form, flags in forms])
        self._max_bytes = _MAX_BYTES_A_CHAR * max(form.max_chars for form, _ in forms)

    def find(self, text: bytes, start: int, ended: bool) -> Found | None:
        """What comes first in text[start:]; what is before `start` is only looked at by assertions.

        Args:
            text: UTF-8.
            start: where a character begins.
            ended: whether no more text comes.
        """
        looked_until = 0
        while (first := self._first.search(text, start)) is not None:
            place = int(first.start())
            if len(text) - place > 2 * _BLOCK_BYTES and place >= looked_until:
                start = self._after_clear_blocks(text, place)
                looked_until = start + _BLOCK_BYTES
                if start != place:
                    continue
            if not ended and self._pending is not None and self._pending.fullmatch(text, place) is not None:
                return Found(place, len(text), None)
            match = self._any.match(text, place)
            if match is not None:
                return Found(place, int(match.end()), self._index(text, place, int(match.end())))
            start = _next_char(text, place)
        return None

    def _after_clear_blocks(self, text: bytes, start: int) -> int:
        """`start`, or a later character before which nothing matches. To know whether there is a match takes RE2 one
        way through the text, and no attempt at each place."""
        while len(text) - start > 2 * _BLOCK_BYTES:
            end = start + _BLOCK_BYTES
            block = text[max(0, start - _MAX_BYTES_A_CHAR) : end + self._max_bytes + _MAX_BYTES_A_CHAR]
            if self._set.Match(block):
                break
            start = _next_char(text, end - 1)
        return start

    def _index(self, text: bytes, start: int, end: int) -> int:
        """Index of the first pattern that matches text[start:end], the longest match there."""
        for index, pattern in enumerate(self._each):
            match = pattern.match(text, start)
            if match is not None and match.end() == end:
                return index
        raise AssertionError("one of the patterns matches where any does")


def _next_char(text: bytes, place: int) -> int:
    """Index at which the character after the one at `place` begins."""
    place += 1
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return place


def check_pattern(text: str) -> None:
    """Raises `PatternError` if it cannot be used."""
    Scanner([(text, False)])


def _compiled(pattern: str) -> Regexp:
    import re2

    try:
        return re2.compile(pattern, _options())
    except re2.error as error:
        raise _wrong(error) from None


def _set_of(patterns: Sequence[str]) -> Any:
    """All of them, for whether one is in a text."""
    import re2

    made = re2.Set.SearchSet(_options())
    try:
        for pattern in patterns:
            made.Add(pattern)
        made.Compile()
    except re2.error as error:
        raise _wrong(error) from None
    return made


def _options() -> Any:
    # Only gateways with such rules pay for the library.
    import re2

    options = re2.Options()
    options.longest_match = True
    options.log_errors = False
    options.max_mem = _MAX_MEMORY
    return options


def _wrong(error: Exception) -> PatternError:
    reason = error.args[0]
    return PatternError(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason))
