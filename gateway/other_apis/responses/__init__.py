"""OpenAI's `/v1/responses` without its state: items in, items out, typed events."""
