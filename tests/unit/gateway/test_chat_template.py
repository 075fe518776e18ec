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
    ],
)
def test_a_refusal_is_the_clients_error(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(source)
    assert caught.value.field == "chat.messages"


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(ConfigError, match="chat template, line 2"):
        ChatTemplate("x\n{% endfor %}", {})
