"""Texts that make lookup always wrong. Pure functions of token ids.

The answer is known before its prompt is: at `TEMPERATURE` every token of the vocabulary is as probable as any other, so
that the token drawn at each place depends on the seed alone. The prompt then holds, for each place of that answer, the
tokens before it with a continuation that is not the answer's. Every step therefore finds a match, and each first draft
is wrong.

The matches have all lengths in `LENGTHS` in turn, so that nothing can be learned of a length. What stands in the prompt
for a later place has the tokens of earlier ones in it, with the right continuation. That must be no better match: so
lengths grow by 1 from place to place, and later places stand first, because the latest of equal matches is taken.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

TEMPERATURE = 1e9
LENGTHS = range(3, 11)
"""Lengths of matches."""


def hostile_prompt(answer: Sequence[int], vocab_size: int, seed: int, num_wrong: int = 3) -> list[int]:
    """A prompt in which the last tokens before each place of the answer are followed by `num_wrong` tokens that are not
    in the answer. It ends with such a token, so that no match reaches over its end.

    Raises:
        ValueError: the answer has all tokens of the vocabulary.
    """
    wrong = sorted(set(range(vocab_size)) - set(answer))
    if not wrong:
        raise ValueError("no token is left that is not in the answer")
    dice = random.Random(seed)
    prompt = [dice.choice(wrong)]
    for place in range(len(answer) - 1, LENGTHS[0] - 1, -1):
        length = LENGTHS[(place - LENGTHS[0]) % len(LENGTHS)]
        prompt += answer[place - length : place]
        prompt += dice.choices(wrong, k=num_wrong)
    return prompt
