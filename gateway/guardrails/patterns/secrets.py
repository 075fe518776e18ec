"""Patterns of secrets that programs write in a form of their own. Pure.

They find what looks like a key, not whether it is valid, and no passwords: those have no form.
"""

from __future__ import annotations

from typing import Final

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
