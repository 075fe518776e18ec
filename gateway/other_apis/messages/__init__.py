"""Anthropic's `/v1/messages`: turns of content blocks in, blocks out, typed events."""
