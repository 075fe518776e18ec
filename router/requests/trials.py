"""Trials: requests that are admitted although they are predicted to miss their TTFT target even on an idle worker.

    predicted miss ──no prompt was computed recently, no trial runs, the pause is over──> admitted ──> met or missed
                                                                                           first pause <─┴─> doubled

Such a prediction would never be corrected: refused requests are not computed, so no step shows that a worker is faster
than predicted, for example because its machine was busy when it calibrated. Compared with a refusal, an admitted
request loses only the time until its end.

Owner: the router core.
"""

from __future__ import annotations

from disagg.router.api import RUNNING, RequestTrace

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Shortest and longest pause in seconds from one trial to the next."""
MOST_WRONG = 1000.0
"""Ratio of prediction to target from which on the target cannot be met, however wrong the prediction is: there is no
trial."""


class Trials:
    """Decides which requests are trials, one at a time."""

    def __init__(self) -> None:
        self._trace: RequestTrace | None = None
        """The trace of the present trial, or of the last one until its result was read."""
        self._pause_s = FIRST_PAUSE_S
        self._next_at = 0.0

    def may_begin(self, confirmed_at: float, now: float) -> bool:
        """Whether a request may be a trial now. `confirmed_at`: when the predicted workers last computed a prompt."""
        if self._trace is not None:
            met = _result(self._trace)
            if met is None:
                return False
            self._pause_s = FIRST_PAUSE_S if met else min(LONGEST_PAUSE_S, 2 * self._pause_s)
            self._next_at = max(self._next_at, now if met else now + self._pause_s)
            self._trace = None
        return now >= self._next_at and now >= confirmed_at + FIRST_PAUSE_S

    def begin(self, trace: RequestTrace, now: float) -> None:
        """Note that this request is a trial."""
        self._trace, self._next_at = trace, now + FIRST_PAUSE_S


def _result(trace: RequestTrace) -> bool | None:
    """Whether a request met its TTFT target; None while that is not known."""
    first_at = trace.stages.get("first_token")
    if first_at is not None and trace.ttft_slo_s is not None:
        return first_at - trace.arrival <= trace.ttft_slo_s
    return None if trace.outcome == RUNNING else False
