"""`gateway.guardrails` in the YAML: what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.gateway.guardrails.config import PythonOptions
from disagg.gateway.guardrails.shell.judges import load_function
from disagg.proto.errors import ConfigError


def parse(*guardrails: Any) -> Any:
    return parse_config({"model": {"path": "fake"}, "gateway": {"guardrails": list(guardrails)}}).gateway.guardrails


def test_all_kinds() -> None:
    rules = [{"pattern": "a{2}", "action": "replace"}, {"secrets": True}, {"max_chars": 9, "applies_to": "answers"}]
    first, second, third = parse(
        {"name": "r", "rules": rules},
        {"name": "s", "service": {"url": "http://127.0.0.1:1/check"}, "piece_chars": 200, "on_failure": "allow"},
        {"name": "p", "python": {"object": "a.b:c", "options": {"x": [1]}}},
    )
    assert [rule.action for rule in first.rules] == ["replace", "stop", "stop"]
    assert (second.service.url, second.piece_chars, second.timeout_s) == ("http://127.0.0.1:1/check", 200, 1.0)
    assert third.python == PythonOptions(object="a.b:c", options={"x": [1]})


RULE = {"pattern": "a"}


@pytest.mark.parametrize(
    ("guardrail", "message"),
    [
        ({"rules": [RULE]}, "gateway.guardrails[0].name: must be set where gateway.guardrails[0] is"),
        ({"name": "a b", "rules": [RULE]}, "gateway.guardrails[0].name: must be of letters, digits,"),
        ({"name": "a"}, "gateway.guardrails[0]: exactly one of rules, service and python must be set"),
        ({"name": "a", "rules": [{}]}, "gateway.guardrails[0].rules[0]: exactly one of pattern,"),
        (
            {"name": "a", "rules": [RULE, {"patern": "a"}]},
            "gateway.guardrails[0].rules[1].patern: unknown key",
        ),
        ({"name": "a", "rules": [{"pattern": "a+"}]}, "gateway.guardrails[0].rules[0].pattern: + has no long"),
        ({"name": "a", "rules": [{"pattern": "[b-a]"}]}, "gateway.guardrails[0].rules[0].pattern: invalid character"),
        ({"name": "a", "rules": [{"max_chars": 0}]}, "gateway.guardrails[0].rules[0].max_chars: expected int >= 1"),
        (
            {"name": "a", "rules": [{"max_chars": 5, "action": "replace"}]},
            "gateway.guardrails[0].rules[0].action: max_chars can only stop",
        ),
        ({"name": "a", "rules": [RULE], "timeout_s": 0}, "gateway.guardrails[0].timeout_s: expected float > 0"),
        ({"name": "a", "service": {"url": "file:///x"}}, "gateway.guardrails[0].service.url: must be http"),
        ({"name": "a", "service": {"url": "http://u:p@h/"}}, "gateway.guardrails[0].service.url: must have no user"),
        ({"name": "a", "python": {"object": "a b"}}, "gateway.guardrails[0].python.object: must be module:function"),
        (
            {"name": "a", "python": {"object": "a:b"}, "context_chars": 5},
            "gateway.guardrails[0].context_chars: needs piece_chars; whole answers have no text before them",
        ),
        (
            {"name": "a", "rules": [RULE], "on_failure": "drop"},
            "gateway.guardrails[0].on_failure: 'drop' is not",
        ),
    ],
)
def test_what_is_wrong_is_named(guardrail: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(guardrail)
    assert str(caught.value).startswith(message)


def test_names_are_unique() -> None:
    with pytest.raises(ConfigError, match=r"gateway.guardrails\[1\].name: 'a' is the name of another one"):
        parse({"name": "a", "rules": [RULE]}, {"name": "a", "rules": [RULE]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PythonOptions(object="no.such.module:f"), "p.object: no.such.module:f cannot be loaded: No module named 'no'"),
        (PythonOptions(object="json:nothing"), "p.object: json:nothing cannot be loaded: "),
        (PythonOptions(object="json:__name__"), "p.object: json:__name__ cannot be called"),
        (PythonOptions(object="no-such-entry"), "p.object: no installed package has an entry point 'no-such-entry'"),
        (PythonOptions(object="json:loads", options={"a": 1}), "p.options: json:loads is a function; only a class"),
        (PythonOptions(object="json:JSONDecoder", options={"a": 1}), "p.options: json:JSONDecoder refuses them: "),
    ],
)
def test_functions_that_cannot_be_loaded(options: PythonOptions, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(options, "p")
    assert str(caught.value).startswith(message)
