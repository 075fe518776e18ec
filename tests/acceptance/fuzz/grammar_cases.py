"""Schemas, expressions, grammars and choices for the fuzz: valid ones, hostile ones, and those that are nearly
valid. Pure.

Each case is a function of its seed, so that a finding is repeated by its number.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from disagg.gateway.requests.structured import Kind

NUMBERS: Final = (
    *(0, 1, -1, 2, 3, 7, 10, 64, 99, 100, 255, 1000, 65_535, 10**6, 10_007, 10_000_019, 2**31, -(2**31), 2**32, 2**53),
    *(0.1, -0.5, 1.5, 1e-7, 1e-20, 1e17, 1e22, 9.2e18, 9.3e18, -9.2e18, -9.3e18, -(2**53), 3.14159265358979),
)
"""Edges of what numbers are kept in, all of them exact as doubles are read."""
INEXACT: Final = (
    *(sign * (2**power + offset) for power in (53, 62, 63, 64, 128) for offset in (-1, 0, 1) for sign in (1, -1)),
    *(1e-300, 5e-324, 1e300, -1e308, 1.7976931348623157e308, 0.30000000000000004),
)
COUNTS: Final = (0, 0, 1, 1, 2, 3, 5, 20, 100, 1000, 10_000, 2**16, 2**31, 2**32, 2**63, 2**64, -1, 1.5)
TEXTS: Final = (
    *(
        "",
        "a",
        "kind",
        "x y",
        "\n",
        "\\",
        '"',
        "\u0000",
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    ),
    *("<|im_start|>", "<|im_end|>", "a<|im_start|>b", "<|endoftext|>", "</s>", "<tool_call>", "ÿ", "\u2028", "日本語"),
    *("a" * 70, "0" * 300, "true", "null", "-1", "{", "}", "[1]", "/", "$ref", "#/$defs/d0"),
)
FORMATS: Final = (
    *("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "regex", "unknown"),
    *("json-pointer", "idn-email", "iri"),
)
_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_ATOMS: Final = (
    *(
        "a",
        "b",
        "ab",
        ".",
        "[a-z]",
        "[^a]",
        "[0-9a-fA-F]",
        "\\d",
        "\\w",
        "\\s",
        "\\S",
        "\\n",
        "é",
        "日",
        "\\p{L}",
        "\\p{Greek}",
    ),
    *(
        "\\x41",
        "\\u{1F600}",
        "[\\s\\S]",
        "[[:alpha:]]",
        "\\/",
        "\\.",
        "(?i:abc)",
        "(?s:.)",
        "[^\\x00-\\x1f]",
        "\\b",
        "^",
        "$",
    ),
)
_REPEATS: Final = ("*", "+", "?", "*?", "{2}", "{0,3}", "{1,}", "{50}", "{0,1000}", "{1000}", "{5,2}", "{100000}")
_RULE_REPEATS: Final = ("*", "+", "?", "{2}", "{0,3}", "{1,}", "{1000}", "{0,100000}", "{3,1}", "{99999999999}")


class Case(NamedTuple):
    """What a client asks of an answer."""

    kind: Kind
    """As in `StructuredOutput`."""
    value: Any
    """A schema, an expression, a grammar, or a list of choices."""


def make_case(seed: int) -> Case:
    """The case of this number; at most some 30 KiB."""
    dice = random.Random(seed)
    kind, make = dice.choices(_KINDS, _WEIGHTS)[0]
    value = make(dice)
    return Case(kind, value)


# ---------------------------------------------------------------- schemas


def _schema_case(dice: random.Random) -> Any:
    definitions = {f"d{i}": _schema(dice, dice.randrange(1, 3)) for i in range(dice.randrange(3))}
    schema = _schema(dice, dice.randrange(1, 6))
    if not isinstance(schema, dict):
        schema = {"items": schema}
    if definitions:
        schema["$defs"] = definitions
    if dice.random() < 0.1:
        schema["x-guidance"] = {
            "whitespace_flexible": dice.random() < 0.5,
            "lenient": dice.random() < 0.7,
            **({"coerce_one_of": True} if dice.random() < 0.5 else {}),
            **({"item_separator": dice.choice(TEXTS)} if dice.random() < 0.2 else {}),
            **({"whitespace_pattern": _regex(dice, 2)} if dice.random() < 0.2 else {}),
        }
    return schema


def _schema(dice: random.Random, depth: int) -> Any:
    if depth <= 0 or dice.random() < 0.05:
        return dice.choice([True, False, {}, {"type": dice.choice(_TYPES)}, _value(dice, 0)])
    schema: dict[str, Any] = {}
    if dice.random() < 0.7:
        schema["type"] = dice.choice(_TYPES) if dice.random() < 0.85 else dice.choices(_TYPES, k=dice.randrange(4))
    for _ in range(dice.randrange(1, 4)):
        keyword, make = dice.choice(_KEYWORDS)
        schema[keyword] = make(dice, depth - 1)
    return schema


def _number(dice: random.Random) -> Any:
    number = dice.choice(INEXACT if dice.random() < 0.03 else NUMBERS)
    return number + dice.randrange(-2, 3) if isinstance(number, int) and dice.random() < 0.3 else number


def _count(dice: random.Random, _depth: int) -> Any:
    return dice.choice(COUNTS)


def _value(dice: random.Random, depth: int) -> Any:
    pick = dice.randrange(8 if depth > 0 else 5)
    if pick == 0:
        return dice.choice([None, True, False])
    if pick <= 2:
        return _number(dice)
    if pick <= 4:
        return dice.choice(TEXTS)
    if pick == 5:
        return [_value(dice, depth - 1) for _ in range(dice.randrange(4))]
    return {dice.choice(TEXTS): _value(dice, depth - 1) for _ in range(dice.randrange(4))}


def _values(dice: random.Random, depth: int) -> Any:
    return [_value(dice, depth) for _ in range(dice.choice((0, 1, 1, 2, 3, 20, 300)))]


def _schemas(dice: random.Random, depth: int) -> Any:
    return [_schema(dice, depth - 1) for _ in range(dice.choice((0, 1, 2, 2, 3, 6)))]


def _properties(dice: random.Random, depth: int) -> Any:
    names = [dice.choice(TEXTS) if dice.random() < 0.2 else f"p{i}" for i in range(dice.choice((0, 1, 2, 3, 8)))]
    return {name: _schema(dice, depth) for name in names}


def _names(dice: random.Random, _depth: int) -> Any:
    return [dice.choice(TEXTS) if dice.random() < 0.2 else f"p{dice.randrange(8)}" for _ in range(dice.randrange(4))]


def _reference(dice: random.Random, _depth: int) -> Any:
    return dice.choice(
        ("#", "#/$defs/d0", "#/$defs/d1", "#/properties/p0", "#/items", "#/nowhere", "http://a.b/c", "x")
    )


_KEYWORDS: Final[tuple[tuple[str, Callable[[random.Random, int], Any]], ...]] = (
    *((name, _schemas) for name in ("allOf", "anyOf", "oneOf", "prefixItems")),
    *((name, _schema) for name in ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else")),
    *((name, _schema) for name in ("contains", "propertyNames", "unevaluatedProperties")),
    *((name, _properties) for name in ("properties", "properties", "patternProperties", "dependentSchemas")),
    *((name, _names) for name in ("required", "required")),
    *((name, lambda dice, _: _number(dice)) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    *((name, lambda dice, _: _number(dice)) for name in ("minimum", "maximum", "multipleOf")),
    *((name, _count) for name in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")),
    *((name, _value) for name in ("const", "const", "default")),
    *((name, _values) for name in ("enum", "enum", "examples")),
    ("pattern", lambda dice, depth: _regex(dice, depth + 1)),
    ("format", lambda dice, _: dice.choice(FORMATS)),
    ("$ref", _reference),
    ("uniqueItems", lambda dice, _: dice.random() < 0.5),
)


# ---------------------------------------------------------------- expressions


def _regex(dice: random.Random, depth: int) -> str:
    if depth <= 0 or dice.random() < 0.15:
        return dice.choice(_ATOMS)
    parts = [_regex(dice, depth - 1) for _ in range(dice.randrange(1, 4))]
    pick = dice.randrange(10)
    if pick < 3:
        return "".join(parts)
    if pick < 6:
        return f"({'|'.join(parts)})"
    if pick < 9:
        return f"(?:{''.join(parts)}){dice.choice(_REPEATS)}"
    return dice.choice((f"(?={parts[0]})", f"(?!{parts[0]})", f"({parts[0]}", f"[{parts[0]}", f"(?P<n>{parts[0]})\\1"))


def _regex_case(dice: random.Random) -> str:
    if dice.random() < 0.1:
        opened = dice.choice(("(", "(?:", "[", "(a|", "(a?"))
        count = dice.choice((10, 100, 1000, 5000))
        return opened * count + "a" + {"[": "]"}.get(opened, ")") * count + dice.choice(("", "*", "{2}"))
    return _regex(dice, dice.randrange(1, 7)) or "a"


# ---------------------------------------------------------------- grammars


def _grammar_case(dice: random.Random) -> str:
    num_rules = dice.choice((1, 2, 3, 5, 10, 200))
    lines = [f"start{_options(dice)}: {_rule(dice, num_rules, 3)}"]
    lines += [f"r{i}{_options(dice)}: {_rule(dice, num_rules, 2)}" for i in range(num_rules)]
    lines += [f"T{i}: {_terminal(dice, 3)}" for i in range(3)]
    if dice.random() < 0.1:
        lines.append(f"%ignore {_terminal(dice, 1)}")
    if dice.random() < 0.1:
        lines.insert(0, f"%llguidance {json.dumps({'no_forcing': True, 'allow_initial_skip': True})}")
    return "\n".join(lines)


def _options(dice: random.Random) -> str:
    if dice.random() < 0.9:
        return ""
    return dice.choice(
        (
            "[lazy]",
            "[max_tokens=3]",
            "[stop=/a/]",
            '[suffix="a"]',
            "[capture]",
            "[temperature=0.5]",
            '[stop=""]',
            "[max_tokens=99999999999]",
            "[stop_capture=x]",
        )
    )


def _rule(dice: random.Random, num_rules: int, depth: int) -> str:
    if depth <= 0:
        pick = dice.randrange(8)
        if pick < 3:
            return f"r{dice.randrange(num_rules)}"
        if pick < 5:
            return f"T{dice.randrange(4)}"
        if pick == 5:
            return json.dumps(dice.choice(TEXTS))
        if pick == 6:
            return f"%json {json.dumps(_schema(dice, 2))}"
        return dice.choice(
            (
                "<|im_end|>",
                "<[1]>",
                "<[0-9]>",
                "<[^0-9]>",
                "<[99999999]>",
                "@other",
                '%regex { "substring_chars": "abcabc" }',
                '%regex { "substring_words": "a b c" }',
                '%lark { start: "a" }',
                '""',
                "r0::0x1",
            )
        )
    parts = [_rule(dice, num_rules, depth - 1) for _ in range(dice.choice((1, 1, 2, 3)))]
    pick = dice.randrange(6)
    if pick < 2:
        return " ".join(parts)
    if pick < 4:
        return f"({' | '.join(parts)})"
    return f"({' '.join(parts)}){dice.choice(_RULE_REPEATS)}"


def _terminal(dice: random.Random, depth: int) -> str:
    pick = dice.randrange(7)
    if depth <= 0 or pick < 2:
        return f"/{_regex(dice, 3)}/{dice.choice(('', '', 'i', 's'))}"
    if pick == 2:
        return json.dumps(dice.choice(TEXTS))
    if pick == 3:
        return f"({_terminal(dice, depth - 1)} | {_terminal(dice, depth - 1)})"
    if pick == 4:
        return f"({_terminal(dice, depth - 1)} & {_terminal(dice, depth - 1)})"
    if pick == 5:
        return f"~({_terminal(dice, depth - 1)})"
    return f"({_terminal(dice, depth - 1)}){dice.choice(('*', '+', '?', '{3}', '{0,200}'))}"


# ---------------------------------------------------------------- choices, and texts that are nearly right


def _choice_case(dice: random.Random) -> Any:
    return [dice.choice(TEXTS) or "x" for _ in range(dice.choice((1, 1, 2, 5, 200)))]


def _damaged_case(dice: random.Random) -> str:
    """A grammar with some characters taken out, doubled or replaced."""
    text = list(dice.choice((_grammar_case, _regex_case))(dice))
    for _ in range(dice.randrange(1, 6)):
        place = dice.randrange(len(text)) if text else 0
        text[place : place + dice.randrange(3)] = dice.choices(string.printable, k=dice.randrange(3))
    return "".join(text) or "start: /a/"


_KINDS: Final[tuple[tuple[Kind, Callable[[random.Random], Any]], ...]] = (
    ("json_schema", _schema_case),
    ("regex", _regex_case),
    ("grammar", _grammar_case),
    ("choice", _choice_case),
    ("grammar", _damaged_case),
)
_WEIGHTS: Final = (60, 15, 12, 5, 8)
