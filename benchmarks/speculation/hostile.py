"""Texts that make lookup always wrong. Pure functions of token ids.

The answer is known before its prompt is: at `TEMPERATURE` every token of the vocabulary is as probable as any other, so
that the token drawn at each place depends on the seed alone. The prompt then holds each trigram of that answer with a
continuation that is not the answer's. Every step therefore finds a match, and each first draft is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.speculation.copying import ORDER

TEMPERATURE = 1e9


def hostile_prompt(answer: Sequence[int], vocab_size: int, seed: int, num_wrong: int = 4) -> list[int]:
    """A prompt in which each trigram of the answer is followed by `num_wrong` tokens that are not in the answer.

    The prompt ends with a token of its own, so that the trigrams over its end are in no match.

    Raises:
        ValueError: the answer has all tokens of the vocabulary.
    """
    wrong = sorted(set(range(vocab_size)) - set(answer))
    if not wrong:
        raise ValueError("no token is left that is not in the answer")
    dice = random.Random(seed)
    prompt: list[int] = []
    for end in range(ORDER, len(answer)):
        prompt += answer[end - ORDER : end]
        prompt += dice.choices(wrong, k=num_wrong)
    return [*prompt, dice.choice(wrong)]
