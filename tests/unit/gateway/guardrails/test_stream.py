"""Text through guardrails as it comes: the same whatever pieces it comes in, and held back only as far as needed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.gateway.guardrails.config import RuleOptions
from disagg.gateway.guardrails.release import Part, TokenRelease
from disagg.gateway.guardrails.rules import Rules
from disagg.gateway.guardrails.stream import Chain, Check, PieceCheck
from disagg.gateway.requests.verdicts import ALLOW, Decision, Decisions, Question, Replace, Stop, Verdict

Answer = Callable[[Question], Verdict]


def allow(_: Question) -> Verdict:
    return ALLOW


def run(chain: Chain, pieces: Sequence[str], answer: Answer = allow) -> tuple[list[str], str | None]:
    """What each piece and the end released, and the reason of a stop."""
    released: list[str] = []
    for text, ended in [*((piece, False) for piece in pieces), ("", True)]:
        work = chain.feed(text, ended)
        try:
            question = next(work)
            while True:
                question = work.send(answer(question))
        except StopIteration as end:
            released.append("".join(run.text for run in end.value))
        if chain.stopped is not None:
            return released, chain.stopped.reason
    return released, None


def chain_of(*rules: RuleOptions, may_replace: bool = True, decisions: Decisions | None = None) -> Chain:
    note, made = (decisions or Decisions()).add, Rules("g", rules)
    return Chain([*made.limits(note), *made.checks("answer", may_replace, note)])


def cuts(text: str, seed: int) -> list[str]:
    """The text in random pieces."""
    dice, pieces, start = random.Random(seed), list[str](), 0
    while start < len(text):
        size = dice.choice((1, 1, 2, 3, 7))
        pieces.append(text[start : start + size])
        start += size
    return pieces


class TestHoldingBack:
    def test_only_a_suffix_that_can_become_a_match_is_held_back(self) -> None:
        chain = chain_of(RuleOptions(pattern="secret", action="replace", replacement="[x]"))
        pieces = ["a se", "a", "cret s", "ecre", "t", " sec"]
        assert run(chain, pieces) == (["a ", "sea", "cret ", "", "[x]", " ", "sec"], None)

    def test_a_longer_match_is_waited_for(self) -> None:
        chain = chain_of(RuleOptions(pattern="[0-9]{3,5}", action="replace", replacement="#"))
        assert run(chain, ["12", "3", "4", "5", "6 ", "789", " "]) == (["", "", "", "#", "6 ", "", "# ", ""], None)

    def test_a_word_boundary_waits_for_the_next_character(self) -> None:
        chain = chain_of(RuleOptions(pattern=r"\bcat\b", action="replace", replacement="dog"))
        assert run(chain, ["cat", "s con", "cat", " cat", "."]) == (["", "cats con", "cat", " ", "dog.", ""], None)

    def test_characters_of_several_bytes(self) -> None:
        chain = chain_of(RuleOptions(pattern="é[à-ü]{2}é", action="replace", replacement="ß"))
        assert run(chain, ["aé", "à", "ü", "é😀", "éàb"]) == (["a", "", "", "ß😀", "éàb", ""], None)


class TestStopping:
    def test_the_text_before_the_match_is_the_answer(self) -> None:
        decisions = Decisions()
        chain = chain_of(RuleOptions(name="r", pattern="bomb", reason="no"), decisions=decisions)
        assert run(chain, ["a b", "o", "mb", " x"]) == (["a ", "", ""], "no")
        assert dict(decisions.counts) == {Decision("g", "r", "answer", "stop", "no"): 1}

    def test_a_stop_is_found_before_a_replacement_hides_it(self) -> None:
        chain = chain_of(
            RuleOptions(pattern="mail [a-z]{1,20}", action="replace"), RuleOptions(pattern="bad", reason="b")
        )
        assert run(chain, ["a mail badly"]) == (["a mail "], "b")

    def test_where_nothing_can_be_replaced_it_stops(self) -> None:
        chain = chain_of(RuleOptions(pattern="x", action="replace", reason="r"), may_replace=False)
        assert run(chain, ['{"a": "x"}']) == (['{"a": "'], "r")

    def test_a_length(self) -> None:
        assert run(chain_of(RuleOptions(max_chars=5)), ["abc", "de"]) == (["abc", "de", ""], None)
        assert run(chain_of(RuleOptions(max_chars=5)), ["abc", "def"]) == (
            ["abc", "de"],
            "it has more than 5 characters",
        )


SECRET_RULES = (
    RuleOptions(pattern="aa[ab]{1,3}c", action="replace", replacement="<1>"),
    RuleOptions(pattern=r"\bcab\b", action="replace", replacement=""),
    RuleOptions(pattern="b{2,4}", action="replace", replacement="é"),
    RuleOptions(pattern="caca", reason="stop"),
)


class TestEverySplit:
    @settings(max_examples=100, deadline=None)
    @given(st.text("abc ", max_size=40), st.integers(0, 1 << 30))
    def test_rules_release_the_same_text(self, text: str, seed: int) -> None:
        whole, reason = run(chain_of(*SECRET_RULES), [text] if text else [])
        pieces, its_reason = run(chain_of(*SECRET_RULES), cuts(text, seed))
        assert ("".join(pieces), its_reason) == ("".join(whole), reason)

    @settings(max_examples=100, deadline=None)
    @given(st.text("abc ", max_size=40), st.integers(0, 1 << 30), st.booleans())
    def test_two_guardrails_and_one_that_is_asked(self, text: str, seed: int, second_first: bool) -> None:
        def verdict(question: Question) -> Verdict:
            (piece,) = question.texts
            if question.before.endswith("ca") and piece.startswith("a"):
                return Stop("asked")
            return Replace((piece.upper(),)) if "b" in piece else ALLOW

        def made() -> Chain:
            note = Decisions().add
            checks: list[Check] = Rules("g", SECRET_RULES).checks("answer", True, note)
            asked = PieceCheck("s", _question, 4, 3, True, note)
            return Chain([asked, *checks] if second_first else [*checks, asked])

        whole, reason = run(made(), [text] if text else [], verdict)
        pieces, its_reason = run(made(), cuts(text, seed), verdict)
        assert ("".join(pieces), its_reason) == ("".join(whole), reason)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.text("abc ", max_size=5), max_size=12), st.integers(0, 1 << 30))
    def test_tokens_go_with_their_text(self, tokens: list[str], seed: int) -> None:
        """However tokens come in batches: the same tokens, each with the same text before it; and none of which a
        character was replaced or cut off."""
        one_by_one = _released(tokens, [1] * len(tokens))
        dice = random.Random(seed)
        batches = [dice.randint(1, 4) for _ in tokens]
        assert _released(tokens, batches) == one_by_one
        text, places = one_by_one
        whole, _ = run(chain_of(*SECRET_RULES), ["".join(tokens)] if any(tokens) else [])
        assert text == "".join(whole)
        for index, num_before in places:
            if tokens[index]:
                assert text[num_before - len(tokens[index]) : num_before] == tokens[index]


def _question(piece: str, before: str, ended: bool) -> Question:
    return Question(subject="answer", texts=(piece,), before=before, ended=ended)


def _released(tokens: Sequence[str], batches: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and of each token that was released how much text there is up to its end."""
    chain, release = chain_of(*SECRET_RULES), TokenRelease()
    parts: list[Part] = []
    left = list(enumerate(tokens))
    for size in batches:
        batch, left = left[:size], left[size:]
        runs = []
        for _, text in batch:
            release.push(len(text), len(text), None)
            runs += _done(chain, text, False)
            if chain.stopped is not None:
                break
        if chain.stopped is not None:
            parts += release.take(runs, ended=True)
            break
        parts += release.take(runs)
    else:
        parts += release.take(_done(chain, "", True), ended=True)
    places, num_chars = list[tuple[int, int]](), 0
    for part in parts:
        own = [tokens[part.first_index + i] for i in range(len(part.token_ids))]
        assert part.token_ids == [len(text) for text in own]
        num_chars += len("".join(part.texts))
        place = num_chars
        for i in reversed(range(len(own))):
            places.append((part.first_index + i, place))
            place -= len(own[i])
    return "".join("".join(part.texts) for part in parts), sorted(places)


