"""Speculative decoding: which tokens may follow a text, and how many of them a step computes. Pure."""
