"""Rules on prompts and answers: what operators let pass, replace or stop. See docs/guardrails.md.

A guardrail of one's own is a function from a `Question` to `Allow()`, `Replace(...)` or `Stop(...)`. It raises
`CannotJudgeError` for a text that it cannot judge.
"""

from __future__ import annotations

from disagg.gateway.requests.verdicts import Allow, CannotJudgeError, Question, Replace, Stop

__all__ = ["Allow", "CannotJudgeError", "Question", "Replace", "Stop"]
