r"""The patterns that rules may have, and for each the pattern of what can still become a match. Pure.

A rule on a stream has to know two things of the text that has come: where it matches, and from where on more text could
make a match or a longer one. The second is a regular expression, too, which is made here from the syntax tree:

    E(c) = nothing                        for one character c
    E(x1 ... xn) = x1 ... x(i-1) E(xi)    for any i; and x1 ... xi, where the rest is more than nothing
    E(x|y) = E(x) | E(y)
    E(x{m,n}) = x{0,n-1} E(x) | x{1,n-1}

Where one can begin is a third, much smaller one, of the first characters. It finds the places at which the other two
are tried, each from its place on: RE2 goes through the text once then, in a few states. Searched for anywhere, patterns
with large repetitions cost it a hundred times that.

The assertions \b and \B take no character and may depend on the next one, so what ends before one can still change.

The syntax is that of RE2 without what has no longest match (`*`, `+`, `{n,}`), anchors, flags and named groups: a
stream could be held back for ever. Characters and classes are given on to RE2 as they are written, which checks them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_PATTERN_CHARS: Final = 2048
MAX_MATCH_CHARS: Final = 1024
"""Characters of the longest match, which a rule may hold back."""
MAX_DEPTH: Final = 8
"""Maximum depth of groups. Each may double the pattern of what can become a match."""
_NUM_FIRST: Final = 2
_MAX_FIRSTS: Final = 256
_MAX_REPEATS: Final = 1000
"""The same limit as in RE2."""
_ATOM: Final = re.compile(
    r"""\\[pP]\{\^?\w{1,64}\}|\\[pP]\w|\\x\{[0-9a-fA-F]{1,6}\}|\\x[0-9a-fA-F]{2}   # a property, a code point
    |\\[dDsSwWtnrfv]|\\[^\w\s]                                                       # a class, an escaped character
    |\[\^?\]?(?:\[:\^?\w{1,16}:\]|\\.|[^\]\\])*+\]                                   # [...]
    |[^\\\[\](){}*+?|^$]                                                             # a character""",
    re.VERBOSE | re.DOTALL,
)
_REPEAT: Final = re.compile(r"\{(\d{1,4})(,?)(\d{0,4})\}")


class PatternError(ValueError):
    """The message says what is wrong with a pattern."""


@dataclass(frozen=True, slots=True)
class PatternForms:
    """One pattern, for RE2."""

    match: str
    pending: str
    """Matches a text that more text could make a match, or a longer one; empty where there is none, as in a pattern of
    one character."""
    first: str
    """Matches where one may begin: the first characters, or as many as there are at the end of the text."""
    max_chars: int
    """Characters of the longest match; at least 1."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of a pattern, written so that it can be repeated and put beside others."""

    full: str
    firsts: frozenset[tuple[str, ...]]
    """What it may begin with: sequences of up to `_NUM_FIRST` characters, and the assertions before them; shorter ones
    where all of it is shorter."""
    extendable: str | None
    """See the module: None is nothing."""
    min_chars: int
    max_chars: int
    asserts: bool
    """Whether an assertion is in it."""


def read_pattern(text: str) -> PatternForms:
    """Both forms of a pattern. Raises `PatternError`."""
    if not 1 <= len(text) <= MAX_PATTERN_CHARS:
        raise PatternError(f"must have 1 to {MAX_PATTERN_CHARS} characters")
    reader = _Reader(text)
    node = reader.alternatives(0)
    if reader.pos < len(text):
        raise PatternError(f"a ) without ( at character {reader.pos + 1}")
    if node.min_chars == 0:
        raise PatternError("matches nothing at all, too; something in it must be there")
    if node.max_chars > MAX_MATCH_CHARS:
        raise PatternError(f"matches up to {node.max_chars} characters; at most {MAX_MATCH_CHARS} can be held back")
    first = "|".join(sorted({_begin(sequence) for sequence in node.firsts}))
    return PatternForms(node.full, node.extendable or "", first, node.max_chars)


