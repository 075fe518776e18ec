"""How much of an answer is copied, and which answers count as copying work. Pure functions of token ids."""

from __future__ import annotations

from collections.abc import Sequence

ORDER = 3
"""Tokens of a trigram: the shortest match that lookup continues."""
SHARES = (0.5, 0.9)
"""Shares of copied trigrams of copying work: least and most."""
FEWEST_TOKENS = 32
"""Length of the shortest answer that counts."""
LEAST_REPEATS = 3
"""A text loops where a part of it stands so often in a row."""
MOST_LOOPED = 0.25
"""Largest share of an answer that may stand in loops."""


def copied_share(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Share of the answer's tokens that end a trigram which the text before them has already: prompt and answer,
    overlaps included. 0 for an empty answer."""
    text = [*prompt, *answer]
    seen = {tuple(text[at : at + ORDER]) for at in range(len(prompt) - ORDER + 1)}
    num_copied = 0
    for end in range(len(prompt) + 1, len(text) + 1):
        trigram = tuple(text[max(0, end - ORDER) : end])
        num_copied += trigram in seen
        if len(trigram) == ORDER:
            seen.add(trigram)
    return num_copied / len(answer) if answer else 0.0


def looped_share(answer: Sequence[int]) -> float:
    """Share of the answer's tokens that stand in loops: stretches in which a part of 1 token or more stands
    `LEAST_REPEATS` times or more in a row. 0 for an empty answer."""
    is_looped = [False] * len(answer)
    for period in range(1, len(answer) // LEAST_REPEATS + 1):
        num_equal = 0  # tokens up to `at` that equal the one a period before
        for at in range(period, len(answer)):
            num_equal = num_equal + 1 if answer[at] == answer[at - period] else 0
            if num_equal == (LEAST_REPEATS - 1) * period:
                is_looped[at - num_equal - period + 1 : at + 1] = [True] * (num_equal + period)
            elif num_equal > (LEAST_REPEATS - 1) * period:
                is_looped[at] = True
    return sum(is_looped) / len(answer) if answer else 0.0


def is_copying(prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether a plain answer is copying work: long enough, with a share of copied trigrams in `SHARES`, and not an
    answer that only loops."""
    least, most = SHARES
    is_long = len(answer) >= FEWEST_TOKENS
    return is_long and looped_share(answer) <= MOST_LOOPED and least <= copied_share(prompt, answer) <= most
