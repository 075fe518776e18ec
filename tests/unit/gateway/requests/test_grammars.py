"""Verdicts on grammars, which are kept; nothing is compiled where one is known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.router.gateway.answers import grammars
from disagg.router.gateway.answers.grammars import Grammars
from disagg.router.gateway.text.tokenizer import ServedModel


def schema(value: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


def test_verdicts_are_kept_until_there_are_too_many(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MAX_KNOWN", 2)
    made, good, bad = Grammars(model), schema({"type": "integer"}), schema({"type": "nothing"})
    assert (made.known(good), made.compiled(good), made.known(good)) == (None, "", "")
    assert made.compiled(bad).startswith("cannot be used: ")
    assert made.known(bad) == made.compiled(bad)
    made.known(good)
    assert made.compiled(schema({"type": "boolean"})) == ""
    assert (made.known(good), made.known(bad)) == ("", None)


def test_a_product_of_branches_is_refused_before_the_compiler_sees_it(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "new_matcher", None)
    some = {"anyOf": [{"maxLength": i} for i in range(20)]}
    assert Grammars(model).compiled(schema({"allOf": [some, some]})) == (
        "cannot be used: at most 64 combinations of anyOf and oneOf branches that hold together"
    )