@pytest.mark.parametrize("piece_chars", [None, 3])
def test_questions_about_an_answer(piece_chars: int | None) -> None:
    asked: list[Question] = []

    def verdict(question: Question) -> Verdict:
        asked.append(question)
        return ALLOW

    chain = Chain([PieceCheck("s", _question, piece_chars, 2, True, Decisions().add)])
    released, reason = run(chain, ["ab", "cdef", "g"], verdict)
    assert reason is None
    if piece_chars is None:
        assert released == ["", "", "", "abcdefg"]
        assert asked == [_question("abcdefg", "", True)]
    else:
        assert released == ["", "abc", "def", "g"]
        assert asked == [_question("abc", "", False), _question("def", "bc", False), _question("g", "ef", True)]


def test_replaced_tokens_are_left_out_with_their_probabilities() -> None:
    chain = chain_of(RuleOptions(pattern="[0-9]{4}", action="replace", replacement="#"))
    release = TokenRelease()
    parts: list[Part] = []
    for i, text in enumerate([" a", " 1", "2", "34x", " b", ""]):
        release.push(100 + i, len(text), None)
        parts += release.take(_done(chain, text, False))
    parts += release.take(_done(chain, "", True), ended=True)
    assert [(part.first_index, part.token_ids, "".join(part.texts), part.skipped_chars) for part in parts] == [
        (0, [100], " a", 0),
        (1, [], " #x", 0),
        (4, [104], " b", 3),
        (5, [105], "", 0),
    ]


def _done(chain: Chain, text: str, ended: bool) -> list:  # type: ignore[type-arg]
    work = chain.feed(text, ended)
    try:
        next(work)
    except StopIteration as end:
        return list(end.value)
    raise AssertionError("no question is asked here")
