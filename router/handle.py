"""The client's end of one request: the router puts tokens in, one consumer takes them out in batches.

    put* ── finish ──> iteration ends, `completion` is set          put* ── fail ──> iteration raises

What the consumer has not read yet waits here, so memory is bounded by the request's `max_tokens`. Tokens that came
before a failure are still delivered, except after a cancel.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from disagg.proto.errors import DisaggError, RequestCancelledError
from disagg.proto.ids import RequestId
from disagg.proto.messages import TokenLogprobs
from disagg.router.api import Completion, TokenBatch


class Handle:
    """Implements `api.RequestHandle`. Lives on the router's event loop; not for other threads."""

    def __init__(self, request_id: RequestId, on_cancel: Callable[[RequestId], None]) -> None:
        self.request_id = request_id
        self.completion: Completion | None = None
        self._on_cancel = on_cancel
        self._unread = TokenBatch([])
        self._end: Completion | DisaggError | None = None
        self._changed = asyncio.Event()

    def put(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """The next tokens; one of `logprobs` for each, or none."""
        self._unread.token_ids.extend(token_ids)
        self._unread.logprobs.extend(logprobs)
        self._changed.set()

    def finish(self, completion: Completion) -> None:
        """All tokens were put."""
        self._end = self._end or completion
        self._changed.set()

    def fail(self, error: DisaggError) -> None:
        """There will be no more tokens. The first end counts."""
        if self._end is None and isinstance(error, RequestCancelledError):
            self._unread = TokenBatch([])
        self._end = self._end or error
        self._changed.set()

    @property
    def error(self) -> DisaggError | None:
        """What it failed with, if it did."""
        return self._end if isinstance(self._end, DisaggError) else None

    def cancel(self) -> None:
        """See `api.RequestHandle`."""
        if self._end is None:
            self._on_cancel(self.request_id)

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        """See `api.RequestHandle`."""
        return self

    async def __anext__(self) -> TokenBatch:
        """The batch of all tokens that came since the last one; waits for at least one."""
        while not self._unread.token_ids:
            if isinstance(self._end, DisaggError):
                raise self._end
            if self._end is not None:
                self.completion = self._end
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        batch, self._unread = self._unread, TokenBatch([])
        return batch
