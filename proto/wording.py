"""Words for texts that people read."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number of things: `1 rank`, `2 ranks`. `noun`: its singular, whose plural ends with s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
