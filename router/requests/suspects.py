"""Requests that may be the cause of the end of workers. Pure.

The cause of a worker that ends, or never ends its step, may be one of the requests that it computed: a prompt that a
kernel cannot compute, or one for which the memory is too small. That request must not end worker after worker, and the
requests that were computed beside it must be answered nevertheless.

    first loss     all requests that the worker computed may be the cause, and all are tried again at once: most
                   losses have another cause
    second loss    of a request that was computed alone: it ends. Of one beside others: it is isolated, that is, of all
                   such requests one is tried at a time, and only it is suspected if its worker is lost
    third loss     it ends
    `PASSED_TOKENS` more of the answer, or its end: it was another one, and the next isolated one is tried

So a request ends three workers at most, and two where it comes alone. A worker that is merely silent makes none of its
requests a suspect, nor does one that sent nothing since the request was placed there: it may have ended before, with
the node of the first.

Owner: the router core.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from disagg.proto.errors import SuspectRequestError
from disagg.proto.ids import RequestId
from disagg.router.requests.record import RequestRecord
from disagg.router.workers.worker import Worker

PASSED_TOKENS = 16
"""Number of tokens of the answer by which an isolated request has passed the place where it was lost: the last ones
before a loss may not have arrived."""


class Suspicion(NamedTuple):
    """Whether a request may have caused the loss of its worker."""

    may_be_cause: bool
    was_computed: bool = False
    """Whether the worker computed it, and ended or did not end its step. Else the worker was silent, or only held
    blocks for it."""
    is_sole: bool = False
    """Whether no other request may be the cause."""


NO_CAUSE = Suspicion(may_be_cause=False)


class Suspects:
    """The requests of a lost worker that may be the cause: the isolated one of those that it computed, else all that it
    computed, else all."""

    def __init__(self, worker: Worker, records: Iterable[RequestRecord], *, is_silent: bool) -> None:
        found = list(records)
        computed = [
            record
            for record in found
            if record.running.is_computed_on(worker.worker_id) and record.running.marks.placed <= worker.heard_at
        ]
        self._are_computed = bool(computed) and not is_silent
        isolated = [record for record in computed if record.is_isolated]
        self._ids: set[RequestId] = {record.request_id for record in isolated or computed or found}

    def suspicion(self, record: RequestRecord) -> Suspicion:
        """The suspicion against one of its requests."""
        if record.request_id not in self._ids:
            return NO_CAUSE
        return Suspicion(True, self._are_computed, is_sole=self._are_computed and len(self._ids) == 1)


def suspect_error(num_lost: int, message: str) -> SuspectRequestError:
    """The error of a request that was computed on `num_lost` workers when they were lost."""
    return SuspectRequestError(
        f"{num_lost} workers were lost while they computed this request, the last one while it computed nothing else "
        f"that is suspected: it is not tried on another one; {message}"
    )


def has_passed(record: RequestRecord) -> bool:
    """Whether a running request has passed the place where workers were lost before."""
    return len(record.output.released) - record.running.num_before >= PASSED_TOKENS
