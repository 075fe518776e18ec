"""The likeliest tokens beside an answer's own show nothing that a guardrail would not let pass."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.gateway.guardrails.alternatives import Alternatives
from disagg.gateway.guardrails.scanner import Scanner
from disagg.proto.messages import TokenLogprobs

TEXTS = [" the", " cat", "cat", "con", "s", " se", "cret", "secret", "c", "ecret", "\xe9"]


def ids(*texts: str) -> tuple[int, ...]:
    return tuple(TEXTS.index(text) for text in texts)


def shown(*tokens: tuple[str, Sequence[str]], scanners: list[Scanner] | None) -> list[list[str]]:
    """What is shown beside each token."""
    alternatives = Alternatives(scanners, lambda token_id: TEXTS[token_id].encode())
    found = []
    for text, others in tokens:
        logprobs = TokenLogprobs(-1.0, ids(*others), tuple(-float(i) for i in range(len(others))))
        one = alternatives.shown(TEXTS.index(text), logprobs)
        assert one.top_logprobs == logprobs.top_logprobs[: len(one.top_ids)]
        found.append([TEXTS[i] for i in one.top_ids])
    return found


RULES = [Scanner([("secret", False)]), Scanner([(r"\bcat\b", False)])]


def test_one_that_would_complete_a_match_is_left_out_with_those_after_it() -> None:
    assert shown((" the", [" the", "con", "secret", " se"]), scanners=RULES) == [[" the", "con"]]
    found = shown((" se", ["secret", " se"]), ("con", ["con", "cret", " the"]), ("s", ["cret", "s"]), scanners=RULES)
    assert found == [[], ["con"], ["cret", "s"]]


def test_a_match_begins_in_the_text_before() -> None:
    assert shown(("s", ["s"]), ("c", ["c", "ecret"]), (" the", ["ecret"]), scanners=RULES) == [["s"], ["c"], ["ecret"]]


def test_words_have_borders() -> None:
    assert shown((" the", [" the"]), ("con", ["cat"]), scanners=RULES) == [[" the"], ["cat"]]
    assert shown((" the", [" cat", " the"]), ("s", ["cat"]), scanners=RULES) == [[], ["cat"]]


def test_where_somebody_is_asked_only_the_text_itself_is_shown() -> None:
    assert shown((" the", [" the", "con"]), ("s", ["c", "s"]), scanners=None) == [[" the"], []]


def test_the_token_itself_is_decided_with_the_text() -> None:
    """As the first part of another word, for example."""
    assert shown(("cat", ["cat", "c"]), ("s", ["s"]), scanners=RULES) == [["cat", "c"], ["s"]]
