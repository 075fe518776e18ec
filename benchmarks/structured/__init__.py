"""Structured output: whether answers follow their schemas, and what that costs."""
