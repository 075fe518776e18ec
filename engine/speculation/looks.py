"""Which steps look for drafts: all of them while that pays, and fewer where it does not. Pure.

To look up 4 texts takes 0.15 ms of a step of 12 ms, because the step before filled the caches with weights (one thread,
AMD EPYC (Zen 4), 2026-11-27). What looks bring is a running mean of accepted drafts, less the tokens that the time of
the drafts gives without them, over the rows without drafts. While it is below `LEAST_GAIN`, the steps between two looks
become more, up to `LONGEST_REST`, and the drafts of these looks are not computed: of each sequence only the first one
counts, whose outcome shows in the next token. So a text that lookup always mispredicts costs no row. A text that begins
to copy goes on for longer than a rest, and a look that would have paid raises the mean at once.
"""

from __future__ import annotations

LEAST_GAIN = 0.01
"""Share of the tokens of a step that looks have to bring."""
FIRST_GAIN = 0.1
"""What they are assumed to bring at first."""
LONGEST_REST = 8
"""Most steps in a row without a look."""
LOOKS_OF_A_REST = 2
"""Number of looks in vain after which a rest becomes a step longer."""
_WINDOW = 32.0
"""About the number of latest looks that count."""


class Looks:
    """The looks of one worker. Owner: its `Speculation`."""

    def __init__(self) -> None:
        self._gain = FIRST_GAIN
        self._num_vain = 0
        """Looks in a row behind which the mean was below `LEAST_GAIN`."""
        self._num_resting = 0
        """Number of next steps that pass without a look."""
        self._pending: tuple[int, float] | None = None
        """Rows of the last look, and the price of its drafts in tokens."""
        self._num_accepted = 0

    def rests(self) -> bool:
        """Whether the next step passes without a look."""
        if self._num_resting == 0:
            return False
        self._num_resting -= 1
        return True

    @property
    def only_watches(self) -> bool:
        """Whether the drafts of the next look are not to be computed."""
        return self._num_vain >= LOOKS_OF_A_REST

    def looked(self, num_rows: int, price: float) -> None:
        """A look is over; the drafts of its step cost, or would cost, as much as `price` tokens."""
        self._pending = num_rows, price

    def accepted(self, num_drafts: int) -> None:
        """So many of the drafts of one sequence were accepted, or would have been."""
        self._num_accepted += num_drafts

    def settle(self) -> None:
        """What became of the drafts of the last look is known."""
        if self._pending is None:
            return
        num_rows, price = self._pending
        self._gain += ((self._num_accepted - price) / num_rows - self._gain) / _WINDOW
        self._num_vain = 0 if self._gain >= LEAST_GAIN else self._num_vain + 1
        self._num_resting = min(LONGEST_REST, self._num_vain // LOOKS_OF_A_REST)
        self._pending, self._num_accepted = None, 0
