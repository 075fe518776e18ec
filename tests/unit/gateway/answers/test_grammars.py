"""Verdicts on grammars: kept, asked for in turn, and what becomes of a grammar that ends its compiler."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disagg.gateway.answers.grammars import compiler, grammars
from disagg.gateway.answers.grammars.grammars import Grammars, LateVerdictError, NoVerdictError
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import OverloadedError, UnavailableError
from tests.support.gateway import CompilerHere

REFUSED = "cannot be used: the compiler of grammars ended with it 2 times"


def schema(value: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


class Scripted:
    """Implements `Compiler` by a function."""

    def __init__(self, verdict: Callable[[str], str]) -> None:
        self.verdict = verdict

    def prepare(self) -> None:
        """It has nothing to load."""

    def close(self) -> None:
        """It has nothing to end."""


@contextmanager
def opened(verdict: Callable[[str], str]) -> Iterator[Grammars]:
    """With threads."""
    made = Grammars(Scripted(verdict))
    try:
        yield made
    finally:
        made.close()


def test_verdicts_are_kept_until_there_are_too_many(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MAX_KNOWN", 2)
    made = Grammars(CompilerHere(model), is_inline=True)
    good, bad = schema({"type": "integer"}), schema({"type": "nothing"})
    assert (made.known(good), made.compiled(good), made.known(good)) == (None, "", "")
    assert made.compiled(bad).startswith("cannot be used: ")
    assert made.known(bad) == made.compiled(bad)
    made.known(good)
    assert made.compiled(schema({"type": "boolean"})) == ""
    assert (made.known(good), made.known(bad)) == ("", None)


def test_a_product_of_branches_is_refused_before_the_library_sees_it(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "prove", None)
    some = {"anyOf": [{"maxLength": i} for i in range(20)]}
    assert Grammars(CompilerHere(model), is_inline=True).compiled(schema({"allOf": [some, some]})) == (
        "cannot be used: at most 64 combinations of anyOf and oneOf branches that hold together"
    )


def test_without_an_end_of_sequence_all_are_refused() -> None:
    assert Grammars(None).compiled(schema({})) == "cannot be used: the model has no end-of-sequence token"


def test_a_grammar_that_took_too_long_is_not_tried_again_meanwhile() -> None:
    asked = list[str]()

    def verdict(grammar: str) -> str:
        asked.append(grammar)
        raise LateVerdictError("the processors are busy")

    made = Grammars(Scripted(verdict), is_inline=True)
    with pytest.raises(UnavailableError, match="grammars cannot be compiled now"):
        made.compiled("a")
    assert (asked, made.known("a")) == (["a"], None)


class TestAnEndedCompiler:
    """`blames`: the compiler had the grammar when it ended."""

    @staticmethod
    def ending(*blames: bool) -> tuple[Grammars, list[str]]:
        asked, left = list[str](), list(blames)

        def verdict(grammar: str) -> str:
            asked.append(grammar)
            if left:
                raise NoVerdictError("its compiler ended", left.pop(0))
            return ""

        return Grammars(Scripted(verdict), is_inline=True), asked

    def test_once_says_nothing_about_a_grammar(self) -> None:
        made, asked = self.ending(True)
        assert made.compiled("a") == ""
        assert asked == ["a", "a"]

    def test_twice_does_and_is_remembered(self) -> None:
        made, asked = self.ending(True, True)
        assert made.compiled("a") == REFUSED
        assert (made.known("a"), made.compiled("a"), len(asked)) == (REFUSED, REFUSED, 2)
        assert made.compiled("b") == ""

    @pytest.mark.parametrize("blames", [(False, False), (True, False), (False, True)])
    def test_what_was_not_its_fault_is_told_and_forgotten(self, blames: tuple[bool, bool]) -> None:
        made, _ = self.ending(*blames)
        with pytest.raises(UnavailableError, match="grammars cannot be compiled now"):
            made.compiled("a")
        assert made.known("a") is None
        assert made.compiled("a") == ""


async def test_of_two_places_one_tenant_has_one() -> None:
    may_end, has_begun, running = threading.Event(), threading.Event(), list[str]()

    def verdict(grammar: str) -> str:
        running.append(grammar)
        if grammar.startswith("slow"):
            has_begun.set()
            may_end.wait(60.0)
        return ""

    with opened(verdict) as made:
        slow = [asyncio.create_task(made.check(f"slow-{i}", "a", None)) for i in range(3)]
        await asyncio.to_thread(has_begun.wait, 60.0)
        quick = [await made.check(f"quick-{i}", "b", None) for i in range(3)]
        found = sorted(running)
        may_end.set()
        assert await asyncio.gather(*slow) == quick == ["", "", ""]
        assert found == ["quick-0", "quick-1", "quick-2", "slow-0"]


async def test_what_a_tenant_has_waiting_is_bounded() -> None:
    may_end = threading.Event()

    def verdict(grammar: str) -> str:
        may_end.wait(60.0)
        return ""

    with opened(verdict) as made:
        large = "x" * (1 << 20)
        first = asyncio.create_task(made.check(large, "a", None))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="bytes of this key's grammars are worked on"):
            await made.check("y", "a", None)
        may_end.set()
        assert await first == ""
        assert await made.check("y", "a", None) == ""


async def test_the_same_grammar_is_compiled_once() -> None:
    asked = list[str]()

    def verdict(grammar: str) -> str:
        asked.append(grammar)
        return "wrong"

    with opened(verdict) as made:
        found = await asyncio.gather(*(made.check("a", "a", None) for _ in range(5)))
    assert (found, asked) == (["wrong"] * 5, ["a"])
