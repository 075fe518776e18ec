"""Speculation: how much faster the engine decodes with drafts than without, and whether the tokens are the same."""
