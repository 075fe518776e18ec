"""Which ids a text has, and how often its output has each: kept while the text grows. Pure.

The ids are sorted, so that a new token is found by bisection and a new id moves those behind it: that is 8 bytes for
each different id, and a microsecond or two for each token, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST_CAPACITY = 64
_MANY = 64
"""Number of new tokens beyond which they are counted together."""


class TextCounts:
    """The counts of one sequence. Owner: the sequence.

    Args:
        token_ids: prompt and output.
        num_prompt_tokens: how many of these are the prompt's; their occurrences do not count.
    """

    def __init__(self, token_ids: Seq[int], num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        self._count_all(token_ids)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The different ids, ascending; good until the text grows."""
        return self._ids[: self._size]

    @property
    def outputs(self) -> NDArray[np.float32]:
        """How often the output has each of them, as whole numbers; 0 for one that only the prompt has."""
        return self._outputs[: self._size]

    def copied(self) -> TextCounts:
        """The same counts, which go on by themselves."""
        other = TextCounts.__new__(TextCounts)
        other._num_prompt_tokens, other._num_counted, other._size = (
            self._num_prompt_tokens,
            self._num_counted,
            self._size,
        )
        other._ids, other._outputs = self._ids.copy(), self._outputs.copy()
        return other

    def extend(self, token_ids: Seq[int]) -> None:
        """Count what the text has behind what was counted before, all of it output."""
        num_new = len(token_ids) - self._num_counted
        if num_new > _MANY or self._num_counted < self._num_prompt_tokens:
            self._count_all(token_ids)
            return
        assert num_new >= 0, "the text became shorter"
        for index in range(self._num_counted, len(token_ids)):
            self._count(token_ids[index])
        self._num_counted = len(token_ids)

    def _count_all(self, token_ids: Seq[int]) -> None:
        every_id = np.array(token_ids, dtype=np.int64)
        largest = int(every_id.max(initial=0))
        is_known = np.zeros(largest + 1, dtype=np.bool_)
        is_known[every_id] = True
        ids = np.flatnonzero(is_known)
        outputs = np.bincount(every_id[self._num_prompt_tokens :], minlength=largest + 1)[ids]
        self._size = len(ids)
        self._ids, self._outputs = _with_room(ids), _with_room(outputs.astype(np.float32))
        self._num_counted = len(token_ids)

    def _count(self, token_id: int) -> None:
        size = self._size
        at = int(self._ids[:size].searchsorted(token_id))
        if at == size or self._ids[at] != token_id:
            if size == len(self._ids):
                self._ids, self._outputs = _with_room(self._ids), _with_room(self._outputs)
            for array in (self._ids, self._outputs):
                array[at + 1 : size + 1] = array[at:size]
            self._ids[at], self._outputs[at] = token_id, 0
            self._size = size + 1
        self._outputs[at] += 1


def _with_room(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that is half as long again."""
    larger = np.empty(max(_LEAST_CAPACITY, len(array) * 3 // 2), dtype=array.dtype)
    larger[: len(array)] = array
    return larger
