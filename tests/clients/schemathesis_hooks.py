"""What Schemathesis is told of this API: a served model, and that a small machine answers in few tokens."""

from __future__ import annotations

import os
from typing import Any

import schemathesis  # type: ignore[import-not-found]  # only in its own environment

MODEL = os.environ["SERVED_MODEL"]
LIMITS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""Fields that limit the tokens of an answer, the one that goes first before others."""
MAX_TOKENS = 8


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Let most texts that are no model be one, and no answer be long. Fields of a wrong type stay as they are."""
    body = case.body
    if not isinstance(body, dict):
        return
    changed = dict(body)
    if isinstance(body.get("model"), str) and len(body["model"]) % 8:
        changed["model"] = MODEL
    limits = LIMITS.get(case.operation.path, ())
    if limits and all(body.get(name) is None for name in limits):
        changed[limits[0]] = MAX_TOKENS
    for name in limits:
        if isinstance(body.get(name), int) and body[name] > MAX_TOKENS:
            changed[name] = MAX_TOKENS
    case.body = changed
