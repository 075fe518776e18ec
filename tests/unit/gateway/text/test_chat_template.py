from __future__ import annotations

from datetime import datetime

import pytest

from disagg.gateway.text.chat_template import ChatTemplate, ChatTurn
from disagg.proto.errors import ConfigError, InvalidRequestError

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
        (
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(17) }}",
            "more work than",
        ),
        ("{{ 'a' | center(1000000000) }}", "a value of 1000000000 parts"),
        ("{{ ['a'] | map('center', 1000000000) | list }}", "a value of 1000000000 parts"),
        ("{% filter center(1000000000) %}a{% endfilter %}", "a value of 1000000000 parts"),
        ("{{ ('ab' * 500000) | indent(2000000) }}", "a value of 2000000 parts"),
        ("{{ ('a\n' * 99999) | indent(1000) }}", "more work than"),
        ("{{ ('\t' * 99999).expandtabs(10000) }}", "more work than"),
        ("{{ '{:99999d}'.format(1) }}", "formatting to a width"),
        ("{{ '{:{}}'.format(1, 99999) }}", "formatting to a width"),
        ("{{ ('{0}' * 9999).format('a' * 99999) }}", "more work than"),
        ("{{ '%(a)99999d' % {'a': 1} }}", "formatting with %"),
        ("{{ '%99999d' | format(1) }}", "formatting with %"),
        ("{{ ('%(a)s' * 9999) % {'a': 'a' * 99999} }}", "more work than"),
        ("{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "more work"),
        ("{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}", "more work"),
        ("{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}", "more work"),
        ("{% set n = namespace(s=9) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}", "4096 bits"),
        ("{% set n = namespace(s=9) %}{% for i in range(99) %}{% set n.s = n.s ** 64 %}{% endfor %}", "4096 bits"),
        ("{{ 5 | round(-99999999) }}", "more than 64 digits"),
        ("{{ ('f' * 99999) | int(base=16) }}", "4096 bits"),
        ("{{ ('a' * 99999).replace('a', 'b' * 99999) }}", "more work"),
        ("{{ ('a' * 99999) | replace('a', 'b' * 99999) }}", "more work"),
        ("{{ ('a' * 99999).join(['b'] * 99999) }}", "more work"),
        ("{{ (['b'] * 99999) | join('a' * 99999) }}", "more work"),
        ("{{ range(99999) | map('string') | join('a' * 99999) }}", "more work"),
        ("{{ (['a' * 99999] * 9999) | string }}", "more work"),
        ("{{ (['a' * 99999] * 9999) | tojson }}", "more work"),
        ("{{ ['a' * 99999] * 9999 }}", "more work"),
        ("{{ [1] | tojson(indent=1000) }}", "an indent or a separator of more than 16"),
        (
            "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
            "nested",
        ),
        (
            "{% set n = namespace(l=[]) %}{% for i in range(40) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
            "more",
        ),
        ("{{ ([[1]] * 9999) | sum(start=[]) }}", "sums of numbers"),
        ("{{ 'a'.translate({97: 'b'}) }}", "translate"),
        ("{{ (1).to_bytes(1000000000) }}", "to_bytes"),
        ("{{ 'a'.encode() }}", "encode"),
        ("{{ strftime_now('%c' * 9999) }}", "a form of more than"),
        ("{% set l = [1] * 99999 %}{% for i in range(999) %}{% set x = 2 in l %}{% endfor %}", "more work"),
        ("{% set l = [1] * 99999 %}{% for i in range(999) %}{% set x = l[1:] %}{% endfor %}", "more work"),
        ("{% set s %}{% for i in range(999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}", "more work"),
        ("{% set s %}{% for i in range(999) %}" + 99999 * "a" + "{% endfor %}{% endset %}", "more work"),
        ("{{ lipsum(9999) }}", "'lipsum' is undefined"),
        ("{% set __step__ = none %}{% for i in range(9999) %}{% endfor %}", "rounds of loops"),
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


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' | center(5) }}|{{ '%s-%s' | format(1, 'b') }}|{{ '{0:>4}{x}'.format(1, x=2) }}", "  a  |1-b|   12"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'aba' | replace('a', 'c') }}|{{ 'aba'.replace('a', 'c', 1) }}", "a\n  b|cbc|cba"),
        (
            "{{ ['a', 1] | join('-') }}|{{ ','.join(['a', 'b']) }}|{{ [1, 2] | sum }}|{{ 1.26 | round(1) }}",
            "a-1|a,b|3|1.3",
        ),
        ("{% macro m(n) %}{% if n %}{{ n }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(9) }}", "987654321"),
        (
            "{{ 'a' ~ 1 ~ [2] }}|{{ 'a' + 'b' }}|{{ [1] + [2] }}|{{ 1 + 2 }}|{{ 'a' in 'ab' }}|{{ [1, 2][1:] }}",
            "a1[2]|ab|[1, 2]|3|True|[2]",
        ),
        ("{{ [1, 2] | map('string') | select('equalto', '2') | list }}|{{ {'b': 1} | dictsort }}", "['2']|[('b', 1)]"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}", "hiso"),
        (
            "{{ 'a<b' | e }}|{{ ('<' | safe) ~ '>' }}|{{ {'a': [1, 2]} | tojson(indent=2, separators=(',', ':')) }}",
            'a&lt;b|<>|{\n  "a":[\n    1,\n    2\n  ]\n}',
        ),
        ("{% for key, value in {'a': 1}.items() %}{{ key }}{{ value }}{% endfor %}{{ 'A b'.split(' ')[-1] }}", "a1b"),
    ],
)
def test_what_is_counted_is_rendered_as_before(source: str, text: str) -> None:
    assert render(source) == text


def test_text_that_is_collected_turn_by_turn() -> None:
    source = "{% set n = namespace(s='') %}{% for m in messages %}{% set n.s = n.s ~ m.content %}{% endfor %}{{ n.s }}"
    turns = [ChatTurn("user", 1000 * "a")] * 1000
    assert ChatTemplate(source, {}).render(turns) == 1_000_000 * "a"


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(ConfigError, match="chat template, line 2"):
        ChatTemplate("x\n{% endfor %}", {})
