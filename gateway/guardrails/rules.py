"""The built-in guardrail: patterns, secrets and lengths, checked in the gateway itself. Pure.

The patterns of secrets find what looks like a key, in the form that a program writes, not whether it is valid. They
find no passwords: those have no form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from disagg.gateway.guardrails.config import RuleOptions
from disagg.gateway.guardrails.scanner import Scanner
from disagg.gateway.guardrails.stream import Check, LengthCheck, Note, PatternCheck, Rule
from disagg.gateway.requests.verdicts import Subject

SECRETS: Final = {
    "aws-access-key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "github-token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{22,255})",
    "gitlab-token": r"\bglpat-[A-Za-z0-9_-]{20,64}",
    "google-api-key": r"\bAIza[0-9A-Za-z_-]{35}",
    "huggingface-token": r"\bhf_[A-Za-z0-9]{30,64}",
    "llm-api-key": r"\bsk-[A-Za-z0-9_-]{20,200}",
    "slack-token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,200}",
    "stripe-key": r"\b[rs]k_live_[A-Za-z0-9]{20,247}",
    "json-web-token": r"\beyJ[A-Za-z0-9_-]{8,300}\.eyJ[A-Za-z0-9_-]{8,400}\.[A-Za-z0-9_-]{16,300}",
    "private-key": r"-----BEGIN (?:[A-Z]{2,10} ){0,2}PRIVATE KEY(?: BLOCK)?-----[A-Za-z0-9+/=\s]{0,900}",
}
"""Patterns by name. A private key is its first line, and up to 900 characters after it."""


_SUBJECTS: Final = {"both": ("prompt", "answer"), "prompts": ("prompt",), "answers": ("answer",)}


class _Patterns:
    """Some patterns with what they do."""

    def __init__(self, found: Sequence[tuple[Rule, str, bool]]) -> None:
        self.rules = tuple(rule for rule, _, _ in found)
        self.scanner = Scanner([(pattern, ignores_case) for _, pattern, ignores_case in found])


class Rules:
    """The rules of one guardrail, compiled.

    What stops is looked for in the text as it is, before anything of it is replaced: else a replacement could hide it.

    Args:
        guardrail: its name.
        options: checked.
    """

    def __init__(self, guardrail: str, options: Sequence[RuleOptions]) -> None:
        self._guardrail = guardrail
        self._patterns: dict[Subject, list[_Patterns]] = {"prompt": [], "answer": []}
        self.max_chars: dict[Subject, tuple[Rule, int] | None] = {"prompt": None, "answer": None}
        """The least of each; of a prompt it is for all of its texts together, which the caller adds up."""
        for subject in self._patterns:
            mine = [(i, each) for i, each in enumerate(options) if subject in _SUBJECTS[each.applies_to]]
            for action in ("stop", "replace"):
                found = [one for i, each in mine if each.action == action for one in _patterns_of(each, i)]
                if found:
                    self._patterns[subject].append(_Patterns(found))
            lengths = [(each.max_chars, i, each) for i, each in mine if each.max_chars is not None]
            if lengths:
                most, i, least = min(lengths, key=lambda one: one[0])
                reason = least.reason or f"it has more than {most} characters"
                self.max_chars[subject] = (Rule(_name(least, i), reason, None), most)

    def is_for(self, subject: Subject) -> bool:
        """Whether a rule looks at such texts."""
        return bool(self._patterns[subject]) or self.max_chars[subject] is not None

    def checks(self, subject: Subject, may_replace: bool, note: Note) -> list[Check]:
        """Checks for one text; none where no rule is for it."""
        return [
            PatternCheck(self._guardrail, patterns.scanner, patterns.rules, subject, may_replace, note)
            for patterns in self._patterns[subject]
        ]

    @property
    def answer_scanners(self) -> list[Scanner]:
        """Scanners of all patterns for answers."""
        return [patterns.scanner for patterns in self._patterns["answer"]]

    def limits(self, note: Note) -> list[Check]:
        """What ends an answer at a length: for all that the model wrote, before it is divided into texts."""
        if (length := self.max_chars["answer"]) is None:
            return []
        rule, max_chars = length
        return [LengthCheck(self._guardrail, rule, max_chars, "answer", note)]


def _name(rule: RuleOptions, index: int) -> str:
    return rule.name or str(index)


def _patterns_of(rule: RuleOptions, index: int) -> list[tuple[Rule, str, bool]]:
    """What it does, pattern, whether case is ignored."""
    replacement = rule.replacement if rule.action == "replace" else None
    name = _name(rule, index)
    if rule.pattern is not None:
        made = Rule(name, rule.reason or "it has text that is not allowed", replacement)
        return [(made, rule.pattern, rule.ignore_case)]
    if not rule.secrets:
        return []
    return [
        (
            Rule(f"{name}/{kind}", rule.reason or f"it has what looks like a secret ({kind})", replacement),
            pattern,
            False,
        )
        for kind, pattern in SECRETS.items()
    ]