class _Reader:
    """Recursive descent over one pattern."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.pos = 0

    def alternatives(self, depth: int) -> _Node:
        """`x|y|z`, up to the end or an unmatched parenthesis."""
        if depth > MAX_DEPTH:
            raise PatternError(f"at most {MAX_DEPTH} groups in each other")
        branches = [self._sequence(depth)]
        while self._takes("|"):
            branches.append(self._sequence(depth))
        if len(branches) == 1:
            return branches[0]
        return _Node(
            _group("|".join(branch.full for branch in branches)),
            _bounded(frozenset().union(*(branch.firsts for branch in branches))),
            _either([branch.extendable for branch in branches]),
            min(branch.min_chars for branch in branches),
            max(branch.max_chars for branch in branches),
            any(branch.asserts for branch in branches),
        )

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self.pos < len(self._text) and self._text[self.pos] not in "|)":
            parts.append(self._repeated(depth))
        extendable: str | None = None
        rest_chars, rest_asserts = 0, False
        firsts: frozenset[tuple[str, ...]] = frozenset(((),))
        for part in parts:
            firsts = _joined(firsts, part.firsts)
        for part in reversed(parts):
            ways = [part.extendable]
            if part.max_chars and (rest_chars or rest_asserts):
                ways.append(part.full + _optional(extendable))
            elif extendable is not None:  # behind an assertion
                ways.append(part.full + extendable)
            extendable = _either(ways)
            rest_chars += part.max_chars
            rest_asserts = rest_asserts or part.asserts
        return _Node(
            "".join(part.full for part in parts),
            firsts,
            extendable,
            sum(part.min_chars for part in parts),
            rest_chars,
            rest_asserts,
        )

    def _repeated(self, depth: int) -> _Node:
        node = self._single(depth)
        bounds = self._bounds()
        if bounds is None:
            return node
        least, most = bounds
        if node.asserts:
            raise PatternError("\\b and \\B cannot be repeated")
        if node.min_chars == 0:
            raise PatternError("what may be nothing cannot be repeated")
        if self.pos < len(self._text) and self._text[self.pos] in "?*+{":
            raise PatternError(f"two repetitions in a row at character {self.pos + 1}")
        ways = []
        if node.extendable is not None and most > 0:
            before = f"{node.full}{{0,{most - 1}}}" if most > 1 else ""
            ways.append(before + node.extendable)
        if most > 1:
            ways.append(f"{node.full}{{1,{most - 1}}}")
        full = f"{node.full}{{{least},{most}}}"
        firsts = node.firsts if most == 1 else _joined(node.firsts, node.firsts | {()} if least < 2 else node.firsts)
        if least == 0:
            firsts |= {()}
        return _Node(full, firsts, _either(ways), least * node.min_chars, most * node.max_chars, False)

    def _bounds(self) -> tuple[int, int] | None:
        if self._takes("?"):
            return 0, 1
        for sign in "*+":
            if self._takes(sign):
                raise PatternError(f"{sign} has no longest match; write how many, such as {{1,64}}")
        if self.pos >= len(self._text) or self._text[self.pos] != "{":
            return None
        found = _REPEAT.match(self._text, self.pos)
        if found is None:
            raise PatternError(f"no number of repetitions at character {self.pos + 1}; a brace is written \\{{")
        self.pos = found.end()
        least = int(found[1])
        if found[2] and not found[3]:
            raise PatternError(f"{found[0]} has no longest match; write how many, such as {{{least},{least + 64}}}")
        most = int(found[3]) if found[3] else least
        if not least <= most <= _MAX_REPEATS or most == 0:
            raise PatternError(f"{found[0]} must go up to 1 to {_MAX_REPEATS}, and not down")
        return least, most

    def _single(self, depth: int) -> _Node:
        text = self._text
        if text.startswith(("\\b", "\\B"), self.pos):
            self.pos += 2
            sign = text[self.pos - 2 : self.pos]
            return _Node(sign, frozenset(((sign,),)), None, 0, 0, True)
        if self._takes("("):
            if self._takes("?") and not self._takes(":"):
                raise PatternError("only plain groups, ( and (?:, are supported")
            inner = self.alternatives(depth + 1)
            if not self._takes(")"):
                raise PatternError("a ( without )")
            return _Node(
                _group(inner.full), inner.firsts, inner.extendable, inner.min_chars, inner.max_chars, inner.asserts
            )
        found = _ATOM.match(text, self.pos)
        if found is None:
            raise PatternError(
                f"what is at character {self.pos + 1} ({text[self.pos : self.pos + 8]!r}) is not supported"
            )
        self.pos = found.end()
        return _Node(found[0], frozenset(((found[0],),)), None, 1, 1, False)

    def _takes(self, sign: str) -> bool:
        if not self._text.startswith(sign, self.pos):
            return False
        self.pos += len(sign)
        return True


_ASSERTIONS: Final = ("\\b", "\\B")


def _joined(before: frozenset[tuple[str, ...]], after: frozenset[tuple[str, ...]]) -> frozenset[tuple[str, ...]]:
    """What two parts one behind the other may begin with."""
    made = {one if _num_chars(one) >= _NUM_FIRST else _cut(one + other) for one in before for other in after}
    return _bounded(frozenset(made))


def _bounded(firsts: frozenset[tuple[str, ...]]) -> frozenset[tuple[str, ...]]:
    if len(firsts) > _MAX_FIRSTS:
        raise PatternError(f"begins in more than {_MAX_FIRSTS} ways")
    return firsts


def _cut(sequence: tuple[str, ...]) -> tuple[str, ...]:
    """Up to its last character that counts."""
    num_chars = 0
    for i, one in enumerate(sequence):
        num_chars += one not in _ASSERTIONS
        if num_chars == _NUM_FIRST:
            return sequence[: i + 1]
    return sequence


def _num_chars(sequence: tuple[str, ...]) -> int:
    return sum(one not in _ASSERTIONS for one in sequence)


def _begin(sequence: tuple[str, ...]) -> str:
    """The characters of a beginning, or as many as there are: the first one must be there."""
    written, num_chars, num_open = "", 0, 0
    for one in sequence:
        if num_chars:
            written += r"(?:\z|"
            num_open += 1
        written += one
        num_chars += one not in _ASSERTIONS
    return _group(written + ")" * num_open)


def _group(text: str) -> str:
    return f"(?:{text})"


def _optional(text: str | None) -> str:
    return "" if text is None else f"(?:{text})?"


def _either(ways: Sequence[str | None]) -> str | None:
    """One group of what there is."""
    found = list(dict.fromkeys(way for way in ways if way is not None))
    return _group("|".join(found)) if found else None
