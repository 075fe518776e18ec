"""Patterns of rules: what they match, and what of a text can still become a match."""

from __future__ import annotations

import itertools

import pytest
import re2
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.gateway.guardrails.pattern_syntax import PatternError, read_pattern

ALPHABET = "ab-"


def patterns(depth: int = 2) -> st.SearchStrategy[str]:
    """Patterns of few characters, with everything that the syntax has."""
    atoms = st.sampled_from(["a", "b", "-", "[ab]", "[^a]", ".", r"\w", r"\-"])
    if depth == 0:
        return atoms
    inner = patterns(depth - 1)
    repeats = st.sampled_from(["?", "{2}", "{1,2}", "{0,2}"])
    parts = atoms | st.tuples(inner, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}") | inner.map("({})".format)
    sequences = st.lists(parts | st.sampled_from([r"\b", r"\B"]), min_size=1, max_size=3).map("".join)
    return sequences | st.tuples(sequences, sequences).map("|".join)


def fullmatch(pattern: str, text: str) -> bool:
    options = re2.Options()
    options.longest_match = True
    options.log_errors = False
    return re2.compile(pattern, options).fullmatch(text) is not None


@settings(max_examples=150, deadline=None)
@given(patterns(1))
def test_pending_is_what_more_text_can_make_a_longer_match(pattern: str) -> None:
    try:
        forms = read_pattern(pattern)
        fullmatch(forms.match, "a")
    except (PatternError, re2.error):
        return
    plain = re2.compile(f"(?:{forms.match})")
    longest = min(forms.max_chars, 4)
    for size in range(1, longest):
        for text in map("".join, itertools.product(ALPHABET, repeat=size)):
            tails = itertools.chain.from_iterable(
                map("".join, itertools.product(ALPHABET, repeat=n)) for n in range(1, longest - size + 1)
            )
            can_grow = any(plain.fullmatch(text + tail) is not None for tail in tails)
            if can_grow:
                assert forms.pending, pattern
                assert fullmatch(forms.pending, text), (pattern, text)


@settings(max_examples=150, deadline=None)
@given(patterns(1), st.text(ALPHABET, max_size=8), st.text(ALPHABET, max_size=4))
def test_a_place_that_may_begin_a_match_is_found(pattern: str, text: str, more: str) -> None:
    """Of any match in the text and what may follow, if it begins in the text."""
    try:
        forms = read_pattern(pattern)
        plain = re2.compile(forms.match)
    except (PatternError, re2.error):
        return
    first, whole = re2.compile(forms.first), text + more
    for place in range(len(text)):
        if (found := plain.match(whole, place)) is not None and found.end() > place:
            assert first.match(text, place) is not None, (pattern, text, more)


@pytest.mark.parametrize(
    ("pattern", "pending", "done"),
    [
        ("abc", ["a", "ab"], ["abc", "b", "ac"]),
        ("[0-9]{4}", ["1", "12", "123"], ["1234", "a"]),
        ("[0-9]{2,4}", ["1", "12", "123"], ["1234"]),
        (r"foo\b", ["f", "fo", "foo"], ["food", "fx"]),
        (r"\bab", ["a"], ["ab", "b"]),
        ("a|bc", ["b"], ["a", "bc"]),
        ("x(?:yz?){2}", ["x", "xy", "xyz", "xyy", "xyzy"], ["xyzyz", "xz"]),
    ],
)
def test_only_what_can_still_become_a_match_is_pending(pattern: str, pending: list[str], done: list[str]) -> None:
    forms = read_pattern(pattern)
    assert [text for text in pending if not fullmatch(forms.pending, text)] == []
    assert [text for text in done if forms.pending and fullmatch(forms.pending, text)] == []


def test_a_single_character_is_never_pending() -> None:
    assert read_pattern("[a-z]").pending == ""


@pytest.mark.parametrize(
    ("pattern", "max_chars"),
    [("abc", 3), ("a?b", 2), (r"\bx{2,7}\b", 7), ("(?:ab|c){3}", 6), (r"[\]a-]{4}\x{1F600}\pL[[:alpha:]]", 7)],
)
def test_the_longest_match(pattern: str, max_chars: int) -> None:
    assert read_pattern(pattern).max_chars == max_chars


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "must have 1 to 2048 characters"),
        ("a*", "* has no longest match; write how many, such as {1,64}"),
        ("a+b", "+ has no longest match; write how many, such as {1,64}"),
        ("a{2,}", "{2,} has no longest match; write how many, such as {2,66}"),
        ("a?", "matches nothing at all, too; something in it must be there"),
        ("a{0}", "{0} must go up to 1 to 1000, and not down"),
        ("a{3,2}", "{3,2} must go up to 1 to 1000, and not down"),
        ("a{x}", "no number of repetitions at character 2; a brace is written \\{"),
        ("a{2}{3}", "two repetitions in a row at character 5"),
        ("(?=a)", "only plain groups, ( and (?:, are supported"),
        ("(?P<n>a)", "only plain groups, ( and (?:, are supported"),
        ("(a", "a ( without )"),
        ("a)", "a ) without ( at character 2"),
        ("^a", "what is at character 1 ('^a') is not supported"),
        ("(\\ba){2}", "\\b and \\B cannot be repeated"),
        ("(a?){2}b", "what may be nothing cannot be repeated"),
        ("(?:a{1000}){2}", "matches up to 2000 characters; at most 1024 can be held back"),
        ("(" * 9 + "a" + ")" * 9, "at most 8 groups in each other"),
    ],
)
def test_what_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        read_pattern(pattern)
    assert str(caught.value) == message
