from __future__ import annotations

from datetime import datetime

import pytest

from disagg.proto.errors import ConfigError, InvalidRequestError
from disagg.router.gateway.chat_template import ChatTemplate, ChatTurn

TURNS = [ChatTurn("system", "be <kind>"), ChatTurn("user", "hi"), ChatTurn("assistant", "yes"), ChatTurn("user", "so")]
NOW = datetime(2025, 3, 4, 5, 6, 7)


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens, now=lambda: NOW).render(TURNS)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m['role'][0] }}{{ m.content }};{% endfor %}", "sbe <kind>;uhi;ayes;uso;"),
        ("a\n  {% if add_generation_prompt %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "<s>|</s>|"),
        ("{{ messages[0].content | tojson }}", '"be <kind>"'),
        ("{{ 'é' | tojson }}{{ {'b': [1], 'a': none} | tojson(sort_keys=true) }}", '"é"{"a": null, "b": [1]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2025"),
        (
            "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
            "be <kind>hi",
        ),
        ("{% generation %}{{ messages[2].content }}{% endgeneration %}!", "yes!"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "4"),
        ("{{ tools is none }}{{ documents is none }}{{ 'x' if missing is defined }}", "TrueTrue"),
        ("{% if messages[0].content is string %}{{ messages[0]['content'].strip() }}{% endif %}", "be <kind>"),
    ],
)
def test_what_published_templates_use(source: str, text: str) -> None:
    assert render(source, bos_token="<s>", eos_token="</s>") == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ missing.attribute }}", "missing"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{{ 1 // (messages | length - 4) }}", "fails on them: ZeroDivisionError"),
        ("{{ range(100001) }}", "fails on them: OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails on them: RecursionError"),
        ("{% for i in range(9999) %}{% endfor %}", "more than 1464 rounds of loops"),
        ("{% for i in range(99) %}{% for j in range(99) %}{% set x = 1 %}{% endfor %}{% endfor %}", "1464 rounds"),
        ("{{ 'ab' * 524289 }}", "a value of 1048578 parts, at most 1048576"),
        ("{{ 1000000000 * [1] }}", "a value of 1000000000 parts"),
        ("{{ 'a'.ljust(1000000000) }}", "a value of 1000000000 parts"),
        ("{{ 9 ** 999 }}", "an exponent above 64"),
        ("{{ '%999999999d' % 1 }}", "formatting with %"),
        ("{{ '%*d' % (999999999, 1) }}", "formatting with %"),
        ("{{ 'a' * 100000 }}", "the rendered text is too long"),
    ],
)
def test_a_refusal_is_the_clients_error(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(source)
    assert caught.value.field == "chat.messages"


def test_what_is_below_the_limits_is_rendered() -> None:
    assert (
        render("{{ 'ab' * 3 }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ '%5s%s' % (1, 2) }}{{ 'a'.ljust(3) }}|") == "ababab83    12a  |"
    )
    assert render("{% for i in range(1464) %}.{% endfor %}") == 1464 * "."


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(ConfigError, match="chat template, line 2"):
        ChatTemplate("x\n{% endfor %}", {})
