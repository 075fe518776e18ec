"""Patterns that have a longest match, and how they are found."""
