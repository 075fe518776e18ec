"""Which extents of a chain are written to tiers. Pure.

Writing all that is computed wears disks and takes time from steps, and most of it is never asked for again. Written is
what was asked for twice, what takes long to compute, and what belongs to a conversation, whose next turn begins with
it:

    more than `min_tokens` tokens, or in a conversation: an answer ended here,     all of it
    or the client named a session
    else                                                                           what some sequence used before
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from disagg.proto.ids import BlockHash
from disagg.proto.messages import EXTENT_TOKENS


class Admission:
    """Owner: the tiers of a worker.

    Args:
        min_tokens: see above.
        most_seen: extents that are remembered as used before.
    """

    def __init__(self, min_tokens: int, most_seen: int) -> None:
        self._min_tokens = min_tokens
        self._most_seen = most_seen
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()
        """Extents that a sequence used, the one first that was used longest ago."""

    def num_admitted(
        self, keys: Seq[BlockHash], *, num_tokens: int, cached_tokens: int, in_conversation: bool = False
    ) -> int:
        """How many leading extents to write of a chain that a sequence with `num_tokens` computed tokens used, of which
        it found `cached_tokens`; it counts as seen from now on."""
        num_used = max(self._num_seen(keys), min(len(keys), cached_tokens // EXTENT_TOKENS))
        for key in reversed(keys):
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._most_seen:
            self._seen.popitem(last=False)
        return len(keys) if in_conversation or num_tokens > self._min_tokens else num_used

    def _num_seen(self, keys: Seq[BlockHash]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self._seen), len(keys))
