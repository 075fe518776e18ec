"""What is combined: things that happen to an answer on its way, and things that are asked of it; and what does not go
together, each with its reason.

Of the first kind none may change a token: prefix hits, a swap, a move, a retry, other numbers of ranks, forced tokens
that are computed together, drafts, a stream that goes on elsewhere. Those of the second kind are asked of the plain run
too, as far as they choose tokens (grammar, penalties); what the others make of its text is computed in the test.
"""

from __future__ import annotations

from typing import Final

from tests.support.covering import Excluded, Factor, Row, covering_rows, pair_rows

OFF: Final = "off"
ON: Final = "on"
EQUAL_RANKS: Final = "1-1"
_SWITCH: Final = (OFF, ON)

FACTORS: Final = (
    Factor("ranks", (EQUAL_RANKS, "1-2", "2-1")),
    Factor("retry", (OFF, "decode", "prefill")),
    Factor("resumed", (OFF, "tokens", "events")),
    Factor("prefix-on-P", _SWITCH),
    Factor("prefix-on-D", _SWITCH),
    Factor("swap", _SWITCH),
    Factor("migration", _SWITCH),
    Factor("grammar", _SWITCH),
    Factor("forced", _SWITCH),
    Factor("speculation", _SWITCH),
    Factor("penalties", _SWITCH),
    Factor("logprobs", _SWITCH),
    Factor("several", _SWITCH),
    Factor("stop", _SWITCH),
    Factor("guardrails", _SWITCH),
)
"""`ranks`: of the prefill and of each decode worker. `retry`: which worker is killed. `resumed`: by token ids over
gRPC, or by the id of an event over HTTP. `several`: n = 2."""

EXCLUDED: Final = (
    Excluded({"forced": ON, "grammar": OFF}, "only a grammar forces tokens"),
    Excluded({"forced": ON, "logprobs": ON}, "the logprobs of each token need a step of its own"),
    Excluded({"resumed": "tokens", "several": ON}, "only one answer can be resumed"),
    Excluded({"resumed": "events", "several": ON}, "only one answer can be resumed"),
    Excluded({"resumed": "events", "logprobs": ON}, "a stream of events with logprobs has no ids"),
)


def covering() -> list[dict[str, str]]:
    """The rows of continuous integration, those of one shape of the cluster together."""
    return _by_shape(covering_rows(FACTORS, EXCLUDED))


def pairs() -> list[dict[str, str]]:
    """A row for each pair alone."""
    return _by_shape(pair_rows(FACTORS, EXCLUDED))


def name_of(row: Row) -> str:
    """What is not plain in it."""
    plain = {factor.name: factor.levels[0] for factor in FACTORS}
    parts = [name if level == ON else f"{name}={level}" for name, level in row.items() if level != plain[name]]
    return "+".join(parts) or "plain"


def _by_shape(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return sorted(rows, key=lambda row: row["ranks"])
