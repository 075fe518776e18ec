"""Means over a worker's latest steps of what a step does for a sequence that decodes: its tokens, and its rows. Pure.

A step gives a sequence one token, and more where drafts are accepted or its grammar forces tokens. It computes as many
rows for it as it has tokens without KV, and one for each draft. Routers predict with both how long a token takes.
"""

from __future__ import annotations

_WINDOW = 64.0
"""About the number of latest steps that count."""
_KEPT = 1.0 - 1.0 / _WINDOW


class StepMeans:
    """Sums that forget, over the steps with decodes. Owner: the steps of one worker."""

    def __init__(self) -> None:
        self._sequences = self._rows = self._tokens = 0.0

    def observe(self, num_sequences: int, num_rows: int, num_tokens: int, num_steps: int = 1) -> None:
        """So many steps computed `num_rows` rows each for `num_sequences` decoding sequences, and gave them
        `num_tokens` tokens."""
        kept = _KEPT**num_steps
        factor = (1.0 - kept) * _WINDOW
        self._sequences = kept * self._sequences + factor * num_sequences
        self._rows = kept * self._rows + factor * num_rows
        self._tokens = kept * self._tokens + factor * num_tokens

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gives to a sequence; at least 1, also before the first step."""
        return max(1.0, self._tokens / self._sequences) if self._sequences else 1.0

    @property
    def rows_per_step(self) -> float:
        """Rows that a step computes for a sequence; at least 1, also before the first step."""
        return max(1.0, self._rows / self._sequences) if self._sequences else 1.0
