"""The texts of a prompt, as guardrails look at them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from disagg.gateway.guardrails.rules import Rules
from disagg.gateway.guardrails.stream import Chain
from disagg.gateway.requests.request import ChatPrompt, IdsPrompt, Prompt, TextPrompt
from disagg.gateway.requests.validate import RESUMED
from disagg.gateway.requests.verdicts import Decision, Decisions
from disagg.gateway.text.tokenizer import Tokenizer
from disagg.gateway.text.written_json import unescaped
from disagg.proto.errors import ContentFilterError

NO_REPLACEMENT: Final = "; it cannot be replaced there"


@dataclass(frozen=True, slots=True)
class GivenText:
    """A text of a prompt."""

    field: str
    role: str
    text: str
    may_replace: bool = False
    counts: bool = True
    """Whether it is a part of the prompt's length."""
    ended: bool = True
    """Whether no more text comes after it."""


def texts_of(prompt: Prompt, resumed: Sequence[int], tokenizer: Tokenizer) -> list[GivenText]:
    """What is looked at.

    Args:
        prompt: checked.
        resumed: token ids of the beginning of the answer, which the client says that it has. For the model they are
            text of this client like any other; their length is that of an answer.
        tokenizer: of the model.
    """
    found = list(_texts(prompt, tokenizer))
    if resumed:
        found.append(GivenText(RESUMED, "assistant", tokenizer.decode(resumed), counts=False, ended=False))
    return found


def _texts(prompt: Prompt, tokenizer: Tokenizer) -> Iterator[GivenText]:
    match prompt:
        case TextPrompt(text):
            yield GivenText(prompt.field, "", text, may_replace=True)
        case IdsPrompt(token_ids):
            yield GivenText(prompt.field, "", tokenizer.decode(token_ids))
        case ChatPrompt(turns, tools):
            for i, turn in enumerate(turns):
                yield GivenText(f"{prompt.field}[{i}].content", turn.role, turn.content, may_replace=True)
            for i, turn in enumerate(turns):
                yield from _json(f"{prompt.field}[{i}].tool_calls", turn.role, turn.extra)
            yield from _json("tools", "tools", tools)
            yield from _json("chat_template_kwargs", "template", prompt.options.variables)


def _json(field: str, role: str, text: str) -> Iterator[GivenText]:
    """The JSON, and where that has escapes what it says."""
    if text:
        yield GivenText(field, role, text)
    if strings := unescaped(text):
        yield GivenText(field, role, strings, counts=False)


def with_texts(prompt: Prompt, texts: Sequence[GivenText]) -> Prompt:
    """The prompt with what takes the place of its texts; `texts` are all of them."""
    if isinstance(prompt, ChatPrompt):
        turns = tuple(turn._replace(content=one.text) for turn, one in zip(prompt.turns, texts, strict=False))
        return replace(prompt, turns=turns)
    return TextPrompt(texts[0].text)


def ruled(rules: Rules, name: str, texts: list[GivenText], decisions: Decisions) -> list[GivenText]:
    """The texts after the rules of one guardrail. Raises `ContentFilterError`. May run on a thread."""
    if (length := rules.max_chars["prompt"]) is not None:
        rule, max_chars = length
        if sum(len(one.text) for one in texts if one.counts) > max_chars:
            decisions.add(Decision(name, rule.name, "prompt", "stop", rule.reason))
            raise ContentFilterError(texts[0].field, refusal(name, rule.reason))
    found: list[GivenText] = []
    for one in texts:
        chain = Chain(rules.checks("prompt", one.may_replace, decisions.add))
        text = "".join(run.text for run in chain.scan(one.text, one.ended))
        if chain.stopped is not None:
            raise ContentFilterError(one.field, refusal(name, chain.stopped.reason))
        found.append(replace(one, text=text) if one.may_replace and text != one.text else one)
    return found


def refusal(name: str, reason: str) -> str:
    """What a client reads of a prompt that was stopped."""
    return f"the guardrail {name} refuses it" + (f": {reason}" if reason else "")
