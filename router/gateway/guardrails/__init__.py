"""Rules on prompts and answers: what operators let pass, replace or stop. See docs/guardrails.md.

A guardrail of one's own is a function from a `Question` to `Allow()`, `Replace(...)` or `Stop(...)`.
"""

from __future__ import annotations

from disagg.router.gateway.guardrails.verdicts import Allow, Question, Replace, Stop

__all__ = ["Allow", "Question", "Replace", "Stop"]
