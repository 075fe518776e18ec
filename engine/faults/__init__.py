"""Faults on purpose: failpoints, and what they wrap."""
