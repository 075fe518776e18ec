"""Which errors of a line are its answer, and which are tried again."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

from disagg.proto.errors import DisaggError, InvalidRequestError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.router.gateway.auth.auth import AnonymousAccess, Caller
from disagg.router.gateway.batches.lines import Line
from disagg.router.gateway.batches.store import Batch
from disagg.router.gateway.http.batches.line_answers import LineAnswers

LINE = Line(custom_id="a", method="POST", url="/v1/completions", body=msgspec.Raw(b"{}"))
UNJUDGED = UnavailableError("the guardrail g gives no verdict", "guardrail_unavailable")
LOST = UnavailableError("the worker is gone", "worker_lost")


class Completions:
    """Fails so often, then answers."""

    def __init__(self, error: DisaggError, num_failures: int) -> None:
        self.error, self.num_left, self.num_tries = error, num_failures, 0

    async def line(self, endpoint: str, body: bytes, call: Any) -> bytes:
        self.num_tries += 1
        if self.num_tries > self.num_left:
            return b"{}"
        raise self.error


@pytest.mark.parametrize(
    ("error", "num_failures", "status", "num_tries"),
    [
        (InvalidRequestError("top_p", "is wrong"), 1, 400, 1),
        (LOST, 4, 200, 5),
        (LOST, 5, 503, 5),
        (UnavailableError("no worker", "no_decode_worker"), 100, 200, 101),
        (UNJUDGED, 19, 200, 20),
        (UNJUDGED, 20, 503, 20),
    ],
)
async def test_how_often_a_line_is_tried(
    monkeypatch: pytest.MonkeyPatch, error: DisaggError, num_failures: int, status: int, num_tries: int
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    completions: Any = Completions(error, num_failures)
    ids = (RequestId(f"r{i}") for i in itertools.count())
    answers = LineAnswers(completions, AnonymousAccess(Caller("", False)), lambda: next(ids))
    batch = Batch("b", "", "/v1/completions", "f", "in_progress", 0.0, 9.0, None, 1, None, None, None, 0, 0, None)
    result = await answers(batch, LINE)
    assert (result.status, completions.num_tries, len(waits)) == (status, num_tries, num_tries - 1)
    assert result.use.failed is (status != 200)
    assert max(waits, default=0.0) <= 30.0
